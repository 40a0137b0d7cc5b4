"""Configurations of the norm and softmax kernels: each kernel, each regime at its largest tile."""

from __future__ import annotations

from typing import Any

from compile_case import Case

from flashproto import configs
from flashproto.configs import RowConfig
from flashproto.kernels import norm, softmax

NARROW, WIDEST_FORWARD, WIDEST_BACKWARD, LOOPED = 64, 16384, 8192, 131072


ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}


def case(
    name: str, kernel: Any, pointers: dict[str, str], constexprs: dict[str, Any], config: RowConfig
) -> Case:
    """Argument types by name: `pointers` says which there are, the other pointers are None; strides
    and N are multiples of 16, as for usual widths; the tile is that of `config`."""
    names = kernel.arg_names
    missing = {n: None for n in names if n.endswith("_ptr") and n not in pointers}
    tile = {"R": config.rows, "C": config.columns, "STAGES": config.stages}
    scalars = {n: "i32" for n in names if n in ("M", "N", "P") or n.endswith("_stride")}
    signature = pointers | scalars | ({"eps": "fp32"} if "eps" in names else {})
    constexprs = missing | constexprs | {n: tile[n] for n in tile if n in names}
    aligned = tuple(n for n in signature if n not in ("M", "P", "eps"))
    return Case(
        name, kernel, signature, constexprs, aligned, config.num_warps,
        max_registers=config.max_registers,
    )  # fmt: skip


def norm_forward(
    arch: int, name: str, N: int, x: str, centered: bool, weight: str = "", residual: str = ""
) -> Case:
    config = configs.norm_forward(
        N, ITEMSIZE[residual or x], bool(residual), centered, divmod(arch, 10)
    )
    kernel = norm.norm_forward_looped_kernel if config.looped else norm.norm_forward_kernel
    pointers = {"x_ptr": x, "y_ptr": x, "rstd_ptr": "*fp32"}
    if weight:
        pointers |= {"weight_ptr": weight} | ({"bias_ptr": weight} if centered else {})
    if centered:
        pointers["mean_ptr"] = "*fp32"
    if residual:
        pointers |= {"residual_ptr": residual, "total_ptr": residual}
    return case(name, kernel, pointers, {"CENTERED": centered}, config)


def norm_backward(
    name: str, N: int, x: str, centered: bool, weight: str = "", residual: bool = False
) -> Case:
    config = configs.norm_backward(N, ITEMSIZE[x], bool(weight))
    kernel = norm.norm_backward_looped_kernel if config.looped else norm.norm_backward_kernel
    pointers = {"dy_ptr": x, "x_ptr": x, "dx_ptr": x, "rstd_ptr": "*fp32"}
    if weight:
        pointers["weight_ptr"] = weight
        if not config.looped:
            pointers |= {"dweight_ptr": "*fp32"} | ({"dbias_ptr": "*fp32"} if centered else {})
    if centered:
        pointers["mean_ptr"] = "*fp32"
    if residual:
        pointers["dtotal_ptr"] = x
    return case(name, kernel, pointers, {"CENTERED": centered}, config)


def norm_cases(arch: int) -> list[Case]:
    sums = dict.fromkeys(
        ("dweight_partial_ptr", "dbias_partial_ptr", "dweight_ptr", "dbias_ptr"), "*fp32"
    )
    columns = {"dy_ptr": "*bf16", "x_ptr": "*bf16"} | dict.fromkeys(
        ("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32"
    )
    return [
        norm_forward(arch, "layer-narrow", NARROW, "*bf16", True, "*bf16"),
        norm_forward(arch, "rms-2048", 2048, "*bf16", False, "*bf16"),
        norm_forward(arch, "rms-4096-add", 4096, "*bf16", False, "*fp32", "*fp32"),
        norm_forward(arch, "layer-5120", 5120, "*bf16", True, "*bf16"),
        norm_forward(arch, "layer-8192", 8192, "*bf16", True, "*bf16"),
        norm_forward(arch, "layer-8192-add", 8192, "*bf16", True, "*fp32", "*bf16"),
        norm_forward(arch, "layer-widest", WIDEST_FORWARD, "*bf16", True, "*bf16"),
        norm_forward(arch, "layer-widest-fp32-add", WIDEST_FORWARD, "*fp32", True, "*fp32", "*fp32"),
        norm_forward(arch, "layer-looped-add", LOOPED, "*fp16", True, "*fp32", "*fp16"),
        norm_forward(arch, "rms-looped", LOOPED, "*fp32", False),
        norm_backward("layer-narrow-backward", NARROW, "*bf16", True, "*fp32"),
        norm_backward("rms-2048-backward-add", 2048, "*bf16", False, "*bf16", True),
        norm_backward("layer-widest-backward", WIDEST_BACKWARD, "*bf16", True, "*bf16"),
        norm_backward("layer-widest-backward-fp32", WIDEST_BACKWARD, "*fp32", True, "*fp32", True),
        norm_backward("layer-looped-backward-add", LOOPED, "*bf16", True, "*bf16", True),
        case(
            "weight-gradient", norm.norm_weight_gradient_kernel, columns, {"CENTERED": True},
            configs.norm_weight_gradient(),
        ),
        case("column-sums", norm.column_sums_kernel, sums, {}, configs.column_sums(LOOPED)),
    ]  # fmt: skip


def softmax_cases() -> list[Case]:
    cases = []
    for x in ("*bf16", "*fp32"):
        forward, backward = {"x_ptr": x, "y_ptr": x}, {"dy_ptr": x, "y_ptr": x, "dx_ptr": x}
        for name, N, log in (("narrow", NARROW, True), ("widest", WIDEST_FORWARD, False)):
            config = configs.softmax_forward(N, ITEMSIZE[x])
            name = f"softmax-{name}-{x[1:]}"
            cases.append(case(name, softmax.softmax_forward_kernel, forward, {"LOG": log}, config))
        config = configs.softmax_backward(WIDEST_BACKWARD, ITEMSIZE[x])
        name = f"softmax-widest-backward-{x[1:]}"
        cases.append(case(name, softmax.softmax_backward_kernel, backward, {"LOG": True}, config))
    config = configs.softmax_forward(LOOPED, ITEMSIZE[x])
    kernel = softmax.softmax_forward_looped_kernel
    cases.append(case("softmax-looped", kernel, forward, {"LOG": False}, config))
    config = configs.softmax_backward(LOOPED, ITEMSIZE[x])
    kernel = softmax.softmax_backward_looped_kernel
    cases.append(case("softmax-looped-backward", kernel, backward, {"LOG": False}, config))
    config = configs.logsumexp(LOOPED, ITEMSIZE["*bf16"])
    pointers = {"x_ptr": "*bf16", "lse_ptr": "*fp32"}
    cases.append(case("logsumexp", softmax.logsumexp_forward_kernel, pointers, {}, config))
    pointers |= {"dlse_ptr": "*fp32", "dx_ptr": "*bf16"}
    cases.append(case("logsumexp-backward", softmax.logsumexp_backward_kernel, pointers, {}, config))
    return cases
