"""Attention: launches of the Hopper kernels, for ops/attention.py.

Legend: q, out, dout, dq [B, Hq, Sq, D], k, v, dk, dv [B, Hkv, Sk, D]; lse, dlse [B, Hq, Sq] float32.

How a call launches follows from shapes, strides, dtypes and options.  plan_forward and plan_backward
work it out once for each set of them and return a function of the tensors, which takes their addresses
and launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from ..kernels.hopper.attention_backward import attention_backward_kernel
from ..kernels.hopper.attention_backward_rows import COLUMNS, postprocess_kernel, preprocess_kernel
from ..kernels.hopper.attention_backward_work import FIRST_TURN, LEAST_STEPS, MOST_PROGRAMS
from ..kernels.hopper.attention_forward import attention_forward_kernel
from ..variant import Variant
from .descriptors import boxes, readable, tma_reads
from .launch import Launcher, cdiv, launcher, multiprocessors
from .memory import Memory, New, apart

LOG2E = math.log2(math.e)
PREPROCESS_ROWS = 32
LD = COLUMNS.value  # bfloat16 numbers for lse and delta of a query
SUMS_BOX = (128, 32)  # of the float32 sums of dQ

Shape = tuple[int, ...]


def eighths(strides: Shape) -> tuple[int, int, int]:
    """Strides in units of 8 elements, so that the compiler sees pieces of 16 bytes."""
    B, H, S, _ = strides
    return B // 8, H // 8, S // 8


def diagonal(variant: Variant, Sk: int) -> int:
    """The offset of these kernels' masks: query i sees key j <= i + offset, all keys if not causal."""
    return variant.offset if variant.kind.CAUSAL else Sk


# --- the order of work ---------------------------------------------------------------------------


