"""One kernel configuration to compile without a GPU; compile_cases_*.py list them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashproto.kernels import score_hooks
from flashproto.kernels.scores import Given
from flashproto.variant import (
    BY_DISTANCE,
    BY_HEAD,
    BY_PAIR,
    FEATURES,
    INTEGER,
    VARIABLES,
    VECTORS,
    Kind,
)

OF_VARIABLES = {INTEGER: "i32", VECTORS: "*i32"}  # and of numbers fp32
OF_VARIABLES |= dict.fromkeys((BY_HEAD, BY_PAIR, BY_DISTANCE), "*fp32")
STRIDES = ("bias_batch", "bias_head", "bias_row", "bias_column")
TABLE = ("relative_row", "relative_columns", "relative_offset")
SEQUSED = ("seqused_q", "seqused_k")
MADE_ROWS = (
    "max_score", "entropy", "slope_sums", "entropy_gradient", "entropy_weights", "sink_delta",
    "beside_delta", "ends",
)  # fmt: skip
# Of Given's fields.
TYPES = {name: OF_VARIABLES.get(row.what, "fp32") for row in FEATURES for name in row.variables}
TYPES |= dict.fromkeys(("row_of_batch", "row_of_head", "sequences", "queries", "keys", "rows"), "i32")
TYPES |= {"dropout_seed": "*i64"}
TYPES |= {"bits": "*i32", "table": "*i8", "columns": "*i32"}
TYPES |= dict.fromkeys(("table_of_batch", "table_of_head"), "i32")
TYPES |= {"score_mod": ((("*fp32", "i32", "i32", "i32", "i32"),), ())}  # of multiply_score
TYPES |= {"pages": "*i32", "page_stride": "i32", "room": "i32"}
TYPES |= dict.fromkeys((*STRIDES, *TABLE, "heads"), "i32") | {"bias_gradient": "*fp32"}
TYPES |= dict.fromkeys(MADE_ROWS, "*fp32") | {"work": "*i32", "rest": "*i16"}


@dataclass(frozen=True)
class Case:
    """What triton.compile needs to build one cubin, and what the result has to satisfy.

    name: unique within an architecture; shown in the test's report.
    kernel: the @triton.jit function.
    signature: Triton types of the arguments that are no constexpr: {"x": "*bf16", "n": "i32"}.
    constexprs: values of every tl.constexpr argument, by name; within an argument that is a tuple, by
        the path of positions to them.
    divisible_by_16: arguments that are multiples of 16 (pointers: 16-byte aligned), as at run time.
    num_warps, num_stages: launch options; num_ctas: programs of a cluster.
    max_registers: the cap that the launch sets, if any.
    max_stack: bytes of stack allowed per thread; ptxas puts register spills there, so 0 means none.
    max_shared: bytes of shared memory, where that is less than the architecture has.
    hgmma: whether the code has to hold wgmma instructions, which ptxas must not have serialised.
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[Any, Any] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    num_ctas: int = 1
    max_stack: int = 0
    max_shared: int | None = None
    max_registers: int | None = None
    hgmma: bool = False


def given_of(
    kernel: Any,
    kind: Kind,
    work: bool = False,
    slopes: bool = False,
    rows: bool = False,
    cache: Iterable[str] = (),
    bias_gradient: bool = False,
    gaps: bool = False,
    made: Iterable[str] = (),
    exact: bool = False,
) -> tuple[Any, dict[Any, Any]]:
    """The types of what an attention kernel of this kind is given, and constants: at the places of what
    it is not given, and a score_mod's functions.

    work: whether sequences have a table of it; slopes: whether sums for their gradient are made; rows:
    whether the number of these is there; cache: what of a cache is given; bias_gradient: whether the
    kernel stores it; gaps: whether sequences have some behind them; made: rows of numbers beside;
    exact: in float32, where changed scores have a rest of lse.  The columns of a bias, and of a
    score_mod's operand, are neighbours in memory.
    """
    if kind.PLAIN and not cache:
        return (), {}
    used = {name for name, of in VARIABLES.items() if getattr(kind, of) and name not in SEQUSED}
    used |= {"work"} if kind.INTERVALS or work else set()
    used |= set(cache)
    used |= {"row_of_batch", "row_of_head"} if kind.INTERVALS else set()
    used |= {"table_of_batch", "table_of_head"} if kind.TABLE else set()
    used |= {"columns"} if kind.TABLE and "dk_ptr" in kernel.arg_names else set()
    used |= {"sequences", "queries", "keys"} if kind.VARLEN else set()
    used |= set(SEQUSED) if gaps else set()
    used |= set(STRIDES[:3]) if kind.BIAS else set()
    used |= set(TABLE) if kind.RELATIVE_BIAS else set()
    used |= {"bias_gradient", "heads"} if bias_gradient else set()
    wanted = {"max_score": kind.MAX_SCORE, "entropy": kind.ENTROPY, "slope_sums": slopes, "rows": rows}
    used |= {name for name, there in wanted.items() if there} | set(made)
    used |= {"rest"} if exact and kind.RESCALES else set()
    given = Given(*(TYPES[name] if name in used else "constexpr" for name in Given._fields))
    if exact and kind.RESCALES:
        given = given._replace(rest="*fp32")
    place = kernel.arg_names.index("given")
    absent: dict[Any, Any] = {(place, i): None for i, type_ in enumerate(given) if type_ == "constexpr"}
    if kind.BIAS:
        absent[place, Given._fields.index("bias_column")] = 1
    if kind.SCORE_MOD:
        at = Given._fields.index("score_mod")
        given = given._replace(score_mod=((("*fp32", "i32", "i32", "i32", "constexpr"),), ()))
        absent[place, at, 0, 0, 4] = 1
        absent["SCORE_MOD"] = score_hooks.multiply_score
        if "SCORE_MOD_BACKWARD" in kernel.arg_names:
            absent["SCORE_MOD_BACKWARD"] = score_hooks.multiply_score_backward
    return given, absent
