"""Configurations of the softmax kernels: each kernel, each regime at its largest tile."""

from __future__ import annotations

import itertools
from typing import Any

from compile_case import Case

from flashproto import configs
from flashproto.configs import RowConfig
from flashproto.kernels import hooks, logsumexp, softmax, softmax_hooks, softmax_topk
from flashproto.kernels.hopper import softmax_forward

NARROWEST, NARROW, WIDEST_FORWARD, WIDEST_BACKWARD = 1, 64, 16384, 8192
SPLIT, WIDEST_SPLIT, LOOPED = 131072, 2**20, 2**21
SPLIT_FORWARD, SPLIT_BACKWARD = (
    softmax.softmax_forward_split_kernel,
    softmax.softmax_backward_split_kernel,
)
ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}


def case(
    name: str, kernel: Any, pointers: dict[str, str], constexprs: dict[str, Any], config: RowConfig
) -> Case:
    """Argument types by name: `pointers` says which there are, the other pointers are None; strides
    and N are multiples of 16, as for usual widths; the tile is that of `config`."""
    names = kernel.arg_names
    missing = {n: None for n in names if n.endswith("_ptr") and n not in pointers}
    missing |= {n: None for n in names if "logue" in n.lower()}  # no hooks
    tile = {"R": config.rows, "C": config.columns}
    scalars = {n: "i32" for n in names if n in ("M", "N", "K", "splits") or n.endswith("_stride")}
    constexprs = missing | constexprs | {n: tile[n] for n in tile if n in names and n not in constexprs}
    signature = pointers | scalars
    aligned = tuple(n for n in signature if n not in ("M", "K", "splits"))
    return Case(
        name,
        kernel,
        signature,
        constexprs,
        aligned,
        config.num_warps,
        max_registers=config.max_registers,
    )


