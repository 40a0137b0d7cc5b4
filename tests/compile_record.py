"""What compiling gave, kept beside the tests, so that they compile only what has changed since.

    python tests/compile_record.py      with the Triton that is installed; an hour where all is new

compiles what has changed, and everything if the file is deleted first.
tests/compiled/<version of Triton>.tsv has a line for each case that is within its budget: family,
architecture, case; registers and bytes of stack of a thread, bytes of shared memory of a program, wgmma
instructions where they were counted; and a digest of all that these follow from: what the kernel is
made of (kernel_sources.py), the case, the architecture, and how it is compiled.  A change of a kernel
also shows in review what it costs.

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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import kernel_sources
from compile_case import Case
from kernel_sources import Definition, without_docstring

from flashproto.variant import Kind

HERE = Path(__file__).parent
RECORDS = HERE / "compiled"
SAMPLE = 40


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


def definition_of(value: Any) -> Definition | None:
    """Of a kernel's function; None for another value."""
    of = getattr(value, "fn", None)
    return None if of is None else Definition(Path(inspect.getfile(of)).resolve(), of.__name__)


@functools.cache
def source_of_class(of: type) -> str:
    """Without comments and docstrings."""
    return ast.unparse(without_docstring(ast.parse(inspect.getsource(of)).body[0]))


def classes_of(value: Any) -> str:
    """The source of a dataclass's class, and of its fields' but for a Kind; "" for a plain value."""
    if not dataclasses.is_dataclass(value) or isinstance(value, Kind):
        return ""
    return source_of_class(type(value)) + "".join(map(classes_of, vars(value).values()))


def told(value: Any) -> str:
    """A constant in words: a dataclass with its fields, and of a Kind what is on, be it a property."""
    if isinstance(value, Kind):
        names = [x for x in dir(value) if x.isupper() and getattr(value, x)]
        return repr({name: getattr(value, name) for name in names})
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}{ {name: told(x) for name, x in vars(value).items()} }"
    return repr(value)


@functools.cache
def digest_of_harness() -> str:
    import compile_worker
    import lanes

    return inspect.getsource(compile_worker.compile_case) + inspect.getsource(lanes)


def arguments_of(case: Case) -> tuple[dict[str, Any], dict[Any, Any]]:
    """(signature, constexprs), in which what a named tuple does not hold has no place: another field of
    it, which other cases have, is nothing to this one."""
    signature, constexprs = dict(case.signature), {}
    fields = {}
    for place, name in enumerate(case.kernel.arg_names):
        if hasattr(types := signature.get(name), "_asdict"):
            fields[place] = name, types._fields
            signature[name] = {x: of for x, of in types._asdict().items() if of != "constexpr"}
    for at, value in case.constexprs.items():
        if isinstance(at, tuple) and at[0] in fields:
            name, names = fields[at[0]]
            if value is None and len(at) == 2:
                continue
            at = (name, names[at[1]], *at[2:])
        constexprs[at] = value
    return signature, constexprs


def digest(case: Case, arch: int) -> str:
    """Of all that compiling a case depends on but Triton."""
    kind = case.constexprs.get("KIND")
    kind = kind if isinstance(kind, Kind) else None
    made_of: set[str] = set()
    for value in (case.kernel, *case.constexprs.values()):
        at = definition_of(value)
        if at is not None:
            made_of |= kernel_sources.texts(at, kind)
    signature, others = arguments_of(case)
    if kind is not None:
        del others["KIND"]
    parts = (
        sorted(made_of),
        "".join(map(classes_of, others.values())),
        digest_of_harness(),
        arch,
        case.kernel.fn.__name__,
        signature,
        {name: told(x) for name, x in others.items()},
        kind and told(kind),
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


def rows_of(family: str, arch: int, found: dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Lines of the file for cases that are within their budget; of others it is said why not."""
    from compile_worker import cases_of
    from test_compile import complaints

    cases = {case.name: case for case in cases_of(family, arch)}
    rows = {}
    for name, line in found.items():
        wrong = complaints({**line, "recorded": None}, arch)
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            continue
        registers, stack, shared, hgmma = facts_of(line)
        wgmma = "" if hgmma is None else hgmma
        key = family, str(arch), name
        row = (*key, registers, stack, shared, wgmma, digest(cases[name], arch))
        rows[key] = "\t".join(map(str, row))
    return rows


def write(rows: dict[tuple[str, ...], str]) -> None:
    RECORDS.mkdir(exist_ok=True)
    new = record_path().with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in (f"build\t{build()}", *sorted(rows.values()))))
    new.replace(record_path())


def main() -> None:
    """The file is written after each process, so that what is interrupted need not be done again."""
    from test_compile import SHARDS, compile_family

    jobs = [
        (family, arch, shard, shards)
        for family, of in SHARDS.items()
        for arch, shards in of.items()
        for shard in range(shards)
    ]
    lines = record_path().read_text().splitlines()[1:] if is_recorded_build() else []
    rows = {tuple(line.split("\t")[:3]): line for line in lines}
    compiled: set[tuple[str, ...]] = set()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(compile_family, *job): job for job in jobs}
        for done in as_completed(running):
            family, arch, *_ = running[done]
            new = rows_of(family, arch, done.result())
            compiled |= new.keys()
            rows |= new
            write(rows)
    write({key: line for key, line in rows.items() if key in compiled})
    print(f"{len(compiled)} cases in {record_path().relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
