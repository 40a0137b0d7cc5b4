"""RoPE in the attention modules of transformers: their own forward, with another function in it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import functional
from .probing import SHARDED, Left, close, quiet


class Rotary(NamedTuple):
    """What a model's function does to q, k [B, H, S, D] by tables [B | 1, S, ...].

    table: "twice" if the tables hold the R angles one set behind the other, "each twice" if each angle
        is there two times in a row, "once" if they are R wide.
    pairs: "halves" for pairs (i, i + R), "neighbours" for (2i, 2i + 1), "to halves" for neighbours that
        are put apart.
    partial: it leaves the dimensions behind the tables' as they are.
    """

    table: str
    pairs: str
    partial: bool = False

    def turn(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, impl: str | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = cos.shape[0]
        if self.table == "twice":
            cos, sin = (x[..., : x.shape[-1] // 2] for x in (cos, sin))
        elif self.table == "each twice":
            cos, sin = cos[..., ::2], sin[..., ::2]
        B, S, positions = q.shape[0], q.shape[2], None
        if rows > 1:  # each sequence has rows of its own in one table
            positions = torch.arange(B * S, device=q.device).view(B, S)
        cos, sin = (x.reshape(rows * S, x.shape[-1]) for x in (cos, sin))
        interleaved = self.pairs == "neighbours"
        if self.pairs == "to halves":
            q, k = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (q, k))
        return functional.rope(q, k, cos, sin, positions=positions, interleaved=interleaved, impl=impl)


TABLES, PAIRS = ("twice", "once", "each twice"), ("halves", "neighbours", "to halves")
KINDS = [Rotary(*kind) for kind in itertools.product(TABLES, PAIRS)]


def tables(kind: Rotary, angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of angles [B, S, R], as a model makes them."""
    if kind.table == "twice":
        angle = torch.cat((angle, angle), -1)
    if kind.table == "each twice":
        angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


def rotation_of(original: Callable[..., Any]) -> Rotary | None:
    """What a function of (q, k, cos, sin) does, found by its results."""
    with quiet() as generator:
        q, k, wide_q, wide_k = (
            torch.randn(2, heads, 3, D, generator=generator, dtype=torch.float32)
            for heads, D in ((2, 8), (1, 8), (2, 12), (1, 12))
        )
        angle = torch.randn(2, 3, 4, generator=generator, dtype=torch.float32)

        def same(kind: Rotary, q: Tensor, k: Tensor) -> bool:
            cos, sin = tables(kind, angle)
            try:
                wanted = original(q, k, cos, sin)
                got = kind.turn(q, k, cos, sin, "reference")
                return all(close(a, b) for a, b in zip(got, wanted, strict=True))
            except Exception:  # the function takes other tables
                return False

        for kind in KINDS:
            if same(kind, q, k):
                partial = kind.pairs != "to halves" and same(kind, wide_q, wide_k)
                return kind._replace(partial=partial)
    return None


def rotating(original: Callable[..., Any], kind: Rotary) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same function on this library's rope; calls of another form go to the original."""
    width = 2 if kind.table == "once" else 1

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        fits = cos.ndim == 3 and q.ndim == 4 and cos.shape[0] in (1, q.shape[0]) and k is not None
        fits = fits and (kind.partial or width * cos.shape[-1] == q.shape[-1])
        dim = options.get("unsqueeze_dim", 1)
        if args or options.keys() - {"unsqueeze_dim"} or not fits or isinstance(q, SHARDED):
            return original(q, k, cos, sin, *args, **options)
        if dim == 1 and q.shape[2] == cos.shape[1]:
            return kind.turn(q, k, cos, sin)
        if dim == 2 and q.shape[1] == cos.shape[1]:
            q, k = kind.turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2)
        return original(q, k, cos, sin, *args, **options)

    return rotate


def functions_of(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """What the module's forward names that has to do with rotation."""
    function = inspect.unwrap(type(module).forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    found = {name: function.__globals__.get(name) for name in names if "rotary" in name}
    return {name: f for name, f in found.items() if inspect.isfunction(f)}


def looks_like_attention(module: nn.Module) -> bool:
    return bool(functions_of(module))


class Rotations(dict[str, Rotary]):
    """What each function that a forward names does."""

    def __str__(self) -> str:
        return "rope"


def rotary_of(module: nn.Module) -> Rotations:
    """Raises Left if one of them is no rotation of this library."""
    found = Rotations()
    for name, original in functions_of(module).items():
        kind = rotation_of(original)
        if kind is None:
            raise Left(f"{name} is another rotation")
        found[name] = kind
    return found


def rotary_forward(module: nn.Module, rotations: Rotations) -> Callable[..., Any]:
    """The class's forward with its rotations on this library's."""
    functions = functions_of(module)
    mine = {name: rotating(functions[name], kind) for name, kind in rotations.items()}
    return with_globals(type(module).forward, mine)


def with_globals(function: Any, names: dict[str, Any]) -> Any:
    """The same code, its decorators included, in which these global names mean something else."""
    inner = getattr(function, "__wrapped__", None)
    globals_, closure = function.__globals__, function.__closure__
    if inner is None:
        globals_ = {**globals_, **names}
        del globals_["__name__"]  # by it torch.compile would look names up in the module itself
    else:
        if not any(c.cell_contents is inner for c in closure or ()):
            raise Left("its forward is decorated in an unknown way")
        replaced = with_globals(inner, names)
        closure = tuple(CellType(replaced) if c.cell_contents is inner else c for c in closure)
    made = FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    if inner is not None:
        made.__wrapped__ = replaced  # type: ignore[attr-defined]
    return made
