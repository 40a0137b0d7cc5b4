"""The Hopper backend: what it refuses, its configurations and schedules, graphs and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from attention_problem import Problem, lay_out, make, results
from torch import Tensor

import flashproto
from flashproto import backends, configs
from flashproto.functional.attention import hopper_attention_reasons

SHARED_LIMIT = 227 * 1024


@pytest.fixture
def hopper() -> None:
    against = backends.device_reasons("hopper", torch.device("cuda"))
    if against:
        pytest.skip("; ".join(against))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def half(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


# --- what it refuses -----------------------------------------------------------------------------

FITS = half(2, 3, 5, 64)
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
    found = hopper_attention_reasons(*REFUSED[reason])
    assert any(reason in text for text in found), found


@pytest.mark.parametrize("strides", ["contiguous", "tokens first", "packed"])
@pytest.mark.parametrize("D", [8, 64, 96, 128, 192, 256])
def test_takes_whatever_tma_takes(D: int, strides: str) -> None:
    q = lay_out(half(2, 3, 5, D), strides)
    assert hopper_attention_reasons(q, q, q) == []
    one = lay_out(half(1, 1, 5, D), "expanded")  # strides of single entries are never used
    assert hopper_attention_reasons(one, one, one) == []


def test_refuses_when_asked_for_determinism(deterministic: None) -> None:
    (reason,) = hopper_attention_reasons(FITS, FITS, FITS)
    assert "use_deterministic_algorithms" in reason


@pytest.mark.parametrize("dynamic", [False, True])
def test_reasons_are_found_while_compiling(dynamic: bool) -> None:
    def count(q: Tensor) -> Tensor:
        return q + len(hopper_attention_reasons(q, q, q))

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


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("Sk", [1, 1024, 4096, 16384])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_configurations_fit(D: int, Sk: int, causal: bool) -> None:
    config = configs.attention_forward_hopper(D, Sk, causal)
    tiles = config.BM + (config.KS + config.VS) * config.BN
    output = 64 * config.D * 2 if config.WIDE else 0
    assert tiles * config.D * 2 + output <= SHARED_LIMIT
    assert config.D >= D and config.BM == 64 * config.W
    lowest = config.PB if config.PP else config.QB
    assert lowest >= 2 + config.W, "Triton uses the lowest named barriers itself"


@pytest.mark.parametrize(
    ("D", "Sk", "causal", "W", "KS", "VS"),
    [
        (64, 1024, False, 3, 4, 4),
        (64, 1024, True, 2, 4, 4),
        (64, 16384, True, 3, 4, 4),
        (128, 1024, False, 2, 2, 2),
        (128, 4096, False, 2, 3, 2),
        (128, 4096, True, 2, 2, 2),
        (128, 16384, True, 2, 3, 3),
        (256, 4096, True, 2, 2, 2),
        (256, 16384, False, 2, 3, 2),
    ],
)
def test_forward_takes_what_was_measured_fastest(D, Sk, causal, W, KS, VS) -> None:
    config = configs.attention_forward_hopper(D, Sk, causal)
    assert (config.W, config.KS, config.VS) == (W, KS, VS)


@pytest.mark.parametrize(("D", "DQ"), [(64, 2), (96, 1), (128, 1), (192, 0), (256, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_configurations(D: int, DQ: int, causal: bool) -> None:
    config = configs.attention_backward_hopper(D, causal)
    assert config.DQ == DQ
    halves = 4 * config.BM * config.D + 2 * config.BN * config.D + config.TILES * config.BN * config.BM
    parts = {0: 0, 1: 2, 2: 1}[config.DQ] * 128 * 32 * 4
    assert halves * 2 + parts + 4 * config.BM * 4 <= SHARED_LIMIT


@pytest.mark.parametrize(
    "shape", [(8, 2, 1024, 1024), (2, 2, 300, 70), (16, 16, 4096, 4096), (7, 3, 5, 900)]
)
def test_plan_holds_every_item_once_and_is_balanced(shape: tuple[int, int, int, int]) -> None:
    heads, together, Sq, Sk = shape
    config = configs.attention_forward_hopper(128, Sk, True)
    programs = 132
    plan = configs.balanced_plan(config, heads, together, Sq, Sk, Sk - Sq, programs)
    tiles = -(-Sq // config.BM)
    assert Counter(item for own in plan for item in own) == Counter(range(tiles * heads))
    if tiles * heads > 3 * programs:
        assert max(map(len, plan)) <= 2 * tiles * heads / programs + 1


def test_heads_together_split_evenly() -> None:
    config = configs.attention_forward_hopper(128, 4096, True)
    for heads in (1, 7, 16, 48):
        together = configs.heads_together_forward(config, 1, heads, heads, 4096)
        assert 1 <= together <= heads
    backward = configs.attention_backward_hopper(128, True)
    assert configs.heads_together_backward(backward, 1, 64, 8, 4096, 4096, 132) <= 8


# --- on the device -------------------------------------------------------------------------------


@pytest.mark.gpu
def test_is_chosen_where_it_applies(hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    backends._logged.clear()
    with caplog.at_level("INFO", logger="flashproto"):
        flashproto.attention(*(FITS.cuda(),) * 3)
        flashproto.attention(*(FITS.cuda().float(),) * 3)
    said = [record.getMessage() for record in caplog.records]
    assert "'hopper'" in said[0] and "'triton'" in said[1]


@pytest.mark.gpu
def test_determinism_chooses_triton(hopper: None, deterministic: None) -> None:
    x = FITS.cuda()
    assert torch.equal(flashproto.attention(x, x, x), flashproto.attention(x, x, x, impl="triton"))
    with pytest.raises(flashproto.BackendError, match="use_deterministic_algorithms"):
        flashproto.attention(x, x, x, impl="hopper")


@pytest.mark.gpu
def test_capture_of_a_new_causal_shape_says_what_to_do(hopper: None) -> None:
    seen, new = (torch.randn(1, 2, S, 64, device="cuda").bfloat16() for S in (128, 8191))
    flashproto.attention(seen, seen, seen, causal=True, impl="hopper")
    with (
        pytest.raises(RuntimeError, match="Run it once before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        flashproto.attention(new, new, new, causal=True, impl="hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["aot_eager", "default", "reduce-overhead"])
def test_compiles_in_one_graph(mode: str, hopper: None) -> None:
    torch.compiler.reset()
    problem = Problem(torch.bfloat16, 2, 4, 2, 200, 300, 64, 64, causal=True, strides="packed")
    inputs, gradients = make(problem, "cuda")

    def attend(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return flashproto.attention(*inputs, causal=True, return_lse=True, impl="hopper")

    options = {"backend": mode} if mode == "aot_eager" else {"mode": mode}
    compiled = torch.compile(attend, fullgraph=True, **options)
    expected = results(attend(*inputs), inputs, gradients)
    for _ in range(4):  # the third call replays a CUDA graph where the mode makes one
        torch.compiler.cudagraph_mark_step_begin()
        got = results(compiled(*inputs), inputs, gradients)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=2.0**-7, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool, hopper: None) -> None:
    problem = Problem(torch.bfloat16, 1, 2, 1, 90, 70, 64, 64, causal)
    inputs, (dout, dlse) = make(problem, "cuda")
    arguments = (causal, -20, 0.125, "hopper")
    torch.library.opcheck(torch.ops.flashproto.attention_forward.default, (*inputs, *arguments))
    out, lse = torch.ops.flashproto.attention_forward(*inputs, *arguments)
    saved = [t.detach() for t in (*inputs, out, lse, dout, dlse)]
    backward = torch.ops.flashproto.attention_backward.default
    # dq differs in its last bits from run to run
    torch.library.opcheck(backward, (*saved, *arguments, True, True), atol=1e-3, rtol=2.0**-6)
