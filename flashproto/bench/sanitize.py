"""Small attention calls, one for each configuration of the Hopper kernels, for compute-sanitizer.

    python -m flashproto.bench sanitize             # compiles them, into Triton's cache
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1         # so that each tensor is an allocation of its own
    compute-sanitizer --tool memcheck python -m flashproto.bench sanitize
    compute-sanitizer --tool racecheck python -m flashproto.bench sanitize
    compute-sanitizer --tool racecheck python -m flashproto.bench sanitize --controls
    compute-sanitizer --tool racecheck python -m flashproto.bench sanitize --variants
    compute-sanitizer --tool memcheck python -m flashproto.bench sanitize --caches

--variants has masks, packed sequences and changed scores instead; masks are prepared by small kernels.
--caches has calls of attention_with_kv_cache, on the portable kernels too: new tokens are put into rows
or pages, and what nobody wrote is NaN.

Without these two no other kernels run: inputs come from the CPU, and results are checked there.  A line
is printed after each call, so that a run that is cut short says how far it came.  Exit code 1 where a
result is wrong.

racecheck 2025.3.1 seems to compare how many barriers (`bar.sync`) the thread that wrote and the one
that reads have waited at, whoever else took part in them, and not to follow mbarriers.  The kernels are
written so that it reports nothing (kernels/hopper/warpgroups.py).  --controls runs kernels of a few
lines, none with a race, from which that is inferred:

    partitions alone            Triton's hand-over to warp partitions and nothing else: not reported
    and a wait of one           the first partition waits at a barrier of its own warps, for nothing:
                                the hand-over is reported
    and both leave              the same, but the partitions end themselves: not reported
    and a wait of each          the second one does so too: not reported
    a number, by mbarrier       one gives the other a number, and an mbarrier orders it: reported, with
                                --num-cuda-barriers too, and the hand-over with it, since Triton has
                                the first one's warps wait before they arrive
    and a wait of the taker     behind the mbarrier, where it orders nothing: neither is reported
    a number, by named barrier  not reported

By hand, with up to six waits of the partitions alone: reported where the first one waits more often.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashproto

from .. import backends, configs, masks, reference
from ..variant import Kind
from .attention import rounding_of_delta, rounding_of_dq
from .measure import compare
from .search import Chosen

# HOW, WAITS and LEAVES of control_kernel.
CONTROLS = {
    "partitions alone": ("none", 0, False),
    "and a wait of one": ("none", 1, False),
    "and both leave": ("none", 1, True),
    "and a wait of each": ("none", 2, False),
    "a number, by mbarrier": ("mbarrier", 0, False),
    "a number, and a wait of the taker": ("mbarrier", 3, False),
    "a number, by named barrier": ("named", 0, False),
}
CONTROL_PROGRAMS = 132
HEAD_DIMS = (64, 96, 128, 192, 256)
# One between any two lengths at which a configuration changes.
KEYS = (200, 1200, 2100, 4200, 8200, 16400)
SEVERAL_TILES = 600  # keys
# (B, Hq, Hkv, Sq): a head pair of a few tiles; for the forward also few queries, few of grouped heads,
# more of them, and tiles for four consumers
SHAPES = ((1, 2, 1, 380), (1, 2, 2, 300), (1, 2, 2, 3), (1, 4, 1, 5), (30, 8, 2, 33), (1, 2, 2, 500))


@dataclass(frozen=True)
class Call:
    """One call of SHAPES."""

    D: int
    Sk: int
    causal: bool
    backward: bool
    deterministic: bool
    shape: tuple[int, int, int, int] = SHAPES[0]
    # of the pass it is named after, if not the one of this length
    chosen: configs.HopperForward | configs.HopperBackward | None = None

    @property
    def config(self) -> configs.HopperForward:
        """Of its forward."""
        return self.chosen if isinstance(self.chosen, configs.HopperForward) else self.taken()

    def taken(self, seen: int | None = None) -> configs.HopperForward:
        """What its forward takes where a query tile sees so many keys."""
        B, Hq, Hkv, Sq = self.shape
        return configs.attention_forward_hopper(
            self.D, self.Sk, Kind(CAUSAL=self.causal), Sq, B * Hkv, Hq // Hkv, seen=seen
        )

    @property
    def key(self) -> str:
        mask = "causal" if self.causal else "full"
        which = (
            "forward"
            if not self.backward
            else ("deterministic backward" if self.deterministic else "backward")
        )
        B, Hq, Hkv, Sq = self.shape
        name = f" by {self.chosen.name}" if self.chosen else ""
        return f"D{self.D} B{B} H{Hq}/{Hkv} Sq{Sq} Sk{self.Sk} {mask} {which}{name}"


def calls() -> list[Call]:
    """The shortest call for each forward configuration that one of SHAPES takes, keys split and whole,
    and one of a few tiles for each other one and for each backward configuration."""
    made, seen = [], set()
    for causal in (False, True):
        for D in HEAD_DIMS:
            for Sk, shape in itertools.product(KEYS, SHAPES):
                plain = Call(D, Sk, causal, False, False, shape)
                whole = replace(plain, chosen=plain.taken(0))  # keys are not split
                for call in (plain, whole):
                    if (D, call.config) not in seen:
                        seen.add((D, call.config))
                        made.append(call)
            made += [Call(D, KEYS[0], causal, True, deterministic) for deterministic in (False, True)]
    made += [
        Call(config.D, SEVERAL_TILES, config.KIND.CAUSAL, False, False, SHAPES[-1], config)
        for config in forward_configurations()
        if (config.D, config) not in seen
    ]
    made += [
        Call(config.D, SEVERAL_TILES, config.KIND.CAUSAL, True, config.ORDERED, chosen=config)
        for config in backward_configurations()
    ]
    return made


def forward_configurations() -> list[configs.HopperForward]:
    """Those of many queries, each once, over head dims, lengths, masks and numbers of heads that tell
    them apart."""
    chosen = (
        configs.attention_forward_hopper(D, Sk, Kind(CAUSAL=causal), Sq, heads)
        for D, causal, Sk, (Sq, heads) in itertools.product(
            (64, 128, 256), (False, True), KEYS, ((16384, 1024), (4096, 64))
        )
    )
    return list(dict.fromkeys(chosen))


def backward_configurations() -> list[configs.HopperBackward]:
    """Each once, over head dims, lengths, masks, groups and numbers of heads that tell them apart."""
    chosen = (
        configs.attention_backward_hopper(D, Sk, Kind(CAUSAL=causal), deterministic, heads, group)
        for D, causal, deterministic, Sk, heads, group in itertools.product(
            (64, 128, 256), (False, True), (False, True), KEYS, (1, 1024), (1, 8)
        )
    )
    return list(dict.fromkeys(chosen))


def run(call: Call) -> str | None:
    """What is wrong with the call's results; None if nothing."""
    if call.chosen is None:
        return checked(call)
    with Chosen("backward" if call.backward else "forward") as chosen:
        chosen.set(call.chosen)
        return checked(call)


