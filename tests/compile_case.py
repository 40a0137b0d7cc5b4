"""One kernel configuration to compile without a GPU; compile_cases_*.py list them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


def variables_of(
    kernel: Any, kind: Kind, slots: bool = False, slopes: bool = False, queries: bool = False
) -> tuple[tuple[str, ...], dict[Any, None]]:
    """The types of what an attention kernel of this kind is given, in the order of kernels/scores.py,
    and the places of what it is not given.

    slots: whether sequences have a table of them; slopes: whether sums for their gradient are made;
    queries: whether the number of these is there.
    """
    if kind.TUNED:
        return (), {}
    given = (
        *[(TYPES.get(name, "*i32"), getattr(kind, of)) for name, of in VARIABLES.items()],
        ("*i32", kind.INTERVALS or slots),
        *[("i32", kind.INTERVALS)] * 2,
        *[("i32", kind.VARLEN)] * 3,
        ("*fp32", kind.MAX_SCORE),
        ("*fp32", kind.ENTROPY),
        ("*fp32", slopes),
        *[("i32", True)] * queries,
    )
    place = kernel.arg_names.index("variables" if "variables" in kernel.arg_names else "given")
    absent: dict[Any, None] = {(place, i): None for i, (_, used) in enumerate(given) if not used}
    return tuple(t if used else "constexpr" for t, used in given), absent
