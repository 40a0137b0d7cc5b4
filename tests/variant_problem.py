"""Every feature of attention as a row of one table, random problems of any of them together, and what
they are by definition, written down once more in plain PyTorch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from attention_problem import ATOL, Problem, error, lay_out
from score_mods import by_definition
from torch import Tensor

import flashproto
from flashproto import hooks, masks
from flashproto.variant import DIFFERENTIABLE, STATISTIC, Number
from flashproto.variant import FEATURES as OPTIONS

Predicate = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


class Drawn(NamedTuple):
    """options: what attention is given.  sees(o, b, h, i, j): which pairs it lets see each other, o
    being Sk - Sq.
    mask: a value for the argument `mask`."""

    options: dict[str, Any]
    sees: Predicate | None = None
    mask: masks.Mask | None = None


@dataclass(frozen=True)
class Feature:
    """draw(generator, problem, device): one way to ask for it.

    square: whether it needs as many queries as keys.  packed: whether attention_varlen takes it.
    """

    name: str
    draw: Callable[[random.Random, Problem, str], Drawn]
    square: bool = False
    packed: bool = True


def bounds(generator: random.Random, p: Problem) -> tuple[int, int]:
    """Narrow or wide, so that several masks together leave something to see."""
    left, right = (generator.choice((generator.randrange(p.Sk + 2), p.Sk)) for _ in range(2))
    return left, right


def causal(generator: random.Random, p: Problem, device: str) -> Drawn:
    return Drawn({"causal": True}, lambda o, b, h, i, j: j <= i + o)


def top_left(generator: random.Random, p: Problem, device: str) -> Drawn:
    return Drawn({}, lambda o, b, h, i, j: j <= i, masks.causal(top_left=True))


def window(generator: random.Random, p: Problem, device: str) -> Drawn:
    left, right = bounds(generator, p)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + o - left <= j) & (j <= i + o + right)

    return Drawn({"window": (left, right)}, sees)


def left_window(generator: random.Random, p: Problem, device: str) -> Drawn:
    left, _ = bounds(generator, p)
    return Drawn({"window": [left, None]}, lambda o, b, h, i, j: j >= i + o - left)


def right_window(generator: random.Random, p: Problem, device: str) -> Drawn:
    _, right = bounds(generator, p)
    return Drawn({"window": (None, right)}, lambda o, b, h, i, j: j <= i + o + right)


def first_keys(generator: random.Random, p: Problem, device: str) -> Drawn:
    left, right = bounds(generator, p)
    first = generator.randrange(1, p.Sk + 2)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i + o - left <= j) | (j < first)) & (j <= i + o + right)

    return Drawn({}, sees, masks.window(left, right, first=first))


def runs(generator: random.Random, rows: int, length: int, device: str) -> Tensor:
    """[rows, length] of runs of equal numbers."""
    made = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < length:
            row += [len(row)] * generator.randrange(1, length + 1)
        made.append(row[:length])
    return torch.tensor(made, device=device)


def documents(generator: random.Random, p: Problem, device: str) -> Drawn:
    rows = generator.choice((1, p.B))
    if p.Sq == p.Sk:
        ids = runs(generator, rows, p.Sk, device)
        mask = masks.documents(ids[0] if rows == 1 else ids)
        ids = ids.expand(p.B, -1)
        return Drawn({}, lambda o, b, h, i, j: ids[b, i] == ids[b, j], mask)
    ids, ids_k = (runs(generator, rows, n, device) for n in (p.Sq, p.Sk))
    mask = masks.documents(ids, ids_k)
    ids, ids_k = ids.expand(p.B, -1), ids_k.expand(p.B, -1)
    return Drawn({}, lambda o, b, h, i, j: ids[b, i] == ids_k[b, j], mask)


def padding(generator: random.Random, p: Problem, device: str) -> Drawn:
    lengths = torch.tensor([generator.randint(0, p.Sk) for _ in range(p.B)], device=device)
    return Drawn({}, lambda o, b, h, i, j: j < lengths[b], masks.padding(lengths))


def prefix(generator: random.Random, p: Problem, device: str) -> Drawn:
    lengths = torch.tensor([generator.randint(0, p.Sk) for _ in range(p.B)], device=device)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < lengths[b]) | (j <= i + o)

    return Drawn({}, sees, masks.prefix(lengths))


def tree(generator: random.Random, p: Problem, device: str) -> Drawn:
    parents, ancestors = [], torch.zeros(p.B, p.Sk, p.Sk, dtype=torch.bool)
    for b in range(p.B):
        path: list[int] = []  # from the root to the token before
        row = []
        for t in range(p.Sk):
            if generator.random() < 0.3:
                path = path[: generator.randrange(len(path) + 1)]
            row.append(path[-1] if path else -1)
            path.append(t)
            ancestors[b, t, path] = True
        parents.append(row)
    mask = masks.tree(torch.tensor(parents, device=device))
    ancestors = ancestors.to(device)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i + o
        return ancestors[b, at.clamp(0, p.Sk - 1), j] & (at >= 0)

    return Drawn({}, sees, mask)


def intervals(generator: random.Random, p: Problem, device: str) -> Drawn:
    heads = generator.choice((1, p.Hq))
    shape = (generator.choice((1, p.B)), heads, p.Sk)

    def rows(low: int, high: int) -> Tensor:
        numbers = [generator.randrange(low, high) for _ in range(math.prod(shape))]
        return torch.tensor(numbers, device=device).view(shape)

    begin, end = rows(-1, p.Sq // 2 + 2), rows(p.Sq // 3, p.Sq + 2)
    mask = masks.intervals(begin, end)
    begin, end = (x.expand(p.B, p.Hq, p.Sk) for x in (begin, end))
    return Drawn({}, lambda o, b, h, i, j: (begin[b, h, j] <= i) & (i < end[b, h, j]), mask)


def boolean(generator: random.Random, p: Problem, device: str) -> Drawn:
    """Of any shape that broadcasts; in places runs of keys that all or none see."""
    shape = [generator.choice((1, n)) for n in (p.B, p.Hq, p.Sq)] + [p.Sk]
    if generator.random() < 0.2:
        shape = [*shape[:2], p.Sq, 1]
    x = torch.rand(shape, device=device) < generator.choice((0.3, 0.9))
    for seen in (False, True):
        start = generator.randrange(p.Sk + 1)
        x[..., start : start + generator.randrange(p.Sk + 1)] = seen
    if generator.random() < 0.5:
        x = x.mT.contiguous().mT
    given = x[0] if shape[0] == 1 else x
    x = x.expand(p.B, p.Hq, p.Sq, p.Sk)
    return Drawn({}, lambda o, b, h, i, j: x[b, h, i, j], masks.boolean(given))


def from_function(generator: random.Random, p: Problem, device: str) -> Drawn:
    step, of_batch, of_head = (generator.randrange(n) for n in (5, 2, 2))

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i - j
        at = at + b if of_batch else at
        at = at + 2 * h if of_head else at
        return at % (step + 2) != 0

    return Drawn({}, lambda o, *at: function(*at), masks.from_function(function))


def either(generator: random.Random, p: Problem, device: str) -> Drawn:
    """A window, or what intervals hide."""
    band, other = window(generator, p, device), intervals(generator, p, device)
    mask = masks.window(*band.options["window"]) | ~other.mask
    return Drawn({}, lambda *at: band.sees(*at) | ~other.sees(*at), mask)


def chunks(generator: random.Random, p: Problem, device: str) -> Drawn:
    size = generator.randrange(1, p.Sk + 2)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.div(i + o, size, rounding_mode="floor") == j // size

    return Drawn({}, sees, masks.chunks(size))


def global_tokens(generator: random.Random, p: Problem, device: str) -> Drawn:
    n = generator.randrange(1, p.Sk + 2)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < n) | ((i + o >= 0) & (i + o < n))

    return Drawn({}, sees, masks.global_tokens(n))


def dilated(generator: random.Random, p: Problem, device: str) -> Drawn:
    far, step = generator.randrange(p.Sk + 2), generator.randrange(1, 5)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + o - j
        return (distance >= 0) & (distance <= far) & (distance % step == 0)

    return Drawn({}, sees, masks.dilated(far, step))


def softcap(generator: random.Random, p: Problem, device: str) -> Drawn:
    return Drawn({"softcap": generator.choice((0.5, 3.0, 30.0))})


def by_head(p: Problem, device: str) -> Tensor:
    return torch.randn(p.Hq, device=device)


def sinks(generator: random.Random, p: Problem, device: str) -> Drawn:
    return Drawn({"sinks": by_head(p, device).requires_grad_()})


def alibi(generator: random.Random, p: Problem, device: str) -> Drawn:
    return Drawn({"alibi_slopes": (by_head(p, device).abs() * 0.3).requires_grad_()})


def bias(generator: random.Random, p: Problem, device: str) -> Drawn:
    """Of any shape that broadcasts, and any strides; some pairs are hidden, and maybe whole rows."""
    shape = [generator.choice((1, n)) for n in (p.B, p.Hq, p.Sq, p.Sk)]
    shape = shape[generator.randrange(1 + next((d for d in range(4) if shape[d] > 1), 3)) :]
    x = torch.randn(shape, device=device)
    if generator.random() < 0.5:
        x[torch.rand(shape, device=device) < 0.2] = -math.inf
    if len(shape) > 1 and generator.random() < 0.5:
        x = x.mT.contiguous().mT
    if generator.random() < 0.2:
        x = x.expand(p.B, p.Hq, p.Sq, p.Sk)
    return Drawn({"bias": x.to(generator.choice((p.dtype, torch.float32))).requires_grad_()})


def relative_bias(generator: random.Random, p: Problem, device: str) -> Drawn:
    columns = generator.choice((1, 2, 7, p.Sq + p.Sk - 1))
    offset = generator.choice((0, columns // 2, p.Sq - 1, -2))
    table = torch.randn(generator.choice((1, p.Hq)), columns, device=device)
    return Drawn({"relative_bias": table.requires_grad_(), "relative_offset": offset})


def score_mod(generator: random.Random, p: Problem, device: str) -> Drawn:
    """Of the score, all indices, operands that broadcast in any way, and a number."""

    def operand(low: float) -> Tensor:
        shape = [generator.choice((1, n)) for n in (p.B, p.Hq, p.Sq, p.Sk)]
        x = torch.rand(shape, device=device) + low
        x = x[0] if shape[0] == 1 and generator.random() < 0.5 else x
        return x.mT.contiguous().mT.requires_grad_()

    return Drawn({"score_mod": hooks.call("test_bent", operand(0.5), operand(-0.5), 0.1)})


def dropout(generator: random.Random, p: Problem, device: str) -> Drawn:
    share = generator.choice((0.1, 0.5, 0.9, 1.0))
    seed = torch.tensor([generator.randrange(2**63)], device=device)
    return Drawn({"dropout_p": share, "dropout_seed": seed})


def of_scores() -> Iterator[Feature]:
    """What variant.FEATURES has beside masks; a number without a row here is one of few."""
    own = {"softcap": softcap, "sinks": sinks, "alibi": alibi, "dropout": dropout}
    own |= {"bias": bias, "relative_bias": relative_bias, "score_mod": score_mod}
    for row in OPTIONS:
        name = row.field.lower()
        if name in own:
            yield Feature(name, own[name], packed="attention_varlen" in row.functions)
        elif row.what == STATISTIC:
            yield Feature(name, lambda _, p, device, name=name: Drawn({"return_aux": (name,)}))
        elif isinstance(row.what, Number):
            ends = max(row.what.low, -1.0), min(row.what.high, 1.0)
            yield Feature(
                name,
                lambda generator, p, device, name=name, ends=ends: Drawn(
                    {name: generator.uniform(*ends)}
                ),
            )


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("causal", causal),
        Feature("top_left", top_left, packed=False),
        Feature("window", window),
        Feature("left_window", left_window),
        Feature("right_window", right_window),
        Feature("first_keys", first_keys),
        Feature("documents", documents, packed=False),
        Feature("padding", padding, packed=False),
        Feature("prefix", prefix, packed=False),
        Feature("tree", tree, packed=False),
        Feature("intervals", intervals, packed=False),
        Feature("chunks", chunks, packed=False),
        Feature("global_tokens", global_tokens, packed=False),
        Feature("boolean", boolean, packed=False),
        Feature("from_function", from_function, packed=False),
        Feature("either", either, packed=False),
        Feature("dilated", dilated, packed=False),
        *of_scores(),
    )
}
# They are one argument, or one of them is refused beside the other (masks.window has the reason).
WINDOWS = ("window", "left_window", "right_window")


def compatible(names: Sequence[str]) -> bool:
    windows = [n for n in names if n in WINDOWS]
    return len(windows) < 2 and not (windows and windows != ["right_window"] and "first_keys" in names)


PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]


def covering(generator: random.Random, count: int, most: int = 6) -> list[tuple[str, ...]]:
    """`count` sets of up to `most` features, or as many more as it takes for each pair to be in one."""
    made: list[tuple[str, ...]] = []
    left = set(PAIRS)
    while left or len(made) < count:
        names = list(generator.choice(sorted(left) or PAIRS))
        others = [n for n in FEATURES if n not in names]
        generator.shuffle(others)
        for name in others:
            if len(names) < most and compatible((*names, name)):
                names.append(name)
        chosen = tuple(name for name in FEATURES if name in names)
        left -= set(itertools.combinations(chosen, 2))
        made.append(chosen)
    return made


@dataclass(frozen=True)
class Call:
    """A problem and the features that are drawn for it; sequence: its number, of one side by side with
    others."""

    problem: Problem
    names: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    sees: tuple[Predicate, ...] = ()
    sequence: int = 0

    @property
    def aux(self) -> tuple[str, ...]:
        return self.options.get("return_aux", ())

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Beside q, k and v, what has gradients."""
        names = [n for n in DIFFERENTIABLE if n in self.options and n != "score_mod"]
        made = {n: self.options[n] for n in names}
        mod = self.options.get("score_mod")
        return made | {f"score_mod[{i}]": x for i, x in enumerate(mod.operands if mod else ())}

    def visible(self, device: torch.device) -> Tensor:
        """[B, Hq, Sq, Sk]."""
        p = self.problem
        sizes = (p.B, p.Hq, p.Sq, p.Sk)
        places = torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")
        seen = torch.ones(sizes, dtype=torch.bool, device=device)
        for sees in self.sees:
            seen = seen & sees(p.offset, *places)
        return seen

    def kept(self, device: torch.device) -> Tensor:
        """1 / (1 - p) of a probability that dropout keeps and 0 of others, [B, Hq, Sq, Sk]."""
        p, share = self.problem, round(self.options.get("dropout_p", 0.0) * 65536)
        if not share:
            return torch.ones((), device=device)
        b, h, i, j = np.ogrid[: p.B, : p.Hq, : p.Sq, : p.Sk]
        # Queries i, i + 8 and keys j, j + 1, j + 8, j + 9 of a square of 16 x 16 share four words.
        counters = (j >> 4) * 4 + ((j & 7) >> 1), (i >> 4) * 8 + (i & 7), (self.sequence + b) * p.Hq + h
        words = philox(int(self.options["dropout_seed"]), *counters)
        word = np.choose(2 * (i >> 3 & 1) + (j >> 3 & 1), words)
        bits = np.where(j & 1, word >> 16, word & 0xFFFF)
        kept = torch.from_numpy(bits >= share).double().to(device)
        return kept / (1 - share / 65536) if share < 65536 else torch.zeros_like(kept)


