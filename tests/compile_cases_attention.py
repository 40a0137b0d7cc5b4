"""The attention kernels in every configuration that flashproto.configs chooses for an architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from compile_case import Case, given_of
from kinds import FIELDS, covering

from flashproto import configs
from flashproto.kernels.attention_backward import (
    attention_backward_heads_kernel,
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from flashproto.kernels.attention_forward import attention_forward_kernel
from flashproto.kernels.schedule import intervals_kernel
from flashproto.variant import Kind

FLOAT32_ARGUMENTS = {"lse_ptr", "lse2_ptr", "dlse_ptr", "delta_ptr", "rows_ptr"}
# (D, Dv): powers of two take no column mask, the others do; 256 may spill.
HEAD_DIMS = ((16, 16), (64, 64), (96, 96), (128, 128), (64, 128), (256, 256))
ELEMENTS = {"bf16": 2, "fp16": 2, "fp32": 4}


def case(
    kernel,
    name: str,
    element: str,
    config,
    constexprs: dict,
    max_stack: int,
    given: tuple[str, ...] = (),
) -> Case:
    signature, aligned, values = {}, [], dict(constexprs)
    for argument in kernel.arg_names:
        if argument == "given":
            signature[argument] = given
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32" if argument in FLOAT32_ARGUMENTS else f"*{element}"
            aligned.append(argument)
        elif argument.startswith("stride_") and argument.endswith("d"):
            values[argument] = 1  # a contiguous last dimension, as the launcher specialises it
        elif argument.startswith("stride_"):
            signature[argument] = "i32"
            aligned.append(argument)
        elif argument not in values:
            signature[argument] = "fp32" if argument.startswith("scale") else "i32"
    return Case(
        name=f"{name}-{element}",
        kernel=kernel,
        signature=signature,
        constexprs=values,
        divisible_by_16=tuple(aligned),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_stack=max_stack,
    )


# Kinds that cover all pairs of fields, on the shapes in turns.
SHAPES = ((128, 128, "bf16"), (64, 64, "fp16"), (64, 128, "bf16"), (64, 64, "fp32"))
COVERING = covering(FIELDS, (Kind(), Kind(CAUSAL=True)))
VARIANTS = tuple(zip(COVERING, itertools.cycle(SHAPES), strict=False))
# Of all features at once; on sm_100 intervals beside ALiBi spill at head_dim 64, in the forward most.
VARIANT_STACK = {80: 192, 90: 192, 100: 1536}


def variant_cases(
    arch: int, variants: Iterable[tuple[Kind, tuple[int, int, str]]] = VARIANTS
) -> Iterator[Case]:
    """Forward and backward of kinds."""
    capability = divmod(arch, 10)
    for kind, (D, Dv, element) in variants:
        itemsize = ELEMENTS[element]
        exact = replace(kind, SOFTCAP=2 if kind.SOFTCAP and itemsize == 4 else kind.SOFTCAP)
        of_gradients = replace(exact, MAX_SCORE=False, ENTROPY=False)
        forward = configs.attention_forward(capability, itemsize, D, Dv)
        keys, queries = configs.attention_backward(
            capability, itemsize, D, Dv, of_gradients, slopes=of_gradients.ALIBI
        )
        for kernel, stem, kind, config, extra in (
            (attention_forward_kernel, "forward", exact, forward, {"EXACT": itemsize == 4}),
            (attention_backward_keys_kernel, "keys", of_gradients, keys, {}),
            (
                attention_backward_queries_kernel,
                "queries",
                of_gradients,
                queries,
                {"SLOPES": of_gradients.ALIBI},
            ),
        ):
            given, absent = given_of(kernel, kind, slopes=bool(extra.get("SLOPES")))
            constexprs = {
                "D": D,
                "DV": Dv,
                "BLOCK_D": D,
                "BLOCK_DV": Dv,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "KIND": kind,
                "TF32": False,
                "WIDE": False,
            }
            if kind.PLAIN:
                continue  # among the others
            name = f"{stem}-{D}x{Dv}-{kind.name}"
            yield case(
                kernel,
                name,
                element,
                config,
                constexprs | extra | absent,
                VARIANT_STACK[arch],
                given,
            )


def small_cases() -> Iterator[Case]:
    """The gradients of sinks and slopes, delta of sequences side by side, and what says which queries
    meet a tile of keys."""
    one_warp, four = configs.AttentionConfig(0, 0, 1, 1), configs.AttentionConfig(0, 0, 4, 3)
    kind = Kind(SINKS=True, ALIBI=True, VARLEN=True)
    given, absent = given_of(attention_backward_rows_kernel, kind, slopes=True)
    constexprs = {"DV": 128, "BLOCK_DV": 128, "BLOCK_M": 64, "KIND": kind, "HAS_DLSE": True}
    constexprs |= {"SLOPES": True, "WIDE": False} | absent
    # 64 bytes of stack: on sm_100 with Triton 3.6.
    yield case(
        attention_backward_rows_kernel, f"rows-128-{kind.name}", "bf16", four, constexprs, 64, given
    )
    for sinks, kind in ((True, Kind(SINKS=True)), (False, Kind(ALIBI=True, VARLEN=True))):
        given, absent = given_of(attention_backward_heads_kernel, kind, slopes=not sinks)
        constexprs = {"KIND": kind, "SINKS": sinks, "BLOCK": 1024} | absent
        yield case(
            attention_backward_heads_kernel, f"heads-{kind.name}", "fp32", four, constexprs, 0, given
        )
    for BN in (16, 64, 128):
        signature = dict.fromkeys(("begin_ptr", "end_ptr", "tiles_ptr"), "*i32") | {"Sk": "i32"}
        aligned = ("begin_ptr", "end_ptr", "tiles_ptr")
        yield Case(
            f"intervals-{BN}", intervals_kernel, signature, {"BLOCK_N": BN}, aligned, one_warp.num_warps
        )


def one_query_cases(arch: int) -> Iterator[Case]:
    """Of a number that is 1 Triton makes a constant; where that leaves one tile of queries or none,
    Triton 3.6 divided by zero."""
    kind, kernel = Kind(INTERVALS=True), attention_backward_keys_kernel
    keys, _ = configs.attention_backward(divmod(arch, 10), 2, 64, 64, kind)
    given, absent = given_of(kernel, kind)
    constexprs = {
        "D": 64, "DV": 64, "BLOCK_D": 64, "BLOCK_DV": 64, "BLOCK_M": keys.block_m,
        "BLOCK_N": keys.block_n, "KIND": kind, "TF32": False, "WIDE": False, "Sq": 1,
    }  # fmt: skip
    yield case(kernel, "keys-one-query", "bf16", keys, constexprs | absent, 0, given)


def attention_cases(arch: int) -> Iterator[Case]:
    capability = divmod(arch, 10)
    for D, Dv in HEAD_DIMS:
        for element, itemsize in ELEMENTS.items():
            if element == "fp16" and D != 128:
                continue  # the same tiles and registers as bf16
            for kind in (Kind(), Kind(CAUSAL=True)):
                name = f"{D}x{Dv}-{kind.name}"
                shared = {
                    "D": D,
                    "DV": Dv,
                    "BLOCK_D": configs.padded_head_dim(D),
                    "BLOCK_DV": configs.padded_head_dim(Dv),
                    "KIND": kind,
                    "TF32": False,
                    "WIDE": False,
                }
                max_stack = 0 if max(D, Dv) <= 128 else 65536
                forward = configs.attention_forward(capability, itemsize, D, Dv)
                keys, queries = configs.attention_backward(capability, itemsize, D, Dv, kind)
                for kernel, stem, config, extra in (
                    (attention_forward_kernel, "forward", forward, {"EXACT": itemsize == 4}),
                    (attention_backward_keys_kernel, "keys", keys, {}),
                    (attention_backward_queries_kernel, "queries", queries, {"SLOPES": False}),
                ):
                    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
                    yield case(
                        kernel, f"{stem}-{name}", element, config, shared | tiles | extra, max_stack
                    )
    rows = configs.AttentionConfig(64, 0, 4, 3)
    for element, DV, has_dlse in (
        ("bf16", 128, False),
        ("bf16", 128, True),
        ("fp32", 16, False),
        ("fp32", 256, True),
    ):
        constexprs = {
            "DV": DV,
            "BLOCK_DV": DV,
            "BLOCK_M": rows.block_m,
            "HAS_DLSE": has_dlse,
            "SLOPES": False,
            "WIDE": False,
            "KIND": Kind(),
        }
        name = f"rows-{DV}-{has_dlse}"
        yield case(attention_backward_rows_kernel, name, element, rows, constexprs, 0)
    yield from variant_cases(arch)
    yield from small_cases()
    yield from one_query_cases(arch)
