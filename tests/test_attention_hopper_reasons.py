"""What the Hopper backend refuses, and when it is chosen."""

from __future__ import annotations

import pytest
import torch
from attention_problem import lay_out
from hopper_attention import FITS, half
from torch import Tensor

import flashproto
from flashproto import backends, masks
from flashproto.functional.attention_request import attention_request
from flashproto.ops.attention_hopper_reasons import hopper_attention_reasons

REFUSED = {
    "dtype is float32": (FITS.float(),) * 3,
    "one for all": (FITS, FITS, half(2, 3, 5, 32)),
    "head_dim is 264": (half(1, 1, 4, 264),) * 3,
    "head_dim is 12": (half(1, 1, 4, 12),) * 3,
    "q or k is empty": (FITS, FITS[:, :, :0], FITS[:, :, :0]),
    "k's last dimension has stride 5": (FITS, lay_out(FITS, "transposed"), FITS),
    "v's stride 0": (FITS, FITS, lay_out(FITS, "expanded")),
    "q's stride 68": (half(2, 3, 5, 68)[..., :64], FITS, FITS),
    "does not start at a multiple of 16 bytes": (lay_out(FITS, "offset"), FITS, FITS),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_the_reason(reason: str) -> None:
    found = backends.texts(hopper_attention_reasons(*REFUSED[reason]))
    assert any(reason in text for text in found), found


@pytest.mark.parametrize("strides", ["contiguous", "tokens first", "packed"])
@pytest.mark.parametrize("D", [8, 64, 96, 128, 192, 256])
def test_takes_whatever_tma_takes(D: int, strides: str) -> None:
    q = lay_out(half(2, 3, 5, D), strides)
    assert list(hopper_attention_reasons(q, q, q)) == []
    one = lay_out(half(1, 1, 5, D), "expanded")  # strides of single entries are never used
    assert list(hopper_attention_reasons(one, one, one)) == []


def test_which_masks_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "device_reasons", lambda backend, device: ())
    monkeypatch.setattr(backends, "_usable", lambda device, interpreted: backends.BACKENDS)
    boolean = masks.boolean(torch.ones(5, 5) > 0)
    documents = masks.documents(torch.zeros(5, dtype=torch.int32))
    for mask, chosen in (
        (masks.causal(), "hopper"),
        (documents, "hopper"),
        (boolean, "hopper"),
        (boolean & documents, "triton"),
    ):
        assert attention_request("attention", FITS, FITS, FITS, mask=mask).choose(None) == chosen


def test_takes_calls_when_asked_for_determinism(deterministic: None) -> None:
    assert list(hopper_attention_reasons(FITS, FITS, FITS)) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_reasons_are_found_while_compiling(dynamic: bool) -> None:
    def count(q: Tensor) -> Tensor:
        return q + len(list(hopper_attention_reasons(q, q, q)))

    torch.compiler.reset()
    compiled = torch.compile(count, fullgraph=True, backend="eager", dynamic=dynamic)
    for x in (
        FITS,
        half(2, 3, 9, 64),
        half(2, 3, 5, 68)[..., :64],
        lay_out(FITS, "transposed"),
        FITS.float(),
    ):
        assert torch.equal(compiled(x), count(x))


def test_needs_a_device_of_capability_9_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "capability 9.0" in backends.device_reasons("hopper", torch.device("cpu"))[0]
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        (reason,) = backends.device_reasons("hopper", torch.device("cuda"))
        assert f"{capability[0]}.{capability[1]}" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "INTERPRETED", False)
    assert backends.device_reasons("hopper", torch.device("cuda")) == ()


@pytest.mark.gpu
def test_is_chosen_where_it_applies(hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    backends._logged.clear()
    with caplog.at_level("INFO", logger="flashproto"):
        flashproto.attention(*(FITS.cuda(),) * 3)
        flashproto.attention(*(FITS.cuda().float(),) * 3)
    said = [record.getMessage() for record in caplog.records]
    assert "'hopper'" in said[0] and "'triton'" in said[1]


def chosen_backend(caplog: pytest.LogCaptureFixture, *inputs: Tensor) -> str:
    backends._logged.clear()
    with caplog.at_level("INFO", logger="flashproto"):
        flashproto.attention(*inputs)
    return caplog.records[-1].getMessage()


@pytest.mark.gpu
def test_is_chosen_under_determinism(
    hopper: None, deterministic: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "'hopper'" in chosen_backend(caplog, *(FITS.cuda(),) * 3)
