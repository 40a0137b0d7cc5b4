"""num_splits: into how many parts at most keys are split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operators import launches

import flashproto
from flashproto import configs
from flashproto.variant import Kind

pytest.importorskip("triton")

from flashproto.ops import attention_split, call_cache

MERGE = "merge_kernel"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card of eight multiprocessors, so that a tile of queries is split."""
    monkeypatch.setattr(attention_split, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(configs, "attention_splits_keys", lambda kind, *_: not kind.VARLEN)
    call_cache.forget()
    yield
    call_cache.forget()


def calls(device: str) -> dict[str, Any]:
    """By name, each as a function of num_splits and impl."""
    q, k, v = (torch.randn(2, h, s, 16, device=device) for h, s in ((4, 3), (2, 200), (2, 200)))
    cu = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    side_by_side = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu_k = torch.tensor([0, 150, 200], dtype=torch.int32, device=device)
    lengths = torch.tensor([200, 70], dtype=torch.int32, device=device)
    caches = [x.transpose(1, 2) for x in (k, v)]

    def attention(**options: Any) -> Any:
        return flashproto.attention(q, k, v, causal=True, return_lse=True, **options)

    def varlen(**options: Any) -> Any:
        return flashproto.attention_varlen(*side_by_side, cu, cu_k, return_lse=True, **options)

    def cache(**options: Any) -> Any:
        return flashproto.attention_with_kv_cache(
            q, *caches, lengths=lengths, return_lse=True, **options
        )

    return {"attention": attention, "attention_varlen": varlen, "attention_with_kv_cache": cache}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", calls("cpu"))
def test_results_are_the_same(name: str, device: str, few: None) -> None:
    call = calls(device)[name]
    expected = call(impl="reference")
    for impl in ("triton", "reference"):
        for n in (None, 1, 2, 7):
            for _ in range(2):  # the second is a call of the call cache
                for x, want in zip(call(num_splits=n, impl=impl), expected, strict=True):
                    torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["attention", "attention_with_kv_cache"])
def test_parts_that_are_made(name: str, few: None) -> None:
    if torch.cuda.is_available():
        pytest.skip("what the interpreter launches")
    call = calls("cpu")[name]

    def merged(n: int | None) -> list[int]:
        """The programs that had work, where there was a merge."""
        with launches() as seen:
            call(num_splits=n, impl="triton")
        return [x.arguments["programs"] for x in seen if x.kernel == MERGE]

    items = 4  # two sequences, two key heads; a tile of queries each
    assert merged(1) == []
    (free,), (two,), (three,) = merged(None), merged(2), merged(3)
    assert two == items and three == 2 * items and free > three


def test_parts_on_hopper() -> None:
    given: Any = (128, 131072, Kind(CAUSAL=True), 512, 1, 8)
    free = configs.attention_forward_hopper(*given)
    assert free.SPLIT and configs.forward_parts(free, 8, 512, 131072, 132) == 4
    assert not configs.attention_forward_hopper(*given, most_parts=1).SPLIT
    assert [configs.forward_parts(free, 8, 512, 131072, 132, n) for n in (1, 2, 4, 99)] == [1, 2, 4, 4]
    assert configs.attention_cache_hopper(*given, 132, most_parts=1)[1] == 1
    assert configs.attention_cache_hopper(*given, 132)[1] == 4


@pytest.mark.parametrize("name", calls("cpu"))
def test_errors(name: str, device: str) -> None:
    call = calls(device)[name]
    for n in (0, -1):
        with pytest.raises(ValueError, match=rf"^{name}: num_splits is {n}; it takes None or"):
            call(num_splits=n)
    with pytest.raises(TypeError, match=f"^{name}: num_splits is .*; it takes None or an integer"):
        call(num_splits=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", calls("cpu"))
def test_compiled_whole(name: str, device: str) -> None:
    call = calls(device)[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (1, 3):
        for x, want in zip(compiled(num_splits=n), call(num_splits=n), strict=True):
            torch.testing.assert_close(x, want)