def checked(call: Call) -> str | None:
    """`run`, by whatever configuration is taken."""
    B, Hq, Hkv, Sq = call.shape
    shapes = ((B, Hq, Sq, call.D), (B, Hkv, call.Sk, call.D), (B, Hkv, call.Sk, call.D))
    host = [torch.randn(shape).bfloat16() for shape in shapes]
    grad = torch.randn(shapes[0]).bfloat16()
    inputs = [t.cuda().requires_grad_(call.backward) for t in host]
    out = flashproto.attention(*inputs, causal=call.causal, impl="hopper")
    assert isinstance(out, Tensor)
    got = {"out": out.detach().cpu()}
    exact_inputs = [t.float().requires_grad_(call.backward) for t in host]
    exact, _ = reference.attention(*exact_inputs, causal=call.causal)
    want, rounding = {"out": exact.detach()}, {}
    if call.backward:
        names = ("dq", "dk", "dv")
        grads = torch.autograd.grad(out, inputs, grad.cuda())
        got |= {name: t.cpu() for name, t in zip(names, grads, strict=True)}
        want |= dict(zip(names, torch.autograd.grad(exact, exact_inputs, grad.float()), strict=True))
        q, k, _ = (t.detach() for t in exact_inputs)
        rounding["dq"] = rounding_of_dq(q, k, want["out"], grad.float(), grad.dtype, call.causal)
    return compare(got, want, rounding)


