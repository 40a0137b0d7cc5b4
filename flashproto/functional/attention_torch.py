"""PyTorch's own attention, of which bands and masks are boolean tensors, on a CPU.

A tensor is kept for the next call with the same mask object, for as long as there is this object and
there is room; and not where a tracer, a transform or a mode would see it being made.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

# As it is before anybody puts flashproto's in its place.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from ..checks.reading import is_readable
from ..mask_values import Mask
from ..reference.attention import dense_pairs, visible
from ..variant import Variant

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def attention_by_torch(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, mask: Mask | None, scale: float | None
) -> Tensor:
    """Attention of q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv]; of `mask` the variant
    has what is made."""
    if not (q.shape[2] and k.shape[2]):  # sums of nothing: 0 whatever q has, and with a gradient
        nothing = q[..., :0].sum(-1, keepdim=True) + k.sum() + v.sum()
        return nothing.expand(*q.shape[:3], v.shape[3])
    gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210, a bool of sizes that are symbols
    seen, causal = None, variant.kind.CAUSAL
    if not variant.top_left:
        causal = causal and variant.offset < k.shape[2] - 1  # else it hides nothing
        if causal or not variant.kind.PLAIN:
            seen, causal = mask_tensor(variant, mask, q, k), False
    q, scale = with_positive_scale(q, scale)
    return torch_attention(q, k, v, seen, is_causal=causal, scale=scale, enable_gqa=gqa)


def with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """(q, scale) with the same scores: on a CPU torch multiplies the -inf of its causal mask by scale,
    in float32."""
    if scale is None or scale >= SMALLEST_SCALE:
        return q, scale
    return (-q, -scale) if scale <= -SMALLEST_SCALE else (q * scale, 1.0)


# --- boolean tensors ------------------------------------------------------------------------------

BYTES = 2**26  # of all tensors that are kept
LEAST = 2**18  # what one counts for at least, so that they are not too many


@dataclass
class Kept:
    """made: of the mask, as begin and end; seen: of these.  used: a number that grows by each call."""

    made: tuple[Tensor, ...]
    seen: Tensor
    used: int


# By mask, and then by the numbers of the band and lengths.
kept: WeakKeyDictionary[Mask, dict[Hashable, Kept]] = WeakKeyDictionary()
NO_OBJECT = Mask()  # for which tensors are kept that follow from numbers
clock = itertools.count()
making = threading.RLock()  # once more where garbage is collected meanwhile


def mask_tensor(variant: Variant, mask: Mask | None, q: Tensor, k: Tensor) -> Tensor:
    """True where query i sees key j: [Sq, Sk], or [B | 1, H | 1, Sq, Sk] with a mask's own tensors."""
    named = variant.named
    numbers = variant.kind.CAUSAL, variant.offset, named.get("left"), named.get("first", 0)
    made = tuple(variant.tensors.values())
    by_mask = [named.get(name) for name in ("begin", "end", "bits")]
    lengths = q.shape[2], k.shape[2]
    if not all(map(is_readable, (q, *made))):
        return visible(dense_pairs(*lengths, q), *numbers, *by_mask)
    owner = mask if mask is not None else NO_OBJECT
    key = numbers, lengths, q.device
    found = kept.get(owner, {}).get(key)
    # The intervals of a mask follow later changes of its `lengths`.
    if found is not None and all(map(torch.equal, found.made, made)):
        found.used = next(clock)
        return found.seen
    with torch.inference_mode(False):  # it may be saved for a backward later
        seen = visible(dense_pairs(*lengths, q), *numbers, *by_mask)
    keep(owner, key, Kept(made, seen, next(clock)))
    return seen


def keep(owner: Mask, key: Hashable, new: Kept) -> None:
    """Keep it, without those that were used least recently where there is no room."""
    if room_of(new) > BYTES:
        return
    with making:
        kept.setdefault(owner, {})[key] = new
        entries = [(x, own, key) for own in list(kept.values()) for key, x in list(own.items())]
        room = sum(room_of(x) for x, *_ in entries)
        for x, own, key in sorted(entries, key=lambda entry: entry[0].used) if room > BYTES else ():
            if room <= BYTES:
                break
            own.pop(key, None)
            room -= room_of(x)


def room_of(x: Kept) -> int:
    return max(LEAST, sum(tensor.nbytes for tensor in (x.seen, *x.made)))
