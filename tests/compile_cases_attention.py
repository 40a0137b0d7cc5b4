"""The attention kernels in every configuration that flashproto.configs chooses for an architecture."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from compile_case import Case, given_of
from kinds import FIELDS, covering

from flashproto import configs
from flashproto.kernels import score_hooks
from flashproto.kernels.attention_backward import (
    attention_backward_heads_kernel,
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from flashproto.kernels.attention_backward_bias import (
    attention_backward_bias_kernel,
    attention_backward_distances_kernel,
    attention_backward_relative_kernel,
)
from flashproto.kernels.attention_forward import attention_forward_kernel
from flashproto.kernels.mask_table import mask_table_kernel
from flashproto.kernels.schedule import columns_kernel, intervals_kernel
from flashproto.kernels.scores import Given
from flashproto.variant import Kind

FLOAT32_ARGUMENTS = {"lse_ptr", "lse2_ptr", "dlse_ptr", "delta_ptr", "rows_ptr", "sums_ptr", "ends_ptr"}
# (D, Dv): powers of two take no column mask, the others do; 256 may spill.
HEAD_DIMS = ((16, 16), (64, 64), (96, 96), (128, 128), (64, 128), (256, 256))
WIDE = ((320, 320), (512, 512), (96, 512))
WIDE_STACK = 64
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
    signature, aligned = {}, []
    parameters = inspect.signature(kernel.fn).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty} | constexprs
    for argument in kernel.arg_names:
        if argument == "given":
            signature[argument] = given
        elif argument == "columns_ptr":
            signature[argument] = "*i32"
            aligned.append(argument)
        elif argument.endswith("_ptr") and argument not in values:
            signature[argument] = "*fp32" if argument in FLOAT32_ARGUMENTS else f"*{element}"
            aligned.append(argument)
        elif argument.startswith("stride_") and argument.endswith("d") and argument not in values:
            values[argument] = 1  # a contiguous last dimension, as the launcher specialises it
        elif argument.startswith("stride_") and argument not in values:
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
USERS_STACK = {80: 256, 90: 384, 100: 1536}  # and with a user's function


def variant_cases(
    arch: int, variants: Iterable[tuple[Kind, tuple[int, int, str]]] = VARIANTS, gaps: bool = False
) -> Iterator[Case]:
    """Forward and backward of kinds; gaps: with such between sequences."""
    capability = divmod(arch, 10)
    for kind, (D, Dv, element) in variants:
        itemsize = ELEMENTS[element]
        exact = replace(kind, SOFTCAP=2 if kind.SOFTCAP and itemsize == 4 else kind.SOFTCAP)
        of_gradients = replace(exact, MAX_SCORE=False, ENTROPY=False)
        # A user's function is multiply_score of a number for each pair.
        dense = kind.SCORE_MOD
        forward = configs.attention_forward(capability, itemsize, D, Dv, exact, dense)
        keys, queries = configs.attention_backward(
            capability, itemsize, D, Dv, of_gradients, of_gradients.ALIBI, dense
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
            rest = ("rest",) if kind.DROPOUT and itemsize == 2 and stem == "forward" else ()
            slopes = bool(extra.get("SLOPES"))
            given, absent = given_of(
                kernel, kind, slopes=slopes, gaps=gaps, made=rest, exact=itemsize == 4
            )
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
            name = f"{stem}-{D}x{Dv}-{kind.name}{'-gaps' * gaps}"
            yield case(
                kernel,
                name,
                element,
                config,
                constexprs | extra | absent,
                (USERS_STACK if kind.SCORE_MOD else VARIANT_STACK)[arch],
                given,
            )


def alone_cases() -> Iterator[Case]:
    """On Hopper, kinds with one thing that is added to scores, which have tiles of their own."""
    for name, (D, element) in itertools.product(
        ("BIAS", "RELATIVE_BIAS"), ((128, "bf16"), (64, "fp16"))
    ):
        kinds = Kind(**{name: True}), Kind(CAUSAL=True, WINDOW=True, SINKS=True, **{name: True})
        yield from variant_cases(90, [(kind, (D, D, element)) for kind in kinds])


def small_cases() -> Iterator[Case]:
    """The gradients of sinks and slopes, delta of sequences side by side, and what says which queries
    meet a tile of keys."""
    one_warp, four = configs.AttentionConfig(0, 0, 1, 1), configs.AttentionConfig(0, 0, 4, 3)
    kind = Kind(SINKS=True, ALIBI=True, VARLEN=True)
    for gaps in (False, True):
        given, absent = given_of(attention_backward_rows_kernel, kind, slopes=True, gaps=gaps)
        constexprs = {"DV": 128, "BLOCK_DV": 128, "BLOCK_M": 64, "KIND": kind, "HAS_DLSE": True}
        constexprs |= {"SLOPES": True, "WIDE": False} | absent
        name = f"rows-128-{kind.name}{'-gaps' * gaps}"
        # 64 bytes of stack: on sm_100 with Triton 3.6.
        yield case(attention_backward_rows_kernel, name, "bf16", four, constexprs, 64, given)
    for element, DV in (("bf16", 128), ("fp16", 128), ("bf16", 256)):
        kind = Kind(DROPOUT=True)
        given, absent = given_of(attention_backward_rows_kernel, kind, made=("rest",))
        constexprs = {"DV": DV, "BLOCK_DV": DV, "BLOCK_M": 64, "KIND": kind, "HAS_DLSE": False}
        constexprs |= {"SLOPES": False, "WIDE": False} | absent
        name = f"rows-{DV}-{kind.name}-rest"
        yield case(attention_backward_rows_kernel, name, element, four, constexprs, 0, given)
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
    yield from table_cases()


def table_cases() -> Iterator[Case]:
    """What makes the table of a mask, and what lists its columns."""
    aligned = ("seen_ptr", "bits_ptr", "table_ptr")
    numbers = [name for name in mask_table_kernel.arg_names if name not in (*aligned, "WORDS")]
    for words, element in ((True, "*i32"), (False, "*u8")):
        signature = dict(zip(aligned, (element, "*i32", "*i8"), strict=True))
        signature |= dict.fromkeys(numbers, "i32")
        constexprs = {"WORDS": words, "stride_sk": 1}
        del signature["stride_sk"]
        even = (*aligned, "stride_sb", "stride_sh", "stride_sq", "Sk")
        name, num_warps = f"table-{element[1:]}", 4 if words else 8
        yield Case(name, mask_table_kernel, signature, constexprs, even, num_warps)
    kind = Kind(True, True, True)
    given, absent = given_of(columns_kernel, kind)
    signature = {"columns_ptr": "*i32", "table_ptr": "*i8"} | dict.fromkeys(
        ("Sq", "Sk", "offset"), "i32"
    )
    for marked in (False, True):
        constexprs = {"BLOCK_M": 64, "BLOCK_N": 128, "KIND": kind, "MARKED": marked} | absent
        name = f"columns{'-marked' * marked}"
        yield Case(name, columns_kernel, signature | {"given": given}, constexprs, ("columns_ptr",), 1)


# Of what a bias is not broadcast over: batch entries, heads, queries, keys.
BROADCAST = ((False, True, True, True), (False, False, True, True), (True, False, False, True))


def bias_cases(arch: int) -> Iterator[Case]:
    """The gradients of biases."""
    tables = itertools.cycle((Kind(RELATIVE_BIAS=True), Kind(VARLEN=True, RELATIVE_BIAS=True)))
    for (D, Dv), element in itertools.product((*HEAD_DIMS, (512, 512)), ("bf16", "fp32")):
        capability, itemsize = divmod(arch, 10), ELEMENTS[element]
        config = configs.attention_backward_bias(capability, itemsize, D, Dv, Kind(BIAS=True))
        square = configs.attention_backward_distances(capability, itemsize, D, Dv)
        shared = {
            "D": D, "DV": Dv, "BLOCK_D": configs.padded_head_dim(D),
            "BLOCK_DV": configs.padded_head_dim(Dv), "TF32": False, "WIDE": False,
        }  # fmt: skip
        # Of a sum over queries in float32, with Triton 3.6; and of the widest.
        stack = {256: 65536, 512: WIDE_STACK}.get(max(D, Dv), 16 if itemsize == 4 and D == 96 else 8)
        kind = Kind(CAUSAL=D == 128, BIAS=True)
        kernel: object = attention_backward_bias_kernel
        exact = itemsize == 4
        given, absent = given_of(kernel, kind, exact=exact)
        for dims in BROADCAST if D == 64 else BROADCAST[:1]:
            own = dict(zip(("BATCH", "HEADS", "ROWS", "COLUMNS"), dims, strict=True))
            tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "KIND": kind}
            name = f"bias-{D}x{Dv}-{kind.name}-" + "".join("01"[x] for x in dims)
            yield case(kernel, name, element, config, shared | own | tiles | absent, stack, given)
        kind, kernel = next(tables), attention_backward_distances_kernel
        given, absent = given_of(kernel, kind, exact=exact)
        ends = configs.attention_sums_ends(capability, itemsize, kind)
        values = shared | {"BLOCK": square.block_m, "KIND": kind, "ENDS": ends} | absent
        yield case(kernel, f"distances-{D}x{Dv}-{kind.name}", element, square, values, stack, given)
        _, queries = configs.attention_backward(capability, itemsize, D, Dv, Kind(BIAS=True))
        kind, kernel = Kind(BIAS=True), attention_backward_queries_kernel
        given, absent = given_of(kernel, kind, bias_gradient=True, exact=exact)
        tiles = {"BLOCK_M": queries.block_m, "BLOCK_N": queries.block_n, "KIND": kind, "SLOPES": False}
        name = f"queries-{D}x{Dv}-bias-gradient"
        yield case(kernel, name, element, queries, shared | tiles | absent, stack, given)
    four = configs.AttentionConfig(0, 0, 4, 3)
    for block in (16, 32, 64):
        values = {"BLOCK": block, "LOOKED_AT": 32, "COLUMNS": 32}
        kernel = attention_backward_relative_kernel
        yield case(kernel, f"relative-{block}", "bf16", four, values, 0)


def score_mod_cases(arch: int) -> Iterator[Case]:
    """A user's function of one value a query and one a key, and the gradient of the first of them; and
    of two values for each pair, which must have room in shared memory."""
    capability, at = divmod(arch, 10), Given._fields.index("score_mod")
    for D, element, options, dense in (
        (64, "fp32", {}, False),
        (128, "bf16", {"CAUSAL": True}, False),
        (128, "bf16", {"CAUSAL": True}, True),
    ):
        kind, itemsize = Kind(SCORE_MOD=True, **options), ELEMENTS[element]
        forward = configs.attention_forward(capability, itemsize, D, D, kind, dense)
        keys, queries = configs.attention_backward(capability, itemsize, D, D, kind, False, dense)
        summed = configs.attention_backward_bias(capability, itemsize, D, D, kind, dense)
        own = {"BATCH": True, "HEADS": True, "ROWS": True, "COLUMNS": dense, "RESULT": 1}
        strides = "*fp32", "i32", "i32", "i32" if dense else "constexpr", "constexpr"
        for kernel, stem, config, extra in (
            (attention_forward_kernel, "forward", forward, {"EXACT": itemsize == 4}),
            (attention_backward_keys_kernel, "keys", keys, {}),
            (attention_backward_queries_kernel, "queries", queries, {}),
            (attention_backward_bias_kernel, "operand", summed, own),
        ):
            given, absent = given_of(kernel, kind, exact=itemsize == 4)
            given = given._replace(score_mod=((strides, strides), ()))
            place = kernel.arg_names.index("given"), at, 0
            values = {
                "D": D, "DV": D, "BLOCK_D": D, "BLOCK_DV": D, "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n, "KIND": kind, "TF32": False, "WIDE": False,
            } | absent | extra  # fmt: skip
            if dense:
                values |= {(*place, 0, 4): 1, (*place, 1, 4): 1}
            else:
                values |= {(*place, 0, 3): 1, (*place, 0, 4): None}
                values |= {(*place, 1, 3): None, (*place, 1, 4): 1}
            values["SCORE_MOD"] = score_hooks.forget
            if kernel is not attention_forward_kernel:
                values["SCORE_MOD_BACKWARD"] = score_hooks.forget_backward
            # 16 bytes of stack: of the forward in float32 with Triton 3.6.
            name, stack = f"{stem}-{D}-forget{'-dense' * dense}", USERS_STACK[arch] if dense else 16
            yield case(kernel, name, element, config, values, stack, given)


def entropy_cases(arch: int) -> Iterator[Case]:
    """The backward with a gradient of the entropy."""
    capability, of_rows = divmod(arch, 10), ("entropy", "entropy_gradient", "entropy_weights")
    for D, element, options in (
        (64, "fp32", {"CAUSAL": True}),
        (128, "bf16", {"CAUSAL": True, "WINDOW": True, "SINKS": True}),
        (128, "bf16", {"VARLEN": True, "ALIBI": True}),
    ):
        kind = Kind(ENTROPY=True, **options)
        keys, queries = configs.attention_backward(
            capability, ELEMENTS[element], D, D, kind, slopes=kind.ALIBI
        )
        rows = configs.AttentionConfig(64, 0, 4, 3)
        for kernel, stem, config, extra in (
            (attention_backward_rows_kernel, "rows", rows, {"HAS_DLSE": True, "SLOPES": kind.ALIBI}),
            (attention_backward_keys_kernel, "keys", keys, {}),
            (attention_backward_queries_kernel, "queries", queries, {"SLOPES": kind.ALIBI}),
        ):
            given, absent = given_of(kernel, kind, slopes=kind.ALIBI, made=of_rows)
            values = {
                "D": D, "DV": D, "BLOCK_D": D, "BLOCK_DV": D, "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n, "KIND": kind, "TF32": False, "WIDE": False,
            } | extra  # fmt: skip
            values = {n: x for n, x in values.items() if n in kernel.arg_names} | absent
            name = f"{stem}-{D}-{kind.name}-gradient"
            yield case(kernel, name, element, config, values, VARIANT_STACK[arch], given)


def delta_cases(arch: int) -> Iterator[Case]:
    """Delta made anew: before all else, where there is dropout or a bias of all pairs, and in float32;
    or beside dQ."""
    capability, kernel = divmod(arch, 10), attention_backward_queries_kernel
    for (D, Dv), element, (options, delta) in itertools.product(
        (*HEAD_DIMS, *WIDE),
        ELEMENTS,
        (
            ({"DROPOUT": True, "CAUSAL": True}, 2),
            ({"BIAS": True, "SINKS": True}, 2),
            ({"BIAS": True, "DROPOUT": True, "TABLE": True, "SINKS": True}, 2),
            ({"BIAS": True, "CAUSAL": True}, 1),
            ({"RELATIVE_BIAS": True, "ALIBI": True, "VARLEN": True}, 1),
            *((({"RELATIVE_BIAS": True}, 1),) if arch == 90 else ()),
        ),
    ):
        kind, itemsize = Kind(**options), ELEMENTS[element]
        delta = 2 if itemsize == 4 else delta
        if element == "fp16" or (itemsize == 4 and not kind.RESCALES):
            continue
        slopes = kind.ALIBI and delta == 1
        _, queries = configs.attention_backward(capability, itemsize, D, Dv, kind, slopes=kind.ALIBI)
        if delta == 2:
            queries = configs.attention_delta(capability, itemsize, D, Dv, queries)
        ends = 0
        if configs.attention_sums_ends(capability, itemsize, kind):
            ends = configs.attention_backward_distances(capability, itemsize, D, Dv, kind).block_m
        made = ("beside_delta", "ends") if ends else ("beside_delta",)
        given, absent = given_of(kernel, kind, slopes=slopes, made=made, exact=itemsize == 4)
        values = {
            "D": D, "DV": Dv, "BLOCK_D": configs.padded_head_dim(D),
            "BLOCK_DV": configs.padded_head_dim(Dv), "BLOCK_M": queries.block_m,
            "BLOCK_N": queries.block_n, "KIND": kind, "TF32": False, "WIDE": False,
            "SLOPES": slopes, "DELTA": delta, "ENDS": ends,
        }  # fmt: skip
        if delta == 2:
            values |= {"dq_ptr": None} | {f"stride_dq{axis}": 0 for axis in "bhsd"}
        name = f"queries-{D}x{Dv}-{kind.name}-delta={delta}"
        stack = {256: 65536}.get(max(D, Dv), WIDE_STACK if max(D, Dv) > 256 else 8)
        stack = max(stack, VARIANT_STACK[arch]) if kind.TABLE else stack
        stack = max(stack, 24) if (ends and D == 128) or itemsize == 4 else stack  # with Triton 3.9
        if arch == 80 and itemsize == 4 and max(D, Dv) > 256 and delta == 2:
            stack = 4096  # shared memory has room for one stage, of which Triton makes registers
        yield case(kernel, name, element, queries, values | absent, stack, given)


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


def wide_cases(arch: int) -> Iterator[Case]:
    """Head dims above 256; with sm_80 also as they are on cards with less shared memory."""
    for little in (False, True) if arch == 80 else (False,):
        capability = (8, 6) if little else divmod(arch, 10)
        for (D, Dv), element in itertools.product(WIDE, ("bf16", "fp32")):
            itemsize, kind = ELEMENTS[element], Kind(CAUSAL=D != 320, DROPOUT=D == 320)
            forward = configs.attention_forward(capability, itemsize, D, Dv)
            keys, queries = configs.attention_backward(capability, itemsize, D, Dv, kind)
            for kernel, stem, config, extra in (
                (attention_forward_kernel, "forward", forward, {"EXACT": itemsize == 4}),
                (attention_backward_keys_kernel, "keys", keys, {}),
                (attention_backward_queries_kernel, "queries", queries, {"SLOPES": False}),
            ):
                given, absent = given_of(kernel, kind)
                constexprs = {
                    "D": D, "DV": Dv, "BLOCK_D": configs.padded_head_dim(D),
                    "BLOCK_DV": configs.padded_head_dim(Dv), "BLOCK_M": config.block_m,
                    "BLOCK_N": config.block_n, "KIND": kind, "TF32": False, "WIDE": False,
                }  # fmt: skip
                name = f"{stem}-{D}x{Dv}-{kind.name}" + "-little-shared" * little
                values = constexprs | extra | absent
                made = case(kernel, name, element, config, values, WIDE_STACK, given)
                yield replace(made, max_shared=configs.shared_bytes(capability))
    for element in ("bf16", "fp32"):
        config = configs.AttentionConfig(32, 0, 4, 3)
        values = {"DV": 512, "BLOCK_DV": 512, "BLOCK_M": 32, "HAS_DLSE": True, "SLOPES": False}
        values |= {"WIDE": False, "KIND": Kind()}
        yield case(attention_backward_rows_kernel, "rows-512", element, config, values, 0)


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
    gapped = (
        (Kind(CAUSAL=True, VARLEN=True), SHAPES[0]),
        (Kind(VARLEN=True, RELATIVE_BIAS=True), SHAPES[1]),
    )
    yield from variant_cases(arch, gapped, gaps=True)
    yield from small_cases()
    if arch == 90:
        yield from alone_cases()
    yield from bias_cases(arch)
    yield from one_query_cases(arch)
    yield from wide_cases(arch)
    yield from entropy_cases(arch)
    yield from delta_cases(arch)
    yield from score_mod_cases(arch)
