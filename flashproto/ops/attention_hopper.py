"""Attention: launches of the Hopper kernels, for ops/attention.py.

Legend: q, out, dout, dq [B, Hq, Sq, D], k, v, dk, dv [B, Hkv, Sk, D]; lse, dlse [B, Hq, Sq] float32.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from ..kernels.hopper.attention_backward import attention_backward_kernel
from ..kernels.hopper.attention_backward_rows import postprocess_kernel, preprocess_kernel
from ..kernels.hopper.attention_backward_work import FIRST_TURN
from ..kernels.hopper.attention_forward import attention_forward_kernel
from .descriptors import describe, descriptor, tma_reads
from .launch import Launcher, cdiv, launcher, multiprocessors

LOG2E = math.log2(math.e)
PREPROCESS_ROWS = 32
SUMS_BOX = (128, 32)  # of the float32 sums of dQ


# --- operands ------------------------------------------------------------------------------------


def for_rows(x: Tensor) -> Tensor:
    """x, or a contiguous copy where its rows do not come in pieces of 16 bytes."""
    if x.data_ptr() % 16 == 0 and rows_fit(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(1024)
def rows_fit(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return tma_reads(0, 2, shape, strides)


def eighths(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides in units of 8 elements, so that the compiler sees pieces of 16 bytes."""
    B, H, S, _ = strides
    return B // 8, H // 8, S // 8


# --- the order of work ---------------------------------------------------------------------------


_tables: dict[tuple[object, ...], Tensor] = {}


def order_on_device(
    config: configs.HopperForward, heads: int, together: int, Sq: int, Sk: int, offset: int,
    programs: int, device: torch.device,
) -> Tensor:  # fmt: skip
    """The order of work under a causal mask as the kernel reads it: [rounds, programs] int32, item
    numbers, each column ended by the number of items.

    configs.balanced_plan is made on the host, once for a shape, and kept: 4 bytes for a tile of a head.
    While a CUDA graph is captured nothing can be copied from the host; then a shape that never ran
    before is dealt out in turns, which the graph recomputes at each replay.  Results are the same.
    """
    key = (config, heads, together, Sq, Sk, offset, programs, device)
    table = _tables.get(key)
    if table is not None:
        return table
    total = heads * cdiv(Sq, config.BM)
    if torch.cuda.is_current_stream_capturing():
        turns = torch.arange((total // programs + 2) * programs, dtype=torch.int32, device=device)
        turns = turns.clamp_(max=total).view(-1, programs)
        turns[1::2] = turns[1::2].flip(1)  # heavy first, and back: who was first is last
        return turns
    items = configs.balanced_plan(config, heads, together, Sq, Sk, offset, programs)
    rounds = max(map(len, items)) + 1
    rows = [[*own, *[total] * (rounds - len(own))] for own in items]
    host = torch.tensor(rows, dtype=torch.int32).t().contiguous()

    # In a thread of its own, since a private memory pool of the calling thread (torch.compile's CUDA
    # graphs make one to warm up) would take this memory back.
    def upload() -> None:
        _tables[key] = host.to(device)

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join()
    return _tables[key]


# --- launches: what follows from plain facts is kept ---------------------------------------------


@functools.cache
def forward_launcher(config: configs.HopperForward) -> Launcher:
    return launcher(attention_forward_kernel, descriptors=3, tensors=3, CFG=config, num_warps=4)


class Forward(NamedTuple):
    """How the forward kernel is launched for one shape.

    queries, keys: boxes of the descriptors; sizes: the kernel's numbers up to offset; order: arguments
    of order_on_device, None without a mask.
    """

    launch: Launcher
    programs: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[Any, ...] | None


@functools.lru_cache(1024)
def plan_forward(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], causal: bool, offset: int, device: torch.device
) -> Forward:
    (B, Hq, Sq, head_dim), (_, Hkv, Sk, _) = q_shape, k_shape
    config = configs.attention_forward_hopper(head_dim, Sk, causal)
    tiles = cdiv(Sq, config.BM)
    total = tiles * B * Hq
    programs = min(total, multiprocessors(device))
    together = configs.heads_together_forward(config, B, Hq, Hkv, Sk)
    if not causal:
        offset = Sk
    return Forward(
        forward_launcher(config),
        programs,
        (1, 1, 64, config.D),
        (1, 1, config.BN, config.D),
        (total, tiles, Hq, Hq // Hkv, B * Hq, together, Sq, Sk, offset),
        (config, B * Hq, together, Sq, Sk, offset, programs, device) if causal else None,
    )


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, offset: int, scale: float,
) -> None:  # fmt: skip
    """Fill out and lse; scale > 0, no tensor empty."""
    plan = plan_forward(q.shape, k.shape, causal, offset, q.device)
    # The copies, if TMA needs any, are held until the launch.
    (q, q_box), (k, k_box), (v, v_box) = (
        describe(q, plan.queries), describe(k, plan.keys), describe(v, plan.keys)
    )  # fmt: skip
    order = lse if plan.order is None else order_on_device(*plan.order)  # lse is not read
    plan.launch(
        plan.programs, q_box, k_box, v_box, out, lse, order,
        *plan.sizes, *eighths(out.stride()), q.shape[3], scale * LOG2E,
    )  # fmt: skip


def plan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool, offset: int, scale: float
) -> Callable[..., None]:
    """attention_forward as a function of its tensors, for such as are like these."""
    shared = plan_forward(q.shape, k.shape, causal, offset, q.device)
    queries, keys, order_arguments = shared.queries, shared.keys, shared.order
    numbers = *shared.sizes, *eighths(out.stride()), q.shape[3], scale * LOG2E
    _, q_box = describe(q, queries)
    (_, k_box), (_, v_box) = describe(k, keys), describe(v, keys)
    launch = shared.launch.bind(shared.programs, q_box, k_box, v_box, out, out, out, *numbers)

    def fill(q, k, v, out, lse):
        # The copies, if TMA needs any, are held until the launch.
        (q, q_box), (k, k_box), (v, v_box) = describe(q, queries), describe(k, keys), describe(v, keys)
        order = lse if order_arguments is None else order_on_device(*order_arguments)
        launch(q_box, k_box, v_box, out, lse, order)

    return fill


