"""Configurations of the norm kernels: each kernel, each regime at its largest tile, hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
from compile_case import Case

from flashproto import configs
from flashproto.configs import RowConfig
from flashproto.kernels import hooks, norm, norm_backward

ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
HOOK_ARGUMENTS = ("prologue", "prologue_gradients", "epilogue", "epilogue_gradients")
# None with Triton 3.6; the ptxas that came later keeps a few words outside the unrolled slices.
CENTERED_STACK = 0 if triton.__version__.startswith("3.6.") else 32
FUNCTIONS = ("PROLOGUE", "PROLOGUE_BACKWARD", "EPILOGUE", "EPILOGUE_BACKWARD")


def case(
    name: str,
    kernel: Any,
    N: int,
    pointers: dict[str, str],
    constexprs: dict[str, Any],
    config: RowConfig,
) -> Case:
    """Argument types by name: `pointers` says which there are, the other pointers are None, as are
    hooks; strides and N are multiples of 16, as for usual widths."""
    names = kernel.arg_names
    missing = {n: None for n in names if n.endswith("_ptr") and n not in pointers}
    missing |= {n: None for n in HOOK_ARGUMENTS + FUNCTIONS if n in names}
    held = config.columns * config.chunks * config.cluster
    tile = {
        "R": max(config.rows, config.cluster),
        "C": config.columns,
        "K": config.chunks,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "WHOLE": N % config.columns == 0 if config.split else held == N,
        "LANES": configs.power_of_two(-(-N // config.columns)),
        "POLLS": 1024,
        "CASTING": "torch",
        "PDL": False,
    }
    scalars = {n: "i32" for n in names if n in ("M", "N", "P", "G") or n.endswith("_stride")}
    signature = pointers | scalars
    if "eps" in names and (kernel is not norm_backward.norm_backward_kernel or "rstd_ptr" in missing):
        signature["eps"] = "fp32"
    elif "eps" in names:
        missing["eps"] = None
    constexprs = missing | {n: tile[n] for n in tile if n in names} | constexprs
    aligned = tuple(n for n in signature if n not in ("M", "P", "G", "eps"))
    return Case(
        name,
        kernel,
        signature,
        constexprs,
        aligned,
        config.num_warps,
        max_registers=config.max_registers,
        num_ctas=config.cluster,
    )


def forward_pointers(
    x: str,
    centered: bool,
    weight: str = "",
    residual: str = "",
    split: bool = False,
    clears: bool = False,
) -> dict[str, str]:
    """The pointers of a forward kernel; "": there is no such tensor."""
    pointers = {"x_ptr": x, "y_ptr": x, "rstd_ptr": "*fp32"}
    if weight:
        pointers |= {"weight_ptr": weight} | ({"bias_ptr": weight} if centered else {})
    if centered:
        pointers["mean_ptr"] = "*fp32"
    if residual:
        pointers |= {"residual_ptr": residual, "total_ptr": residual}
    if split:
        pointers |= {"words_ptr": "*i64"} | ({"used_ptr": "*i64"} if clears else {})
    return pointers


def backward_pointers(
    x: str,
    centered: bool,
    weight: str = "",
    residual: bool = False,
    split: bool = False,
    clears: bool = False,
    statistics: bool = True,
) -> dict[str, str]:
    """The pointers of a backward kernel."""
    pointers = {"dy_ptr": x, "x_ptr": x, "dx_ptr": x} | ({"rstd_ptr": "*fp32"} if statistics else {})
    if weight:
        pointers |= {"weight_ptr": weight, "dweight_ptr": "*fp32"}
        pointers |= {"dbias_ptr": "*fp32"} if centered else {}
    if centered and statistics:
        pointers["mean_ptr"] = "*fp32"
    if residual:
        pointers["dtotal_ptr"] = x
    if split:
        pointers |= {"words_ptr": "*i64"} | ({"used_ptr": "*i64"} if clears else {})
    return pointers


def forward(
    arch: int,
    name: str,
    N: int,
    x: str,
    centered: bool,
    weight: str = "",
    residual: str = "",
    hooked: bool = False,
    **constexprs: Any,
) -> Case:
    itemsize = 4 if hooked else ITEMSIZE[residual or x]
    config = configs.norm_forward(N, itemsize, bool(residual), centered, divmod(arch, 10))
    kernel = norm.norm_forward_split_kernel if config.split else norm.norm_forward_kernel
    pointers = forward_pointers(x, centered, weight, residual, config.split)
    return case(name, kernel, N, pointers, {"CENTERED": centered} | constexprs, config)


def backward(
    arch: int,
    name: str,
    N: int,
    x: str,
    centered: bool,
    weight: str = "",
    residual: bool = False,
    hooked: bool = False,
    clears: bool = False,
    **constexprs: Any,
) -> Case:
    itemsize = 4 if hooked else ITEMSIZE[x]
    statistics = hooked or configs.norm_keeps_statistics(N)
    config = configs.norm_backward(
        N, itemsize, bool(weight), centered, divmod(arch, 10), residual, statistics=statistics
    )
    whole, split = norm_backward.norm_backward_kernel, norm_backward.norm_backward_split_kernel
    pointers = backward_pointers(x, centered, weight, residual, config.split, clears, statistics)
    kernel = split if config.split else whole
    return case(name, kernel, N, pointers, {"CENTERED": centered} | constexprs, config)


def forward_shared(
    name: str,
    N: int,
    x: str,
    centered: bool,
    weight: str = "",
    residual: bool = False,
    casting: str = "torch",
    clears: bool = False,
) -> Case:
    """On Hopper, from Triton 3.6 on; strides and N are in units of 16 bytes."""
    from flashproto.kernels.hopper import norm_forward, norm_forward_ring
    from flashproto.ops.norm_hopper import FORWARD_LAG

    parameters = ITEMSIZE[weight] * (2 if centered else 1) if weight else 0
    config = configs.norm_forward_shared(N, ITEMSIZE[x], residual, centered, parameters)
    assert config is not None
    kernel = norm_forward.norm_forward_shared_kernel
    if config.split:
        kernel = norm_forward.norm_forward_shared_split_kernel
    pointers = forward_pointers(x, centered, weight, x if residual else "", config.split, clears)
    constexprs = {"CENTERED": centered, "CASTING": casting, "WHOLE": N % config.columns == 0}
    if config.stages > 1:
        kernel = norm_forward_ring.norm_forward_ring_kernel
        constexprs |= {"TURNS": config.stages, "LAG": FORWARD_LAG}
    return case(name, kernel, N, pointers, constexprs, config)


def forward_unaligned(
    name: str,
    N: int,
    x: str,
    centered: bool,
    weight: str = "",
    residual: bool = False,
    casting: str = "torch",
    clears: bool = False,
) -> Case:
    """On Hopper, from Triton 3.6 on; strides and N are no multiples of anything."""
    from flashproto.kernels.hopper.norm_forward_unaligned import norm_forward_unaligned_kernel

    config = configs.norm_forward_unaligned(N, ITEMSIZE[x], residual, centered)
    assert config is not None
    pointers = forward_pointers(x, centered, weight, x if residual else "", True, clears)
    constexprs = {
        "CENTERED": centered,
        "CASTING": casting,
        "C": config.columns + 8,
        "LANES": max(configs.power_of_two(-(-N // config.columns)), 32),
    }
    made = case(name, norm_forward_unaligned_kernel, N, pointers, constexprs, config)
    return replace(
        made,
        divisible_by_16=tuple(n for n in made.divisible_by_16 if n in pointers),
        max_stack=CENTERED_STACK if centered else 0,
    )


def backward_shared(
    name: str,
    N: int,
    x: str,
    centered: bool,
    weight: str = "",
    casting: str = "torch",
    clears: bool = False,
) -> Case:
    """On Hopper, from Triton 3.6 on; strides and N are in units of 16 bytes."""
    from flashproto.kernels.hopper import norm_backward as shared
    from flashproto.ops.norm_hopper import BACKWARD_LAG

    config = configs.norm_backward_shared(N, ITEMSIZE[x], centered)
    assert config is not None
    pointers = backward_pointers(x, centered, weight, False, True, clears)
    constexprs = {"CENTERED": centered, "CASTING": casting, "TURNS": config.stages, "LAG": BACKWARD_LAG}
    return case(name, shared.norm_backward_shared_kernel, N, pointers, constexprs, config)


def with_hook(plain: Case, slot: str, operand: str, scalars: tuple[str, ...], **functions: Any) -> Case:
    """A case with a hook whose operand is [M, N] (operand "full"), or a scalar."""
    pointer = "*bf16" if operand == "full" else "*i64"
    strides = ("i32", "constexpr") if operand == "full" else ("constexpr", "constexpr")
    names = plain.kernel.arg_names
    signature = dict(plain.signature)
    constexprs: dict[Any, Any] = {n: v for n, v in plain.constexprs.items() if n != slot}
    signature[slot] = (((pointer, *strides),), scalars)
    position = names.index(slot)
    constexprs[(position, 0, 0, 2)] = 1 if operand == "full" else None
    if operand != "full":
        constexprs[(position, 0, 0, 1)] = None
    gradients = f"{slot}_gradients"
    if gradients in names:
        constexprs = {n: v for n, v in constexprs.items() if n != gradients}
        signature[gradients] = (pointer if operand == "full" else "constexpr",)
        if operand != "full":
            constexprs[(names.index(gradients), 0)] = None
    return Case(
        f"{plain.name}-{slot}",
        plain.kernel,
        signature,
        constexprs | functions,
        plain.divisible_by_16,
        plain.num_warps,
        max_registers=plain.max_registers,
        num_ctas=plain.num_ctas,
    )


def norm_cases(arch: int) -> list[Case]:
    sums = dict.fromkeys(
        ("dweight_partial_ptr", "dbias_partial_ptr", "dweight_ptr", "dbias_ptr"), "*fp32"
    )
    gate = {"EPILOGUE": hooks.silu_gate}
    gate_backward = {"EPILOGUE_BACKWARD": hooks.silu_gate_backward}
    dropout = {"PROLOGUE": hooks.dropout}
    dropout_backward = {"PROLOGUE_BACKWARD": hooks.dropout_backward}
    shared = [
        forward_shared("rms-shared-ragged", 32760, "*bf16", False, "*bf16"),
        forward_shared("layer-shared-32768", 32768, "*fp16", True, "*fp32"),
        forward_shared("layer-shared-ragged", 20488, "*bf16", True, "*fp32"),
        forward_shared("llama-ring", 65536, "*bf16", False, "*bf16", casting="llama"),
        forward_shared("layer-ring", 131072, "*bf16", True, "*bf16"),
        forward_shared("layer-shared-16384", 16384, "*bf16", True, "*bf16"),
        forward_shared("layer-ring-262144", 2**18, "*fp16", True, "*fp16"),
        forward_shared("rms-ring-32768", 32768, "*bf16", False, "*fp32"),
        forward_shared("rms-ring", 2**19, "*fp16", False, "*fp32"),
        forward_shared("layer-ring-524288", 2**19, "*bf16", True, "*bf16"),
        forward_shared("llama-shared-split", 65544, "*bf16", False, "*bf16", casting="llama"),
        forward_shared("layer-shared-split", 131072, "*bf16", True, "*fp32"),
        forward_shared("layer-shared-split-ragged", 50264, "*bf16", True, "*fp32"),
        forward_shared("rms-shared-add", 14336, "*bf16", False, "*bf16", True),
        forward_shared("layer-shared-add-ragged", 14344, "*fp16", True, "*fp32", True),
        forward_shared("layer-shared-split-add", 131072, "*bf16", True, "*bf16", True),
        forward_unaligned("rms-unaligned", 50257, "*bf16", False, "*bf16"),
        forward_unaligned("llama-unaligned", 50257, "*fp16", False, "*fp16", False, "llama", True),
        forward_unaligned("layer-unaligned", 12291, "*bf16", True, "*fp32"),
        forward_unaligned("layer-unaligned-clears", 50257, "*bf16", True, "*bf16", clears=True),
        forward_unaligned("rms-unaligned-add", 65535, "*bf16", False, "*fp32", True),
        forward_unaligned("layer-unaligned-add", 50257, "*fp16", True, "*fp16", True),
        forward_unaligned("rms-unaligned-wide", 2**18 + 1, "*bf16", False, "*bf16"),
        forward_unaligned("layer-unaligned-wide", 2**19 - 1, "*bf16", True, "*bf16", clears=True),
        forward_unaligned("layer-unaligned-wide-add", 2**18 + 1, "*bf16", True, "*fp32", True),
        backward_shared("rms-shared-backward", 131072, "*bf16", False, "*bf16"),
        backward_shared("llama-shared-backward", 2**19, "*bf16", False, "*bf16", casting="llama"),
        backward_shared("layer-shared-backward", 262144, "*fp16", True, "*fp16"),
        backward_shared("layer-shared-backward-wide", 2**19, "*bf16", True, "*bf16"),
        backward_shared("layer-shared-backward-ragged", 100008, "*bf16", True, "*fp32"),
        backward_shared("layer-shared-backward-alone", 131072, "*bf16", True),
    ]
    for name, N, x, centered, weight in (
        ("rms-ring-clears", 65536, "*bf16", False, "*bf16"),
        ("layer-ring-clears", 131072, "*fp16", True, "*fp16"),
        ("layer-shared-split-clears", 131072, "*fp16", True, "*fp32"),
        ("layer-shared-split-ragged-clears", 50264, "*bf16", True, "*fp32"),
        ("rms-shared-split-wide-clears", 2**19 - 8, "*bf16", False, "*bf16"),
    ):
        shared.append(forward_shared(name, N, x, centered, weight, clears=True))
    for name, N, x, centered, weight in (
        ("rms-shared-backward-clears", 131072, "*bf16", False, "*bf16"),
        ("rms-shared-backward-ragged-clears", 2**19 - 8, "*bf16", False, "*fp32"),
        ("layer-shared-backward-clears", 262144, "*fp16", True, "*fp16"),
        ("layer-shared-backward-ragged-clears", 100008, "*bf16", True, "*fp32"),
        ("layer-shared-backward-alone-clears", 131072, "*bf16", True, ""),
    ):
        shared.append(backward_shared(name, N, x, centered, weight, clears=True))
    return (shared if arch == 90 else []) + [
        forward(arch, "layer-64", 64, "*bf16", True, "*bf16"),
        forward(arch, "layer-48-fp32", 48, "*fp32", True, "*fp32"),
        forward(arch, "layer-256", 256, "*bf16", True, "*bf16"),
        forward(arch, "rms-256", 256, "*bf16", False, "*bf16"),
        forward(arch, "layer-768", 768, "*bf16", True, "*bf16"),
        forward(arch, "rms-2048", 2048, "*bf16", False, "*bf16"),
        forward(arch, "rms-4096-add", 4096, "*bf16", False, "*fp32", "*fp32"),
        forward(arch, "layer-5120", 5120, "*bf16", True, "*bf16"),
        forward(arch, "layer-7168-fp32", 7168, "*fp32", True, "*fp32"),
        forward(arch, "layer-8192", 8192, "*bf16", True, "*bf16"),
        forward(arch, "layer-8192-add", 8192, "*bf16", True, "*fp32", "*bf16"),
        forward(arch, "layer-16384", 16384, "*bf16", True, "*bf16"),
        forward(arch, "layer-16384-add", 16384, "*bf16", True, "*bf16", "*bf16"),
        forward(arch, "rms-16384-add", 16384, "*bf16", False, "*bf16", "*bf16"),
        forward(arch, "layer-16384-fp32", 16384, "*fp32", True, "*fp32"),
        forward(arch, "layer-16384-fp32-add", 16384, "*fp32", True, "*fp32", "*fp32"),
        forward(arch, "layer-split-ragged-fp32", 50257, "*fp32", True, "*fp32"),
        forward(arch, "layer-split-add", 131072, "*fp16", True, "*fp32", "*fp16"),
        forward(arch, "layer-split-ragged", 50257, "*bf16", True, "*bf16"),
        forward(arch, "rms-split", 2**20, "*fp32", False),
        forward(arch, "llama-4096", 4096, "*bf16", False, "*bf16", CASTING="llama"),
        backward(arch, "layer-64-backward", 64, "*bf16", True, "*fp32"),
        backward(arch, "layer-48-backward-fp32", 48, "*fp32", True, "*fp32"),
        backward(arch, "layer-256-backward", 256, "*bf16", True, "*bf16"),
        backward(arch, "rms-256-backward", 256, "*bf16", False, "*bf16"),
        backward(arch, "layer-768-backward", 768, "*bf16", True, "*bf16"),
        backward(arch, "layer-128-backward", 128, "*bf16", True, "*bf16"),
        backward(arch, "layer-256-backward-fp32", 256, "*fp32", True, "*fp32", True),
        backward(arch, "layer-512-backward-add", 512, "*bf16", True, "*bf16", True),
        backward(arch, "layer-640-backward", 640, "*bf16", True, "*bf16"),
        backward(arch, "layer-704-backward", 704, "*bf16", True, "*bf16"),
        backward(arch, "layer-704-backward-fp32", 704, "*fp32", True, "*fp32"),
        backward(arch, "layer-768-backward-fp32", 768, "*fp32", True, "*fp32", True),
        backward(arch, "layer-768-backward-alone", 768, "*bf16", True),
        backward(arch, "rms-2048-backward-add", 2048, "*bf16", False, "*bf16", True),
        backward(arch, "layer-4096-backward-add", 4096, "*bf16", True, "*bf16", True),
        backward(arch, "layer-5120-backward", 5120, "*bf16", True, "*bf16"),
        backward(arch, "layer-5120-backward-fp32", 5120, "*fp32", True, "*fp32"),
        backward(arch, "layer-7168-backward", 7168, "*bf16", True, "*bf16"),
        backward(arch, "layer-8192-backward", 8192, "*bf16", True, "*bf16"),
        backward(arch, "layer-8192-backward-fp32", 8192, "*fp32", True, "*fp32", True),
        backward(arch, "layer-12288-backward", 12288, "*bf16", True, "*bf16"),
        backward(arch, "layer-16384-backward", 16384, "*bf16", True, "*bf16"),
        backward(arch, "layer-16384-backward-add", 16384, "*bf16", True, "*bf16", True),
        backward(arch, "rms-14336-backward-add", 14336, "*bf16", False, "*bf16", True),
        backward(arch, "layer-14336-backward-add-fp32", 14336, "*bf16", True, "*fp32", True),
        backward(arch, "rms-12288-backward", 12288, "*bf16", False, "*bf16"),
        backward(arch, "layer-10240-backward", 10240, "*bf16", True, "*bf16"),
        backward(arch, "rms-10256-backward-add", 10256, "*bf16", False, "*bf16", True),
        backward(arch, "layer-20480-backward", 20480, "*bf16", True, "*fp32"),
        backward(arch, "layer-20480-backward-add", 20480, "*bf16", True, "*bf16", True),
        backward(arch, "rms-20480-backward-add", 20480, "*bf16", False, "*bf16", True),
        backward(arch, "layer-32768-backward-add", 32768, "*bf16", True, "*bf16", True),
        backward(arch, "layer-40960-backward", 40960, "*fp16", True, "*fp16"),
        backward(arch, "layer-40960-backward-add", 40960, "*bf16", True, "*bf16", True),
        backward(arch, "rms-40960-backward-add", 40960, "*bf16", False, "*bf16", True),
        backward(arch, "rms-131072-backward-add", 131072, "*bf16", False, "*bf16", True),
        backward(arch, "rms-65536-backward", 65536, "*bf16", False, "*bf16"),
        backward(arch, "layer-65536-backward-alone", 65536, "*bf16", True),
        backward(arch, "rms-split-backward-ragged", 50257, "*bf16", False, "*bf16"),
        backward(arch, "rms-split-backward-262144-add", 262144, "*bf16", False, "*bf16", True),
        backward(
            arch, "rms-split-backward-262144-clears", 262144, "*bf16", False, "*bf16", True, clears=True
        ),
        backward(arch, "layer-split-backward-262144", 262144, "*bf16", True, "*bf16"),
        backward(arch, "layer-split-backward-add", 131072, "*bf16", True, "*bf16", True),
        backward(arch, "rms-split-backward-fp32", 131072, "*fp32", False, "*fp32"),
        backward(arch, "layer-split-backward-clears", 131072, "*fp32", True, "*fp32", clears=True),
        backward(arch, "gemma-4096-backward", 4096, "*bf16", False, "*bf16", CASTING="gemma"),
        with_hook(
            forward(arch, "rms-2048", 2048, "*bf16", False, "*bf16", hooked=True),
            "epilogue", "full", (), **gate,
        ),
        with_hook(
            forward(arch, "layer-4096-add", 4096, "*bf16", True, "*bf16", "*bf16", hooked=True),
            "prologue", "scalar", ("fp32",), **dropout,
        ),
        with_hook(
            backward(arch, "rms-2048-backward", 2048, "*bf16", False, "*bf16", hooked=True),
            "epilogue", "full", (), **gate_backward,
        ),
        with_hook(
            backward(arch, "layer-48-backward", 48, "*fp32", True, "*fp32", hooked=True),
            "epilogue", "full", (), **gate_backward,
        ),
        with_hook(
            backward(arch, "layer-4096-add-backward", 4096, "*bf16", True, "*bf16", True, hooked=True),
            "prologue", "scalar", ("fp32",), **dropout_backward,
        ),
        case("column-sums", norm_backward.column_sums_kernel, 131072, sums, {"PDL": arch >= 90},
             configs.column_sums(131072)),
    ]  # fmt: skip
