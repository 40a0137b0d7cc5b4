"""Finds reductions that Triton 3.6 gets wrong: over lanes or warps that are no neighbours.

A layout says, of each bit of a register's, lane's and warp's number, which step in which dimension it
makes.  Triton 3.6 takes it for granted that the bits of a dimension are neighbours:

 -  warpReduce of ReduceOpToLLVM.cpp exchanges with lanes whose numbers differ in as many bits as the
    axis has, upwards from its lowest one, whatever those between are of (getThreadOffsetOnReductionAxis
    of Analysis/Utility.cpp finds the lowest alone);
 -  across warps, the lanes that are first along the axis write to shared memory, at the place of their
    warp along it; delinearize reads both off the numbers, bits that make no step left out, as if a
    dimension's bits lay together (storeWarpReduceToSharedMemory).

Layouts of loads are of that kind; what reductions leave and reshapes gather is often not.  Triton 3.9
goes by the bits themselves (its pull request 9219).  So say the sources, and the shuffles in the PTX of
both: of the selftest's case "lanes-apart" 8, 4, 2, 1 here and 16, 8, 2, 1 there.

Scans go wrong where lanes hold the same element (its pull requests 9185 and 9189).  The kernels have
none; all are reported.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from typing import Any

import triton

WRONG = triton.__version__.startswith("3.6.")  # whether this Triton reduces such lanes wrongly

Bases = Sequence[Sequence[int]]  # the steps of bits, lowest first, in each dimension


def scattered(ttgir: str) -> list[str]:
    """The reductions of a kernel, in Triton's IR for GPUs, whose lanes or warps are apart, each with
    its axis and layout; and the scans."""
    from triton._C.libtriton import gluon_ir, ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    found: list[str] = []

    def look(operation: Any) -> None:
        if operation.get_name() == "tt.scan":
            found.append("a scan")
        elif operation.get_name() == "tt.reduce":
            operand, result = operation.get_operand(0), operation.get_result(0)
            layout = builder.get_gluon_layout_from_tensor(operand)
            if not hasattr(layout, "lane_bases"):
                shape = [int(n) for n in re.findall(r"\d+(?=x)", str(operand.get_type()).split(",")[0])]
                layout = builder.to_linear_layout(layout._to_ir(builder), shape)
            scalar = not str(result.get_type()).startswith("tensor")
            axis = 0 if scalar else builder.get_gluon_layout_from_tensor(result).dim
            if not reduces(layout.lane_bases, layout.warp_bases, axis):
                found.append(f"axis {axis} of lanes {layout.lane_bases}, warps {layout.warp_bases}")

    module.walk(look)
    return found


def reduces(lanes: Bases, warps: Bases, axis: int) -> bool:
    """Whether Triton 3.6 reduces along `axis` rightly."""
    own = [bit for bit, steps in enumerate(lanes) if steps[axis]]
    neighbours = not own or own[-1] - own[0] < len(own)
    one_warp = not any(steps[axis] for steps in warps)
    return neighbours and (one_warp or (lies_together(lanes, axis) and lies_together(warps, axis)))


def lies_together(bases: Bases, axis: int) -> bool:
    """Whether, bits that make no step left out, those of `axis` are neighbours, and no other dimension
    has bits both below and above them."""
    of = [next(dim for dim, step in enumerate(steps) if step) for steps in bases if any(steps)]
    if axis not in of:
        return True
    first, end = of.index(axis), len(of) - of[::-1].index(axis)
    return set(of[first:end]) == {axis} and not set(of[:first]) & set(of[end:])