# What attention is given, of a device and a number of tokens; of SEQUENCES attention_varlen.
VARIANTS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "causal": lambda d, n: {"causal": True},
    "window": lambda d, n: {"causal": True, "window": (200, 0)},
    "window and first keys": lambda d, n: {"mask": masks.window(150, 0, first=40)},
    "softcap, sinks": lambda d, n: {"causal": True, "softcap": 20.0, "sinks": numbers(1, d)},
    "ALiBi": lambda d, n: {"causal": True, "alibi_slopes": numbers(0.1, d)},
    "documents": lambda d, n: {"causal": True, "mask": masks.documents(documents(n, d))},
    "padding": lambda d, n: {"mask": masks.padding(torch.tensor([n - 200]).to(d))},
    "tree": lambda d, n: {"causal": True, "mask": masks.tree(branches(n, d))},
    "boolean": lambda d, n: {"mask": masks.boolean(boolean(n, d))},
    "block diffusion": lambda d, n: {"mask": masks.block_diffusion(16)},
    "global tokens": lambda d, n: {"mask": masks.window(100, 100) | masks.global_tokens(30)},
}
SEQUENCES = "sequences"
TABLES = ("boolean", "block diffusion", "global tokens")
VARIANT_HEADS = 2, 1
VARIANT_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def documents(tokens: int, device: str) -> Tensor:
    """[tokens], of which document each is."""
    return ((torch.arange(tokens) + 80) // 150).to(device)


def branches(tokens: int, device: str) -> Tensor:
    """[tokens], the parents of a trunk and three branches."""
    parents = torch.arange(tokens) - 1
    parents[tokens // 4 :: tokens // 4] = tokens // 4 - 1
    return parents.to(device)


def boolean(tokens: int, device: str) -> Tensor:
    """[1, 2, tokens, tokens]: nine of ten pairs, but some tiles whole and some hidden."""
    seen = torch.rand(1, 2, tokens, tokens, generator=torch.Generator().manual_seed(0)) < 0.9
    seen[..., :256, 256:384], seen[..., 256:512, :256] = False, True
    return seen.to(device)


def numbers(first: float, device: str) -> Tensor:
    """A number for each of two heads."""
    return torch.tensor([first, first / 3]).to(device)


@dataclass(frozen=True)
class VariantCall:
    """One call of VARIANTS or of SEQUENCES on the Hopper kernels."""

    name: str
    D: int
    Dv: int
    backward: bool

    @property
    def key(self) -> str:
        return f"{self.name} D{self.D}/{self.Dv} {'backward' if self.backward else 'forward'}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, impl: str) -> Tensor:
        """out [1, H, S, Dv]."""
        device, tokens = str(q.device), q.shape[2]
        if self.name != SEQUENCES:
            out = flashproto.attention(q, k, v, impl=impl, **VARIANTS[self.name](device, tokens))
            assert isinstance(out, Tensor)
            return out
        starts = torch.tensor([0, 150, 150, 151, tokens], dtype=torch.int32).to(device)
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out = flashproto.attention_varlen(q, k, v, starts, starts, causal=True, impl=impl)
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]


def variant_calls() -> list[VariantCall]:
    """All but those that Hopper's kernels refuse: masks with a table where values are narrower."""
    return [
        VariantCall(name, D, Dv, backward)
        for name, (D, Dv), backward in itertools.product(
            (*VARIANTS, SEQUENCES), VARIANT_DIMS, (False, True)
        )
        if Dv == D or name not in TABLES
    ]


def variant_checked(call: VariantCall, impl: str = "hopper", device: str = "cuda") -> str | None:
    """What is wrong with the call's results; None if nothing."""
    Hq, Hkv = VARIANT_HEADS
    shapes = ((Hq, call.D), (Hkv, call.D), (Hkv, call.Dv))
    host = [torch.randn(1, H, SEVERAL_TILES, D).bfloat16() for H, D in shapes]
    grad = torch.randn(1, Hq, SEVERAL_TILES, call.Dv).bfloat16()
    found = []
    for where, dtype, by in ((device, torch.bfloat16, impl), ("cpu", torch.float32, "reference")):
        q, k, v = (t.to(where, dtype, copy=True).requires_grad_(call.backward) for t in host)
        out = call.attend(q, k, v, by)
        found.append({"out": out.detach().cpu()})
        if call.backward:
            grads = torch.autograd.grad(out, (q, k, v), grad.to(where, dtype))
            found[-1] |= {f"d{n}": t.cpu() for n, t in zip("qkv", grads, strict=True)}
    got, want = found
    rounding = {}
    if call.backward:
        q, k, _ = (t.float() for t in host)
        mean_key = call.attend(q, k, k, "reference")
        rounding["dq"] = rounding_of_delta(mean_key, want["out"], grad.float(), grad.dtype)
    return compare(got, want, rounding)


@dataclass(frozen=True)
class CacheCall:
    """One call of attention_with_kv_cache; page: tokens of a page, 0 for rows; packed: queries lie
    sequence behind sequence."""

    impl: str
    D: int
    page: int
    Sq: int
    packed: bool = False

    @property
    def key(self) -> str:
        keys = f"pages of {self.page}" if self.page else "rows"
        return f"cache {self.impl} D{self.D} {keys} Sq{self.Sq}{' packed' * self.packed}"


CACHE_HEADS = 4, 2
CACHE_LENGTHS = (0, 1, 77, 513)  # before the call
CACHE_ROOM = 1024


def cache_calls() -> list[CacheCall]:
    """Few queries and chunks, in rows and in pages of all kinds of copies."""
    made = [
        CacheCall(impl, D, page, Sq)
        for impl, D in itertools.product(("hopper", "triton"), (64, 128))
        for page, Sq in itertools.product((0, 16, 64, 128), (1, 5, 200))
    ]
    return made + [CacheCall("triton", 128, page, 9, packed=True) for page in (0, 16, 48, 64)]


def cache_checked(call: CacheCall, device: str = "cuda") -> str | None:
    """What is wrong with out and with the rows or pages behind the call; None if nothing."""
    (Hq, Hkv), B, page = CACHE_HEADS, len(CACHE_LENGTHS), call.page or CACHE_ROOM
    per_sequence = -(-CACHE_ROOM // page)
    options: dict[str, Tensor] = {"lengths": torch.tensor(CACHE_LENGTHS, dtype=torch.int32)}
    pool = [
        torch.full((B * per_sequence + 1, page, Hkv, call.D), torch.nan, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    places = torch.randperm(B * per_sequence).view(B, -1) if call.page else None
    for b, n in enumerate(CACHE_LENGTHS):
        for x in pool:
            for j in range(n):
                at = b if places is None else places[b, j // page]
                x[at, j % page] = torch.randn(Hkv, call.D)
    if places is None:
        pool = [x[:B].contiguous() for x in pool]
    else:
        options["page_table"] = places.int()
    q, k, v = (torch.randn(B, call.Sq, H, call.D).bfloat16() for H in (Hq, Hkv, Hkv))
    if call.packed:
        options["cu_seqlens_q"] = torch.arange(B + 1, dtype=torch.int32) * call.Sq
    q, k, v = (x.flatten(0, 1) if call.packed else x.transpose(1, 2) for x in (q, k, v))
    found = {}
    for impl, where in ((call.impl, device), ("reference", "cpu")):
        caches = [x.to(where, copy=True) for x in pool]
        tensors: Any = {name: x.to(where) for name, x in (options | {"k": k, "v": v}).items()}
        out = flashproto.attention_with_kv_cache(q.to(where), *caches, **tensors, impl=impl)
        assert isinstance(out, Tensor)
        found[impl] = [x.cpu() for x in (out, *caches)]
    (out, *caches), (wanted, *rows) = found[call.impl], found["reference"]
    if not all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(caches, rows, strict=True)):
        return "other rows"
    return compare({"out": out}, {"out": wanted.float()}, {})


CHECKS: dict[type, Callable[[Any], str | None]] = {
    Call: run,
    VariantCall: variant_checked,
    CacheCall: cache_checked,
}


def control(name: str) -> str | None:
    """What is wrong with the results of one of CONTROLS; None if nothing."""
    from ..kernels.hopper.racecheck_controls import control_kernel  # not every Triton has Gluon

    out = torch.full((CONTROL_PROGRAMS, 2), -1, dtype=torch.int32).cuda()
    control_kernel[(CONTROL_PROGRAMS,)](out, *CONTROLS[name], num_warps=4)
    right = bool((out.cpu() == torch.arange(CONTROL_PROGRAMS)[:, None]).all())
    return None if right else "wrong numbers"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", metavar="REGEX", default="", help="only calls whose name matches")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no new call after that")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--controls", action="store_true", help="run kernels without a race instead")
    instead("--variants", action="store_true", help="run masks and changed scores instead")
    instead("--caches", action="store_true", help="run calls on caches instead")
    options = parser.parse_args(arguments)
    listed: Sequence[Call | VariantCall | CacheCall] = calls()
    if options.variants or options.caches:
        listed = variant_calls() if options.variants else cache_calls()
    wanted = [call for call in listed if re.search(options.cells, call.key)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = backends.device_reasons("hopper", device)
    if reasons:
        sys.exit(f"flashproto.bench sanitize: {'; '.join(reasons)}")
    # Filling new memory would run other kernels.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if options.controls:
        wrong = 0
        for name in CONTROLS:
            complaint = control(name)
            wrong += complaint is not None
            print(f"{name}: {complaint or 'right'}", flush=True)
        sys.exit(wrong > 0)
    torch.manual_seed(0)
    started, wrong = time.perf_counter(), 0
    for index, call in enumerate(wanted):
        if options.budget is not None and time.perf_counter() - started > options.budget:
            print(f"stopped with {len(wanted) - index} calls left, from {call.key}")
            break
        torch.use_deterministic_algorithms(getattr(call, "deterministic", False))
        try:
            complaint = CHECKS[type(call)](call)
        except backends.BackendError as refusal:
            print(f"{call.key}: does not run: {refusal}", flush=True)
            continue
        finally:
            torch.use_deterministic_algorithms(False)
        wrong += complaint is not None
        print(f"{call.key}: {complaint or 'right'}", flush=True)
    print(f"{len(wanted)} calls, {wrong} wrong, {time.perf_counter() - started:.0f} s")
    sys.exit(wrong > 0)
