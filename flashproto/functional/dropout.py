"""Dropout of attention's probabilities: its arguments, and the mask of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import has_dtensors
from ..checks.calls import told
from ..checks.errors import described, refuse
from ..checks.options import check_integer, check_number, is_number
from ..checks.tensors import check_on
from ..reference.philox import kept

STEPS = 65536  # of p: a probability has 16 random bits


def drawn_seed(dropout_p: object, like: object) -> Tensor | None:
    """A seed from torch's generator of the device of a tensor; None where there is nothing to drop, or
    for arguments that are refused later."""
    if not is_number(dropout_p) or dropout_p == 0 or not isinstance(like, Tensor):
        return None
    return torch.randint(2**63 - 1, (1,), device=like.device)


def check_share(operator: str, dropout_p: object) -> float:
    """The share of probabilities to drop, rounded to a multiple of 1/65536."""
    takes, do = "a number from 0 to 1", "Pass 0.0 for none."
    share = check_number(operator, "dropout_p", dropout_p, 0, 1, takes, do)
    return math.floor(share * STEPS + 0.5) / STEPS


def check_seed(operator: str, seed: object) -> Tensor:
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.shape != (1,):
        got = f"of {seed.dtype} {list(seed.shape)}" if isinstance(seed, Tensor) else described(seed)
        takes, do = "an int64 tensor [1]", "Call torch.randint(2**63 - 1, (1,), device=q.device)."
        refuse(operator, "dropout_seed", got, takes, do, TypeError)
    return seed


@told
def dropout_mask(dropout_p: float, dropout_seed: Tensor, shape: Sequence[int]) -> Tensor:
    """Which probabilities attention keeps with this share and this seed.

    out = (where(mask, P, 0) / (1 - dropout_p)) v, for P = softmax(scale * q k^T).  Whether one is kept
    depends on the seed, the batch entry, the head, the query and the key alone, on every backend.  Of
    attention_varlen sequence s has the mask of batch entry s, from its first query and key on.

    Args:
        dropout_p: the share that is dropped, 0 to 1, of which attention makes a multiple of 1/65536.
        dropout_seed: [1] int64, what the call had as dropout_seed.
        shape: (B, Hq, Sq, Sk) of the call.

    Returns: bool [B, Hq, Sq, Sk] on the seed's device.
    Raises: TypeError, ValueError: an argument does not fit.
    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011): Philox, of 7 rounds.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
        >>> seed = torch.randint(2**63 - 1, (1,))
        >>> out = flashproto.attention(q, k, v, dropout_p=0.25, dropout_seed=seed)
        >>> mask = flashproto.dropout_mask(0.25, seed, (2, 4, 8, 8))
        >>> p = torch.softmax(q @ k.mT / 4, -1) * mask / 0.75
        >>> torch.allclose(out, p @ v, atol=1e-5)
        True
    """
    name = "dropout_mask"
    share = check_share(name, dropout_p)
    seed = check_seed(name, dropout_seed)
    if not isinstance(shape, (tuple, list)) or len(shape) != 4:
        takes = "(B, Hq, Sq, Sk)"
        refuse(name, "shape", described(shape), takes, "Pass the numbers of the call.", TypeError)
    takes, do = "numbers of 0 or more", "Pass those of the call."
    B, H, Sq, Sk = (check_integer(name, "shape", n, 0, 2**31 - 1, takes, do) for n in shape)
    i, j = (torch.arange(n, device=seed.device) for n in (Sq, Sk))
    mask = torch.empty(B * H, Sq, Sk, dtype=torch.bool, device=seed.device)
    for number, of_head in enumerate(mask):  # one by one, since words have 8 bytes
        of_head.copy_(kept(seed, seed.new_tensor(number), i[:, None], j, share))
    return mask.view(B, H, Sq, Sk)


def dropout_options(
    operator: str, dropout_p: object, dropout_seed: object, q: Tensor
) -> dict[str, Any]:
    """What attention_request takes of them; nothing where no probability is dropped."""
    share = check_share(operator, dropout_p)
    seed = None
    if dropout_seed is not None:
        seed = check_seed(operator, dropout_seed)
        check_on(operator, "dropout_seed", seed, q.device)
    if share and seed is not None and has_dtensors((q,)):
        takes, do = "0.0 beside DTensors: masks are of whole tensors", "Pass the .to_local() of each."
        refuse(operator, "dropout_p", dropout_p, takes, do)
    return {"dropout_p": share, "dropout_seed": seed} if share else {}
