"""Cross entropy as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional as F


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss with classes in the last dimension: logits [..., V], targets [...].

    Its arguments are torch's in torch's order, the deprecated size_average and reduce included.
    Args beyond torch's: z_loss, softcap, inplace_backward and impl, the backend by name; see
    flashproto.cross_entropy, also for what differs from torch.  Raises what that raises.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace_backward: bool = False,
        impl: str | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap, self.inplace_backward = z_loss, softcap, inplace_backward
        self.impl = impl

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(
            logits, targets, weight=self.weight, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, softcap=self.softcap,
            reduction=self.reduction, inplace_backward=self.inplace_backward, impl=self.impl,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss
