"""The Hopper attention kernels in every configuration that flashproto.configs chooses; sm_90 only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from compile_case import Case, given_of
from kinds import FIELDS, covering
from triton.experimental.gluon.language import NVMMASharedLayout

from flashproto import configs
from flashproto.bench.sanitize import CONTROLS, backward_configurations
from flashproto.kernels.attention_merge import attention_merge_kernel
from flashproto.kernels.hopper.attention_backward import attention_backward_kernel
from flashproto.kernels.hopper.attention_backward_rows import postprocess_kernel, preprocess_kernel
from flashproto.kernels.hopper.attention_cache_slots import cache_slots_kernel, turn_queries_kernel
from flashproto.kernels.hopper.attention_forward import attention_forward_kernel
from flashproto.kernels.hopper.racecheck_controls import control_kernel
from flashproto.kernels.schedule import (
    key_slots_kernel,
    order_kernel,
    order_lists_kernel,
    query_slots_kernel,
    visits_kernel,
)
from flashproto.kernels.scores import TILE
from flashproto.ops.attention_hopper import LD, PREPROCESS_ROWS
from flashproto.ops.descriptors import LANGUAGE_TYPES
from flashproto.variant import Kind, Variant, fields_on, main_backward

HEAD_DIMS, LENGTHS = (64, 128, 256), (512, 1024, 4096, 16384)
# (Sq, heads, group): many queries, few, few of grouped heads, more of them, and such as fill tiles of
# three consumers, with rows for all of them and without, and a round of programs less well than two
QUERIES = (
    (16384, 1024, 1),
    (1, 1024, 1),
    (3, 1024, 4),
    (40, 1024, 5),
    (960, 1024, 1),
    (1088, 1024, 1),
    (4096, 64, 1),
)
# At head_dim 256, more heads packed, by one consumer and by two.
MORE_HEADS = ((40, 1024, 16), (40, 1024, 64))
# So few that long keys are split: unpacked, by three consumers at head_dim 128, of one query, and of
# grouped heads.
SPLIT = ((512, 4, 1), (384, 96, 1), (1, 1, 1), (1, 1, 4), (60, 40, 4))
# None in the forward with Triton 3.6; the ptxas that came later keeps a few words outside the loops.
FORWARD_STACK = 0 if triton.__version__.startswith("3.6.") else 32
# Where keys are split two words at least, outside the loops too.
SPLIT_STACK = max(FORWARD_STACK, 8)
# Kinds beside causal and full, and head dims; a mask may need a few words.
CHOSEN = (
    (128, Kind(CAUSAL=True, WINDOW=True)),
    (64, Kind(SOFTCAP=1)),
    (128, Kind(CAUSAL=True, SOFTCAP=1)),
    (128, Kind(CAUSAL=True, SINKS=True, ALIBI=True)),
    (128, Kind(CAUSAL=True, INTERVALS=True)),
    (128, Kind(CAUSAL=True, VARLEN=True)),
    (64, Kind(TABLE=True)),
    (128, Kind(TABLE=True)),
    (128, Kind(True, True, True, False, 1, True, True, True, TABLE=True)),
    (64, Kind(True, True, True, True, 1, True, True, True)),
    (256, Kind(True, True, True, False, 1, True, True, True, VARLEN=True)),
)
FORWARD = tuple(name for name in FIELDS if name in fields_on("hopper"))
REST = covering(FORWARD, (Kind(), Kind(CAUSAL=True), *(kind for _, kind in CHOSEN)), "hopper")
VARIANTS = (*CHOSEN, *zip((64, 128, 64), REST, strict=False))
SPLIT_VARIANTS = (
    (128, Kind(CAUSAL=True, WINDOW=True)),
    (128, Kind(CAUSAL=True, INTERVALS=True)),
    (64, Kind(True, True, True, True, 1, True, True)),
    (256, Kind(True, True, True, False, 1, True, True)),
)
VARIANT_STACK = 192
# Of 192 columns of queries and keys and 128 of values: (Sq, heads, group), many queries, few, few of
# grouped heads, and keys split.  Kinds beside causal and full.
WIDER_KEYS = (QUERIES[0], QUERIES[1], QUERIES[3], (384, 96, 1))
# The ptxas that came later keeps words outside the backward's loops, and five in them.
WIDER_STACK = 0 if triton.__version__.startswith("3.6.") else 128
WIDER_VARIANTS = (
    Kind(CAUSAL=True, VARLEN=True),
    Kind(CAUSAL=True, WINDOW=True, SINKS=True),
    Kind(True, True, True, True, 1, True, True, True),
)
# Of caches: (head_dim, kind, queries, key heads, group, page size, starts, left, room).
CACHES = (
    (128, Kind(CAUSAL=True), 512, 8, 8, 0, False, None, 131072),
    (128, Kind(CAUSAL=True), 512, 8, 8, 16, False, None, 131072),
    (128, Kind(CAUSAL=True), 512, 1, 8, 16, False, None, 131072),
    (128, Kind(CAUSAL=True), 4096, 8, 8, 64, True, None, 131072),
    (128, Kind(CAUSAL=True), 16, 16, 4, 16, True, None, 8192),
    (64, Kind(CAUSAL=True), 512, 8, 8, 256, True, None, 8192),
    (64, Kind(CAUSAL=True, WINDOW=True, SINKS=True), 512, 8, 8, 16, True, 127, 1024),
    (256, Kind(CAUSAL=True), 512, 8, 2, 16, True, None, 8192),
    (256, Kind(True, True, SOFTCAP=1, ALIBI=True, SINKS=True), 512, 8, 2, 32, True, 300, 8192),
    (128, Kind(), 128, 2, 2, 0, True, None, 8192),
    (128, Kind(CAUSAL=True, WINDOW=True), 256, 2, 2, 0, True, 500, 1024),
)
CACHE_STACK = 24 if FORWARD_STACK == 0 else 96
BACKWARD_VARIANT_STACK = 320
FLOAT32 = {"lse_ptr", "dlse_ptr", "dq_ptr"}
INT32 = {"work_table", "turns_ptr"}


def layout(dtype: torch.dtype, box: tuple[int, ...]) -> NVMMASharedLayout:
    """How a box lies in shared memory, as descriptors have it."""
    return NVMMASharedLayout.get_default_for(list(box), LANGUAGE_TYPES[dtype])


def heads(element: str, rows: int, D: int) -> str:
    """The type of a descriptor with boxes [1, 1, rows, D]."""
    in_shared = layout(torch.bfloat16, (1, 1, rows, D))
    return f"tensordesc<{element}[1, 1, {rows}, {D}],{in_shared!r}>"


def heads_of_sequences(element: str, rows: int, D: int) -> str:
    """The type of a descriptor with boxes [1, 1, 1, rows, D]."""
    in_shared = layout(torch.bfloat16, (1, 1, 1, rows, D))
    return f"tensordesc<{element}[1, 1, 1, {rows}, {D}],{in_shared!r}>"


def packed_heads(element: str, queries: int, pack: int, D: int) -> str:
    """The type of a descriptor with boxes [1, 1, queries, pack, D]."""
    in_shared = layout(torch.bfloat16, (1, 1, queries, pack, D))
    return f"tensordesc<{element}[1, 1, {queries}, {pack}, {D}],{in_shared!r}>"


def float32(*box: int) -> str:
    """The type of a descriptor of float32 with such boxes."""
    return f"tensordesc<fp32[{', '.join(map(str, box))}],{layout(torch.float32, box)!r}>"


def lse_and_delta(rows: int) -> str:
    """The type of a descriptor of what the preprocess leaves of so many queries."""
    return f"tensordesc<bf16[{rows}, {LD}],{layout(torch.bfloat16, (rows, LD))!r}>"


def case(
    name: str,
    kernel: Any,
    element: str,
    constexprs: dict[str, Any],
    descriptors: dict[str, str] | None = None,
    max_stack: int = 0,
    hgmma: bool = True,
    max_registers: int | None = None,
    given: tuple[str, ...] = (),
) -> Case:
    signature: dict[str, Any] = dict(descriptors or {})
    for argument in kernel.arg_names:
        if argument == "given":
            signature[argument] = given
        elif argument in constexprs or argument in signature:
            continue
        elif argument in INT32:
            signature[argument] = "*i32"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32" if argument in FLOAT32 else f"*{element}"
        else:
            signature[argument] = "fp32" if argument.startswith("scale") else "i32"
    aligned = tuple(n for n, t in signature.items() if isinstance(t, str) and t.startswith("*"))
    return Case(
        name=f"{name}-{element}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=aligned,
        max_stack=max_stack,
        hgmma=hgmma,
        max_registers=max_registers,
    )


def forward_configs() -> list[configs.HopperForward]:
    """Each once, over the head dims, lengths, masks and groups that tell them apart."""
    chosen = (
        configs.attention_forward_hopper(D, Sk, kind, *queries)
        for queries in QUERIES + MORE_HEADS
        for D in (HEAD_DIMS if queries in QUERIES else (256,))
        for Sk in LENGTHS
        for kind in (Kind(), Kind(CAUSAL=True))
    )
    split = (
        configs.attention_forward_hopper(D, Sk, kind, *queries)
        for queries in SPLIT
        for D in HEAD_DIMS
        for Sk in (4096, 16384)
        for kind in (Kind(), Kind(CAUSAL=True))
    )
    return list(dict.fromkeys((*chosen, *split)))


def wider_forward_configs() -> list[configs.HopperForward]:
    """Those of latent attention."""
    asked = [(kind, queries) for kind in (Kind(), Kind(CAUSAL=True)) for queries in WIDER_KEYS]
    asked += [(kind, QUERIES[0]) for kind in WIDER_VARIANTS]
    chosen = (
        configs.attention_forward_hopper(192, 4096, kind, *queries, head_dim_v=128)
        for kind, queries in asked
    )
    return list(dict.fromkeys(chosen))


def wider_backward_configs() -> list[configs.HopperBackward]:
    kinds = dict.fromkeys(main_backward(Variant(kind)).kind for kind in WIDER_VARIANTS)
    return [
        configs.attention_backward_hopper(192, 4096, kind, head_dim_v=128)
        for kind in (Kind(), Kind(CAUSAL=True), *kinds)
        if not kind.CURVED
    ]


def forward_case(element: str, config: configs.HopperForward) -> Case:
    queries, keys = (heads(element, rows, config.D) for rows in (64, config.BN))
    if config.PACK > 1:
        queries = packed_heads(element, config.CQ, config.PACK, config.D)
    cache: set[str] = set()
    if config.CACHE:
        cache = {"work"} | ({"room"} if config.ROLLS else set())
    if config.CACHE > 1:
        cache |= {"pages", "page_stride"}
        if config.CACHE < config.BN:
            keys = heads(element, config.CACHE, 64)
    descriptors = {"q_desc": queries, "k_desc": keys, "v_desc": keys}
    if config.MORE:
        more = heads(element, 64, config.MORE)
        if config.PACK > 1:
            more = packed_heads(element, config.CQ, config.PACK, config.MORE)
        descriptors |= {"more_q_desc": more, "more_k_desc": heads(element, config.BN, config.MORE)}
    given, absent = given_of(
        attention_forward_kernel, config.KIND, work=config.KIND.VARLEN or config.KIND.TABLE, cache=cache
    )
    absent |= dict.fromkeys(sorted({"more_q_desc", "more_k_desc"} - set(descriptors)))
    return case(
        config.name,
        attention_forward_kernel,
        element,
        {"CFG": config} | absent | ({} if config.SPLIT else {"parts": None}),
        descriptors | ({"o_ptr": "*fp32"} if config.SPLIT else {}),
        stack_of(config),
        max_registers=config.max_registers,
        given=given,
    )


def stack_of(config: configs.HopperForward) -> int:
    if not config.KIND.PLAIN:
        return VARIANT_STACK
    return CACHE_STACK if config.CACHE else SPLIT_STACK if config.SPLIT else FORWARD_STACK


def cache_cases() -> Iterator[Case]:
    """The forward of a cache, and what goes before it."""
    for D, kind, Sq, heads_of_keys, group, page, starts, left, room in CACHES:
        config, _ = configs.attention_cache_hopper(
            D, room, kind, Sq, heads_of_keys, group, 132, page, starts, left
        )
        yield forward_case("bf16", config)
    for kind in (Kind(), Kind(CAUSAL=True, WINDOW=True)):
        for ragged in (False, True):
            kernel = cache_slots_kernel
            given, absent = given_of(kernel, kind)
            constexprs: dict[Any, Any] = {"BLOCK": 256, "BLOCK_M": 128, "BLOCK_N": 128, "KIND": kind}
            constexprs |= {"ROLLS": kind.WINDOW} | absent
            constexprs |= {} if ragged else {"cu_seqlens_ptr": None, "starts_ptr": None}
            names = [n for n in kernel.arg_names if n not in constexprs and n != "given"]
            pointers = tuple(n for n in names if n.endswith("_ptr"))
            signature = {n: "*i32" if n in pointers else "i32" for n in names} | {"given": given}
            name = f"cache_slots_kernel-{kind.name}{'-ragged' * ragged}"
            yield Case(name, kernel, signature, constexprs, pointers, num_warps=1)
    for ragged in (False, True):
        constants = {"D": 128, "BLOCK_D": 128, "BLOCK_H": 32, "BLOCK_B": 4, "HALF": 64}
        constants |= {"INTERLEAVED": ragged} | ({} if ragged else {"cu_seqlens_ptr": None})
        integers = dict.fromkeys(("lengths_ptr", "starts_ptr", "cu_seqlens_ptr"), "*i32")
        integers = {n: t for n, t in integers.items() if n not in constants}
        tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
        name = f"turn_queries{'-ragged' * ragged}"
        yield case(name, turn_queries_kernel, "bf16", constants, integers | tables, hgmma=False)


def merge_case(head_dim: int, parts: int) -> Case:
    config = configs.attention_merge(parts, head_dim)
    constexprs = {"D": head_dim, "BLOCK_D": config.block_d, "PARTS": config.parts}
    merged = case(
        f"merge-{head_dim}-{parts}-parts",
        attention_merge_kernel,
        "bf16",
        constexprs,
        dict.fromkeys(("outs_ptr", "lses_ptr", "sinks_ptr"), "*fp32"),
        hgmma=False,
    )
    return replace(merged, num_warps=config.num_warps)


def backward_case(element: str, config: configs.HopperBackward) -> Case:
    boxes = heads_of_sequences if config.KIND.VARLEN else heads
    queries, keys = (boxes(element, rows, config.D) for rows in (config.BM, config.BN))
    kernel, kind = attention_backward_kernel, config.KIND
    given, absent = given_of(kernel, kind, work=kind.VARLEN, rows=True)
    more = {}
    if config.MORE:
        rows_of = {"more_q_desc": config.BM, "more_k_desc": config.BN}
        more = {name: boxes(element, rows, config.MORE) for name, rows in rows_of.items()}
    else:
        names = "more_q_desc", "more_k_desc", "v_b", "v_h", "v_s", "D_v"
        absent |= dict.fromkeys(names)
    return case(
        config.name,
        attention_backward_kernel,
        element,
        {"CFG": config} | absent,
        {
            "q_desc": queries,
            "do_desc": queries,
            "k_desc": keys,
            "v_desc": keys,
            "lse_delta_desc": lse_and_delta(config.BM),
            "dq_desc": float32(128, 32),
            **more,
        },
        WIDER_STACK if config.MORE else 64 if config.KIND.PLAIN else BACKWARD_VARIANT_STACK,
        given=given,
    )


def variant_cases(variants: Iterable[tuple[int, Kind]]) -> Iterator[Case]:
    """Forward and, where it is on these kernels, backward of head dims and kinds, each kernel once."""
    for D, kind in variants:
        yield forward_case("bf16", configs.attention_forward_hopper(D, 4096, kind))
    backward = {(D, main_backward(Variant(kind)).kind): None for D, kind in variants}
    for D, kind in backward:
        if not kind.unsupported_by("hopper", backward=True) and not kind.PLAIN:
            yield backward_case("bf16", configs.attention_backward_hopper(D, 4096, kind))


def schedule_cases(BM: int, BN: int) -> Iterator[Case]:
    """What says on the device which tiles are visited."""
    packed, band = Kind(VARLEN=True), Kind(True, True, True, VARLEN=True)
    for kernel, kind, gaps in (
        (visits_kernel, Kind(INTERVALS=True), False),
        (visits_kernel, Kind(True, True, True, True), False),
        (visits_kernel, Kind(True, True, True, TABLE=True), False),
        (query_slots_kernel, packed, False),
        (query_slots_kernel, band, False),
        (query_slots_kernel, packed, True),
        (key_slots_kernel, packed, False),
        (key_slots_kernel, band, False),
        (key_slots_kernel, packed, True),
    ):
        if kind.TABLE and TILE.value < BM:
            continue
        given, absent = given_of(kernel, kind, gaps=gaps)
        names = [n for n in kernel.arg_names if not n.isupper() and n != "given"]
        pointers = tuple(n for n in names if n.endswith("_ptr"))
        constexprs = {"BLOCK_M": BM, "BLOCK_N": BN, "KIND": kind} | absent
        constexprs |= {"BLOCK": 256} if "BLOCK" in kernel.arg_names else {}
        signature = {n: "*i32" if n in pointers else "i32" for n in names} | {"given": given}
        name = f"{kernel.fn.__name__}-{BM}x{BN}-{kind.name}{'-gaps' * gaps}"
        yield Case(name, kernel, signature, constexprs, pointers, num_warps=1)
    if BN == 64:
        aligned = ("slots_ptr", "ordered_ptr")
        signature = dict.fromkeys(aligned, "*i32") | {"n_slots": "i32"}
        yield Case("order_kernel", order_kernel, signature, {"BLOCK": 256}, aligned, num_warps=1)
        signature = {"lists_ptr": "*i32", "tiles": "i32", "words": "i32"}
        yield Case(
            "order_lists_kernel", order_lists_kernel, signature, {"BLOCK": 256}, ("lists_ptr",), 1
        )


def hopper_cases(arch: int) -> Iterator[Case]:
    if arch != 90:
        return
    for element in ("bf16", "fp16"):
        for config in forward_configs():
            if element == "fp16" and (config.D != 128 or not config.KIND.CAUSAL or config.PACK > 1):
                continue  # the same registers as bf16
            yield forward_case(element, config)
        for config in backward_configurations():
            if element == "fp16" and not (config.D == 128 and config.KIND.CAUSAL):
                continue
            yield backward_case(element, config)
    for config in wider_forward_configs():
        yield forward_case("bf16", config)
    for config in wider_backward_configs():
        yield backward_case("bf16", config)
    yield from variant_cases(VARIANTS)
    window = Kind(CAUSAL=True, WINDOW=True, SINKS=True)
    yield forward_case("bf16", configs.attention_forward_hopper(64, 4096, window, 4096, 8, 8, left=127))
    for D, kind in SPLIT_VARIANTS:
        yield forward_case("bf16", configs.attention_forward_hopper(D, 4096, kind, 512, 4))
    yield from cache_cases()
    for head_dim, parts in ((64, 2), (128, 8), (256, 128)):
        yield merge_case(head_dim, parts)
    for BM, BN in ((128, 128), (192, 128), (256, 64)):
        yield from schedule_cases(BM, BN)
    for name, how in CONTROLS.items():
        constexprs = dict(zip(("HOW", "WAITS", "LEAVES"), how, strict=True))
        yield Case(f"control: {name}", control_kernel, {"out_ptr": "*i32"}, constexprs, ("out_ptr",))
    for D, Dv in (*((D, D) for D in HEAD_DIMS), (192, 128)):
        config = configs.attention_backward_hopper(D, 4096, Kind(), head_dim_v=Dv)
        rows = {
            "HAS_DLSE": True,
            "FIRST": config.FIRST,
            "D": Dv,
            "MORE": config.MORE,
            "R": PREPROCESS_ROWS,
            "BM": config.BM,
            "PDL": True,
            "lse2_ptr": None,
            "delta_ptr": None,
            "VARLEN": False,
        }
        yield case(f"preprocess-{D}", preprocess_kernel, "bf16", rows, hgmma=False)
        sums = {"D": D, "N": config.NQ, "BM": config.BM, "VARLEN": False}
        yield case(f"postprocess-{D}", postprocess_kernel, "bf16", sums, hgmma=False)
        for (name, kernel, constants), gaps in itertools.product(
            (("preprocess", preprocess_kernel, rows), ("postprocess", postprocess_kernel, sums)),
            (False, True),
        ):
            given, absent = given_of(kernel, Kind(VARLEN=True), gaps=gaps)
            constants = constants | {"VARLEN": True} | absent
            name = f"{name}-{D}-varlen{'-gaps' * gaps}"
            yield case(name, kernel, "bf16", constants, hgmma=False, given=given)