class Order:
    """The order of work, where the configuration has it PLANNED, as the kernel reads it: [rounds,
    programs] int32, item numbers, each column ended by the number of items.

    configs.balanced_plan is made on the host, once for a shape, and kept: 4 bytes for a tile of a head.
    While a CUDA graph is captured nothing can be copied from the host; then a shape that never ran
    before is dealt out in turns, which the graph recomputes at each replay.  Results are the same.
    """

    table: Tensor | None = None

    def __init__(
        self, config: configs.HopperForward, heads: int, together: int, Sq: int, Sk: int, offset: int,
        programs: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.work = config, heads, together, Sq, Sk, offset, programs
        self.device = device

    def on_device(self) -> Tensor:
        if self.table is not None:
            return self.table
        config, heads, _, Sq, _, _, programs = self.work
        total = heads * cdiv(Sq, config.BQ)
        if torch.cuda.is_current_stream_capturing():
            rounds = total // programs + 2
            turns = torch.arange(rounds * programs, dtype=torch.int32, device=self.device)
            turns = turns.clamp_(max=total).view(-1, programs)
            turns[1::2] = turns[1::2].flip(1)  # heavy first, and back: who was first is last
            return turns
        items = configs.balanced_plan(*self.work)
        rounds = max(map(len, items)) + 1
        rows = [[*own, *[total] * (rounds - len(own))] for own in items]
        host = torch.tensor(rows, dtype=torch.int32).t().contiguous()
        self.table = apart(lambda: host.to(self.device), self.device)
        return self.table


order_of = functools.cache(Order)


# --- forward -------------------------------------------------------------------------------------


@functools.cache
def forward_launcher(config: configs.HopperForward) -> Launcher:
    return launcher(
        attention_forward_kernel, descriptors=3, tensors=3, CFG=config,
        num_warps=4, maxnreg=config.max_registers,
    )  # fmt: skip


def boxes_of_queries(
    config: configs.HopperForward, shape: Shape, strides: Shape, group: int
) -> tuple[Shape, Shape, Shape]:
    """(shape, strides, box) of q as a consumer's rows are fetched; packed, the heads of a group are a
    dimension inside of the queries."""
    if config.PACK == 1:
        return shape, strides, (1, 1, 64, config.D)
    (B, Hq, Sq, head_dim), (b, h, s, one) = shape, strides
    box = (1, 1, config.CQ, config.PACK, config.D)
    return (B, Hq // group, Sq, group, head_dim), (b, group * h, s, h, one), box


@functools.lru_cache(1024)
def plan_forward(
    q_shape: Shape, k_shape: Shape, variant: Variant, scale: float,
    device: torch.device, dtype: torch.dtype,
    q_strides: Shape, k_strides: Shape, v_strides: Shape, out_strides: Shape,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:  # fmt: skip
    """attention_forward as a function of (q, k, v, out, lse), whose strides TMA can read."""
    (B, Hq, Sq, head_dim), (_, Hkv, Sk, _) = q_shape, k_shape
    group, most = Hq // Hkv, multiprocessors(device)
    config = configs.attention_forward_hopper(head_dim, Sk, variant.kind, Sq, B * Hkv, group, most)
    heads = Hq if config.PACK == 1 else Hkv  # of work items
    tiles = cdiv(Sq, config.BQ)
    total = tiles * B * heads
    programs = min(total, most * config.PROGRAMS)
    together = configs.heads_together_forward(config, B, Hq, Hkv, Sk)
    offset = diagonal(variant, Sk)
    order = None
    if config.PLANNED:
        order = order_of(config, B * heads, together, Sq, Sk, offset, programs, device)
    index = memory_index(device)
    keys = (1, 1, config.BN, config.D)
    q_boxes = boxes(index, dtype, *boxes_of_queries(config, q_shape, q_strides, group))
    k_boxes, v_boxes = (boxes(index, dtype, k_shape, s, keys) for s in (k_strides, v_strides))
    floats = Memory(0, torch.float32, index)
    launch = forward_launcher(config).bind(
        programs, True, True, True,
        Memory(0, dtype, index), floats, floats if order is None else Memory(0, torch.int32, index),
        total, tiles, heads, group, B * heads, together, Sq, Sk, offset,
        *eighths(out_strides), head_dim, scale * LOG2E, variant.variables,
    )  # fmt: skip

    def fill(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        at_q, at_k, at_v, at_lse = q.data_ptr(), k.data_ptr(), v.data_ptr(), lse.data_ptr()
        if (at_q | at_k | at_v) & 15:
            attention_forward(q, k, v, out, lse, variant, scale)
            return
        at_order = at_lse  # which is not read
        if order is not None:
            table = order.on_device()
            at_order = table.data_ptr()
        launch(q_boxes[at_q], k_boxes[at_k], v_boxes[at_v], out.data_ptr(), at_lse, at_order)

    return fill


def memory_index(device: torch.device) -> int:
    """What tensors of `device` return as get_device()."""
    return -1 if device.index is None else device.index


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    variant: Variant, scale: float,
) -> None:  # fmt: skip
    """Fill out and lse; scale > 0, no tensor empty.  What TMA cannot read is copied."""
    q, k, v = readable(q), readable(k), readable(v)
    fill = plan_forward(
        q.shape, k.shape, variant, scale, q.device, q.dtype,
        q.stride(), k.stride(), v.stride(), out.stride(),
    )  # fmt: skip
    fill(q, k, v, out, lse)


# --- backward ------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """scale >= 0 multiplies the gradients, positive_scale > 0 the scores."""

    variant: Variant
    scale: float
    positive_scale: float


@functools.cache
def backward_launchers(
    config: configs.HopperBackward,
) -> tuple[Launcher, Launcher, Launcher]:
    """(preprocess, main, postprocess), of which the last two are dependent launches."""
    rows: dict[str, Any] = {
        "FIRST": config.FIRST, "D": config.D, "R": PREPROCESS_ROWS, "BM": config.BM, "PDL": True
    }  # fmt: skip
    sums: dict[str, Any] = {"D": config.D, "N": config.NQ}
    dependent: dict[str, Any] = {"num_warps": 4, "launch_pdl": True}
    return (
        launcher(preprocess_kernel, tensors=7, **rows, num_warps=4),
        launcher(attention_backward_kernel, descriptors=6, tensors=4, CFG=config, **dependent),
        launcher(postprocess_kernel, tensors=3, **sums, **dependent),
    )


@functools.lru_cache(1024)
def plan_backward(
    q_shape: Shape, k_shape: Shape, settings: Settings, ordered: bool, has_dlse: bool,
    device: torch.device, dtype: torch.dtype,
    q_strides: Shape, k_strides: Shape, v_strides: Shape, out_strides: Shape, dout_strides: Shape,
    dq_strides: Shape, dk_strides: Shape,
) -> Callable[..., None]:  # fmt: skip
    """attention_backward as a function of (q, k, v, out, lse, dout, dlse, dq, dk, dv), of which TMA can
    read the strides of the first three, out and dout."""
    (B, Hq, Sq, head_dim), (_, Hkv, Sk, _) = q_shape, k_shape
    variant, scale, positive_scale = settings
    offset = diagonal(variant, Sk)
    config = configs.attention_backward_hopper(head_dim, Sk, variant.kind, ordered, B * Hkv, Hq // Hkv)
    D, BM, BN = config.D, config.BM, config.BN
    query_tiles, key_tiles = cdiv(Sq, BM), cdiv(Sk, BN)
    together = configs.heads_together_backward(config, B, Hq, Hkv, Sq, Sk, multiprocessors(device))
    zeroed = query_tiles * BM
    if config.FIRST:
        # The first key tile stores: zeros are for query tiles that see no key.
        zeroed = min(max(-offset, 0), Sq) // BM * BM
    counts_items = config.COUNTED and query_tiles * (Hq // Hkv) >= LEAST_STEPS.value
    programs = min(key_tiles * B * Hkv, multiprocessors(device), MOST_PROGRAMS.value)
    padded = query_tiles * BM
    rows = B * Hq * padded
    # One piece of memory: sums of dQ, lse and delta, counters and numbers of work items.
    finished = 4 * cdiv(B * Hq, 4)  # counters, so many that the next are at a multiple of 16 bytes
    words = rows * D, rows * LD // 2, finished, FIRST_TURN.value + B * Hq * query_tiles
    total = sum(words)
    to_rows, to_turns = 4 * words[0], 4 * sum(words[:3])
    new_scratch = New((total,), (1,), torch.float32, device).maker()

    index = memory_index(device)
    queries, keys = (1, 1, BM, D), (1, 1, BN, D)
    q_boxes = boxes(index, dtype, q_shape, q_strides, queries)
    dout_boxes = boxes(index, dtype, q_shape, dout_strides, queries)
    k_boxes, v_boxes = (boxes(index, dtype, k_shape, s, keys) for s in (k_strides, v_strides))
    rows_boxes = boxes(index, torch.bfloat16, (rows, LD), (LD, 1), (BM, LD))
    sums_boxes = boxes(index, torch.float32, (words[0] // 32, 32), (32, 1), SUMS_BOX)
    preprocess, main, postprocess = backward_launchers(config)
    own, floats, counts = (Memory(0, t, index) for t in (dtype, torch.float32, torch.int32))
    halves = Memory(0, torch.bfloat16, index)
    launch_preprocess = preprocess.bind(
        rows // PREPROCESS_ROWS, own, own, floats, floats, halves, floats, counts,
        Sq, padded, zeroed, Hq, head_dim, *eighths(out_strides), *eighths(dout_strides), positive_scale,
        HAS_DLSE=has_dlse,
    )  # fmt: skip
    launch_main = main.bind(
        programs, *[True] * 6, floats, counts, own, own,
        key_tiles, query_tiles, Hq, Hq // Hkv, B * Hkv, together, Sk, offset,
        *eighths(dk_strides), head_dim, scale, positive_scale * LOG2E, variant.variables,
    )  # fmt: skip
    launch_postprocess = postprocess.bind(
        rows * D // (64 * config.NQ), floats, own, counts, key_tiles if counts_items else 0,
        Sq, padded // 64, Hq, Hq // Hkv, head_dim, *eighths(dq_strides), scale,
    )  # fmt: skip

    def fill(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        at_q, at_k, at_v, at_dout = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr()
        if (at_q | at_k | at_v | at_dout) & 15:
            attention_backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, settings)
            return
        scratch = new_scratch()
        at_sums = scratch.data_ptr()
        at_rows, at_turns, at_lse = at_sums + to_rows, at_sums + to_turns, lse.data_ptr()
        at_dlse = at_lse if dlse is None else dlse.data_ptr()
        launch_preprocess(
            out.data_ptr(), at_dout, at_lse, at_dlse, at_rows, at_sums, at_turns
        )  # fmt: skip
        launch_main(
            q_boxes[at_q], dout_boxes[at_dout], k_boxes[at_k], v_boxes[at_v], rows_boxes[at_rows],
            sums_boxes[at_sums], at_sums, at_turns, dk.data_ptr(), dv.data_ptr(),
        )  # fmt: skip
        launch_postprocess(at_sums, dq.data_ptr(), at_turns)

    return fill


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, settings: Settings,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, of which dk and dv have the same strides; one of no elements is not wanted.

    dq is summed in a fixed order under torch.use_deterministic_algorithms(True).  What TMA cannot read
    is copied.
    """
    device = q.device
    dq = dq if dq.numel() else torch.empty(q.shape, dtype=q.dtype, device=device)
    if not dk.numel():
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=device) for _ in range(2))
    q, k, v, out, dout = map(readable, (q, k, v, out, dout))
    fill = plan_like(q, k, v, out, dout, dlse, dq, dk, settings)
    fill(q, k, v, out, lse, dout, None if dlse is None else dlse.contiguous(), dq, dk, dv)


def plan_like(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, settings: Settings,
) -> Callable[..., None]:  # fmt: skip
    """plan_backward of these tensors."""
    return plan_backward(
        q.shape, k.shape, settings, torch.are_deterministic_algorithms_enabled(), dlse is not None,
        q.device, q.dtype,
        q.stride(), k.stride(), v.stride(), out.stride(), dout.stride(), dq.stride(), dk.stride(),
    )  # fmt: skip


def plan_gradients(settings: Settings) -> Callable[..., None]:
    """attention_backward as a function of (q, k, v, out, lse, dout, dlse, dq, dk, dv), for tensors of
    one shape, dtype and device, gradients of one layout; other strides may differ, as hooks of saved
    tensors do not keep them."""
    fills: dict[tuple[object, ...], Callable[..., None]] = {}

    def fill_gradients(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        strides = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
        key = strides, dlse is None, torch.are_deterministic_algorithms_enabled()
        fill = fills.get(key)
        if fill is None:
            if all(tma_reads(x.element_size(), x.shape, x.stride()) for x in (q, k, v, out, dout)):
                fill = plan_like(q, k, v, out, dout, dlse, dq, dk, settings)
            else:
                fill = functools.partial(attention_backward, settings=settings)
            fills[key] = fill
        dlse = None if dlse is None else dlse.contiguous()
        fill(q, k, v, out, lse.contiguous(), dout, dlse, dq, dk, dv)

    return fill_gradients
