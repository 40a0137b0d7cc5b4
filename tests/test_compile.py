"""Every kernel configuration compiles for sm_80, sm_90 and sm_100, within its budget.

What has not changed since it was last compiled is not compiled again: see compile_record.py.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import compile_record
import compile_worker
import kernel_sources
import kinds
import lanes
import pytest
import uniform
from compile_case import Case

from flashproto.variant import Kind

pytest.importorskip("triton")

import compile_cases_attention
import compile_cases_hopper

ARCHES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program, CUDA guide
ONCE = dict.fromkeys(ARCHES, 1)
SHARDS = {  # processes that compile a family's cases for an architecture, none where it has no case
    "hopper": {90: 2},
    **dict.fromkeys(
        ("attention", "norm", "softmax", "norm_features", "decode", "elementwise", "cross_entropy"),
        ONCE,
    ),
}
WORKER = Path(__file__).with_name("compile_worker.py")


def compile_family(family: str, arch: int, shard: int = 0, shards: int = 1) -> dict[str, Any]:
    """The worker's lines by case name, compiled by a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(WORKER), family, str(arch), "--shard", f"{shard}/{shards}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def complaints(line: dict[str, Any], arch: int) -> list[str]:
    """What is wrong with one compiled case; empty if nothing."""
    if "error" in line:
        return [f"{line['name']}: {line['error']}"]
    found = []
    if line["stack"] > line["max_stack"]:
        found.append(f"{line['name']}: stack of {line['stack']} bytes, allowed {line['max_stack']}")
    if line["shared"] > (line.get("max_shared") or SHARED_LIMIT[arch]):
        found.append(f"{line['name']}: {line['shared']} bytes of shared memory")
    if line["wants_hgmma"] and not line["hgmma"]:
        found.append(f"{line['name']}: no wgmma")
    if line["wants_hgmma"] and line["serialised"]:
        found.append(f"{line['name']}: ptxas serialised wgmma: {line['serialised']}")
    found += [f"{line['name']}: reduces {which}" for which in line["apart"]]
    found += [f"{line['name']}: reads what is not written, {which}" for which in line["unwritten"]]
    was = line["recorded"]
    if was is not None and (now := compile_record.facts_of(line)) != compile_record.Facts(*was):
        found.append(f"{line['name']}: {now}, recorded as {was}; run tests/compile_record.py")
    return found


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "arch", "shard"),
    [(family, a, i) for family, of in SHARDS.items() for a, n in of.items() for i in range(n)],
)
def test_compiles_within_budget(family: str, arch: int, shard: int) -> None:
    shards = SHARDS[family][arch]
    expected = [case.name for case in compile_worker.cases_of(family, arch)]
    assert len(set(expected)) == len(expected), "two cases of one name"
    lines = compile_family(family, arch, shard, shards)
    assert list(lines) == expected[shard::shards]
    wrong = [text for line in lines.values() for text in complaints(line, arch)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_sample_of_other_kinds_compiles() -> None:
    """For one architecture, by the run's seed, which is printed: FLASHPROTO_TEST_SEED repeats it."""
    arch = random.Random(kinds.seed()).choice(ARCHES)
    lines = compile_family("sample", arch)
    print(f"sm_{arch}, seed {kinds.seed()}: {', '.join(lines)}")
    assert len(lines) >= 3
    wrong = [text for line in lines.values() for text in complaints(line, arch)]
    assert not wrong, "\n".join(wrong)


def test_a_covering_set_of_kinds_is_compiled() -> None:
    """Every two fields with all values that they have together, on each family of kernels."""
    for place, fields, compiled in (
        ("triton", compile_cases_attention.FIELDS, compile_cases_attention.COVERING),
        ("hopper", compile_cases_hopper.FORWARD, [kind for _, kind in compile_cases_hopper.VARIANTS]),
    ):
        given = (Kind(), Kind(CAUSAL=True), *compiled)
        assert not kinds.covering(fields, given, place)
        assert kinds.covering(fields, given[:-1], place)
        assert len(compiled) <= 14


def test_every_case_is_compiled() -> None:
    families = {
        f: [a for a in ARCHES if compile_worker.cases_of(f, a)] for f in compile_worker.FAMILIES
    }
    assert families.pop("selftest") == families.pop("sample") == list(ARCHES)
    assert families == {family: list(shards) for family, shards in SHARDS.items()}


# --- what is not compiled again -------------------------------------------------------------------


def a_case() -> Case:
    return compile_worker.cases_of("selftest", 90)[0]


def test_digest_follows_all_but_the_budget() -> None:
    case = a_case()
    constexprs = dict(case.constexprs)
    name = next(iter(constexprs))
    others = [
        replace(case, num_warps=2 * case.num_warps),
        replace(case, max_registers=64),
        replace(case, signature={**case.signature, "more": "i32"}),
        replace(case, constexprs={**constexprs, name: 2 * constexprs[name]}),
    ]
    digests = [compile_record.digest(x, 90) for x in (case, *others)]
    digests.append(compile_record.digest(case, 80))
    assert len(set(digests)) == len(digests)
    assert compile_record.digest(replace(case, name="new", max_stack=99), 90) == digests[0]


TOP = """
import os
from ..scores import modified, plain
from . import near
from .near import unused

def kernel(s, KIND):
    \"\"\"What it says here does not count.\"\"\"
    if KIND.CAUSAL and not KIND.SOFTCAP:
        s = near.causal(s)
    elif KIND.SOFTCAP == 2:
        s = modified(s, KIND)
    return plain(s, other) if s else os.path
"""
SCORES = """
from .far import FACTOR, far as modified_far

def modified(s, KIND):
    return modified_far(s) if KIND.CAUSAL or KIND.SOFTCAP else s

def plain(s, KIND):
    return both(s) if KIND.ALIBI else s

def both(s):
    return s
"""
FILES = {
    "hopper/top.py": TOP,
    "hopper/near.py": "def causal(s): return s\ndef unused(): pass",
    "scores.py": SCORES,
    "far.py": "FACTOR = 2\nif FACTOR:\n    def far(s): return s * FACTOR",
    "other.py": "x = 1",
}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        # plain is given another Kind than the kernel has, so it has all branches.
        (Kind(), "kernel plain both"),
        (Kind(CAUSAL=True), "kernel plain both causal"),
        (Kind(SOFTCAP=2), "kernel plain both modified far FACTOR"),
        (Kind(SOFTCAP=1, CAUSAL=True), "kernel plain both"),
        (None, "kernel plain both modified far FACTOR causal"),
    ],
    ids=["full", "causal", "softcap", "causal and softcap", "all"],
)
def test_sources_are_what_a_kind_leads_to(kind: Kind | None, names: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = kernel_sources.texts(
        kernel_sources.Definition(tmp_path / "hopper" / "top.py", "kernel"), kind
    )
    assert {x.partition(":")[0] for x in found} == set(names.split())
    kernel = next(x for x in found if x.startswith("kernel:"))
    assert "does not count" not in kernel
    if kind is not None:
        assert "KIND." not in kernel
        assert "    if " not in kernel


def test_what_one_option_reaches_changes_kernels_with_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [c for c in compile_worker.cases_of("attention", 90) if "KIND" in c.constexprs]
    mine = {c.name for c in cases if c.constexprs["KIND"].SCORE_MOD}
    before = {c.name: compile_record.digest(c, 90) for c in cases}
    text_of = kernel_sources.text_of

    def changed(at: Any, values: Any) -> Any:
        text = text_of(at, values)
        return text._replace(text=text.text + "\npass") if at.name == "user_modified" else text

    monkeypatch.setattr(kernel_sources, "text_of", changed)
    after = {c.name: compile_record.digest(c, 90) for c in cases}
    assert mine and {name for name in before if before[name] != after[name]} == mine


def test_backward_kernel_counts_its_configuration() -> None:
    case = next(c for c in compile_worker.cases_of("hopper", 90) if c.name.startswith("backward"))
    found = compile_record.classes_of(case.constexprs["CFG"])
    assert "class HopperBackward" in found and "class HopperForward" not in found
    assert "'CAUSAL': True" in compile_record.told(
        replace(case.constexprs["CFG"], KIND=Kind(CAUSAL=True))
    )


def test_only_the_same_digest_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case()
    facts = compile_record.Facts(32, 0, 0, None)

    def known(case: Case, digest: str) -> compile_record.Recorded | None:
        record = {("selftest", 90, case.name): compile_record.Recorded(facts, digest)}
        monkeypatch.setattr(compile_record, "recorded", lambda: record)
        return compile_record.known("selftest", case, 90)

    same = compile_record.digest(case, 90)
    found = known(case, same)
    assert found is not None
    assert compile_worker.recall(case, found)["registers"] == 32
    assert known(case, "0" * 12) is None
    assert known(replace(case, hgmma=True), same) is None  # whose wgmma nobody counted
    monkeypatch.setattr(compile_record, "recorded", dict)
    assert compile_record.known("selftest", case, 90) is None


def test_every_case_has_its_day() -> None:
    found = compile_record.Recorded(compile_record.Facts(32, 0, 0, None), "0123456789ab")
    days = [compile_record.sampled(found, day) for day in range(2 * compile_record.SAMPLE)]
    assert sum(days) == 2


@pytest.mark.slow
def test_another_result_than_recorded_is_a_failure() -> None:
    line = selftest(90)["fits"]
    assert complaints({**line, "recorded": compile_record.facts_of(line)}, 90) == []
    other = compile_record.facts_of(line)._replace(registers=line["registers"] + 8)
    assert "recorded" in complaints({**line, "recorded": other}, 90)[0]


@pytest.mark.parametrize("same_build", [False, True])
@pytest.mark.parametrize("differs", [False, True])
def test_another_build_that_gives_something_else_compiles_all(
    same_build: bool, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three cases is sampled; the last has no record."""
    cases = [replace(a_case(), name=name) for name in ("sampled", "recalled", "new")]
    facts = compile_record.Facts(32, 0, 0, None)
    records = {name: compile_record.Recorded(facts, name) for name in ("sampled", "recalled")}
    reported: list[str] = []

    def report(case: Case, arch: int, sass: bool) -> dict[str, Any]:
        reported.append(case.name)
        return {"name": case.name, "registers": 40 if differs else 32, "stack": 0, "shared": 0}

    monkeypatch.setattr(compile_record, "is_recorded_build", lambda: same_build)
    monkeypatch.setattr(compile_record, "known", lambda family, case, arch: records.get(case.name))
    monkeypatch.setattr(compile_record, "sampled", lambda found: found.digest == "sampled")
    monkeypatch.setattr(compile_worker, "report", report)
    lines = list(compile_worker.compiled("selftest", cases, 90, False))
    assert [line["name"] for line in lines] == ["sampled", "recalled", "new"]
    everything = differs and not same_build
    assert sorted(reported) == sorted(["sampled", "new"] + ["recalled"] * everything)
    assert lines[0]["recorded"] == (None if everything else facts)
    assert lines[1]["registers"] == (40 if everything else 32)
    assert [line["recorded"] for line in lines[1:]] == [None, None]


def test_the_record_is_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_record.build() == compile_record.build.__wrapped__()
    path = tmp_path / "record.tsv"
    monkeypatch.setattr(compile_record, "record_path", lambda: path)
    assert not compile_record.is_recorded_build()
    path.write_text("build\t0123456789ab\n")
    assert not compile_record.is_recorded_build()
    path.write_text(f"build\t{compile_record.build()}\nnorm\t90\tcase\t32\t0\t0\t\tabc\n")
    assert compile_record.is_recorded_build()
    found = compile_record.recorded.__wrapped__()
    assert found == {
        ("norm", 90, "case"): compile_record.Recorded(compile_record.Facts(32, 0, 0, None), "abc")
    }


# --- the harness ----------------------------------------------------------------------------------


@functools.cache
def selftest(arch: int) -> dict[str, Any]:
    return compile_family("selftest", arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_harness_sees_spills(arch: int) -> None:
    lines = selftest(arch)
    assert complaints(lines["fits"], arch) == []
    assert "stack" in complaints(lines["spills"], arch)[0]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_harness_sees_lanes_apart(arch: int) -> None:
    lines = selftest(arch)
    assert complaints(lines["neighbours"], arch) == []
    for name in ("lanes-apart", "apart-across-warps"):
        found = complaints(lines[name], arch)
        assert ["reduces axis" in text for text in found] == [True] * lanes.WRONG, name


def test_what_reads_an_unwritten_register_is_found() -> None:
    """Code that ptxas 12.8 made of attention_decode_kernel, shortened; and as it had to be."""
    listing = """
		Function : attention_decode_kernel
        /*0720*/                   S2UR UR4, SR_CgaCtaId ;
        /*07d0*/                   UMOV UR10, 0x400 ;
        /*0810*/                   UIADD3 UR30, UP0, {of}, 0x20, URZ ;
        /*0870*/                   UIADD3.X UR31, UR10, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0880*/                   ULDC.64 UR32, c[0x0][0x208] ;
        /*4f10*/              @!P2 LDG.E R4, desc[UR32][R2.64] ;
        /*5270*/                   HGMMA.64x16x16.F32 R64, R28, gdesc[UR28].tnspB, R64 ;
    """
    assert uniform.unwritten(listing.format(of="UR4")) == []
    found = uniform.unwritten(listing.format(of="UR30"))
    assert found == ["UIADD3 UR30, UP0, UR30, 0x20, URZ"]
    assert len(uniform.unwritten(listing.format(of="UR4").replace("UIADD3.X UR31", "UMOV UR29"))) == 1
    call = """
		Function : attention_decode_kernel
        /*0390*/                   CALL.REL.NOINC 0x9020 ;
        /*03a0*/                   UMOV UR37, UR36 ;
        /*9000*/                   EXIT ;
        /*9520*/                   UMOV UR36, 0x1 ;
    """
    assert uniform.unwritten(call) == []
    assert uniform.unwritten(call.replace("CALL.REL.NOINC", "BRA")) == ["UMOV UR37, UR36"]


@pytest.mark.parametrize(
    ("lane", "warp", "rightly"),
    [
        ("00111", "00", True),
        ("11000", "00", True),  # some bits up
        ("01101", "00", False),  # row bits between
        ("-0-11", "--", True),  # steps that only some bits make
        ("1-011", "00", False),
        ("11-10", "00", False),  # lanes that hold the same
        ("01100", "00", True),  # in one warp what is on either side does not count
        ("01100", "10", False),  # across warps it does
        ("0110-", "1-", False),
        ("-1100", "10", True),
        ("111-0", "01", True),
        ("11111", "010", False),
        ("11111", "101", False),
        ("11111", "1-1", True),
    ],
)
def test_which_reductions_are_right(lane: str, warp: str, rightly: bool) -> None:
    """Of layouts whose bits, highest first, move along axis 1, along 0 or not at all."""
    steps = {"0": [1, 0], "1": [0, 1], "-": [0, 0]}
    lane_bases, warp_bases = ([steps[bit] for bit in reversed(bits)] for bits in (lane, warp))
    assert lanes.reduces(lane_bases, warp_bases, axis=1) == rightly