def drawn(generator: random.Random, problem: Problem, names: Sequence[str], device: str) -> Call:
    """A call of attention with these features, drawn anew."""
    options: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal}
    sees: list[Predicate] = []
    if problem.causal:
        sees.append(lambda o, b, h, i, j: j <= i + o)
    for name in names:
        made = FEATURES[name].draw(generator, problem, device)
        for option, value in made.options.items():
            value = (
                (*options["return_aux"], *value)
                if option in ("return_aux",) & options.keys()
                else value
            )
            options[option] = value
        if made.sees is not None:
            sees.append(made.sees)
        if made.mask is not None:
            options["mask"] = options["mask"] & made.mask if "mask" in options else made.mask
    return Call(problem, tuple(names), options, tuple(sees))


def philox(seed: int, *counters: np.ndarray) -> list[np.ndarray]:
    """Philox-4x32 of 7 rounds, as Salmon et al. have it in figure 1, of three counters and 1."""
    low = np.uint64(2**32 - 1)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (*counters, 1)))
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(7):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ keys[0], second & low
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ keys[1], first & low
        keys = [(k + np.uint64(w)) & low for k, w in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return [c0.astype(np.int64), c1.astype(np.int64), c2.astype(np.int64), c3.astype(np.int64)]


# --- by definition --------------------------------------------------------------------------------


def eager(
    q: Tensor, k: Tensor, v: Tensor, parameters: dict[str, Tensor], call: Call
) -> dict[str, Tensor]:
    """All results, operator by operator in the dtype of q."""
    p, options = call.problem, call.options
    group = p.Hq // p.Hkv
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = (q @ k.mT) * (p.D**-0.5 if p.scale is None else p.scale)
    seen = call.visible(q.device)
    raw = s
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "alibi_slopes" in parameters:
        i = torch.arange(p.Sq, device=q.device)[:, None] + p.offset
        distance = (i - torch.arange(p.Sk, device=q.device)).abs().to(q.dtype)
        s = s - parameters["alibi_slopes"].to(q.dtype)[:, None, None] * distance
    if "bias" in parameters:
        s = s + parameters["bias"].to(q.dtype)
    if "relative_bias" in parameters:
        i = torch.arange(p.Sq, device=q.device)[:, None] + p.offset + options["relative_offset"]
        table = parameters["relative_bias"].to(q.dtype)
        column = (i - torch.arange(p.Sk, device=q.device)).clamp(0, table.shape[1] - 1)
        s = s + table[:, column]
    if "score_mod" in options:
        operands = [parameters[f"score_mod[{n}]"].to(q.dtype) for n in range(2)]
        places = torch.meshgrid(*(torch.arange(n, device=q.device) for n in s.shape), indexing="ij")
        hidden = s == -math.inf
        s = by_definition(s.masked_fill(hidden, 1.0), *places, *operands, *options["score_mod"].scalars)
        s = s.masked_fill(hidden, -math.inf)
    seen = seen & (s != -math.inf)
    top = raw.masked_fill(~seen, -math.inf).amax(-1)
    s = s.masked_fill(~seen, -math.inf)
    keyless = ~seen.any(-1, keepdim=True)
    keys = torch.softmax(s.masked_fill(keyless, 0.0), -1).masked_fill(keyless, 0.0)
    logs = torch.log_softmax(s.masked_fill(keyless, 0.0), -1).masked_fill(~seen, 0.0)
    entropy = -(keys * logs).sum(-1)
    kept = call.kept(q.device).to(q.dtype)
    if "sinks" in parameters:
        sink = parameters["sinks"].to(q.dtype)[:, None, None].expand(p.B, -1, p.Sq, 1)
        s = torch.cat([s, sink], -1)
        return {
            "out": (torch.softmax(s, -1)[..., :-1] * kept) @ v,
            "lse": torch.logsumexp(s, -1),
            "max_score": top,
            "entropy": entropy,
        }
    lse = torch.logsumexp(s.masked_fill(keyless, 0.0), -1).masked_fill(keyless[..., 0], -math.inf)
    return {"out": (keys * kept) @ v, "lse": lse, "max_score": top, "entropy": entropy}


def eager_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: dict[str, Tensor],
    call: Call,
    lengths: Sequence[tuple[int, int]],
) -> dict[str, Tensor]:
    """The same of sequences side by side [T, H, D], one after another."""
    made: list[dict[str, Tensor]] = []
    at = [0, 0]
    for s, (Sq, Sk) in enumerate((*lengths, (q.shape[0] - sum(n for n, _ in lengths), 0))):
        parts = q[at[0] : at[0] + Sq], *(x[at[1] : at[1] + Sk] for x in (k, v))
        at = [at[0] + Sq, at[1] + Sk]
        if Sq and Sk:
            one = replace(call, problem=replace(call.problem, B=1, Sq=Sq, Sk=Sk), sequence=s)
            made.append(eager(*(x.transpose(0, 1)[None] for x in parts), parameters, one))
        elif Sq:
            rows = q.new_zeros(1, q.shape[1], Sq)
            none = torch.full_like(rows, -math.inf)
            lse = parameters["sinks"][None, :, None].expand_as(rows) if "sinks" in parameters else none
            out = rows[..., None].expand(*rows.shape, v.shape[2])
            made.append({"out": out, "lse": lse.to(q.dtype), "max_score": none, "entropy": rows})
    found = {name: torch.cat([x[name] for x in made], 2)[0] for name in made[0]}
    none = sum(x[:0].sum() for x in (q, k, v, *parameters.values()))  # so that all have gradients
    found |= {name: found[name] + none for name in ("lse", "entropy")}
    return found | {"out": found["out"].transpose(0, 1) + none}


