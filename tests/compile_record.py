"""What compiling gave, kept beside the tests, so that they compile only what has changed since.

    python tests/compile_record.py      with the Triton that is installed; ten minutes where all is new

compiles what has changed, and everything if the file is deleted first.
tests/compiled/<version of Triton>.tsv has a line for each case that is within its budget: family,
architecture, case; registers and bytes of stack of a thread, bytes of shared memory of a program, wgmma
instructions where they were counted; and a digest of all that these follow from: the sources of the
kernel and of what it imports, the case, the architecture, and how it is compiled.  So a change of a
kernel also shows in review what it costs.

A line whose digest is another one counts for nothing: the tests compile its case.  Of the others they
compile one in SAMPLE too, other ones every day, which has to give what was recorded.  With a Triton
without a file they compile everything.

The first line names the build of Triton (`build`): another wheel of the same version may give a kernel
other registers.  With another build the sample decides: where it gives something else, all cases of its
process are compiled, and what is recorded of them is not asked for.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import hashlib
import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from compile_case import Case

HERE = Path(__file__).parent
RECORDS = HERE / "compiled"
SAMPLE = 20


class Facts(NamedTuple):
    registers: int
    stack: int
    shared: int
    hgmma: int | None


class Recorded(NamedTuple):
    facts: Facts
    digest: str


def facts_of(line: dict[str, Any]) -> Facts:
    """Of a line of compile_worker.py."""
    return Facts(line["registers"], line["stack"], line["shared"], line.get("hgmma"))


def record_path() -> Path:
    import triton

    return RECORDS / f"{triton.__version__}.tsv"


@functools.cache
def build() -> str:
    """A digest of the Triton that is installed: of its compiler's size and first MiB."""
    from triton._C import libtriton

    path = Path(libtriton.__file__)
    with path.open("rb") as file:
        start = file.read(1 << 20)
    return hashlib.sha256(start + str(path.stat().st_size).encode()).hexdigest()[:12]


def is_recorded_build() -> bool:
    """Whether the record is of the build that is installed."""
    path = record_path()
    return path.exists() and path.read_text().startswith(f"build\t{build()}\n")


@functools.cache
def recorded() -> dict[tuple[str, int, str], Recorded]:
    """By family, architecture and case; empty for a Triton without a file."""
    found = {}
    path = record_path()
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        family, arch, name, registers, stack, shared, hgmma, digest = line.split("\t")
        facts = Facts(int(registers), int(stack), int(shared), int(hgmma) if hgmma else None)
        found[family, int(arch), name] = Recorded(facts, digest)
    return found


@functools.cache
def sources(path: Path) -> frozenset[Path]:
    """A module's file, and those of all modules of its package that it imports."""
    found = {path}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            module = folder.joinpath(*(node.module or "").split("."))
            for file in (module.with_suffix(".py"), *(module / f"{x.name}.py" for x in node.names)):
                if file.exists():
                    found |= sources(file)
    return frozenset(found)


def source_of(value: Any) -> Path | None:
    """The file of a kernel's function; None for another value."""
    of = getattr(value, "fn", None)
    return None if of is None else Path(inspect.getfile(of)).resolve()


source_of_class = functools.cache(inspect.getsource)


def classes_of(value: Any) -> str:
    """The source of a dataclass's class, and of those of its fields; "" for a plain value."""
    if not dataclasses.is_dataclass(value):
        return ""
    return source_of_class(type(value)) + "".join(map(classes_of, vars(value).values()))


@functools.cache
def digest_of_files(paths: frozenset[Path]) -> str:
    """Of what is in them, wherever they are."""
    digests = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@functools.cache
def digest_of_harness() -> str:
    import compile_worker
    import lanes

    return inspect.getsource(compile_worker.compile_case) + inspect.getsource(lanes)


def digest(case: Case, arch: int) -> str:
    """Of all that compiling a case depends on but Triton."""
    files: frozenset[Path] = frozenset()
    for value in (case.kernel, *case.constexprs.values()):
        path = source_of(value)
        if path is not None:
            files |= sources(path)
    classes = "".join(map(classes_of, case.constexprs.values()))
    parts = (
        digest_of_files(files) + classes,
        digest_of_harness(),
        arch,
        case.kernel.fn.__name__,
        case.signature,
        case.constexprs,
        case.divisible_by_16,
        case.num_warps,
        case.num_stages,
        case.num_ctas,
        case.max_registers,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def known(family: str, case: Case, arch: int) -> Recorded | None:
    """What is recorded of a case as it is now."""
    found = recorded().get((family, arch, case.name))
    if found is None or found.digest != digest(case, arch) or (case.hgmma and not found.facts.hgmma):
        return None
    return found


def sampled(found: Recorded, day: int | None = None) -> bool:
    """Whether the case is compiled all the same on a day (its ordinal; None: today)."""
    day = datetime.date.today().toordinal() if day is None else day
    return int(found.digest, 16) % SAMPLE == day % SAMPLE


def main() -> None:
    from compile_worker import cases_of
    from test_compile import SHARDS, compile_family, complaints

    jobs = [
        (family, arch, shard, shards)
        for family, of in SHARDS.items()
        for arch, shards in of.items()
        for shard in range(shards)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda job: compile_family(*job), jobs))
    lines = []
    for (family, arch, *_), found in zip(jobs, compiled, strict=True):
        digests = {case.name: digest(case, arch) for case in cases_of(family, arch)}
        for name, line in found.items():
            wrong = complaints({**line, "recorded": None}, arch)
            if wrong:
                print("\n".join(wrong), file=sys.stderr)
                continue
            registers, stack, shared, hgmma = facts_of(line)
            wgmma = "" if hgmma is None else hgmma
            row = (family, arch, name, registers, stack, shared, wgmma, digests[name])
            lines.append("\t".join(map(str, row)))
    RECORDS.mkdir(exist_ok=True)
    record_path().write_text("".join(f"{line}\n" for line in (f"build\t{build()}", *sorted(lines))))
    print(f"{len(lines)} cases in {record_path().relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
