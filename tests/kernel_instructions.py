"""Compares the instructions of the attention kernels of two trees of this project, without a GPU.

    python tests/kernel_instructions.py . ../other            compiles both
    python tests/kernel_instructions.py --write other.tsv ../other
    python tests/kernel_instructions.py . other.tsv           compiles one; the other was written

For a change that must cost nothing: names, arguments that nobody uses, code behind a constant.  Every
case of compile_cases_attention.py (sm_80 and sm_90) and of compile_cases_hopper.py (sm_90) is compiled
as its own tree does it, all kernels forward and backward, and disassembled.  A kernel is

    equal        if its machine code is, bit for bit, with the hints for the scheduler;
    renumbered   if the instructions are equal once the places of arguments in the constant bank are
                 numbered in the order in which the code reads them: arguments have moved;
    different    otherwise, and then the script ends with 1; so too where a case has no partner.

--only takes the cases that a regular expression finds.  A file is of one build of Triton, which its
first line names; with another it is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

JOBS = (("attention", 80), ("attention", 90), ("hopper", 90))
# An instruction's line: where it is, its text, and the first half of its code.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?;)\s+/\* (0x[0-9a-f]{16}) \*/")
REST = re.compile(r"^\s+/\* (0x[0-9a-f]{16}) \*/")
ARGUMENT = re.compile(r"c\[0x0\]\[0x[0-9a-f]+\]")


class Code(NamedTuple):
    """Of one kernel: how many instructions, a digest of their code, and one of their text, in which
    arguments are renumbered."""

    count: int
    code: str
    text: str


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


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
    return Code(len(texts), digest(codes), digest(texts))


def disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([knobs.nvidia.cuobjdump.path, "-sass", file.name], text=True)


def compiled(tree: Path, only: str) -> Iterator[tuple[str, Code]]:
    """(family, architecture and name; code) of every case of the tree that is imported."""
    import compile_worker

    if Path(compile_worker.__file__).resolve().parent != tree / "tests":
        raise RuntimeError(f"{compile_worker.__file__} is imported, not that of {tree}")
    for family, arch in JOBS:
        for case in compile_worker.cases_of(family, arch):
            name = f"{family} {arch} {case.name}"
            if "control: " in name or not re.search(only, name):
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                kernel = compile_worker.compile_case(case, arch)
            yield name, code_of(disassembled(kernel.asm["cubin"]))


def build() -> str:
    """The version of Triton, and of its build."""
    import triton
    from triton._C import libtriton

    return f"{triton.__version__} {Path(libtriton.__file__).stat().st_size}"


def show(tree: str, only: str) -> None:
    """Print a line of JSON for each kernel of a tree, in a process that imports nothing else."""
    path = Path(tree).resolve()
    sys.path[:0] = [str(path), str(path / "tests")]
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "MLIR_DISABLE_MULTITHREADING": "1"}
        for name, code in compiled(path, only):
            print(json.dumps((name, *code)), flush=True)


def instructions(source: str, only: str) -> dict[str, Code]:
    """Of a tree, or of a file that --write has written."""
    if Path(source).is_file():
        first, *lines = Path(source).read_text().splitlines()
        if first != f"build\t{build()}":
            sys.exit(f"{source} is of Triton {first[6:]}, this is {build()}. Write it again.")
    else:
        environment = {
            k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")
        }
        worker = [sys.executable, __file__, "--show", source, "--only", only]
        printed = subprocess.run(worker, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        lines = printed.stdout.splitlines()
    found = {name: Code(*code) for name, *code in map(json.loads, lines)}
    return {name: code for name, code in found.items() if re.search(only, name)}


def compare(ours: dict[str, Code], others: dict[str, Code]) -> list[str]:
    """Print what is how often equal; returns what is not, a line each."""
    wrong = [f"{name}: in one tree only" for name in sorted(ours.keys() ^ others.keys())]
    both = sorted(ours.keys() & others.keys())
    equal = [name for name in both if ours[name] == others[name]]
    renumbered = [n for n in both if n not in equal and ours[n].text == others[n].text]
    wrong += [
        f"{name}: different, {ours[name].count} and {others[name].count} instructions"
        for name in both
        if ours[name].text != others[name].text
    ]
    print(
        f"Triton {build()}: {len(both)} kernels compared, {len(equal)} equal bit for bit, "
        f"{len(renumbered)} equal with arguments renumbered, {len(wrong)} not"
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", help="trees of the project, or files that were written")
    parser.add_argument("--only", default="", help="a regular expression of cases")
    parser.add_argument("--write", help="write what is found of one tree to this file")
    parser.add_argument("--show", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        show(arguments.show, arguments.only)
        return
    if len(arguments.sources) != (1 if arguments.write else 2):
        parser.error("it takes two trees or files, or --write and one tree")
    found = [instructions(source, arguments.only) for source in arguments.sources]
    if arguments.write:
        lines = [json.dumps((name, *code)) for name, code in found[0].items()]
        Path(arguments.write).write_text("\n".join([f"build\t{build()}", *lines, ""]))
        return
    wrong = compare(*found)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
