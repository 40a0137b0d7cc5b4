"""Tables of masks that are neither bands nor intervals: made once, and kept with the mask, or with the
boolean tensor that it is, for the next layer and the next step.

They are made anew where a tensor that the mask reads has been written to, which its version says.  None
is kept where a tracer, a transform or a mode would see it being made, in a CUDA graph, and of tensors
of inference mode, which have no version.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from .. import backends
from ..checks.reading import transforms_active, watched
from ..mask_values import Rule, Tables, places
from ..reference.mask_table import TILE, WORD, packed

if backends.HAS_TRITON:
    from ..ops import mask_table as mask_table_op

PAIRS = 2**22  # at which a rule is looked at together, at most, but for one tile
MOST = 4  # tables of one mask: for other lengths, say


class Table(NamedTuple):
    """See reference/mask_table.py."""

    bits: Tensor
    table: Tensor


class Kept(NamedTuple):
    versions: tuple[int, ...]
    made: Table


of_rules: MutableMapping[Rule, dict[Hashable, Kept]] = WeakKeyDictionary()
of_tensors: MutableMapping[Tensor, dict[Hashable, Kept]] = WeakTensorKeyDictionary()


def table_of(
    rule: Rule, Sq: int, Sk: int, B: int, H: int, device: torch.device, by_kernel: bool
) -> Table:
    """The table of a rule for B batch entries and H heads, or 1 where it does not read which.

    by_kernel: where it is made, by a kernel; else by PyTorch, which gives the same."""
    if not can_be_kept(rule.tensors, device):
        return made_of(rule, Sq, Sk, B, H, device, by_kernel)
    key: list[Hashable] = [Sq, Sk, device, stream_of(device)]
    x = rule.dense
    if x is None:
        own = of_rules.setdefault(rule, {})
        key += [B, H]
    else:
        # A model may cut the same mask anew in each layer.
        own = of_tensors.setdefault(x if x._base is None else x._base, {})
        key += [x.shape, x.stride(), x.storage_offset()]
    versions = tuple(x._version for x in rule.tensors)
    found = own.get(tuple(key))
    if found is None or found.versions != versions:
        with torch.inference_mode(False):  # a backward may keep it later
            found = Kept(versions, made_of(rule, Sq, Sk, B, H, device, by_kernel))
        if len(own) >= MOST:
            own.clear()
        own[tuple(key)] = found
    return found.made


def is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all of these lie in memory, and nothing wants to see what is done with them."""
    if is_compiling() or transforms_active() or watched():
        return False
    return all(type(x) is Tensor or type(x) is Parameter for x in tensors)


def can_be_kept(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    if not is_plain(tensors) or any(x.is_inference() for x in tensors):
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# --- making one -------------------------------------------------------------------------------------


def made_of(
    rule: Rule, Sq: int, Sk: int, B: int, H: int, device: torch.device, by_kernel: bool
) -> Table:
    """One, looked at in parts of whole tiles; where torch.compile joins the loops, or torch.func takes
    nothing that is written to, at once."""
    if is_compiling() or transforms_active():
        return Table(*packed(rule.visible(places(Sq, Sk, device, B, H))))
    by_kernel = by_kernel and is_plain(rule.tensors)
    start = places(Sq, Sk, device, B, H, slice(0, min(Sq, 1)), slice(0, min(Sk, 1)))
    batch, heads = rule.visible(start).shape[:2]
    Tq, Tk = -(-Sq // TILE), -(-Sk // TILE)
    table = Table(
        torch.empty(batch, heads, Tq * TILE, Tk * TILE // WORD, dtype=torch.int32, device=device),
        torch.empty(batch, heads, Tq, Tk, dtype=torch.int8, device=device),
    )
    if can_be_kept(rule.tensors, device):
        table.table.tables = Tables()  # type: ignore[attr-defined]
    at_once = by_kernel and rule.dense is not None
    for queries, keys in [(slice(0, Tq), slice(0, Tk))] if at_once else parts(batch * heads, Tq, Tk):
        i, j = (slice(x.start * TILE, min(x.stop * TILE, S)) for x, S in ((queries, Sq), (keys, Sk)))
        seen = rule.visible(places(Sq, Sk, device, B, H, i, j))
        bits = table.bits[
            ..., queries.start * TILE : queries.stop * TILE, keys.start * 4 : keys.stop * 4
        ]
        of_part = table.table[..., queries, keys]
        if by_kernel and seen.numel():
            mask_table_op.fill(seen, bits, of_part)
        else:
            for whole, part in zip((bits, of_part), packed(seen), strict=True):
                whole.copy_(part)
    return table


def parts(rows: int, Tq: int, Tk: int) -> list[tuple[slice, slice]]:
    """Slices of tiles, of queries and keys, which together are all."""
    most = max(PAIRS // (max(rows, 1) * TILE * TILE), 1)  # tiles of a row together
    wide = min(max(Tk, 1), most)
    high = max(most // wide, 1)
    return [
        (slice(i, min(i + high, Tq)), slice(j, min(j + wide, Tk)))
        for i in range(0, Tq, high)
        for j in range(0, Tk, wide)
    ]
