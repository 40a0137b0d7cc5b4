"""Configurations of what norms do on request: 8-bit results, x got back from y, split rows."""

from __future__ import annotations

from typing import Any

from compile_case import Case
from compile_cases_norm import backward, case

from flashproto import configs
from flashproto.kernels import norm, norm_backward, norm_quantize, norm_recover


def quantize(
    arch: int,
    name: str,
    N: int,
    x: str,
    out: str,
    centered: bool,
    residual: str = "",
    **constexprs: Any,
) -> Case:
    config = configs.norm_forward(N, 4, True, centered, divmod(arch, 10))
    whole, split = norm_quantize.norm_quantize_kernel, norm_quantize.norm_quantize_split_kernel
    pointers = {"x_ptr": x, "weight_ptr": "*bf16", "out_ptr": out, "scale_ptr": "*fp32"}
    if residual:
        pointers |= {"residual_ptr": residual, "total_ptr": residual}
    if config.split:
        pointers["words_ptr"] = "*i64"
    constexprs = {"CENTERED": centered, "LARGEST": 448.0 if out == "*fp8e4nv" else 57344.0} | constexprs
    return case(name, split if config.split else whole, N, pointers, constexprs, config)


def from_output(arch: int, name: str, N: int, y: str, centered: bool, residual: bool = False) -> Case:
    """A backward pass whose x is y: the prologue has rstd [M] and the weight [N] as operands."""
    plain = backward(
        arch, name, N, y, centered, y, residual, hooked=True, PROLOGUE=norm_recover.recovered
    )
    absent = ("mean_ptr", "dbias_ptr")
    position = plain.kernel.arg_names.index("prologue")
    constexprs: dict[Any, Any] = {n: v for n, v in plain.constexprs.items() if n != "prologue"}
    constexprs |= dict.fromkeys(absent)
    constexprs[(position, 0, 0, 1)], constexprs[(position, 0, 0, 2)] = 1, None  # one value a row
    constexprs[(position, 0, 1, 1)], constexprs[(position, 0, 1, 2)] = None, 1  # one value a column
    signature: dict[str, Any] = {n: t for n, t in plain.signature.items() if n not in absent}
    strides = ("constexpr", "constexpr")
    signature["prologue"] = ((("*fp32", *strides), (y, *strides)), ("fp32",))
    aligned = tuple(n for n in plain.divisible_by_16 if n not in absent)
    return Case(
        name,
        plain.kernel,
        signature,
        constexprs,
        aligned,
        plain.num_warps,
        max_registers=plain.max_registers or 128,
    )


def split(name: str, N: int, x: str, is_backward: bool) -> Case:
    """LayerNorm with rows split on request."""
    config = configs.norm_split(N, 4 if x == "*fp32" else 2)
    names = ["x_ptr", "weight_ptr", "bias_ptr", "y_ptr"]
    floats = ["mean_ptr", "rstd_ptr"]
    kernel = norm.norm_forward_split_kernel
    if is_backward:
        names = ["dy_ptr", "x_ptr", "weight_ptr", "dx_ptr"]
        floats += ["dweight_ptr", "dbias_ptr"]
        kernel = norm_backward.norm_backward_split_kernel
    pointers = dict.fromkeys(names, x) | dict.fromkeys(floats, "*fp32") | {"words_ptr": "*i64"}
    return case(name, kernel, N, pointers, {"CENTERED": True}, config)


def norm_feature_cases(arch: int) -> list[Case]:
    weight = {"weight_ptr": "*bf16", "out_ptr": "*fp32"}
    tile = configs.RowConfig(1, 1024, 4)
    cases = [
        from_output(arch, "recover-rms-2048", 2048, "*bf16", False),
        from_output(arch, "recover-layer-4096-add", 4096, "*bf16", True, True),
        from_output(arch, "recover-rms-8192-fp32", 8192, "*fp32", False, True),
        from_output(arch, "recover-layer-split", 131072, "*bf16", True),
        case(
            "recoverable-weight",
            norm_recover.recoverable_weight_kernel,
            4096,
            weight,
            {"shift": 1.0},
            tile,
        ),
        split("few-rows-2048", 2048, "*bf16", False),
        split("few-rows-16384", 16384, "*fp32", False),
        split("few-rows-16384-backward", 16384, "*bf16", True),
        split("few-rows-131072-backward", 131072, "*fp32", True),
        quantize(arch, "e5m2-rms-4096", 4096, "*bf16", "*fp8e5", False),
        quantize(arch, "e5m2-layer-split-fp32", 131072, "*fp32", "*fp8e5", True),
    ]
    if arch >= 89:
        cases += [
            quantize(arch, "e4m3-rms-256", 256, "*bf16", "*fp8e4nv", False),
            quantize(arch, "e4m3-rms-4096", 4096, "*bf16", "*fp8e4nv", False),
            quantize(arch, "e4m3-layer-5120", 5120, "*bf16", "*fp8e4nv", True),
            quantize(arch, "e4m3-rms-8192-add", 8192, "*bf16", "*fp8e4nv", False, "*fp32"),
            quantize(arch, "e4m3-layer-16384", 16384, "*bf16", "*fp8e4nv", True, CASTING="llama"),
            quantize(arch, "e4m3-rms-split-add", 131072, "*bf16", "*fp8e4nv", False, "*bf16"),
            quantize(arch, "e4m3-layer-split-ragged", 50257, "*bf16", "*fp8e4nv", True),
        ]
    return cases
