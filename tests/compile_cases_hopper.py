"""The Hopper attention kernels in every configuration that flashproto.configs chooses; sm_90 only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from compile_case import Case
from triton.experimental.gluon.language import NVMMASharedLayout

from flashproto import configs
from flashproto.bench.sanitize import CONTROLS, backward_configurations
from flashproto.kernels.hopper.attention_backward import attention_backward_kernel
from flashproto.kernels.hopper.attention_backward_rows import postprocess_kernel, preprocess_kernel
from flashproto.kernels.hopper.attention_forward import attention_forward_kernel
from flashproto.kernels.hopper.racecheck_controls import control_kernel
from flashproto.ops.attention_hopper import LD, PREPROCESS_ROWS
from flashproto.ops.descriptors import LANGUAGE_TYPES
from flashproto.variant import HOPPER_BACKWARD, Kind, Variant, main_backward

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
# None in the forward with Triton 3.6; the ptxas that came later keeps a few words outside the loops.
FORWARD_STACK = 0 if triton.__version__.startswith("3.6.") else 32
# Kinds beside causal and full, and head dims; a mask may need a few words.
VARIANTS = (
    (128, Kind(CAUSAL=True, WINDOW=True)),
    (64, Kind(SOFTCAP=1)),
    (128, Kind(CAUSAL=True, SOFTCAP=1)),
    (128, Kind(CAUSAL=True, SINKS=True, ALIBI=True)),
    (128, Kind(CAUSAL=True, INTERVALS=True)),
    (128, Kind(CAUSAL=True, VARLEN=True)),
    (64, Kind(True, True, True, True, 1, True, True, True)),
    (256, Kind(True, True, True, False, 1, True, True, True, VARLEN=True)),
)
VARIANT_STACK = 192
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
    variables: tuple[str, ...] = (),
) -> Case:
    signature: dict[str, Any] = dict(descriptors or {})
    for argument in kernel.arg_names:
        if argument == "variables":
            signature[argument] = variables
        elif argument in constexprs:
            continue
        elif argument in INT32:
            signature[argument] = "*i32"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32" if argument in FLOAT32 else f"*{element}"
        elif argument not in signature:
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
    return list(dict.fromkeys(chosen))


def variables_of(kernel: Any, kind: Kind) -> tuple[tuple[str, ...], dict[tuple[int, ...], None]]:
    """The types of what a kernel of this kind is given, in the order of kernels/scores.py, and the
    places of what it is not given."""
    if kind.TUNED:
        return (), {}
    given = (
        ("i32", kind.WINDOW),
        ("i32", kind.FIRST),
        ("fp32", kind.SOFTCAP),
        ("*fp32", kind.SINKS),
        ("*fp32", kind.ALIBI),
        *[("*i32", kind.INTERVALS)] * 2,
        *[("*i32", kind.VARLEN)] * 2,
        ("*i32", kind.INTERVALS or kind.VARLEN),
        *[("i32", kind.INTERVALS)] * 2,
        *[("i32", kind.VARLEN)] * 3,
        ("*fp32", kind.MAX_SCORE),
        ("*fp32", False),
        ("*fp32", False),
        ("i32", kernel is attention_backward_kernel),
    )
    place = kernel.arg_names.index("variables")
    absent = {(place, i): None for i, (_, used) in enumerate(given) if not used}
    return tuple(t if used else "constexpr" for t, used in given), absent


def lengths_of(kernel: Any) -> tuple[tuple[str, ...], dict[tuple[int, ...], None]]:
    """The same of a kernel that is given the lengths of sequences and nothing else."""
    types = ["constexpr"] * 18
    types[7:9] = ["*i32"] * 2
    types[12:15] = ["i32"] * 3
    place = kernel.arg_names.index("variables")
    absent = {(place, i): None for i, what in enumerate(types) if what == "constexpr"}
    return tuple(types), absent


def forward_case(element: str, config: configs.HopperForward) -> Case:
    queries, keys = (heads(element, rows, config.D) for rows in (64, config.BN))
    if config.PACK > 1:
        queries = packed_heads(element, config.CQ, config.PACK, config.D)
    variables, absent = variables_of(attention_forward_kernel, config.KIND)
    return case(
        config.name,
        attention_forward_kernel,
        element,
        {"CFG": config} | absent,
        {"q_desc": queries, "k_desc": keys, "v_desc": keys},
        FORWARD_STACK if config.KIND.TUNED else VARIANT_STACK,
        max_registers=config.max_registers,
        variables=variables,
    )


def backward_case(element: str, config: configs.HopperBackward) -> Case:
    boxes = heads_of_sequences if config.KIND.VARLEN else heads
    queries, keys = (boxes(element, rows, config.D) for rows in (config.BM, config.BN))
    variables, absent = variables_of(attention_backward_kernel, config.KIND)
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
        },
        64 if config.KIND.TUNED else BACKWARD_VARIANT_STACK,
        variables=variables,
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
    for D, kind in VARIANTS:
        yield forward_case("bf16", configs.attention_forward_hopper(D, 4096, kind))
    for D, kind in VARIANTS:
        kind = main_backward(Variant(kind)).kind
        if not kind.beyond(HOPPER_BACKWARD):
            yield backward_case("bf16", configs.attention_backward_hopper(D, 4096, kind))
    for name, how in CONTROLS.items():
        constexprs = dict(zip(("HOW", "WAITS", "LEAVES"), how, strict=True))
        yield Case(f"control: {name}", control_kernel, {"out_ptr": "*i32"}, constexprs, ("out_ptr",))
    for D in HEAD_DIMS:
        config = configs.attention_backward_hopper(D, 4096, Kind())
        rows = {
            "HAS_DLSE": True,
            "FIRST": config.FIRST,
            "D": D,
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
        for name, kernel, constants in (
            ("preprocess", preprocess_kernel, rows),
            ("postprocess", postprocess_kernel, sums),
        ):
            variables, absent = lengths_of(kernel)
            constants = constants | {"VARLEN": True} | absent
            yield case(
                f"{name}-{D}-varlen", kernel, "bf16", constants, hgmma=False, variables=variables
            )
