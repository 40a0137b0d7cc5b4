"""The checked mode of flashproto.distributed: what differs by rank is the same error on all ranks.

All calls of a number of processes are made in one group, one behind the other: each error leaves the
group as it was, or the next call says so.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flashproto import distributed, masks
from flashproto.checks import reading
from flashproto.distributed.agreement import CHUNK, digest, facts_of

Call = Callable[[], Any]
SAME = "; it takes the same on all ranks of the group. Make the same call on every rank."
TOKENS, HEADS, D = 12, 2, 8  # of a shard


def at(rank: int, here: Any, elsewhere: Any) -> Any:
    return here if dist.get_rank() == rank else elsewhere


def ring(**options: Any) -> Any:
    q, k, v = (torch.randn(1, HEADS, TOKENS, D) for _ in range(3))
    return distributed.ring_attention(**{"q": q, "k": k, "v": v, "impl": "reference"} | options)


def of_type(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.randn(1, HEADS, TOKENS, D, dtype=dtype) for name in "qkv"}


def documents(*ids: int) -> masks.Mask:
    return masks.documents(torch.tensor(ids).repeat_interleave(TOKENS * dist.get_world_size() // 3))


def with_grad(*names: str) -> dict[str, Tensor]:
    return {n: torch.randn(1, HEADS, TOKENS, D).requires_grad_(n in names) for n in "qkv"}


def within(context: Any, run: Call) -> Any:
    with context:
        return run()


def mapped(run: Callable[[Tensor], Any], x: Tensor) -> Any:
    return torch.vmap(run)(x[None])


def forward_mode(run: Callable[[Tensor], Any], x: Tensor) -> Any:
    return torch.func.jvp(run, (x,), (x,))


def plain(run: Callable[[Tensor], Any], x: Tensor) -> Any:
    return run(x)


def backward_of(make: Callable[[Tensor], Tensor], *shape: int) -> None:
    """The last rank makes the call again where the others run its backward pass."""
    x = torch.randn(shape, requires_grad=True)
    out = make(x)
    if at(2, True, False):
        make(x)
    else:
        out.sum().backward()


norm, rms = distributed.layer_norm, distributed.rms_norm
ROWS, WEIGHT = torch.ones(3, 4), torch.ones(4)
SINKS = torch.tensor([0.5, -torch.inf])

# A call that is another one on one of three ranks, and the error of all three; SAME ends most of them.
DIFFERENCES: dict[str, tuple[Call, str]] = {
    "shape": (
        lambda: ring(q=torch.randn(1, HEADS, at(1, 6, TOKENS), D)),
        "ring_attention: q is [1, 2, 12, 8] on ranks 0, 2 and [1, 2, 6, 8] on rank 1",
    ),
    "shapes of three kinds": (
        lambda: ring(v=torch.randn(1, HEADS, TOKENS, 8 * (1 + dist.get_rank()))),
        "ring_attention: v is [1, 2, 12, 8] on rank 0 and [1, 2, 12, 16] on rank 1",
    ),
    "dtype": (
        lambda: ring(**of_type(at(0, torch.bfloat16, torch.float32))),
        "ring_attention: q is bfloat16 on rank 0 and float32 on ranks 1, 2",
    ),
    "device": (
        lambda: ring(k=torch.randn(1, HEADS, TOKENS, D).to(at(2, "meta", "cpu"))),
        "ring_attention: k is of device cpu on ranks 0, 1 and of device meta on rank 2",
    ),
    "no tensor": (
        lambda: ring(q=at(2, "q", torch.randn(1, HEADS, TOKENS, D))),
        "ring_attention: q is [1, 2, 12, 8] on ranks 0, 1 and 'q' on rank 2",
    ),
    "gradient": (
        lambda: ring(**with_grad("q", *at(2, "", "kv"))),
        "ring_attention: k is differentiated on ranks 0, 1 and not differentiated on rank 2",
    ),
    "no_grad": (
        lambda: within(torch.set_grad_enabled(at(2, False, True)), lambda: ring(**with_grad("v"))),
        "ring_attention: v is differentiated on ranks 0, 1 and not differentiated on rank 2",
    ),
    "autocast": (
        lambda: within(torch.autocast("cpu", torch.bfloat16, enabled=at(2, True, False)), ring),
        "ring_attention: torch.autocast is None on ranks 0, 1 and torch.bfloat16 on rank 2",
    ),
    "causal": (
        lambda: ring(causal=at(2, True, False)),
        "ring_attention: causal is False on ranks 0, 1 and True on rank 2",
    ),
    "window": (
        lambda: ring(window=at(2, (4, 0), (3, 0))),
        "ring_attention: window is [3, 0] on ranks 0, 1 and [4, 0] on rank 2",
    ),
    "softcap": (
        lambda: ring(softcap=at(2, 30, 20.5)),
        "ring_attention: softcap is 20.5 on ranks 0, 1 and 30 on rank 2",
    ),
    "scale": (
        lambda: ring(scale=at(2, 0.25, None)),
        "ring_attention: scale is None on ranks 0, 1 and 0.25 on rank 2",
    ),
    "return_lse": (
        lambda: ring(return_lse=at(2, True, False)),
        "ring_attention: return_lse is False on ranks 0, 1 and True on rank 2",
    ),
    "method": (
        lambda: ring(method=at(2, "all_gather", "ring")),
        "ring_attention: method is 'ring' on ranks 0, 1 and 'all_gather' on rank 2",
    ),
    "impl": (
        lambda: ring(impl=at(2, None, "reference")),
        "ring_attention: impl is 'reference' on ranks 0, 1 and None on rank 2",
    ),
    "sinks of one": (
        lambda: ring(sinks=at(2, None, SINKS)),
        "ring_attention: sinks is [2] on ranks 0, 1 and None on rank 2",
    ),
    "sinks": (
        lambda: ring(sinks=at(2, torch.nn.Parameter(2 * SINKS), torch.nn.Parameter(SINKS))),
        "ring_attention: sinks is of values * on ranks 0, 1 and of values * on rank 2",
    ),
    "alibi_slopes": (
        lambda: ring(
            alibi_slopes=torch.tensor([0.5, at(2, 0.25, 0.5)]), causal=True, method="all_gather"
        ),
        "ring_attention: alibi_slopes is of values * on ranks 0, 1 and of values * on rank 2",
    ),
    "mask of one": (
        lambda: ring(mask=at(2, None, masks.causal())),
        "ring_attention: mask is a mask of 1 part on ranks 0, 1 and None on rank 2",
    ),
    "bands": (
        lambda: ring(mask=masks.causal() & masks.window(at(2, 4, 3))),
        "ring_attention: mask is window(3, 0) on ranks 0, 1 and window(4, 0) on rank 2",
    ),
    "parts": (
        lambda: ring(mask=at(2, documents(0, 1, 2), masks.causal() & documents(0, 1, 2))),
        "ring_attention: mask is a mask of 2 parts on ranks 0, 1 and a mask of 1 part on rank 2",
    ),
    "length of documents": (
        lambda: ring(mask=masks.causal() & documents(0, 1, 2, *at(2, (3,), ()))),
        "ring_attention: mask is documents(a *[36]) on ranks 0, 1 and documents(a *[48]) on rank 2",
    ),
    "documents": (
        lambda: ring(mask=documents(*at(2, (0, 0, 1), (0, 1, 1)))),
        "ring_attention: mask is of values * on ranks 0, 1 and of values * on rank 2",
    ),
    "padding": (
        lambda: ring(mask=masks.padding(torch.tensor([at(2, 20, 30)]))),
        "ring_attention: mask is of values * on ranks 0, 1 and of values * on rank 2",
    ),
    "another function": (
        lambda: at(2, rms, norm)(ROWS),
        "flashproto.distributed: the call is layer_norm on ranks 0, 1 and rms_norm on rank 2",
    ),
    "rows": (
        lambda: norm(torch.ones(at(2, 4, 3), 4 + dist.get_rank())),
        "layer_norm: x is [3, ...] on ranks 0, 1 and [4, ...] on rank 2",
    ),
    "weight": (
        lambda: rms(ROWS, at(2, None, WEIGHT)),
        "rms_norm: weight is [...] on ranks 0, 1 and None on rank 2",
    ),
    "dtype of a bias": (
        lambda: norm(ROWS, WEIGHT, WEIGHT.to(at(2, torch.float64, torch.float32))),
        "layer_norm: bias is float32 on ranks 0, 1 and float64 on rank 2",
    ),
    "eps": (
        lambda: norm(ROWS, eps=at(2, 1e-6, 1e-5)),
        "layer_norm: eps is 1e-05 on ranks 0, 1 and 1e-06 on rank 2",
    ),
    "unshard": (
        lambda: distributed.unshard(torch.ones(at(2, 3, 2), 4), 1),
        "unshard: x is [2, 4] on ranks 0, 1 and [3, 4] on rank 2",
    ),
    "dim": (
        lambda: distributed.unshard(torch.ones(4, 4), at(2, 0, 1)),
        "unshard: dim is 1 on ranks 0, 1 and 0 on rank 2",
    ),
    "sequence": (
        lambda: distributed.shard(torch.arange(12) + at(2, 1, 0), 0),
        "shard: x is of values * on ranks 0, 1 and of values * on rank 2",
    ),
    "backward pass of attention": (
        lambda: backward_of(lambda x: ring(q=x), 1, HEADS, TOKENS, D),
        "flashproto.distributed: the call is backward of ring_attention on ranks 0, 1 and "
        "ring_attention on rank 2",
    ),
    "backward pass of a norm": (
        lambda: backward_of(norm, 3, 4),
        "flashproto.distributed: the call is backward of a norm on ranks 0, 1 and layer_norm on rank 2",
    ),
    "backward pass of unshard": (
        lambda: backward_of(lambda x: distributed.unshard(x, 1), 3, 4),
        "flashproto.distributed: the call is backward of unshard on ranks 0, 1 and unshard on rank 2",
    ),
    # --- what one rank alone is refused, of arguments that do not differ
    "vmap": (
        lambda: at(2, mapped, plain)(norm, ROWS),
        "NotImplementedError: layer_norm: x is inside a *. Call it outside. (on rank 2 of the group)",
    ),
    "forward mode": (
        lambda: at(1, forward_mode, plain)(partial(distributed.unshard, dim=0), torch.ones(2, 3)),
        "NotImplementedError: unshard: x is inside a *. Call it outside. (on rank 1 of the group)",
    ),
    # --- what all are refused alike is said as ever
    "refused": (
        lambda: ring(method="star"),
        "ring_attention: method is 'star'; it takes 'ring' or 'all_gather'. Pass 'ring' for *.",
    ),
}


def said(call: Call) -> str:
    with pytest.raises(Exception) as caught:
        call()
    name = caught.type.__name__
    return str(caught.value) if caught.type is ValueError else f"{name}: {caught.value}"


def differences() -> dict[str, str]:
    reading.CHECKED = True
    return {name: said(call) for name, (call, _) in DIFFERENCES.items()}


def agreement() -> None:
    """Calls that agree give what they give without the mode, forward and backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = {n: torch.randn(1, HEADS, TOKENS * size, D) for n in "qkv"}
    sinks, columns, weight = torch.randn(HEADS), torch.randn(3, 4 + rank), torch.randn(4 + rank)

    def results() -> list[Tensor]:
        shards = {n: distributed.shard(x, 2).requires_grad_() for n, x in whole.items()}
        mask = documents(0, 1, 2) & masks.window(20, first=1)
        out, lse = ring(**shards, sinks=sinks, mask=mask, softcap=9, return_lse=True)
        back = distributed.unshard(out, 2)
        rows, scale = (x.clone().requires_grad_() for x in (columns, weight))
        y = distributed.layer_norm(rows, scale)
        leaves = [*shards.values(), rows, scale]
        total = back.square().sum() + lse.sum() + y.square().sum()
        return [back, lse, y, *torch.autograd.grad(total, leaves)]

    made = []
    for reading.CHECKED in (False, True):
        made.append(results())
    assert all(map(torch.equal, *made))


