"""What the tests of norms and softmax share: the bound on errors, and tensors in awkward memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashproto.ops import call_cache, private, recipe, written


def assert_no_worse(
    name: str, got: Tensor, eager: Tensor, exact: Tensor, magnitude: float = 0.0
) -> None:
    """got is no further from `exact` (float64) than eager is, plus one rounding of the largest.

    magnitude: that of the terms of which the result is a difference, where they may cancel; a few
    roundings of it in float32 are allowed.
    """
    assert (got.shape, got.dtype) == (exact.shape, eager.dtype), name
    assert not got.isnan().any(), f"{name} is NaN"
    if not got.numel():
        return
    error, allowed = ((t.double() - exact).abs().max().item() for t in (got, eager))
    one_rounding = torch.finfo(got.dtype).eps * exact.abs().max().item()
    cancellation = 4 * torch.finfo(torch.float32).eps * magnitude
    assert error <= allowed + one_rounding + cancellation, (
        f"{name}: error {error:.3g}, eager's {allowed:.3g}, one rounding {one_rounding:.3g}"
    )


def assert_bits_stay(
    run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], slices: Sequence[slice]
) -> None:
    """run(*tensors), all [M, N], gives the same bits in 50 runs, and rows of its first result, also
    [M, N], whichever other rows there are."""
    wanted = run(*tensors)
    for _ in range(50):
        assert all(map(torch.equal, run(*tensors), wanted))
    for rows in slices:
        assert torch.equal(run(*(t[rows] for t in tensors))[0], wanted[0][rows])


def poison(monkeypatch: pytest.MonkeyPatch, value: float = float("nan")) -> None:
    """Fill all memory that is asked for uninitialised with NaN, so that whatever a kernel leaves
    unwritten shows; or with another value, so that what nobody reads is the same each time."""

    def poisoned(make):
        def empty(*args, **kwargs):
            t = make(*args, **kwargs)
            return t.fill_(value) if t.is_floating_point() else t

        return empty

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    if private.empty_strided_cuda is not None:
        monkeypatch.setattr(private, "empty_strided_cuda", poisoned(private.empty_strided_cuda))
    call_cache.forget()
    monkeypatch.setattr(written, "_factory", functools.lru_cache(written._factory.__wrapped__))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


@contextlib.contextmanager
def patched(target: Any, **values: Any) -> Iterator[None]:
    """Other values for a while of names of a module from which what a call does follows."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(target, name, value)
        call_cache.forget()
        yield
    call_cache.forget()


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A list to which every launch adds the kernel's name and its arguments, real tensors, by name."""
    seen: list[tuple[str, dict[str, Any]]] = []
    ordinary = recipe.launch

    def launch(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
        seen.append((kernel.__name__, arguments | options))
        return ordinary(kernel, programs, arguments, options)

    call_cache.forget()
    monkeypatch.setattr(private, "has_entry", lambda kernel: False)
    monkeypatch.setattr(recipe, "launch", launch)
    return seen


def in_memory(x: Tensor, how: str) -> Tensor:
    """x [M, N] with its values, laid out in one of LAYOUTS."""
    M, N = x.shape
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "rows apart":
        return torch.cat([x, x], 1)[:, :N]
    if how == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(M, N)
    if how == "every other column":
        return torch.stack([x, x], 2).view(M, 2 * N)[:, ::2]
    assert how == "contiguous"
    return x.contiguous()


LAYOUTS = ("contiguous", "transposed", "rows apart", "offset", "every other column")
