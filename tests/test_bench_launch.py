"""The bench of the host's time: its rows make the calls of their names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashproto import backends
from flashproto.bench import launch

NEW = "mask=documents|varlen|key mask|kv_cache|one query|forward and backward"


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    before = backends.get_default()
    yield
    backends.set_default(before)


def rows_of(impl: str, device: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    torch.manual_seed(0)
    running, errors = launch.running_rows(impl, torch.device(device), NEW)
    return {name: call() for name, call in running.items()}, errors


def test_rows_make_the_calls_of_their_names(device: str) -> None:
    """Beside torch's of the same name, and on the reference backend; a cache's beside attention's."""
    pytest.importorskip("triton")
    tolerance = {"rtol": 0, "atol": 1e-5 if device == "cpu" else 0.06}  # of bfloat16 on a GPU
    found, errors = rows_of("triton", device)
    exact, _ = rows_of("reference", device)
    varlen = {f"torch attention_varlen{kind}" for kind in launch.KINDS}
    assert set(errors) == (varlen if device == "cpu" else set()), errors
    assert set(found) == set(exact)
    for name, result in found.items():
        torch.testing.assert_close(result, exact[name], **tolerance)
        theirs = found.get(name.replace("flashproto.", "torch "))
        if theirs is not None:
            torch.testing.assert_close(result, theirs, **tolerance)
        elif "kv_cache" not in name:
            assert name.replace("flashproto.", "torch ") in errors
    one = found["flashproto.attention one query"]
    for which in ("read", "paged"):
        got = found[f"flashproto.attention_with_kv_cache {which}"]
        torch.testing.assert_close(got, one, **tolerance)
    appended = found["flashproto.attention_with_kv_cache append + RoPE"]
    assert (appended - one).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("flashproto.attention_varlen", "flashproto.attention"),
        ("torch attention mask=documents with grad", "flashproto.attention with grad"),
        (f"torch attention_varlen{launch.BOTH}", f"flashproto.attention{launch.BOTH}"),
        ("flashproto.attention backward, its node", None),
        (f"torch attention backward{launch.IN_ONE_GRAPH}", None),
        ("flashproto.softmax with grad", None),
    ],
)
def test_rows_are_compared_with_attention_of_their_kind(name: str, row: str | None) -> None:
    assert launch.attention_row(name) == row


def test_text_has_ratios_and_names_what_does_not_run() -> None:
    figures = {
        "impl": "triton",
        "import_torch_s": 1.0,
        "import_flashproto_s": 1.2,
        "import_ratio": 1.2,
        "first_attention_s": {"forward": 1.0, "backward": 2.0},
        "host_us": {"flashproto.attention": (30.0, 20.0), "flashproto.attention_varlen": (40.0, 35.0)},
        "errors": {"torch attention_varlen": "NotImplementedError: no such kernel"},
    }
    *_, attention, varlen, error = launch.launch_text(figures).splitlines()
    assert attention.endswith("30.0    20.0    1.00x") and varlen.endswith("40.0    35.0    1.75x")
    assert error == "  torch attention_varlen: NotImplementedError: no such kernel"
