"""Compares the kernels of attention, decode and norms of this tree with another's, without a GPU.

    git worktree add --detach ../other COMMIT
    python tests/kernel_instructions.py ../other              every kernel
    python tests/kernel_instructions.py ../other --only 'backward-128.*' --code
    python tests/kernel_instructions.py ../other --only '^decode'

For a change that must cost nothing: names, arguments that nobody uses, code behind a constant.  The
kernels are every case of FAMILIES (compile_worker.py) for sm_80, sm_90 and sm_100, forward and
backward, each as its own tree lists it; compile_cases_hopper.py has cases for sm_90 alone.

First each is compiled up to Triton's own representation with all calls inlined and all constants
folded, from which the rest follows: where it and the options are the same in both trees, character by
character, so are the instructions.  The others, and with --code all, are compiled to the end and
disassembled.  These are

    equal        if the machine code is, bit for bit, with the hints for the scheduler;
    renumbered   if the instructions are equal once the places of arguments in the constant bank are
                 numbered in the order in which the code reads them: arguments have moved;
    rescheduled  if Triton's representation has the same operations on the same values in the same
                 order, and only declares its constants in another: what is computed is the same, and
                 ptxas orders some instructions in another way.  They are named;
    different    otherwise, and then the script ends with 1; so too where a case has no partner.

Triton does not always compile to the same code: of one tree, one sm_100 kernel was two in nine
processes with 3.6.0.  So what is different is compiled again by new processes, ATTEMPTS times in all,
until the other tree has given every code that this one gave.

--only takes the cases that a regular expression finds, "hopper 90 forward-64-causal-...".
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

HERE = Path(__file__).resolve().parent.parent
FAMILIES = ("attention", "decode", "hopper", "norm", "norm_features")
ARCHES = (80, 90, 100)
# An instruction's line: where it is, its text, and the first half of its code.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?;)\s+/\* (0x[0-9a-f]{16}) \*/")
REST = re.compile(r"^\s+/\* (0x[0-9a-f]{16}) \*/")
ARGUMENT = re.compile(r"c\[0x0\]\[0x[0-9a-f]+\]")
CONSTANT = re.compile(r"\s*(%\w+) = arith\.constant (.*)")
VALUE = re.compile(r"%\w+")
RELATIONS = "equal", "renumbered", "rescheduled", "different"
ATTEMPTS = 12


class Code(NamedTuple):
    """Of one kernel: how many instructions, a digest of their code, and one of their text, in which
    arguments are renumbered."""

    count: int
    code: str
    text: str


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def code_of(sass: str) -> Code:
    """Of what cuobjdump prints."""
    places: dict[str, str] = {}

    def renumbered(found: re.Match[str]) -> str:
        return places.setdefault(found[0], f"argument {len(places)}")

    texts, codes = [], []
    for line in sass.splitlines():
        if found := INSTRUCTION.match(line):
            texts.append(ARGUMENT.sub(renumbered, found[1]))
            codes.append(found[2])
        elif found := REST.match(line):
            codes.append(found[1])
    if not texts or len(codes) != 2 * len(texts):
        raise RuntimeError(f"{len(texts)} instructions and {len(codes)} words of code: unknown listing")
    return Code(len(texts), digest(*codes), digest(*texts))


def operations_of(module: str) -> str:
    """A digest of a module's text in which constants stand where they are used, and other values are
    numbered in the order in which they come."""
    names: dict[str, str] = {}
    numbers = itertools.count()
    lines = []

    def numbered(value: re.Match[str]) -> str:
        if value[0] not in names:
            names[value[0]] = f"%{next(numbers)}"
        return names[value[0]]

    for line in module.splitlines():
        if found := CONSTANT.match(line):
            names[found[1]] = f"<{found[2]}>"
        else:
            lines.append(VALUE.sub(numbered, line))
    return digest(*lines)


# --- in a process that imports one tree -----------------------------------------------------------


def compiled_code(case: Any, arch: int) -> Code:
    import compile_worker
    from triton import knobs

    with contextlib.redirect_stdout(io.StringIO()):
        kernel = compile_worker.compile_case(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return code_of(subprocess.check_output(listing, text=True, stderr=subprocess.DEVNULL))


class Reached(Exception):
    """Compiling has come so far; with what `representation` returns."""


def representation(case: Any, arch: int) -> tuple[str, str]:
    """The kernel as Triton has it before it makes layouts or, of Gluon, LLVM's code: digests of it with
    the options, and of its operations."""
    import compile_worker
    from triton.backends.nvidia.compiler import CUDABackend

    def reach(module: Any, metadata: Any, options: Any, *others: Any) -> NoReturn:
        text = module.str_nodebug()
        raise Reached(digest(text, repr(options)), digest(operations_of(text), repr(options)))

    def reach_with_self(self: Any, *arguments: Any) -> NoReturn:
        reach(*arguments)

    stage = "make_llir" if case.kernel.is_gluon() else "make_ttgir"
    is_static = isinstance(vars(CUDABackend)[stage], staticmethod)
    patched = staticmethod(reach) if is_static else reach_with_self
    with mock.patch.object(CUDABackend, stage, patched):
        try:
            compile_worker.compile_case(case, arch)
        except Reached as reached:
            return reached.args
    raise RuntimeError(f"{case.name} was compiled without {stage}")


def show(tree: str, only: str, code: bool) -> None:
    """Print a line of JSON for each kernel of a tree: name, and representation or code."""
    path = Path(tree).resolve()
    sys.path[:0] = [str(path), str(path / "tests")]
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "MLIR_DISABLE_MULTITHREADING": "1"}
        import compile_worker

        assert Path(compile_worker.__file__).resolve().parent == path / "tests"
        for family, arch in itertools.product(FAMILIES, ARCHES):
            for case in compile_worker.cases_of(family, arch):
                name = f"{family} {arch} {case.name}"
                if "control: " not in name and re.search(only, name):
                    found = compiled_code(case, arch) if code else representation(case, arch)
                    print(json.dumps((name, found)), flush=True)


# --- the two trees --------------------------------------------------------------------------------


def shown(tree: str, only: str, code: bool) -> dict[str, Any]:
    """What `show` prints of a tree."""
    without = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    worker = [sys.executable, __file__, tree, "--only", only, "--show", *(["--code"] if code else [])]
    printed = subprocess.run(worker, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(map(json.loads, printed.stdout.splitlines()))


def shown_of_each(trees: Sequence[str], only: str, code: bool) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(lambda tree: shown(tree, only, code), trees))


def exactly(names: Iterable[str]) -> str:
    """The regular expression of these."""
    return f"^({'|'.join(map(re.escape, names))})$"


def relation(ours: set[Code], theirs: set[Code]) -> str:
    """Of a kernel's codes in two trees, one of RELATIONS."""
    if ours <= theirs:
        return "equal"
    return "renumbered" if {x.text for x in ours} <= {x.text for x in theirs} else "different"