def test_all_ranks_say_what_differs() -> None:
    made = processes.run({"differences": differences, "agreement": agreement}, 3)["differences"]
    assert made[0] == made[1] == made[2]
    for name, (_, words) in DIFFERENCES.items():
        whole = words if words.endswith((".", ")")) else words + SAME
        assert fnmatch(made[0][name], whole.replace("[", "[[]")), f"{name}: {made[0][name]}"


def test_nothing_is_told_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own, group: told.append(own))
    x = torch.randn(2, 8, requires_grad=True)
    with processes.alone():
        for checked in (False, True):
            monkeypatch.setattr(reading, "CHECKED", checked)
            try:
                distributed.unshard(norm(distributed.shard(x, 0)), 0).sum().backward()
            except TypeError:
                assert checked
    assert len(told) == 1


def test_a_digest_tells_values_and_their_order() -> None:
    x = torch.arange(CHUNK + 3)
    for dtype in (torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.bool):
        a = (x % 250 - 50 * (dtype == torch.bool)).clamp(0).to(dtype)
        assert digest(a) == digest(a.clone()) == digest(a.reshape(-1, 1)[:, 0])
        other = [a.flip(0), a.roll(1)]
        for i in (0, CHUNK - 1, CHUNK + 2):
            other.append(a.clone())
            other[-1][i] = 1 - a[i].int()
        assert len({digest(a), *map(digest, other)}) == 1 + len(other), dtype
    assert digest(torch.tensor([1, 3])) != digest(torch.tensor([3, 2]))
    assert digest(torch.empty(0)) == digest(torch.empty(2, 0))


def test_numbers_are_the_same_in_any_type() -> None:
    numpy = pytest.importorskip("numpy")
    for many in (
        (3, 3.0, numpy.int32(3), numpy.float32(3)),
        (True, numpy.bool_(True)),
        ([1, 2], (1.0, 2)),
    ):
        assert len({str(facts_of(x, False, False)) for x in many}) == 1, many
    assert facts_of(float("nan"), False, False) == ["nan"]
