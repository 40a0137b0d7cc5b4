"""Attention: launches of the Hopper kernels, for ops/attention.py.

Legend: q, out, dout, dq [B, Hq, Sq, D], k, v, dk, dv [B, Hkv, Sk, D]; lse, dlse [B, Hq, Sq] float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .. import configs
from ..kernels.attention_backward import attention_backward_heads_kernel
from ..kernels.attention_merge import attention_merge_kernel
from ..kernels.hopper.attention_backward import attention_backward_kernel
from ..kernels.hopper.attention_backward_rows import COLUMNS, postprocess_kernel, preprocess_kernel
from ..kernels.hopper.attention_backward_work import BOUND, FIRST_TURN, LEAST_STEPS
from ..kernels.hopper.attention_forward import attention_forward_kernel
from ..kernels.hopper.items import MOST_PROGRAMS, TURNS
from ..kernels.schedule import (
    LIST,
    RECORD,
    key_slots_kernel,
    order_kernel,
    order_lists_kernel,
    query_slots_kernel,
    visits_kernel,
)
from ..kernels.scores import Given
from ..variant import Variant, main_backward
from .attention_triton import LOG2E, SMALLEST_SCALE, columns_for, given_to
from .descriptors import UNUSED_STRIDE, boxed, readable
from .device import cdiv, multiprocessors, outside_memory_pool
from .recipe import New, Operand, Recipe, Table, Zeroed

PREPROCESS_ROWS = 32
LD = COLUMNS.value  # bfloat16 numbers for lse and delta of a query
SUMS_BOX = (128, 32)  # of the float32 sums of dQ

Shape = tuple[int, ...]


def eighths(strides: Shape) -> tuple[int, int, int]:
    """Strides in units of 8 elements, so that the compiler sees pieces of 16 bytes."""
    B, H, S, _ = strides
    return B // 8, H // 8, S // 8


def diagonal(variant: Variant, Sk: int) -> int:
    """The offset of these kernels' masks: query i sees key j <= i + offset, all keys if there is no
    band."""
    kind = variant.kind
    return variant.offset if kind.CAUSAL or kind.WINDOW or kind.VARLEN else Sk


# --- the order of work ---------------------------------------------------------------------------


class WorkTable:
    """The order of work, where the configuration has a work table, as the kernel reads it: [rounds,
    programs] int32, item numbers, each column ended by the number of items.

    configs.balanced_work is made on the host, once for a shape, and kept: 4 bytes for a tile of a head.
    While a CUDA graph is captured nothing can be copied from the host; then a shape that never ran
    before is dealt out in turns, which the graph recomputes at each replay.  Results are the same.
    """

    table: Tensor | None = None

    def __init__(
        self,
        config: configs.HopperForward,
        heads: int,
        together: int,
        Sq: int,
        Sk: int,
        offset: int,
        programs: int,
        device: torch.device,
        left: int = 0,
    ) -> None:
        self.work = config, heads, together, Sq, Sk, offset, programs, left
        self.device = device

    def on_device(self) -> Tensor:
        if self.table is not None:
            return self.table
        config, heads, _, Sq, _, _, programs, _ = self.work
        total = heads * cdiv(Sq, config.BQ)
        if torch.cuda.is_current_stream_capturing():
            rounds = total // programs + 2
            turns = torch.arange(rounds * programs, dtype=torch.int32, device=self.device)
            turns = turns.clamp_(max=total).view(-1, programs)
            turns[1::2] = turns[1::2].flip(1)  # heavy first, and back: who was first is last
            return turns
        items = configs.balanced_work(*self.work)
        rounds = max(map(len, items)) + 1
        rows = [[*own, *[total] * (rounds - len(own))] for own in items]
        host = torch.tensor(rows, dtype=torch.int32).t().contiguous()
        self.table = outside_memory_pool(lambda: host.to(self.device), self.device)
        return self.table


work_table_of = functools.cache(WorkTable)


# --- forward -------------------------------------------------------------------------------------


def boxes_of_queries(
    config: configs.HopperForward, shape: Shape, strides: Shape, group: int, columns: int = 0
) -> tuple[Shape, Shape, Shape]:
    """(shape, strides, box) of q as a consumer's rows are fetched, so many columns of them or D;
    packed, the heads of a group are a dimension inside of the queries."""
    if config.PACK == 1:
        return shape, strides, (1, 1, 64, columns or config.D)
    (B, Hq, Sq, head_dim), (b, h, s, one) = shape, strides
    box = (1, 1, config.CQ, config.PACK, columns or config.D)
    return (B, Hq // group, Sq, group, head_dim), (b, group * h, s, h, one), box


def slots_of(variant: Variant, tokens: int, block: int) -> int:
    """How many tiles sequences of so many tokens may have, see sequence_of of kernels/schedule.py."""
    return tokens // block + variant.named["cu_seqlens_q"].shape[0]


def records(recipe: Recipe, slots: int, device: torch.device) -> Operand:
    """Memory for those of so many slots, in order, see kernels/schedule.py."""
    return recipe.make(New.contiguous((1 + slots, RECORD.value), torch.int32, device))


def work_on_device(
    recipe: Recipe,
    config: configs.HopperForward,
    variant: Variant,
    q: Operand,
    k: Operand,
    max_score: Operand | None,
) -> Any:
    """What the kernel is given, see kernels/scores.py, and the steps that make it: which key tiles are
    visited, where intervals, a table or lengths on the device say so."""
    kind, BM, BN = variant.kind, config.BQ, config.BN
    start = len(recipe.steps)
    given = given_to(recipe, variant, q, k, BN, keeping=False, max_score=max_score)
    Sq, Sk = q.shape[2], k.shape[2]
    constants = {"BLOCK_M": BM, "BLOCK_N": BN, "KIND": kind, "num_warps": 1}
    if kind.LISTS:
        of = given.table if kind.TABLE else given.begin
        rows, tiles = of.shape[0] * of.shape[1], cdiv(Sq, BM)
        lines = rows, tiles, LIST.value + cdiv(Sk, BN)
        work = recipe.make(New.contiguous(lines, torch.int32, q.device))
        numbers = Sq, Sk, diagonal(variant, Sk)
        recipe.launch(visits_kernel, rows * tiles, work, *numbers, given, **constants)
        recipe.launch(order_lists_kernel, rows * tiles, work, *lines[1:], BLOCK=256, num_warps=1)
        name = "visits", BM, BN, kind, *numbers, given.left, given.first
        recipe.keep(start, work, of, name)
    elif kind.VARLEN:
        slots = slots_of(variant, Sq, BM)
        work = records(recipe, slots, q.device)
        found = work, variant.offset, given, slots
        recipe.launch(query_slots_kernel, slots, *found, BLOCK=256, **constants)
    else:
        return given
    return given._replace(work=work)


def keys_seen(variant: Variant, Sq: int, Sk: int) -> int:
    """How many keys all queries together see, but for intervals, of which the host knows nothing."""
    kind, named = variant.kind, variant.named
    end = max(min(Sk, Sq + variant.offset), 0) if kind.CAUSAL else Sk
    begin = min(max(variant.offset - named["left"], 0), end) if kind.WINDOW else 0
    return end - max(begin - named.get("first", 0), 0)


def merge(
    recipe: Recipe, outs: Operand, lses: Operand, out: Operand, lse: Operand, sinks: Operand | None
) -> None:
    """Fill out and lse from those of parts of the keys, outs [B * parts, Hq, Sq, D] float32."""
    B, H, Sq, D = out.shape
    parts = outs.shape[0] // B
    config = configs.attention_merge(parts, D)
    recipe.launch(
        attention_merge_kernel,
        B * H * Sq,
        outs,
        lses,
        out,
        lse,
        None if sinks is None else sinks.contiguous(),
        *out.stride()[:3],
        H,
        Sq,
        parts,
        D=D,
        BLOCK_D=config.block_d,
        PARTS=config.parts,
        num_warps=config.num_warps,
    )


def forward(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    variant: Variant,
    scale: float,
    num_splits: int = 0,
    max_score: Operand | None = None,
) -> None:
    """Fill out, lse and max_score, if it is not None; no tensor is empty.  What TMA cannot read is
    copied.  num_splits: of the keys at most; 0, as many as are best."""
    q, k, v = map(readable, (q, k, v))
    (B, Hq, Sq, head_dim), (_, Hkv, Sk, head_dim_v) = q.shape, v.shape
    group, most = Hq // Hkv, multiprocessors(q.device)
    seen = keys_seen(variant, Sq, Sk)
    left = variant.named.get("left")
    config = configs.attention_forward_hopper(
        head_dim, Sk, variant.kind, Sq, B * Hkv, group, most, seen, num_splits, left, head_dim_v
    )
    heads = Hq if config.PACK == 1 else Hkv  # of work items
    tiles = cdiv(Sq, config.BQ)
    if variant.kind.VARLEN:
        tiles = slots_of(variant, Sq, config.BQ)
    total = tiles * B * heads
    parts, to, lse_to = None, out, lse
    if config.SPLIT:
        parts = configs.forward_parts(config, B * heads, Sq, seen, most, num_splits)
        total *= parts
        rows = (B * parts, Hq, Sq)
        to = recipe.make(New.contiguous((*rows, head_dim_v), torch.float32, q.device))
        lse_to = recipe.make(New.contiguous(rows, torch.float32, q.device))
    programs = min(total, most * config.PROGRAMS)
    together = configs.heads_together_forward(config, B, Hq, Hkv, Sk)
    offset = diagonal(variant, Sk)
    order: Any = lse  # which is not read
    if config.HAS_WORK_TABLE:
        table = config, B * heads, together, Sq, Sk, offset, programs, q.device, left or 0
        work = work_table_of(*table)
        order = Table(work.on_device)
    if config.DYNAMIC:
        programs = min(programs, MOST_PROGRAMS.value)
        order = Zeroed(TURNS.value)
    keys = (1, 1, config.BN, config.D)
    more: dict[str, Any] = {}
    if config.MORE:
        boxes = boxes_of_queries(config, q.shape, q.strides, group, config.MORE)
        more["more_q_desc"] = boxed(q, *boxes)
        more["more_k_desc"] = boxed(k, k.shape, k.strides, (1, 1, config.BN, config.MORE))
    given = work_on_device(recipe, config, variant, q, k, max_score)
    recipe.launch(
        attention_forward_kernel,
        programs,
        boxed(q, *boxes_of_queries(config, q.shape, q.strides, group)),
        boxed(k, k.shape, k.strides, keys),
        boxed(v, v.shape, v.strides, keys),
        to,
        lse_to,
        order,
        total,
        tiles,
        heads,
        group,
        B * heads,
        together,
        Sq,
        Sk,
        offset,
        *eighths(to.strides),
        head_dim_v,
        max(scale, SMALLEST_SCALE) * LOG2E,
        given,
        parts,
        CFG=config,
        **more,
        num_warps=4,
        maxnreg=config.max_registers,
    )
    if config.SPLIT:
        merge(recipe, to, lse_to, out, lse, variant.named.get("sinks"))


# --- backward ------------------------------------------------------------------------------------


def boxes_of_heads(
    shape: Shape, strides: Shape, rows: int, D: int, varlen: bool
) -> tuple[Shape, Shape, Shape]:
    """(shape, strides, box) of heads [B, H, S, head_dim] in boxes of so many rows.

    Of sequences side by side, B = 1, a box has zeros past the end of its own sequence.  A descriptor
    knows one end for all.  So it is given BOUND rows, counted so that each sequence ends at the last of
    them, and two dimensions in front that move the address on and back: coordinates (BOUND, stop, h,
    BOUND - count + row, 0) are row `row` of the sequence of `count` tokens before token `stop`.
    Addresses are computed modulo 2^64.  Source: triton/tools/ragged_tma.py of Triton.
    """
    if not varlen:
        return shape, strides, (1, 1, rows, D)
    (_, H, S, head_dim), (_, head, token, one) = shape, strides
    if S == 1:
        token = UNUSED_STRIDE
    most = 0x7FFF0000  # a coordinate is an int32
    back = 2**64 // BOUND.value - token
    return (most, most, H, BOUND.value, head_dim), (back, token, head, token, one), (1, 1, 1, rows, D)


def backward(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    dout: Operand,
    dlse: Operand | None,
    dq: Operand | None,
    dk: Operand | None,
    dv: Operand | None,
    variant: Variant,
    scale: float,
    ordered: bool,
    sinks: Operand | None = None,
) -> None:
    """Fill dq, dk and dv, of which dk and dv of one head_dim have the same strides, and the gradient of
    the sinks; one that is None is not wanted.

    ordered: dq is summed in a fixed order.  What TMA cannot read is copied.
    """
    if dq is None:
        dq = recipe.make(New.contiguous(q.shape, q.dtype, q.device))
    if dk is None or dv is None:
        dk, dv = (recipe.make(New.contiguous(x.shape, x.dtype, x.device)) for x in (k, v))
    q, k, v, out, dout = map(readable, (q, k, v, out, dout))
    dlse = None if dlse is None else dlse.contiguous()
    (B, Hq, Sq, head_dim), (_, Hkv, Sk, _) = q.shape, k.shape
    given_sinks, variant = variant.named.get("sinks"), main_backward(variant)
    offset, positive_scale = diagonal(variant, Sk), max(scale, SMALLEST_SCALE)
    most = multiprocessors(q.device)
    head_dim_v = v.shape[3]
    config = configs.attention_backward_hopper(
        head_dim, Sk, variant.kind, ordered, B * Hkv, Hq // Hkv, head_dim_v
    )
    D, BM, BN, varlen = config.D, config.BM, config.BN, variant.kind.VARLEN
    of_sums = D + config.MORE
    query_tiles, key_tiles = cdiv(Sq, BM), cdiv(Sk, BN)
    if varlen:
        query_tiles, key_tiles = slots_of(variant, Sq, BM), slots_of(variant, Sk, BN)
    together = configs.heads_together_backward(config, B, Hq, Hkv, Sq, Sk, most)
    zeroed = query_tiles * BM
    if config.FIRST:
        # The first key tile stores: zeros are for query tiles that see no key.
        zeroed = min(max(-offset, 0), Sq) // BM * BM
    counts_items = config.COUNTED and query_tiles * (Hq // Hkv) >= LEAST_STEPS.value
    programs = min(key_tiles * B * Hkv, most, MOST_PROGRAMS.value)
    padded = query_tiles * BM
    rows = B * Hq * padded
    # One piece of memory: sums of dQ, lse and delta, counters and numbers of work items.
    finished = 4 * cdiv(B * Hq, 4)  # counters, so many that the next are at a multiple of 16 bytes
    words = rows * of_sums, rows * LD // 2, finished, FIRST_TURN.value + B * Hq * query_tiles
    scratch = recipe.make(New.contiguous((sum(words),), torch.float32, q.device))
    sums = scratch.part(0, torch.float32, words[0] // 32, 32)
    terms = scratch.part(4 * words[0], torch.bfloat16, rows, LD)
    counts = scratch.part(4 * sum(words[:3]), torch.int32, words[3])
    given = given_to(recipe, variant, q, k, BN)
    lengths: Given | tuple[()] = ()  # what other kernels than the main one are given
    if varlen:
        names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "sequences", "queries", "keys"
        lengths = Given(**{name: getattr(given, name) for name in names})
        made, work = (records(recipe, key_tiles, q.device) for _ in range(2))
        constants = {"BLOCK_M": BM, "BLOCK_N": BN, "KIND": variant.kind}
        recipe.launch(
            key_slots_kernel, key_tiles, made, variant.offset, given, **constants, num_warps=1
        )
        recipe.launch(order_kernel, key_tiles, made, work, key_tiles, BLOCK=256, num_warps=1)
        given = given._replace(work=work)
    if variant.kind.TABLE:
        given = given._replace(columns=columns_for(recipe, variant, given, q, k, BM, BN, marked=True))
    if not variant.kind.PLAIN:
        given = given._replace(rows=2 * Sq + 1)  # as `counts` of kernels/scores.py has it
    lse2, delta = None, None
    if sinks is not None:
        lse2, delta = (recipe.make(New.contiguous(lse.shape, lse.dtype, lse.device)) for _ in range(2))
        if "seqused_q" in variant.named:  # nothing is written in gaps
            lse2, delta = lse2.fill_(math.inf), delta.zero_()
    recipe.launch(
        preprocess_kernel, rows // PREPROCESS_ROWS,
        out, dout, lse, lse if dlse is None else dlse, terms, sums, counts,
        Sq, padded, zeroed, Hq, head_dim_v, *eighths(out.strides), *eighths(dout.strides),
        1 / LOG2E if variant.kind.CURVED and variant.kind.RESCALES else positive_scale,
        HAS_DLSE=dlse is not None, FIRST=config.FIRST, D=D, R=PREPROCESS_ROWS, BM=BM, PDL=True,
        lse2_ptr=lse2, delta_ptr=delta, given=lengths, VARLEN=varlen, MORE=config.MORE, num_warps=4,
    )  # fmt: skip
    queries, keys = ((x, D, varlen) for x in (BM, BN))
    more: dict[str, Any] = {}
    if config.MORE:
        more_queries, more_keys = ((x, config.MORE, varlen) for x in (BM, BN))
        more["more_q_desc"] = boxed(q, *boxes_of_heads(q.shape, q.strides, *more_queries))
        more["more_k_desc"] = boxed(k, *boxes_of_heads(k.shape, k.strides, *more_keys))
        more |= zip(("v_b", "v_h", "v_s", "D_v"), (*eighths(dv.strides), head_dim_v), strict=True)
    recipe.launch(
        attention_backward_kernel, programs,
        boxed(q, *boxes_of_heads(q.shape, q.strides, *queries)),
        boxed(dout, *boxes_of_heads(dout.shape, dout.strides, *queries)),
        boxed(k, *boxes_of_heads(k.shape, k.strides, *keys)),
        boxed(v, *boxes_of_heads(v.shape, v.strides, *keys)),
        boxed(terms, terms.shape, terms.strides, (BM, LD)),
        boxed(sums, sums.shape, sums.strides, SUMS_BOX), sums, counts, dk, dv,
        key_tiles, query_tiles, Hq, Hq // Hkv, B * Hkv, together, Sk, offset,
        *eighths(dk.strides), head_dim, scale, positive_scale * LOG2E, given,
        CFG=config, **more, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    recipe.launch(
        postprocess_kernel,
        rows * of_sums // (64 * config.NQ),
        sums,
        dq,
        counts,
        key_tiles if counts_items else 0,
        Sq,
        padded // 64,
        Hq,
        Hq // Hkv,
        head_dim,
        *eighths(dq.strides),
        scale,
        lengths,
        D=of_sums,
        N=config.NQ,
        BM=BM,
        VARLEN=varlen,
        num_warps=4,
        launch_pdl=True,
    )
    if sinks is not None:
        recipe.launch(
            attention_backward_heads_kernel,
            Hq,
            delta,
            lse2,
            given_sinks,
            sinks,
            Hq,
            B,
            Sq if not varlen else 0,
            lengths,
            KIND=variant.kind,
            SINKS=True,
            BLOCK=1024,
            num_warps=4,
        )