def compare(other: str, only: str, code: bool) -> list[str]:
    """Print how many kernels are equal, and how; returns what is wrong, a line each."""
    trees = str(HERE), other
    ours, theirs = shown_of_each(trees, only, code=False)
    wrong = [f"{name}: in one tree only" for name in sorted(ours.keys() ^ theirs.keys())]
    both = sorted(ours.keys() & theirs.keys())
    same = [name for name in both if ours[name] == theirs[name]]
    rest = both if code else [name for name in both if ours[name] != theirs[name]]
    of_the_same_operations = [name for name in rest if ours[name][1] == theirs[name][1]]
    print(f"{len(both)} kernels, {len(same)} of them with the same representation", flush=True)
    # codes that a kernel was compiled to, in each tree
    codes: list[dict[str, set[Code]]] = [{name: set() for name in rest} for _ in trees]
    how = dict.fromkeys(rest, "different")
    for _ in range(ATTEMPTS):
        left = [name for name in rest if how[name] == "different"]
        if not left:
            break
        for seen, found in zip(codes, shown_of_each(trees, exactly(left), code=True), strict=True):
            for name in left:
                seen[name].add(Code(*found[name]))
        how |= {name: relation(*(seen[name] for seen in codes)) for name in left}
    for name in of_the_same_operations:
        if how[name] == "different":
            how[name] = "rescheduled"
            print(f"{name}: rescheduled")
    wrong += [f"{name}: different" for name in rest if how[name] == "different"]
    counts = (f"{list(how.values()).count(which)} {which}" for which in RELATIONS)
    print(f"{len(rest)} disassembled: {', '.join(counts)}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", help="the other tree")
    parser.add_argument("--only", default="", help="a regular expression of cases")
    parser.add_argument("--code", action="store_true", help="disassemble all of them")
    parser.add_argument("--show", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        show(arguments.tree, arguments.only, arguments.code)
    elif wrong := compare(arguments.tree, arguments.only, arguments.code):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
