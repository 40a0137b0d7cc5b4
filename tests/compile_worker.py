"""Compiles kernels to cubins without a GPU; prints what ptxas made of each as a line of JSON.

    python tests/compile_worker.py attention 90              every attention case, for sm_90
    python tests/compile_worker.py norm 80 --shard 1/4 --sass

Runs in a process of its own, since kernels are either interpreted or compiled for a whole process.
Each line holds name, registers, stack (bytes a thread; spills live there), shared (bytes a
program), max_stack, serialised (ptxas's warnings that it serialised wgmma), unwritten (of kernels with
wgmma, what reads a register that nothing has set, see uniform.py), apart (the reductions that
this Triton gets wrong, see lanes.py), with --sass or for cases that want them the number of HGMMA
(wgmma) instructions, or else "error".  What compile_record.py has of a case that is unchanged is taken
from there, but with --sass; of a case that is compiled all the same, it is in "recorded", unless this
is another build of Triton, which gives one of those cases something else.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import compile_record
import lanes
import uniform
from compile_case import Case

FAMILIES = {
    "selftest": "compile_cases_selftest.selftest_cases",
    "sample": "compile_cases_sample.sample_cases",
    "hopper": "compile_cases_hopper.hopper_cases",
    "attention": "compile_cases_attention.attention_cases",
    "decode": "compile_cases_decode.decode_cases",
    "norm": "compile_cases_norm.norm_cases",
    "norm_features": "compile_cases_norm_features.norm_feature_cases",
    "softmax": "compile_cases_softmax.softmax_cases",
    "cross_entropy": "compile_cases_cross_entropy.cross_entropy_cases",
    "elementwise": "compile_cases_elementwise.elementwise_cases",
}


def cases_of(family: str, arch: int) -> list[Case]:
    """The cases of one family for one architecture (80, 90 or 100)."""
    module, function = FAMILIES[family].split(".")
    cases: Callable[..., list[Case]] = getattr(__import__(module), function)
    return list(cases(arch) if inspect.signature(cases).parameters else cases())


def compile_case(case: Case, arch: int) -> Any:
    """triton.compile of one case; the place for whatever differs between Triton's versions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    constexprs = {(names.index(n),): v for n, v in case.constexprs.items() if n in names}
    constexprs |= {n: v for n, v in case.constexprs.items() if isinstance(n, tuple)}
    known = {*case.signature, *(n for n in case.constexprs if isinstance(n, str))}
    unknown, missing = {*known, *case.divisible_by_16} - set(names), set(names) - known
    if unknown or missing:
        raise ValueError(f"unknown arguments {sorted(unknown)}, missing arguments {sorted(missing)}")
    make_source = GluonASTSource if case.kernel.is_gluon() else ASTSource
    source = make_source(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs=constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16},
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "num_ctas": case.num_ctas,
        "maxnreg": case.max_registers,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin: bytes, sass: bool, matrices: bool) -> dict[str, Any]:
    """Registers and stack bytes per thread of a cubin, and its HGMMA count when asked; of one with
    matrices of warpgroups what reads a register that nothing has set."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([tool, "-res-usage", file.name], text=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump printed no resource usage: {usage!r}")
        result: dict[str, Any] = {"registers": int(found[1]), "stack": int(found[2]), "unwritten": []}
        if sass or matrices:
            code = subprocess.check_output([tool, "-sass", file.name], text=True)
            result["unwritten"] = uniform.unwritten(code)
        if sass:
            result["hgmma"] = code.count("HGMMA")
    return result


def budget_of(case: Case) -> dict[str, Any]:
    """The beginning of a case's line."""
    budget = {"max_stack": case.max_stack, "max_shared": case.max_shared}
    return {"name": case.name, **budget, "wants_hgmma": case.hgmma}


def report(case: Case, arch: int, sass: bool) -> dict[str, Any]:
    line: dict[str, Any] = budget_of(case)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as ptxas_log:
            kernel = compile_case(case, arch)
        matrices = "warp_group_dot" in kernel.asm["ttgir"]
        line |= resources(kernel.asm["cubin"], sass or case.hgmma, matrices)
        # ptxas says so when it makes wgmmas wait for one another, by C7510, C7514 and their neighbours
        line["serialised"] = sorted(set(re.findall(r"C75\d\d", ptxas_log.getvalue())))
        line["shared"] = kernel.metadata.shared
        line["apart"] = lanes.scattered(kernel.asm["ttgir"]) if lanes.WRONG else []
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"
    return line


def recall(case: Case, known: compile_record.Recorded) -> dict[str, Any]:
    """`report` of a case as it was recorded; cases with something serialised, unwritten or apart are
    not."""
    line = budget_of(case)
    return (
        line
        | known.facts._asdict()
        | {
            "serialised": [],
            "unwritten": [],
            "apart": [],
            "recorded": None,
        }
    )


def compiled(family: str, cases: list[Case], arch: int, sass: bool) -> Iterator[dict[str, Any]]:
    """A line for each case, in their order."""
    known = {case.name: None if sass else compile_record.known(family, case, arch) for case in cases}
    fresh = {
        case.name: report(case, arch, sass)
        for case in cases
        if (found := known[case.name]) is None or compile_record.sampled(found)
    }
    another = not compile_record.is_recorded_build() and any(
        "error" in line or compile_record.facts_of(line) != found.facts
        for name, line in fresh.items()
        if (found := known[name]) is not None
    )
    for case in cases:
        found, line = known[case.name], fresh.get(case.name)
        if found is None or another:
            yield {**(line or report(case, arch, sass)), "recorded": None}
        else:
            yield recall(case, found) if line is None else {**line, "recorded": found.facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("arch", type=int, choices=(80, 90, 100))
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th case, from the I-th on")
    parser.add_argument("--sass", action="store_true", help="count HGMMA instructions")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("compile_worker: TRITON_INTERPRET is 1; it takes 0. Unset it.")
    shard, shards = map(int, arguments.shard.split("/"))
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {
            "TRITON_CACHE_DIR": cache,
            "TRITON_DUMP_PTXAS_LOG": "1",
            "MLIR_DISABLE_MULTITHREADING": "1",  # a pool of threads for each kernel takes longer
        }
        cases = cases_of(arguments.family, arguments.arch)[shard::shards]
        for line in compiled(arguments.family, cases, arguments.arch, arguments.sass):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
