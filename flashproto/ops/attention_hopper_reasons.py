"""What backend "hopper" asks of an attention call's tensors.  Beside the launch, but without Gluon,
which not every Triton has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..backends import Reason
from ..configs.hopper import more_columns

# A cache's calls that are quicker there: from so many query rows of a key head on, or so many key heads
# of all sequences.  docs/hopper.md has the measurements.
CACHE_ROWS, CACHE_HEADS = 65, 128


def hopper_cache_reasons(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor | None,
    sequences: int,
    prefix: bool,
    rolls: bool,
    any_of: bool,
) -> Iterator[Reason]:
    """What they do not take of a call with a cache, beside the above; q [B, Hq, Sq, D] or, of all
    sequences, [1, Hq, T, D]; k_cache [pages, page size, Hkv, D].  any_of: no backend was asked for, and
    the quickest is wanted."""
    if k_cache.dtype != q.dtype:
        yield "the cache is {} and q {}; the kernels take one dtype", k_cache.dtype, q.dtype
    if prefix:
        yield "it takes no prefix"
    size = k_cache.shape[1]
    if page_table is not None and (size < 16 or size & (size - 1)):
        yield "page_size is {}; the kernels take powers of 2 from 16 on", size
    if page_table is None and rolls and size % 128:
        yield "the cache rolls in {} slots; the kernels take multiples of 128", size
    heads = k_cache.shape[2]
    rows = q.shape[0] * q.shape[2] * q.shape[1] // max(sequences * heads, 1)
    if any_of and rows < CACHE_ROWS and sequences * heads < CACHE_HEADS:
        yield (
            "{} query rows of each of {} key heads are few; triton is no slower then, and "
            "hopper runs if it is asked for by name",
            rows,
            sequences * heads,
        )


def hopper_attention_reasons(q: Tensor, k: Tensor, v: Tensor, table: bool = False) -> Iterator[Reason]:
    """What TMA and the tiles of kernels/hopper do not take.  table: whether the mask has one."""
    D, Dv = q.shape[3], v.shape[3]
    if q.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype is {str(q.dtype)[6:]}; the kernels take bfloat16 and float16"
        return
    if Dv != D and not more_columns(D, Dv):
        yield (
            "q and k have head_dim {} and v has {}; the kernels take one for all, or 136 to 192 and up "
            "to 128",
            D,
            Dv,
        )
    elif Dv != D and table:
        yield "q and k have head_dim {} and v has {}; a mask with a table takes one for all", D, Dv
    if D > 256 or D % 8:
        yield "head_dim is {}; the kernels take multiples of 8 up to 256", D
    if Dv % 8:
        yield "v has head_dim {}; the kernels take multiples of 8", Dv
    if q.numel() == 0 or k.numel() == 0:
        yield "q or k is empty"
    if k.shape[1] * D >= 2**25:
        yield "{} key heads of {} are too many: a token's gradient passes 2^25", k.shape[1], D
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            yield f"{name}'s last dimension has stride {{}}; TMA takes 1", x.stride(3)
        for dim in range(3):
            stride = x.stride(dim)
            if x.shape[dim] > 1 and (stride <= 0 or stride % 8 or stride >= 2**39):
                why = (
                    f"{name}'s stride {{}} of dimension {dim} is no positive multiple of 8 elements "
                    "(16 bytes) below 2^39; TMA takes no other"
                )
                yield why, stride
    # torch.compile neither traces nor guards offsets; the launch copies what does not start right.
    if not torch.compiler.is_compiling():
        late = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.storage_offset() % 8]
        if late:
            yield f"{' and '.join(late)} does not start at a multiple of 16 bytes, as TMA wants"
