"""The folder for the Kernels Hub: a copy that lives beside an installed flashproto."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flashproto
from flashproto import backends
from flashproto.integrations import kernels_hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hub")
    kernels_hub.write(made)
    return made


def load(place: Path) -> ModuleType:
    """As kernels 0.17 does: under the id of its metadata."""
    name = json.loads((place / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, place / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def copy(folder: Path) -> ModuleType:
    return load(folder / "build" / "torch-cuda")


def tensors(**options: Any) -> list[torch.Tensor]:
    return [torch.randn(2, 17, heads, 32, **options) for heads in (4, 2, 2)]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_copy_gives_what_the_package_gives(copy: ModuleType, impl: str, device: str) -> None:
    """Forward and gradients, by ops of its own: under torch.compile too."""
    if impl == "triton" and not backends.HAS_TRITON:
        pytest.skip("triton is not installed")
    own = sys.modules[f"{copy.__name__}.flashproto"].backends
    given = tensors(requires_grad=True, device=device)
    grad = torch.randn(2, 17, 4, 32, device=device)
    wanted = flashproto.attention(*(x.transpose(1, 2) for x in given), causal=True, impl=impl)
    wanted = [wanted.transpose(1, 2), *torch.autograd.grad(wanted.transpose(1, 2), given, grad)]
    own.set_default(impl)
    try:
        for call in (
            copy.flash_attn_func,
            torch.compile(copy.flash_attn_func, backend="aot_eager", fullgraph=True),
        ):
            out = call(*given, causal=True)
            for got, want in zip((out, *torch.autograd.grad(out, given, grad)), wanted, strict=True):
                torch.testing.assert_close(got, want)
    finally:
        own.set_default(None)
    assert own is not backends and f"{copy.__name__}_flashproto" in dir(torch.ops)


def test_two_copies_of_other_text_have_other_names(folder: Path, tmp_path: Path) -> None:
    kernels_hub.write(tmp_path)
    changed = tmp_path / "build" / "torch-cuda" / "flashproto" / "backends.py"
    changed.write_text(changed.read_text() + "# changed\n")
    first = kernels_hub.metadata(folder / "build" / "torch-cuda", "cuda")
    assert first != kernels_hub.metadata(changed.parents[1], "cuda")
    assert first == json.loads((folder / "build" / "torch-cuda" / "metadata.json").read_text())


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "build" / "torch-cuda"
    place.mkdir(parents=True)
    (place / "mine.py").write_text("")
    with pytest.raises(ValueError, match="with other files"):
        kernels_hub.write(tmp_path)
    assert (place / "mine.py").exists()


def test_kernels_loads_it(folder: Path, tmp_path: Path) -> None:
    """With what is exported, and without the package that it is a copy of."""
    if (
        importlib.util.find_spec("kernels") is None
        or importlib.util.find_spec("kernels").origin is None
    ):
        pytest.skip("kernels is not installed")
    code = (
        "import sys, kernels, pathlib, torch\n"
        f"module = kernels.get_local_kernel(pathlib.Path({str(folder)!r}), backend='cpu')\n"
        "q = torch.randn(1, 5, 2, 16)\n"
        "assert module.flash_attn_varlen_func and module.flash_attn_with_kvcache\n"
        "assert 'flashproto' not in sys.modules\n"
        "print(tuple(module.flash_attn_func(q, q, q, causal=True).shape))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 5, 2, 16)"
