"""Configurations of the gated linear units, of the rotary embedding, of QK norm, of merge_attention, of
the linear layer of one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compile_case import Case

from flashproto import configs
from flashproto.kernels import attention_merge, glu, linear_row, qk_norm, rope

ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}


def case(
    name: str, kernel: Any, pointers: dict[str, str], constexprs: dict[str, Any], num_warps: int
) -> Case:
    """Pointers that are not named are None; strides and N are multiples of 16, other numbers any."""
    names = kernel.arg_names
    missing = {n: None for n in names if n.endswith("_ptr") and n not in pointers}
    constexprs = missing | constexprs
    scalars = {n: "i32" for n in names if n not in pointers and n not in constexprs and n != "eps"}
    signature = pointers | scalars | ({"eps": "fp32"} if "eps" in names else {})
    aligned = tuple(n for n in signature if n.endswith("_ptr") or "_stride" in n or n == "N")
    return Case(name, kernel, signature, constexprs, aligned, num_warps)


def glu_case(name: str, N: int, dtype: str, act: str, backward: bool = False, up: bool = True) -> Case:
    config = configs.glu(N, ITEMSIZE[dtype])
    names = ["gate_ptr", *(["up_ptr"] if up else [])]
    names += ["dy_ptr", "dgate_ptr", *(["dup_ptr"] if up else [])] if backward else ["y_ptr"]
    kernel = glu.glu_backward_kernel if backward else glu.glu_forward_kernel
    constexprs = {"ACT": act, "R": config.rows, "C": config.columns}
    return case(name, kernel, dict.fromkeys(names, dtype), constexprs, config.num_warps)


def heads_case(
    name: str, kernel: Any, D: int, rotary_dim: int, dtype: str, with_v: bool, **constexprs: Any
) -> Case:
    """Every pointer of a kernel of heads; with_v: v too; without "cos_ptr" in the tables none."""
    backward = "dq_ptr" in kernel.arg_names
    choose = configs.qk_norm_backward if backward else configs.heads
    config = choose(D, rotary_dim, 4096, 32, ITEMSIZE[dtype])
    pointers = {n: dtype for n in kernel.arg_names if n.endswith("_ptr")}
    for n in pointers:
        if n in ("cos_ptr", "sin_ptr", "dq_weight_ptr", "dk_weight_ptr"):
            pointers[n] = "*fp32"
    pointers = {n: t for n, t in pointers.items() if with_v or n not in V_POINTERS}
    if constexprs["COUNT"]:
        pointers["positions_ptr"] = "*i64"
    else:
        del pointers["positions_ptr"]
    tile = {
        "D": D,
        "HALF": rotary_dim // 2,
        "T": config.tokens,
        "H": config.heads,
        "C": config.pairs,
        "REST": config.rest,
        "WHOLE": config.whole,
    }
    tile |= {} if backward else {"STEPS": config.steps}
    return case(name, kernel, pointers, tile | constexprs, config.num_warps)


def merge_case(
    n: int, D: int, element: str, backward: bool = False, heads: bool = False, aligned: bool = True
) -> Case:
    """Of n parts; heads: whether their rows lie in three dimensions, else in one."""
    config = configs.merge_parts(D, ITEMSIZE[f"*{element}"], aligned)
    kernel = attention_merge.merge_parts_kernel
    if backward:
        kernel = attention_merge.merge_parts_backward_kernel
    wide, narrow = (attention_merge.Rows(f"*{x}", "i32", "i32", "i32") for x in (element, "fp32"))
    one, parts = {"out": wide, "lse": narrow}, {"outs": (wide,) * n, "lses": (narrow,) * n}
    if backward:
        one = {"dout": wide, "dlse": narrow}
        parts |= {"douts": (wide,) * n, "dlses": (narrow,) * n}
    sizes = {"M": "i32"} | (dict.fromkeys(("middle", "inner"), "i32") if heads else {})
    tile = {"D": D, "BLOCK_D": config.columns, "ROWS": config.rows, "ALIGNED": aligned}
    constexprs = (
        tile | ({"LSES": True} if backward else {}) | ({} if heads else {"middle": 1, "inner": 1})
    )
    name = f"merge{'-backward' * backward}{'-heads' * heads}-{n}-parts-{D}-{element}"
    return Case(name, kernel, one | parts | sizes, constexprs, num_warps=config.num_warps)


def merge_cases() -> list[Case]:
    return [
        merge_case(n, D, element, backward, heads, aligned)
        for n, D, element, heads, aligned in (
            (2, 128, "bf16", False, True),
            (2, 128, "fp32", True, True),
            (5, 64, "fp16", True, True),
            (3, 37, "bf16", False, False),
            (16, 128, "bf16", True, True),
            (2, 1024, "bf16", False, True),
            (16, 1024, "fp32", True, True),
            (16, 1023, "bf16", True, False),
        )
        for backward in (False, True)
    ]


def linear_row_case(
    N: int, K: int, element: str, norm: str = "", act: str = "", up: bool = False, pdl: bool = False
) -> Case:
    """A linear layer of one row; with a norm also a residual."""
    config = configs.linear_row(N, K, norm != "", up, 132)
    chunks = -(-K // config.inner)
    names = ["x_ptr", "weight_ptr", "bias_ptr", "y_ptr"]
    if norm:
        names += ["residual_ptr", "norm_weight_ptr", "norm_bias_ptr", "total_ptr"]
    options = {"NORM": norm, "CASTING": "torch", "ACT": act, "UP": up, "BLOCK_N": config.columns}
    options |= {"C": config.inner, "CHUNKS": chunks, "WHOLE": chunks * config.inner == K, "PDL": pdl}
    name = f"linear-row-{N}x{K}{'-' * bool(norm)}{norm}{'-' * bool(act)}{act}{'-pdl' * pdl}-{element}"
    pointers = dict.fromkeys(names, f"*{element}")
    made = case(name, linear_row.linear_row_kernel, pointers, options, config.num_warps)
    return replace(made, divisible_by_16=(*made.divisible_by_16, *["K"][: K % 16 == 0]))


def linear_cases(arch: int) -> list[Case]:
    pdl = {"pdl": arch >= 90}
    return [
        linear_row_case(2304, 768, "bf16", "layer"),
        linear_row_case(768, 768, "bf16", **pdl),
        linear_row_case(3072, 768, "fp16", "layer", "gelu_tanh", **pdl),
        linear_row_case(768, 3072, "bf16", **pdl),
        linear_row_case(5632, 2048, "bf16", "rms", "silu", True, **pdl),
        linear_row_case(2048, 5632, "bf16"),
        linear_row_case(22016, 4096, "fp16", "rms", "silu", True, **pdl),
        linear_row_case(1000, 1001, "bf16", "rms", "gelu_tanh", True),
    ]


V_POINTERS = ("v_ptr", "v_out_ptr", "dv_ptr", "dv_out_ptr")


def elementwise_cases(arch: int) -> list[Case]:
    plain = {"INTERLEAVED": False, "COUNT": False}
    interleaved = {"INTERLEAVED": True, "COUNT": True}
    forward, backward = qk_norm.qk_norm_forward_kernel, qk_norm.qk_norm_backward_kernel
    return [
        glu_case("swiglu-bf16", 5632, "*bf16", "silu"),
        glu_case("geglu-narrow-fp32", 24, "*fp32", "gelu"),
        glu_case("gelu-tanh-fp16", 2**20, "*fp16", "gelu_tanh", up=False),
        glu_case("swiglu-backward-bf16", 11008, "*bf16", "silu", True),
        glu_case("geglu-backward-fp32", 5632, "*fp32", "gelu", True),
        glu_case("geglu-tanh-backward-bf16", 5632, "*bf16", "gelu_tanh", True),
        glu_case("gelu-backward-bf16", 5632, "*bf16", "gelu", True, up=False),
        heads_case("rope-bf16", rope.rope_kernel, 128, 128, "*bf16", False, INVERSE=False, **plain),
        heads_case("rope-qkv-bf16", rope.rope_kernel, 128, 64, "*bf16", True, INVERSE=True, **plain),
        heads_case(
            "rope-interleaved-bf16",
            rope.rope_kernel,
            64,
            64,
            "*bf16",
            False,
            INVERSE=False,
            **interleaved,
        ),
        heads_case(
            "rope-interleaved-fp32",
            rope.rope_kernel,
            256,
            64,
            "*fp32",
            True,
            INVERSE=True,
            **interleaved,
        ),
        heads_case("qk-norm-bf16", forward, 128, 128, "*bf16", True, CASTING="torch", **plain),
        heads_case("qk-norm-fp32", forward, 256, 64, "*fp32", False, CASTING="llama", **interleaved),
        heads_case(
            "qk-norm-backward-bf16", backward, 128, 128, "*bf16", True, CASTING="torch", **plain
        ),
        heads_case(
            "qk-norm-backward-interleaved-bf16",
            backward,
            128,
            64,
            "*bf16",
            False,
            CASTING="gemma",
            **interleaved,
        ),
        heads_case(
            "qk-norm-backward-fp32", backward, 256, 256, "*fp32", True, CASTING="torch", **plain
        ),
        *merge_cases(),
        *linear_cases(arch),
    ]
