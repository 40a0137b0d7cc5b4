"""The tests run on an NVIDIA GPU where there is one, else on the CPU in Triton's interpreter.

FLASHPROTO_TEST_SEED=N   the seed that a failing run printed, to see the same failure again
--slow                   tests that are marked slow too; else they run if a test is given by name
--all                    these, and all cases of each test, not a sample of them (sampled_cases.py)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

# @triton.jit makes compiled or interpreted kernels by what this says when Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import sampled_cases
from hypothesis import HealthCheck, settings

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import quick_interpreter

    quick_interpreter.install()

# An interpreted kernel takes longer than Hypothesis expects of an example, more so the first time.
settings.register_profile(
    "flashproto", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("flashproto")

# Workers share the processor; more threads than cores make every one of them slower.  Nor does each
# start a process a core for Inductor to compile in.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)

MEMORY_SECONDS = 240  # the most that a test waits for memory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="tests that are marked slow too")
    parser.addoption("--all", action="store_true", help="all tests and all cases, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    # Drawn once and inherited by the workers of pytest-xdist, so that one number describes a run.
    if "FLASHPROTO_TEST_SEED" not in os.environ:
        os.environ["FLASHPROTO_TEST_SEED"] = str(random.SystemRandom().randrange(2**31))


def pytest_report_header(config: pytest.Config) -> list[str]:
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU, Triton interpreter"
    cases = "all cases" if config.getoption("--all") else "a sample of the cases (--all for all)"
    if not (config.getoption("--all") or config.getoption("--slow")):
        cases += ", no slow tests (--slow)"
    return [f"flashproto: {where}; {cases}; FLASHPROTO_TEST_SEED={os.environ['FLASHPROTO_TEST_SEED']}"]


@pytest.hookimpl(trylast=True)  # behind -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        seed, with_slow = os.environ["FLASHPROTO_TEST_SEED"], config.getoption("--slow")
        left_out = sampled_cases.left_out(items, seed, with_slow)
        if not config.getoption("--slow"):
            named = {x.partition("[")[0].rpartition("/")[2] for x in config.args if "::" in x}
            slow = [x for x in items if x.get_closest_marker("slow")]
            left_out |= {x for x in slow if x.nodeid.partition("[")[0].rpartition("/")[2] not in named}
        config.hook.pytest_deselected(items=[x for x in items if x in left_out])
        items[:] = [x for x in items if x not in left_out]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):  # not a keyword, as the name of a folder is
            item.add_marker(skip)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        seed = os.environ["FLASHPROTO_TEST_SEED"]
        report.sections.append(("flashproto", f"reproduce with FLASHPROTO_TEST_SEED={seed}"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch and random by the run's seed and the test's name, in whatever order tests run."""
    value = random.Random(os.environ["FLASHPROTO_TEST_SEED"] + request.node.nodeid).randrange(2**31)
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of a GPU, which other workers share: of the tests with the mark gib one runs at a time, once that
    much is free, and what torch keeps after one that needed much goes back."""
    gib = request.node.get_closest_marker("gib")
    with contextlib.ExitStack() as stack:
        if gib:
            stack.enter_context(one_worker(tmp_path_factory.getbasetemp().parent / "gib.lock"))
            end = time.monotonic() + MEMORY_SECONDS
            while torch.cuda.mem_get_info()[0] < gib.args[0] << 30 and time.monotonic() < end:
                torch.cuda.empty_cache()
                time.sleep(1)
        yield
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def one_worker(path: Path) -> Iterator[None]:
    """Waits until no other process is in here with the same path."""
    import fcntl  # not on Windows; only tests on a GPU come here

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run in this session."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def hopper() -> None:
    """Skips the test where backend "hopper" has no device."""
    from flashproto import backends

    against = backends.device_reasons("hopper", torch.device("cuda"))
    if against:
        pytest.skip("; ".join(against))


@pytest.fixture
def deterministic() -> Iterator[None]:
    from hopper_attention import determinism

    with determinism():
        yield
