"""Configurations of the cross entropy kernels: narrow and wide vocabularies, every option."""

from __future__ import annotations

from compile_case import Case

from flashproto import configs
from flashproto.kernels import cross_entropy as kernels

WIDTHS = {"narrow": 100, "wide": 32768, "widest": 131072}
ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
ROWS = ("loss_ptr", "z_ptr", "lse_ptr", "m_ptr", "l_ptr")
NUMBERS = ("M", "V", "N", "first", "tiles", "ignore_index")
OPTIONS = ("smoothing", "z_loss", "softcap")


def case(
    name: str,
    V: int,
    x: str,
    backward: bool,
    gradient: bool = False,
    every_option: bool = False,
    aligned: bool = True,
) -> Case:
    kernel = kernels.cross_entropy_backward_kernel if backward else kernels.cross_entropy_forward_kernel
    kind = "backward" if backward else "forward_gradient" if gradient else "forward"
    config = getattr(configs, f"cross_entropy_{kind}")(V, ITEMSIZE[x])
    pointers = {"x_ptr": x, "targets_ptr": "*i64"}
    if every_option:
        pointers |= {"weight_ptr": "*fp32", "weight_sum_ptr": "*fp32"}
    if every_option or gradient:
        pointers["denominator_ptr"] = "*fp32"
    if backward:
        pointers |= {"dloss_ptr": "*fp32", "dx_ptr": x} | dict.fromkeys(ROWS[2:], "*fp32")
        pointers |= {"dlse_ptr": "*fp32"} if every_option else {}
    else:
        pointers |= dict.fromkeys(ROWS, "*fp32") | ({"dx_ptr": x} if gradient else {})
    names = kernel.arg_names
    missing = {n: None for n in names if n.endswith("_ptr") and n not in pointers}
    scalars = {n: "i32" for n in names if n.endswith("_stride") or n in NUMBERS}
    scalars |= dict.fromkeys(OPTIONS, "fp32")
    flags = {"SMOOTHING": every_option, "SOFTCAP": every_option}
    flags |= {"DONE": not every_option} if backward else {"KEEP": False, "ALIGNED": aligned}
    signature = pointers | scalars
    return Case(
        name,
        kernel,
        signature,
        missing | flags | {"R": config.rows, "G": config.groups, "E": config.elements},
        tuple(n for n in signature if n not in NUMBERS + OPTIONS and (aligned or "stride" not in n)),
        config.num_warps,
        max_registers=config.max_registers,
    )


def cross_entropy_cases() -> list[Case]:
    cases = []
    for x in ("*bf16", "*fp32"):
        for width, V in WIDTHS.items():
            for every_option in (False, True):
                name = f"{width}-{x[1:]}{'-every-option' * every_option}"
                cases += [
                    case(f"forward-{name}", V, x, False, False, every_option),
                    case(f"forward-gradient-{name}", V, x, False, True, every_option),
                    case(f"backward-{name}", V, x, True, False, every_option),
                ]
    for x in ("*bf16", "*fp32"):
        for width, V in (("narrow", 101), ("wide", 50257)):
            for gradient in (False, True):
                name = f"forward-unaligned-{width}-{x[1:]}{'-gradient' * gradient}"
                cases.append(case(name, V, x, False, gradient, aligned=False))
    total, scale = configs.cross_entropy_total(), configs.gradient_scale(2)
    signature = {"targets_ptr": "*i64"} | dict.fromkeys(
        ("weight_ptr", "loss_ptr", "z_ptr", "loss_sum_ptr", "z_sum_ptr", "denominator_ptr"), "*fp32"
    )
    cases.append(
        Case(
            "total",
            kernels.cross_entropy_total_kernel,
            signature | dict.fromkeys(("M", "V", "ignore_index"), "i32"),
            {"MEAN": True, "ROWS": total.length, "BLOCK": total.tile},
            tuple(signature),
            total.num_warps,
        )
    )
    cases.append(
        Case(
            "scale",
            kernels.scale_unless_one_kernel,
            {"x_ptr": "*bf16", "factor_ptr": "*fp32", "N": "i64"},
            {"BLOCK": scale.tile},
            ("x_ptr", "factor_ptr"),
            scale.num_warps,
        )
    )
    return cases