@functools.cache
def backward_launchers(
    config: configs.HopperBackward,
) -> tuple[Launcher, Launcher, Launcher]:
    """(preprocess, main, postprocess)."""
    rows = {"FIRST": config.FIRST, "D": config.D, "R": PREPROCESS_ROWS, "BM": config.BM}
    sums = {"D": config.D, "N": config.NQ}
    return (
        launcher(preprocess_kernel, tensors=7, **rows, num_warps=4),
        launcher(attention_backward_kernel, descriptors=6, tensors=4, CFG=config, num_warps=4),
        launcher(postprocess_kernel, tensors=2, **sums, num_warps=4),
    )


class Backward(NamedTuple):
    """How the backward kernels are launched for one shape: three functions of their tensors.

    queries, keys, rows: boxes of the descriptors of q and dout, k and v, lse and delta; lse_delta,
    sums, turns: elements of these (counters of work items and of tiles).
    """

    preprocess: Callable[..., None]
    main: Callable[..., None]
    postprocess: Callable[..., None]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: tuple[int, ...]
    lse_delta: int
    sums: int
    turns: int


@functools.lru_cache(1024)
def plan_backward(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], causal: bool, offset: int, ordered: bool,
    device: torch.device, dtype: torch.dtype, scale: float, positive_scale: float, has_dlse: bool,
    out_strides: tuple[int, ...], dout_strides: tuple[int, ...],
    dq_strides: tuple[int, ...], dk_strides: tuple[int, ...],
) -> Backward:  # fmt: skip
    """Of tensors of `dtype` on `device`, with these strides where descriptors do not hold them."""
    (B, Hq, Sq, head_dim), (_, Hkv, Sk, _) = q_shape, k_shape
    config = configs.attention_backward_hopper(head_dim, Sk, causal, ordered)
    D, BM, BN = config.D, config.BM, config.BN
    query_tiles, key_tiles = cdiv(Sq, BM), cdiv(Sk, BN)
    together = configs.heads_together_backward(config, B, Hq, Hkv, Sq, Sk, multiprocessors(device))
    zeroed, turns = query_tiles * BM, FIRST_TURN.value
    if config.FIRST:
        # The first key tile stores: zeros are for query tiles that see no key.
        zeroed = min(max(-offset, 0), Sq) // BM * BM if causal else 0
        turns += B * Hq * query_tiles
    programs = min(key_tiles * B * Hkv, multiprocessors(device))
    padded = query_tiles * BM
    rows = B * Hq * padded
    preprocess, main, postprocess = backward_launchers(config)
    some = [True] * 10  # tensors and descriptors, none of them None
    return Backward(
        preprocess.bind(
            rows // PREPROCESS_ROWS, *some[:7], Sq, padded, zeroed, Hq, head_dim,
            *eighths(out_strides), *eighths(dout_strides), HAS_DLSE=has_dlse,
        ),
        main.bind(
            programs, *some, key_tiles, query_tiles, Hq, Hq // Hkv, B * Hkv, together, Sk,
            offset if causal else Sk, *eighths(dk_strides), head_dim, scale, positive_scale * LOG2E,
        ),
        postprocess.bind(
            rows * D // (64 * config.NQ), *some[:2], Sq, padded // 64, Hq, head_dim,
            *eighths(dq_strides), scale,
        ),
        (1, 1, BM, D), (1, 1, BN, D), (2 * BM,), 2 * rows, rows * D, turns,
    )  # fmt: skip


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, offset: int, scale: float, positive_scale: float,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, of which dk and dv have the same strides; one of no elements is not wanted.

    scale >= 0 multiplies the gradients, positive_scale > 0 the scores.  dq is summed in a fixed order
    under torch.use_deterministic_algorithms(True).
    """
    device = q.device
    dq = dq if dq.numel() else torch.empty(q.shape, dtype=q.dtype, device=device)
    if not dk.numel():
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=device) for _ in range(2))
    # The copies, if TMA needs any, are held until the launches.
    out, dout = for_rows(out), for_rows(dout)
    plan = plan_backward(
        q.shape, k.shape, causal, offset, torch.are_deterministic_algorithms_enabled(),
        device, q.dtype, scale, positive_scale, dlse is not None,
        out.stride(), dout.stride(), dq.stride(), dk.stride(),
    )  # fmt: skip
    (q, q_box), (dout, dout_box) = describe(q, plan.queries), describe(dout, plan.queries)
    (k, k_box), (v, v_box) = describe(k, plan.keys), describe(v, plan.keys)
    sums = torch.empty(plan.sums, dtype=torch.float32, device=device)
    lse_delta = torch.empty(plan.lse_delta, dtype=torch.float32, device=device)
    turns = torch.empty(plan.turns, dtype=torch.int32, device=device)
    plan.preprocess(out, dout, lse, lse if dlse is None else dlse.contiguous(), lse_delta, sums, turns)
    index = q.get_device()
    lse_box = descriptor(lse_delta.data_ptr(), index, torch.float32, (plan.lse_delta,), (1,), plan.rows)
    sums_shape = plan.sums // 32, 32
    sums_box = descriptor(sums.data_ptr(), index, torch.float32, sums_shape, (32, 1), SUMS_BOX)
    plan.main(q_box, dout_box, k_box, v_box, lse_box, sums_box, sums, turns, dk, dv)
    plan.postprocess(sums, dq)
