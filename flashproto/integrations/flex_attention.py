"""FlexAttention's masks and score functions in this library's terms.

mask = flex_attention.from_block_mask(block_mask)  # once for each mask
out = flashproto.attention(q, k, v, mask=mask, **flex_attention.score_mod("softcap", 30.0))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from .. import hooks, masks
from ..checks.errors import described, refuse
from ..checks.options import check_integer
from ..mask_values import Places, Rule

NAME = "from_block_mask"
PAIRS = 2**24  # for which mask_mod is evaluated at a time
FAR = 2**30


def from_block_mask(block_mask: BlockMask) -> masks.Mask:
    """A BlockMask as a mask of this library: masks.intervals where one run of queries sees each key,
    else a table of tiles, which the first call makes.

    Blocks that its table calls full are taken from there, those that it calls partial are looked at by
    its mask_mod.  That a key's queries are one run is proven by counting them.  This reads the mask on
    the host: make it once for each mask, and not inside of torch.compile.

    Args:
        block_mask: of torch.nn.attention.flex_attention.create_block_mask.  One with a batch or a
            number of heads of 1 is the same for all, as its table is.

    Returns: a value of flashproto.masks for Sq queries and Sk keys, with tensors [B, H, Sk], or with a
        bit for each pair.  It says all that block_mask does: causal=True is not needed beside it.
    Raises: TypeError, ValueError: no such mask.
    Source: https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> causal = lambda b, h, q, kv: kv <= q
        >>> block_mask = create_block_mask(causal, None, None, 200, 200, device="cpu")
        >>> mask = flex_attention.from_block_mask(block_mask)
        >>> torch.equal(mask.visible(200, 200)[0, 0], masks.causal().visible(200, 200))
        True
    """
    if not isinstance(block_mask, BlockMask):
        takes = "a BlockMask of torch.nn.attention.flex_attention"
        refuse(NAME, "block_mask", described(block_mask), takes, "Call create_block_mask.", TypeError)
    partial, full = _blocks(block_mask)
    begin, end, count = _of_full(full, block_mask)
    for rows, keys, seen in _tiles(partial, block_mask):
        some = seen.any(2)
        top, bottom = seen.int().argmax(2), seen.flip(2).int().argmax(2)
        first = torch.where(some, rows[0] + top, FAR)
        last = torch.where(some, rows[-1] + 1 - bottom, 0)
        begin[..., keys] = torch.minimum(begin[..., keys], first)
        end[..., keys] = torch.maximum(end[..., keys], last)
        count[..., keys] += seen.sum(2)
    if ((count > 0) & (end - begin != count)).any():
        Sq, Sk = block_mask.seq_lengths
        seen_by = functools.partial(_pairs, partial, full, block_mask)
        words = f"from_block_mask({getattr(block_mask.mask_mod, '__name__', 'mask_mod')})"
        return masks.Mask(rule=Rule(words, seen_by, (partial, full), queries=Sq, keys=Sk))
    return masks.intervals(begin.where(count > 0, 0).int(), end.int())


def _pairs(partial: Tensor, full: Tensor, block_mask: BlockMask, at: Places) -> Tensor:
    """Which of these pairs see each other, [B, H, n, m]; a table of 1 is the same for all."""
    rows, columns = (x.flatten() // n for x, n in zip((at.i, at.j), block_mask.BLOCK_SIZE, strict=True))
    some, all_ = (x[:, :, rows][..., columns] for x in (partial, full))

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return block_mask.mask_mod(b, h, q + at.queries.start, kv + at.keys.start)

    B, H, n, m = some.shape
    seen = create_mask(mod, B, H, n, m, device=str(partial.device))
    return all_ | (some & seen)


def _blocks(block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which blocks are partial and which are full, [B, H, blocks of queries, blocks of keys]."""
    Sk, columns = block_mask.seq_lengths[1], block_mask.BLOCK_SIZE[1]
    n = -(-Sk // columns)

    def dense(number: Tensor | None, index: Tensor | None) -> Tensor:
        if number is None or index is None:
            return torch.zeros_like(partial)
        if index.ndim != 4:
            takes, do = "tables [B, H, blocks, blocks]", "Add dimensions of batch and heads."
            refuse(NAME, "block_mask", f"of kv_indices {list(index.shape)}", takes, do)
        listed = torch.arange(index.shape[3], device=index.device) < number[..., None]
        at = torch.where(listed, index.long(), n)
        blank = torch.zeros((*index.shape[:3], n + 1), dtype=torch.bool, device=index.device)
        return blank.scatter_(3, at, True)[..., :n]

    partial = dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if (partial & full).any():
        takes, do = "blocks that are either partial or full", "Call create_block_mask."
        refuse(NAME, "block_mask", "a table with a block that is both", takes, do)
    return partial, full


def _of_full(full: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor, Tensor]:
    """For each key the first query in a full block, the one behind the last, and how many there are."""
    (Sq, Sk), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    top = torch.arange(full.shape[2], device=full.device) * rows
    bottom = (top + rows).clamp_max(Sq)
    begin = torch.where(full, top[:, None], FAR).amin(2)
    end = torch.where(full, bottom[:, None], 0).amax(2)
    count = (full * (bottom - top)[:, None]).sum(2)
    begin, end, count = (x.repeat_interleave(columns, 2)[..., :Sk] for x in (begin, end, count))
    return begin.contiguous(), end.contiguous(), count.contiguous()


def _tiles(partial: Tensor, block_mask: BlockMask) -> Any:
    """(rows, keys, seen [B, H, rows, keys]) of all partial blocks."""
    (Sq, Sk), (height, width) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    B, H, blocks, _ = partial.shape
    most = max(1, PAIRS // max(1, B * H * height * width))  # columns at a time
    for block in range(blocks):
        rows = range(block * height, min((block + 1) * height, Sq))
        here = partial[:, :, block]
        for columns in here.any(0).any(0).nonzero()[:, 0].split(most) if rows else ():
            keys = columns[:, None] * width + torch.arange(width, device=columns.device)
            keys = keys.flatten()
            keys = keys[keys < Sk]

            def at(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, keys: Tensor = keys) -> Tensor:
                return block_mask.mask_mod(b, h, q + rows.start, keys[kv])  # noqa: B023

            if keys.numel():
                seen = create_mask(at, B, H, len(rows), keys.shape[0], device=str(keys.device))
                yield rows, keys, seen & here[:, :, keys // width][:, :, None]


# --- score functions ------------------------------------------------------------------------------


def softcap(cap: float) -> dict[str, Any]:
    """cap * tanh(score / cap), as attention-gym's generate_tanh_softcap: {"softcap": cap}."""
    return {"softcap": cap}


def alibi(slopes: int | Tensor, device: Any = None) -> dict[str, Any]:
    """score - slope * |q - kv|, {"alibi_slopes": [H]}; slopes: [H], or a number of heads H for slopes
    2^(-8 (h + 1) / H), on `device`, of attention-gym's generate_alibi_bias, which is the same beside
    causal.

    Distances are those of positions i + Sk - Sq, which are FlexAttention's q where Sq = Sk.
    """
    if isinstance(slopes, Tensor):
        return {"alibi_slopes": slopes}
    takes, do = "a number of heads, or a tensor [H]", "Pass the number of query heads."
    H = check_integer("alibi", "slopes", slopes, 1, 2**20, takes, do)
    return {"alibi_slopes": torch.exp2(-8 / H * torch.arange(1, H + 1, device=device))}


SCORE_MODS: dict[str, Callable[..., dict[str, Any]]] = {"softcap": softcap, "alibi": alibi}


def score_mod(name: str, *arguments: Any) -> dict[str, Any]:
    """The options of flashproto.attention that do what a score_mod of this name does.

    Args:
        name: of SCORE_MODS, to which others may be added, or of a hook of scores, which
            flashproto.hooks.register has made known: that is a score_mod in Triton with its derivative,
            of the same (score, b, h, q, kv) and of what the score_mod in PyTorch captures.
        arguments: softcap: the cap; alibi: slopes [H], or a number of heads H (and a device) for those
            of the paper; of a hook its operands, then its scalars.

    Returns: a dict of keyword arguments of attention, those of SCORE_MODS also of attention_varlen and
        attention_with_kv_cache.
    Raises: NotImplementedError: there is none of that name.  What a score_mod does cannot be read off
        the function itself.  TypeError: the hook takes other arguments.

    Example:
        >>> q = torch.randn(1, 2, 8, 16)
        >>> out = flashproto.attention(q, q, q, **flex_attention.score_mod("softcap", 30.0))
        >>> torch.equal(out, flashproto.attention(q, q, q, softcap=30.0))
        True
    """
    if name in SCORE_MODS:
        return SCORE_MODS[name](*arguments)
    if name in hooks.names("score"):
        return {"score_mod": hooks.call(name, *arguments)}
    got = f"{described(name)}, none of {', '.join(SCORE_MODS)}"
    takes = f"one of these, or of the hooks {', '.join(hooks.names('score'))}"
    do = "Call flashproto.hooks.register with signature='score'."
    refuse("score_mod", "name", got, takes, do, NotImplementedError)


__all__ = ["alibi", "from_block_mask", "score_mod", "softcap"]
