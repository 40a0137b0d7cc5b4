"""What an installation holds, and that the folder kernels/ gets in nobody's way."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flashproto

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('dist'))"


def python(*arguments: str, cwd: Path, path: str = "") -> str:
    """Run Python in `cwd` with PYTHONPATH set to `path`; its output."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def build(kind: str, source: Path) -> Path:
    return source / "dist" / python("-c", BUILD, f"build_{kind}", cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that building leaves nothing behind in it."""
    target = tmp_path_factory.mktemp("source") / "tree"
    target.mkdir()
    for name in ("flashproto", "kernels", "tests", "examples", "docs"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    return build("sdist", source)


@pytest.fixture(scope="module")
def wheel_of_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", next(folder.iterdir()))


def package_files(source: Path) -> set[str]:
    """Every source file of the package, device code included, as paths inside an installation."""
    found = {"flashproto/py.typed"}
    for folder, inside in (("flashproto", "flashproto"), ("kernels", "flashproto/kernels")):
        root = source / folder
        found |= {f"{inside}/{p.relative_to(root)}" for p in root.rglob("*.py")}
    return found


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if ".dist-info/" not in name}


def test_wheel_holds_the_package_and_nothing_else(source: Path) -> None:
    assert wheel_files(build("wheel", source)) == package_files(source)


def test_wheel_of_sdist_is_the_same(wheel_of_sdist: Path, source: Path) -> None:
    assert wheel_files(wheel_of_sdist) == package_files(source)


def test_sdist_holds_tests_examples_and_docs(sdist: Path, source: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert package_files(source) <= names
    assert {"tests/conftest.py", "examples/time_layers.py", "docs/kernels.md"} <= names
    assert {"LICENSE", "constraints.txt"} <= names


@pytest.fixture(scope="module")
def installed(wheel_of_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it."""
    site = tmp_path_factory.mktemp("installed") / "site"
    options = "-q", "--no-deps", "--no-index", "--target", str(site)
    python("-m", "pip", "install", *options, str(wheel_of_sdist), cwd=site.parent)
    return site


WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"
RUN = """
import torch, flashproto
from flashproto import backends, nn
model = nn.GPT(nn.GPTConfig(vocab_size=11, context=8, n_layers=1, d_model=16, n_heads=2))
tokens = torch.arange(8)[None]
model(tokens)[0].square().mean().backward()
print(all(p.grad is not None for p in model.parameters()), backends.HAS_TRITON)
print(model.generate(tokens[:, :3], 2).shape[1])
print(flashproto.softmax(torch.zeros(4)).tolist())
print(flashproto.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", WITHOUT_TRITON], ids=["with triton", "without triton"])
def test_installed_wheel_runs_from_an_empty_folder(
    before: str, installed: Path, tmp_path: Path
) -> None:
    trained, length, values, file = python(
        "-c", before + RUN, cwd=tmp_path, path=str(installed)
    ).splitlines()
    there = not before and importlib.util.find_spec("triton") is not None
    assert trained == f"True {there}" and length == "5"
    assert values == "[0.25, 0.25, 0.25, 0.25]"
    assert Path(file).is_relative_to(installed)


def test_installed_wheel_has_the_kernels(installed: Path, tmp_path: Path) -> None:
    code = "import flashproto.kernels.online_softmax as k; print(k.__file__)"
    pytest.importorskip("triton")
    (file,) = python("-c", code, cwd=tmp_path, path=str(installed)).splitlines()
    assert Path(file).is_relative_to(installed)


def test_kernels_is_a_relative_symlink_without_init() -> None:
    link = ROOT / "flashproto" / "kernels"
    if not link.is_symlink():
        pytest.skip("not a checkout: a source archive holds the files themselves")
    assert os.readlink(link) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_installed_package_named_kernels_wins(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'the installed one'\n")
    code = "import kernels, flashproto; print(kernels.NAME)"
    assert python("-c", code, cwd=ROOT, path=str(tmp_path)) == "the installed one"


def test_transformers_loads_llama_from_the_root(tmp_path: Path) -> None:
    for name in ("transformers", "kernels"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            pytest.skip(f"{name} is not installed")
    code = """
import kernels, torch, flashproto
from transformers import LlamaConfig, LlamaForCausalLM
assert kernels.__file__, "the folder was imported instead of the package"
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
import sys
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
print(tuple(model(torch.zeros(1, 5, dtype=torch.long)).logits.shape))
"""
    assert python("-c", code, str(tmp_path), cwd=ROOT).splitlines()[-1] == "(1, 5, 64)"


def test_a_link_that_is_a_file_is_named(tmp_path: Path) -> None:
    """As git on Windows leaves flashproto/kernels: neither an import nor a wheel goes on without it."""
    ignore = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(ROOT / "flashproto", tmp_path / "flashproto", ignore=ignore)
    (tmp_path / "flashproto" / "kernels").write_text("../kernels")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    commands = [["-c", BUILD, "build_wheel"]]
    if importlib.util.find_spec("triton") is not None:
        commands.append(["-c", "import flashproto"])
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "git config core.symlinks true" in done.stderr.splitlines()[-1]


def test_modules_and_distributed_are_there_and_imported_on_first_use(tmp_path: Path) -> None:
    code = """
import sys, flashproto
late = {f"flashproto.{name}" for name in ("distributed", "integrations", "nn")}
assert not {*late, "transformers"} & sys.modules.keys()
assert {"attention", "distributed", "integrations", "masks", "nn"} <= {*dir(flashproto)}
print(flashproto.nn.RMSNorm(8).weight.shape[0], flashproto.distributed.shard.__name__)
assert flashproto.nn is sys.modules["flashproto.nn"]
assert "flash_attn_4" in dir(flashproto.integrations)
assert "flashproto.integrations.flash_attn_4" not in sys.modules
assert flashproto.integrations.torch is sys.modules["flashproto.integrations.torch"]
assert not hasattr(flashproto.integrations, "modules")
print(hasattr(flashproto, "modules"), hasattr(flashproto, "_nn"))
try:
    flashproto.modules
except AttributeError as error:
    print(error)
"""
    lines = python("-c", code, cwd=tmp_path, path=str(ROOT)).splitlines()
    assert lines == ["8 shard", "False False", "module 'flashproto' has no attribute 'modules'"]


@pytest.mark.slow
def test_import_takes_under_one_and_a_half_times_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time of `import flashproto`, torch's part of it and the rest in one process, since
    what else runs slows either; the median of five.  With the bytecode that pip compiles, as torch has
    its own, whatever this environment says of writing it: the first process of all writes it."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    code = (
        "import time; start = time.process_time(); import torch; middle = time.process_time();"
        "import flashproto; print((time.process_time() - start) / (middle - start))"
    )
    _, *ratios = (float(python("-c", code, cwd=tmp_path, path=str(ROOT))) for _ in range(6))
    assert statistics.median(ratios) < 1.5, ratios


def test_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [flashproto.__version__]


def test_functions_of_agents_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    for name in set(re.findall(r"flashproto\.(\w+)\(", text)) | {"masks", "attention_with_kv_cache"}:
        assert hasattr(flashproto, name), name
