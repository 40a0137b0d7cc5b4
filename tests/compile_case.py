"""One kernel configuration to compile without a GPU; compile_cases_*.py list them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