def split_case(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    constexprs: dict[str, Any],
    N: int,
    config: RowConfig,
    polls: int = 1024,
) -> Case:
    lanes = configs.power_of_two(-(-N // config.columns))
    exchange = {"LANES": lanes, "POLLS": polls}
    return case(name, kernel, pointers | {"words_ptr": "*i64"}, constexprs | exchange, config)


def softmax_cases(arch: int) -> list[Case]:
    cases = shared_cases() if arch == 90 else []
    for x in ("*bf16", "*fp32"):
        forward, backward = {"x_ptr": x, "y_ptr": x}, {"dy_ptr": x, "y_ptr": x, "dx_ptr": x}
        size, no_log = ITEMSIZE[x], {"LOG": False}
        for name, N, log in (
            ("narrowest", NARROWEST, False),
            ("narrow", NARROW, True),
            ("wide", 8192, False),
            ("wide-log", 8192, True),
            ("widest", WIDEST_FORWARD, False),
            ("widest-log", WIDEST_FORWARD, True),
        ):
            config = configs.softmax_forward(N, size)
            name = f"softmax-{name}-{x[1:]}"
            cases.append(case(name, softmax.softmax_forward_kernel, forward, {"LOG": log}, config))
        for N in (WIDEST_BACKWARD, *([2 * WIDEST_BACKWARD] if size == 2 else [])):
            config = configs.softmax_backward(N, size)
            name = f"softmax-backward-{N}-{x[1:]}"
            cases.append(case(name, softmax.softmax_backward_kernel, backward, {"LOG": True}, config))
        # Programs that look once or never wait are those of a test.
        for N, polls in ((12288, 1024), (SPLIT, 1024), (WIDEST_SPLIT, 1024), (SPLIT, 0), (SPLIT, 1)):
            name = f"softmax-split-{N}-{polls}-{x[1:]}"
            config = configs.softmax_forward(N, size, polls < 2)  # without the cap, which is no concern
            cases.append(split_case(name, SPLIT_FORWARD, forward, no_log, N, config, polls))
            config = configs.softmax_backward(N, size, polls < 2)
            name = f"{name}-backward"
            cases.append(split_case(name, SPLIT_BACKWARD, backward, no_log, N, config, polls))
            if polls == 1024:
                clearing, name = backward | {"used_ptr": "*i64"}, f"{name}-clears"
                cases.append(split_case(name, SPLIT_BACKWARD, clearing, no_log, N, config))
        config = configs.softmax_forward(LOOPED, size)
        name, kernel = f"softmax-looped-{x[1:]}", softmax.softmax_forward_looped_kernel
        cases.append(case(name, kernel, forward, no_log, config))
        config = configs.softmax_backward(LOOPED, size)
        name, kernel = f"{name}-backward", softmax.softmax_backward_looped_kernel
        cases.append(case(name, kernel, backward, no_log, config))
    return cases + hook_cases() + logsumexp_cases() + softmax_topk_cases()


def shared_cases() -> list[Case]:
    """Rows in shared memory, on Hopper: numbers are in units of 16 bytes, and any."""
    cases = []
    kinds = [
        *itertools.product(("*bf16", "*fp16"), (16392, 24576, 32768, 32776, 65536, 2**19, 2**19 - 8))
    ]
    kinds += itertools.product(
        ["*fp32"], (8196, 10000, 12292, 16384, 32768, 50260, 65536, 10**6, 2**20)
    )
    for (x, N), log, clears in itertools.product(kinds, (False, True), (False, True)):
        config = configs.softmax_forward_shared(N, ITEMSIZE[x])
        assert config is not None
        if clears and (not config.split or x == "*fp16"):
            continue
        kernel = softmax_forward.softmax_forward_shared_kernel
        pointers = {"x_ptr": x, "y_ptr": x}
        constexprs = {"LOG": log, "WHOLE": N % config.columns == 0, "C": config.columns}
        if config.split:
            kernel = softmax_forward.softmax_forward_shared_split_kernel
            pointers |= {"words_ptr": "*i64"} | ({"used_ptr": "*i64"} if clears else {})
            constexprs |= {"LANES": configs.power_of_two(-(-N // config.columns)), "POLLS": 1024}
            constexprs |= {} if clears else {"used_ptr": None}
        signature = pointers | {"x_stride": "i32", "M": "i32", "N": "i32"}
        cases.append(
            Case(
                f"softmax-shared-{N}{'-log' * log}{'-clears' * clears}-{x[1:]}",
                kernel,
                signature,
                constexprs,
                tuple(pointers),
                config.num_warps,
                max_registers=config.max_registers,
            )
        )
    return cases


def hooked(
    plain: Case, slot: str, operands: list[tuple[str, str]], wanted: list[bool], **functions: Any
) -> Case:
    """A case with a hook as a launch passes it: operands of (dtype, what they vary by: "full", "row" or
    "column"), one scalar in a prologue; wanted: which operands have a gradient, float32."""
    names = plain.kernel.arg_names
    signature: dict[str, Any] = dict(plain.signature)
    constexprs = {n: v for n, v in plain.constexprs.items() if n not in (slot, f"{slot}_gradients")}
    position, types = names.index(slot), []
    for i, (dtype, by) in enumerate(operands):
        strides = ["i32" if by in ("full", "row") else "constexpr", "constexpr"]
        types.append((dtype, *strides))
        if strides[0] == "constexpr":
            constexprs[(position, 0, i, 1)] = None
        constexprs[(position, 0, i, 2)] = 1 if by in ("full", "column") else None
    signature[slot] = (tuple(types), ("fp32",) if slot == "prologue" else ())
    if f"{slot}_gradients" in names:
        position = names.index(f"{slot}_gradients")
        signature[names[position]] = tuple("*fp32" if want else "constexpr" for want in wanted)
        constexprs |= {(position, i): None for i, want in enumerate(wanted) if not want}
    return Case(
        plain.name,
        plain.kernel,
        signature,
        constexprs | functions,
        plain.divisible_by_16,
        plain.num_warps,
        max_registers=plain.max_registers,
    )


# name: (hook, its operands, which of them have a gradient)
HOOKS: dict[str, tuple[str, list[tuple[str, str]], list[bool]]] = {
    "scale": ("scale", [], []),
    "bias": ("scale_bias", [("*bf16", "full")], [True]),
    "bias-alone": ("scale_bias", [("*bf16", "column")], [False]),
    "mask": ("scale_mask", [("*i1", "row")], [False]),
    "limit": ("scale_limit", [("*i64", "row")], [False]),
    "bias-limit": ("scale_bias_limit", [("*bf16", "full"), ("*i64", "row")], [True, False]),
    "mask-limit": ("scale_mask_limit", [("*i1", "full"), ("*i64", "row")], [False, False]),
}


def hook_cases() -> list[Case]:
    """Scale, mask and causal in every regime, and a hook behind them."""
    cases, log = [], {"LOG": False}
    forward = {"x_ptr": "*bf16", "y_ptr": "*bf16", "lse_ptr": "*fp32"}
    backward = {"dy_ptr": "*bf16", "x_ptr": "*bf16", "lse_ptr": "*fp32", "dx_ptr": "*bf16"}
    for hook, (name, operands, wanted) in HOOKS.items():
        function, derivative = getattr(softmax_hooks, name), getattr(softmax_hooks, f"{name}_backward")
        both = {"PROLOGUE": function, "PROLOGUE_BACKWARD": derivative}
        plain = case(
            f"softmax-{hook}",
            softmax.softmax_forward_kernel,
            forward,
            log,
            configs.softmax_forward(4096, 2, True),
        )
        cases.append(hooked(plain, "prologue", operands, wanted, PROLOGUE=function))
        plain = case(
            f"softmax-{hook}-backward",
            softmax.softmax_backward_kernel,
            backward,
            log,
            configs.softmax_backward(4096, 2, True),
        )
        cases.append(hooked(plain, "prologue", operands, wanted, **both))
    _, operands, wanted = HOOKS["bias-limit"]
    function, derivative = softmax_hooks.scale_bias_limit, softmax_hooks.scale_bias_limit_backward
    both = {"PROLOGUE": function, "PROLOGUE_BACKWARD": derivative}
    gate = {"EPILOGUE": hooks.silu_gate}
    gate_backward = {"EPILOGUE_BACKWARD": hooks.silu_gate_backward}
    for N in (SPLIT, LOOPED):
        config, kernel = configs.softmax_forward(N, 2, True), softmax.softmax_forward_looped_kernel
        if N == SPLIT:
            plain = split_case("softmax-hooks-split", SPLIT_FORWARD, forward, log, N, config)
        else:
            plain = case("softmax-hooks-looped", kernel, forward, log, config)
        plain = hooked(plain, "prologue", operands, wanted, PROLOGUE=function)
        cases.append(hooked(plain, "epilogue", [("*bf16", "full")], [True], **gate))
        config, kernel = configs.softmax_backward(N, 2, True), softmax.softmax_backward_looped_kernel
        if N == SPLIT:
            plain = split_case("softmax-hooks-split-backward", SPLIT_BACKWARD, backward, log, N, config)
        else:
            plain = case("softmax-hooks-looped-backward", kernel, backward, log, config)
        plain = hooked(plain, "prologue", operands, wanted, **both)
        cases.append(hooked(plain, "epilogue", [("*bf16", "full")], [False], **gate_backward))
    return cases


def logsumexp_cases() -> list[Case]:
    cases = []
    kernel, split_kernel = logsumexp.logsumexp_forward_kernel, logsumexp.logsumexp_forward_split_kernel
    for x in ("*bf16", "*fp32"):
        forward, size = {"x_ptr": x, "lse_ptr": "*fp32"}, ITEMSIZE[x]
        backward = forward | {"dlse_ptr": "*fp32", "dx_ptr": x}
        for N in (32, 1024, 8192, LOOPED):
            config = configs.logsumexp(N, size)
            cases.append(case(f"logsumexp-{N}-{x[1:]}", kernel, forward, {}, config))
        split = configs.logsumexp(SPLIT, size)
        cases.append(split_case(f"logsumexp-split-{x[1:]}", split_kernel, forward, {}, SPLIT, split))
        kernel_backward = logsumexp.logsumexp_backward_kernel
        cases.append(case(f"logsumexp-backward-{x[1:]}", kernel_backward, backward, {}, split))
    return cases


def softmax_topk_cases() -> list[Case]:
    cases = []
    for x in ("*bf16", "*fp32"):
        size = ITEMSIZE[x]
        results = {"values_ptr": "*fp32", "indices_ptr": "*i64", "states_ptr": "*fp32"}
        for N, k in ((64, 8), (128, 8), (256, 8), (256, 64), (1024, 64), (4096, 8), (4096, 64)):
            config = configs.softmax_topk(N, size, k)
            constants = {"RENORMALIZE": True, "KP": k}
            constants |= {"W": config.block, "PART": config.part, "SORT": config.sort}
            name, kernel = f"topk-{N}-{k}-{x[1:]}", softmax_topk.softmax_topk_kernel
            cases.append(case(name, kernel, {"x_ptr": x} | results, constants, config))
        for k in (8, 64):
            config = configs.softmax_topk(SPLIT, size, k)
            constants = {"SPAN": configs.softmax_topk_span(SPLIT, k), "KP": k}
            partial = {"keys_ptr": "*i64", "words_ptr": "*i64"}
            name, kernel = f"topk-split-{k}-{x[1:]}", softmax_topk.softmax_topk_split_kernel
            cases.append(case(name, kernel, {"x_ptr": x} | partial, constants, config))
            splits = WIDEST_SPLIT // configs.softmax_topk_span(WIDEST_SPLIT, k)
            config = configs.softmax_topk_join(splits, k)
            constants = {"RENORMALIZE": False, "LANES": splits, "KP": k, "SORT": config.sort}
            name, kernel = f"topk-join-{k}-{x[1:]}", softmax_topk.softmax_topk_join_kernel
            cases.append(case(name, kernel, {"x_ptr": x} | partial | results, constants, config))
        del results["values_ptr"]
        pointers = {"x_ptr": x, "dx_ptr": x, "dvalues_ptr": "*fp32"} | results
        for N in (NARROW, 4096):
            config, constants = configs.softmax_topk_backward(N, size), {"RENORMALIZE": False, "KP": 64}
            name, kernel = f"topk-backward-{N}-{x[1:]}", softmax_topk.softmax_topk_backward_kernel
            cases.append(case(name, kernel, pointers, constants, config))
    return cases