# --- results and their errors ---------------------------------------------------------------------


def make(call: Call, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Random q, k and v, and gradients of out and lse."""
    p = call.problem
    shapes = ((p.B, p.Hq, p.Sq, p.D), (p.B, p.Hkv, p.Sk, p.D), (p.B, p.Hkv, p.Sk, p.Dv))
    inputs = [
        lay_out(torch.randn(s, device=device).to(p.dtype), p.strides).detach().requires_grad_()
        for s in shapes
    ]
    dout = lay_out(torch.randn(p.B, p.Hq, p.Sq, p.Dv, device=device).to(p.dtype), p.strides)
    return inputs, [dout, torch.randn(p.B, p.Hq, p.Sq, device=device) * p.lse_gradient]


def with_gradients(
    outputs: dict[str, Tensor],
    inputs: Sequence[Tensor],
    parameters: dict[str, Tensor],
    gradients: Sequence[Tensor],
) -> dict[str, Tensor]:
    """outputs and the gradients of out, lse and the entropy; rows without a key give lse none."""
    out, lse = outputs["out"], outputs["lse"]
    dout, dlse = gradients
    dlse = torch.where(lse.isinf(), 0.0, dlse).to(lse.dtype)
    given = {"out": dout.to(out.dtype), "lse": dlse}
    if "entropy" in outputs:
        given["entropy"] = gradients[1].flip(-1).to(outputs["entropy"].dtype)
    leaves = {"dq": inputs[0], "dk": inputs[1], "dv": inputs[2]}
    leaves |= {f"d{name}": x for name, x in parameters.items() if x.requires_grad}
    grads = torch.autograd.grad(
        [outputs[name] for name in given], list(leaves.values()), list(given.values())
    )
    made = dict(zip(leaves, grads, strict=True))
    return {name: x.detach() for name, x in outputs.items()} | made


Lengths = Sequence[tuple[int, int]]


def make_packed(
    call: Call, lengths: Lengths, behind: tuple[int, int], device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """As `make`, of sequences of `lengths` side by side and tokens behind them."""
    p = call.problem
    T, Tk = (sum(n[side] for n in lengths) + behind[side] for side in (0, 1))
    shapes = ((T, p.Hq, p.D), (Tk, p.Hkv, p.D), (Tk, p.Hkv, p.Dv))
    inputs = [torch.randn(s, device=device).to(p.dtype).requires_grad_() for s in shapes]
    dout = torch.randn(T, p.Hq, p.Dv, device=device).to(p.dtype)
    return inputs, [dout, torch.randn(p.Hq, T, device=device) * p.lse_gradient]


def starts(lengths: Lengths, device: str) -> list[Tensor]:
    """cu_seqlens of queries and of keys."""
    return [
        torch.tensor([0, *(n[side] for n in lengths)], device=device).cumsum(0, dtype=torch.int32)
        for side in (0, 1)
    ]


def tokens_of_gapped(used: Lengths, gaps: Lengths, behind: tuple[int, int], side: int) -> Tensor:
    """Where the tokens of sequences of `used` lengths, and those behind them all, lie where each has so
    many others behind its own."""
    at, places = 0, []
    for own, gap in (*zip(used, gaps, strict=True), (behind, behind)):
        places.append(torch.arange(at, at + own[side]))
        at += own[side] + gap[side]
    return torch.cat(places)


def with_gaps(x: Tensor, places: Tensor, dim: int, value: float) -> Tensor:
    """x, whose dimension `dim` has tokens, with them at `places`, up to the last of these, and `value`
    between them."""
    shape = [*x.shape]
    shape[dim] = int(places[-1]) + 1 if places.numel() else 0
    return x.new_full(shape, value).index_copy(dim, places, x)


def outputs_of(
    call: Call,
    inputs: Sequence[Tensor],
    impl: str | None,
    lengths: Lengths | None = None,
    wrap: Callable[[Any], Any] = lambda f: f,
    **others: Any,
) -> dict[str, Tensor]:
    """What flashproto.attention returns, or with `lengths` attention_varlen.

    wrap: makes of such a function the one that is called.
    """
    options = call.options | others | {"return_lse": True, "impl": impl}
    operands = [options.pop(n) for n in [*options] if n.startswith("score_mod[")]
    if operands:
        mod = options["score_mod"]
        options["score_mod"] = hooks.call(mod.hook.name, *operands, *mod.scalars)
    if lengths is None:
        made = wrap(flashproto.attention)(*inputs, **options)
    else:
        cu_seqlens = starts(lengths, inputs[0].device)
        made = wrap(flashproto.attention_varlen)(*inputs, *cu_seqlens, **options)
    return dict(zip(("out", "lse", *call.aux), made, strict=True))


def run(
    call: Call,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    impl: str | None,
    lengths: Lengths | None = None,
    wrap: Callable[[Any], Any] = lambda f: f,
    **others: Any,
) -> dict[str, Tensor]:
    """The same and all gradients."""
    parameters = {name: others.get(name, x) for name, x in call.parameters.items()}
    return with_gradients(
        outputs_of(call, inputs, impl, lengths, wrap, **others), inputs, parameters, gradients
    )


def exact_and_eager(
    call: Call, inputs: Sequence[Tensor], gradients: Sequence[Tensor], lengths: Lengths | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By definition, in float64 and in the dtype of the problem."""
    found = []
    for dtype in (torch.float64, call.problem.dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        keep = torch.float64 if dtype == torch.float64 else torch.float32
        parameters = {
            n: x.detach().to(keep).requires_grad_(x.requires_grad) for n, x in call.parameters.items()
        }
        if lengths is None:
            outputs = eager(*leaves, parameters, call)
        else:
            outputs = eager_packed(*leaves, parameters, call, lengths)
        outputs = {n: x for n, x in outputs.items() if n in ("out", "lse", *call.aux)}
        found.append(with_gradients(outputs, leaves, parameters, gradients))
    return found[0], found[1]


def sum_of_rows(out: Tensor, weights: Tensor | float) -> float:
    """The size of what a sum over a head's rows gathers of roundings of out: a row's term is at most
    its weight [Hq, rows] times the product of out and dout, which is drawn from N(0, 1), and rows'
    roundings are independent."""
    heads = out.movedim(1, 0).flatten(1, -2)  # of packed ones [T, H, D] too
    return (weights * heads.norm(dim=-1)).norm(dim=-1).max().item()


def assert_within_bound(
    got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], call: Call
) -> None:
    """No further off than twice what eager is, thrice with a softcap, and one unit in the last place:
    at 1, with dropout at 1 / (1 - p), by which the rounded out has been multiplied unless p is 1; and
    of what is summed over all rows at its own size or that of rounded terms' sum."""
    dtype, times = call.problem.dtype, 3 if "softcap" in call.options else 2
    assert got.keys() == exact.keys()
    for name, value in got.items():
        assert value.shape == exact[name].shape, name
        size = exact[name].abs().max().item() if name[1:] in call.parameters else 1.0
        kept = 1 - call.options.get("dropout_p", 0.0)
        size = max(size, 1 / kept if kept else 0.0)
        if name == "dsinks":
            sinks, lse = call.parameters["sinks"].detach(), exact["lse"].movedim(-2, 0).flatten(1)
            size = max(size, sum_of_rows(exact["out"], torch.exp(sinks[:, None] - lse)))
        if name in ("dbias", "drelative_bias") and "dropout_p" in call.options:
            # Of out as it is divided by 1 - p; a row's probabilities are its weight.
            size = max(size, sum_of_rows(exact["out"], 1.0))
        allowed = times * error(plain[name], exact[name]) + ATOL[dtype] * max(size, 1.0)
        ours = error(value, exact[name])
        assert ours <= allowed, f"{name}: error {ours:.3g}, allowed {allowed:.3g} ({call})"
