"""Finds uniform registers that machine code reads and has not written before.

ptxas 12.8, Triton 3.6's, loses such writes: attention to a cache of 8 bits in tiles of 64 or 128
queries got the descriptors of its last wgmmas from a register that nobody had set, and read other
memory.
"""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", re.MULTILINE)
ARGUMENTS = re.compile(r",(?![^\[]*\])")
REGISTER = re.compile(r"(gdesc\[)?\bUR(\d+)")
WRITES = re.compile(r"U(?!P)\w*|UP2UR|S2UR|R2UR|VOTEU|REDUX|CREDUX")


def uses(opcode: str, rest: str) -> tuple[set[int], set[int]]:
    """(read, written): the uniform registers of an instruction.  Of a matrix descriptor, four
    registers, operand B's two are looked at."""
    arguments = [x.strip() for x in ARGUMENTS.split(rest)]
    if opcode.startswith("ULOP3") and arguments[0].startswith("UP"):
        del arguments[0]  # a predicate is set, too
    to = re.fullmatch(r"UR(\d+)", arguments[0]) if WRITES.match(opcode) else None
    read = {
        int(number) + shift
        for argument in arguments[1 if to else 0 :]
        for matrix, number in REGISTER.findall(argument)
        for shift in ((2, 3) if matrix else (0,))
    }
    wide = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    return read, {int(to[1]) + n for n in range(wide)} if to else set()


def unwritten(sass: str) -> list[str]:
    """The instructions, of cuobjdump -sass, that read a uniform register which no instruction at a
    lower address writes, nor a subroutine that was called before; these come last."""
    found = []
    for function in sass.split("Function : ")[1:]:
        code = [(int(at, 16), opcode, rest) for at, opcode, rest in INSTRUCTION.findall(function)]
        calls = [int(rest, 16) for _, opcode, rest in code if opcode.startswith("CALL.REL")]
        begin = min(calls, default=code[-1][0] + 1 if code else 0)
        of_subroutines: set[int] = set()
        for at, opcode, rest in code:
            of_subroutines |= uses(opcode, rest)[1] if at >= begin else set()
        written: set[int] = set()
        for at, opcode, rest in code:
            read, writes = uses(opcode, rest)
            if at < begin and read - written:
                found.append(f"{opcode} {rest}")
            written |= of_subroutines if opcode.startswith("CALL.REL") else writes
    return found
