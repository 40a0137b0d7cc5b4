"""Cross entropy as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional as F
from ..checks.errors import described, refuse
from ..checks.rows import check_loss_options
from ..checks.tensors import check_tensor


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss with classes in the last dimension: logits [..., V], targets [...].

    The arguments are torch's, in torch's order; of these size_average and reduce, which torch
    deprecates, are None.  flashproto.cross_entropy tells what differs from torch.

    Args beyond torch's:
        class_dim: the dimension of the classes; 1 for logits [N, V, d1, ...] as torch takes them.
        z_loss, softcap, inplace_backward: as in flashproto.cross_entropy.
        impl: the backend by name; None chooses.

    Raises: TypeError, ValueError: an argument does not fit; at a call what cross_entropy raises.

    Example:
        >>> loss = nn.CrossEntropyLoss(ignore_index=0)
        >>> loss(torch.randn(2, 5, 100), torch.randint(100, (2, 5))).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        class_dim: int = -1,
        inplace_backward: bool = False,
        impl: str | None = None,
    ) -> None:
        name = type(self).__name__
        for argument, x in (("size_average", size_average), ("reduce", reduce)):
            if x is not None:
                do = "Pass reduction='mean', 'sum' or 'none'; ignore_index comes behind size_average."
                got = described(x)
                refuse(name, argument, got, "None: it is deprecated in torch", do, TypeError)
        if weight is not None:
            check_tensor(name, "weight", weight)
        check_loss_options(name, ignore_index, label_smoothing, z_loss, softcap, reduction)
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.z_loss, self.softcap, self.inplace_backward = z_loss, softcap, inplace_backward
        self.class_dim, self.impl = class_dim, impl

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(
            logits,
            targets,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            inplace_backward=self.inplace_backward,
            class_dim=self.class_dim,
            impl=self.impl,
        )
        assert isinstance(loss, Tensor)
        return loss
