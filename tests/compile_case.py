"""One kernel configuration to compile without a GPU; compile_cases_*.py list them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashproto.kernels.scores import Given
from flashproto.variant import VARIABLES, Kind

# Of VARIABLES, but for pointers to integers.
TYPES = {"left": "i32", "first": "i32", "softcap": "fp32", "sinks": "*fp32", "alibi_slopes": "*fp32"}


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
    max_registers: int | None = None
    hgmma: bool = False


def given_of(
    kernel: Any, kind: Kind, work: bool = False, slopes: bool = False, rows: bool = False
) -> tuple[Any, dict[Any, None]]:
    """The types of what an attention kernel of this kind is given, and the places of what it is not
    given.

    work: whether sequences have a table of it; slopes: whether sums for their gradient are made; rows:
    whether the number of these is there.
    """
    if kind.TUNED:
        return (), {}
    types = {name: TYPES.get(name, "*i32") for name, of in VARIABLES.items() if getattr(kind, of)}
    if kind.INTERVALS or work:
        types["work"] = "*i32"
    if kind.INTERVALS:
        types |= dict.fromkeys(("row_of_batch", "row_of_head"), "i32")
    if kind.VARLEN:
        types |= dict.fromkeys(("sequences", "queries", "keys"), "i32")
    made = {"max_score": kind.MAX_SCORE, "entropy": kind.ENTROPY, "slope_sums": slopes}
    types |= {name: "*fp32" for name, used in made.items() if used}
    types |= {"rows": "i32"} if rows else {}
    given = Given(**dict.fromkeys(Given._fields, "constexpr") | types)
    place = kernel.arg_names.index("given")
    return given, {(place, i): None for i, type_ in enumerate(given) if type_ == "constexpr"}
