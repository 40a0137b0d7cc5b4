"""What a module computes, found by its own forward on a small random input.

A probe runs the forward of the module's class, on the CPU, on a twin: an object of the same class whose
parameters or children are small stand-ins.  So the module's own weights may be anywhere, or nowhere
yet, and its hooks, buffers and gradients are not touched.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ... import functional
from ...functional.autocast import without_autocast
from ...nn.recompute import through_activation

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor

    SHARDED: tuple[type, ...] = (DTensor,)
else:
    SHARDED = ()

M = TypeVar("M", bound=nn.Module)
CASTINGS = ("llama", "torch", "gemma")  # in the order of what float32 cannot tell apart
LARGEST = 5  # inputs go to 10**5, to see limits
OTHER_ORDER = 2e-2  # of values in 16 bits, the share that another order of summation may round apart


@contextmanager
def quiet() -> Iterator[torch.Generator]:
    """Nothing that a probe does is seen outside; gives its random numbers."""
    grad, autocast = torch.no_grad(), torch.autocast("cpu", enabled=False)
    with grad, autocast, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        yield torch.Generator("cpu").manual_seed(0)


def twin_of(module: M, **parts: Any) -> M:
    """An object of the same class with the same attributes, but for some; it is in training."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, training=True, **parts)
    return twin


def own_forward(module: nn.Module, *args: Any, **options: Any) -> Any:
    """What the class's forward gives, without hooks."""
    return type(module).forward(module, *args, **options)


def takes_one(module: nn.Module) -> bool:
    """Whether forward needs one argument, and knows no other."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def close(got: Tensor, wanted: object) -> bool:
    return (
        isinstance(wanted, Tensor)
        and got.shape == wanted.shape
        and torch.allclose(got, wanted.to(got.dtype), rtol=1e-4, atol=1e-5)
    )


def close_rows(got: Tensor, wanted: object) -> bool:
    """Close, of what is largest in a row: sums of large numbers round in these."""
    if not isinstance(wanted, Tensor) or got.shape != wanted.shape:
        return False
    largest = wanted.abs().amax(-1, keepdim=True)
    return close(got / largest, wanted / largest)


def likeness(module: nn.Module) -> tuple[object, ...]:
    """What modules have in common that compute the same of the same parameters."""
    own = sorted(vars(module).items())
    plain = [(name, repr(x)) for name, x in own if isinstance(x, (bool, int, float, str, tuple))]
    functions = [(name, id(x)) for name, x in own if callable(x)]
    shapes = [None if p is None else str(p.shape) for p in module._parameters.values()]
    layers = {*weighted(module)}
    children = [
        (name, type(child) if child is None or name in layers else likeness(child))
        for name, child in module._modules.items()
    ]
    return type(module), *plain, *functions, *shapes, *children


def weighted(module: nn.Module) -> list[str]:
    """Names of the children that have parameters or buffers."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    return [n for n, c in children if any(True for _ in itertools.chain(c.parameters(), c.buffers()))]


class Left(Exception):
    """Why a module stays as it is."""


# --- norms ------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """casting: of rms_norm, None for layer_norm; promotes: y has the wider dtype of x and weight, None
    where a weight of another dtype than x means something else."""

    casting: str | None
    eps: float
    promotes: bool | None = False

    def __str__(self) -> str:
        return "layer_norm" if self.casting is None else f"rms_norm, casting {self.casting!r}"

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, impl: str | None = None
    ) -> Tensor:
        n = x.shape[-1]
        if self.casting is None:
            return functional.layer_norm(x, n, weight, bias, self.eps, impl=impl)
        dtype = torch.promote_types(x.dtype, weight.dtype) if self.promotes else x.dtype
        options: dict[str, Any] = {"bias": bias, "casting": self.casting, "impl": impl}
        with without_autocast(x):
            return functional.rms_norm(x, n, weight, self.eps, dtype=dtype, **options)


def looks_like_norm(module: nn.Module) -> bool:
    """A vector of weights, perhaps one of biases, and nothing else."""
    given = {name: p for name, p in module._parameters.items() if p is not None}
    return (
        "weight" in given
        and given.keys() <= {"weight", "bias"}
        and all(p.ndim == 1 for p in given.values())
        and not any(x is not None for x in module._buffers.values())
        and not module._modules
        and takes_one(module)
    )


def norm_of(module: nn.Module) -> Norm:
    """Which norm of this library a module is, with its rounding; raises Left if it is none.

    float32 tells eps apart and what the weight does, 16 bits tell when what is rounded.
    """
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    n = weight.numel() or 64  # of a weight that is elsewhere until it is used
    with quiet() as generator:
        random = functools.partial(torch.randn, generator=generator, dtype=torch.float32)
        w, b = random(n), None if bias is None else random(n)
        rows = max(16, 4096 // n)
        x = random(rows, n) * torch.logspace(-3, LARGEST, rows, dtype=torch.float32)[:, None]

        def own(x: Tensor, w: Tensor) -> Any:
            parameters = {"weight": w, "bias": None if b is None else b.to(w.dtype)}
            twin = twin_of(module, _parameters={n: parameters[n] for n in module._parameters})
            return own_forward(twin, x)

        def ours(norm: Norm, x: Tensor, w: Tensor) -> Tensor:
            return norm(x, w, None if b is None else b.to(w.dtype), impl="reference")

        numbers = {v for v in vars(module).values() if type(v) is float}
        kinds = [Norm(*k) for k in itertools.product((*CASTINGS, None), sorted(numbers))]
        wanted = own(x, w)
        found = [k for k in kinds if close(ours(k, x, w), wanted)]
        if not found:
            raise Left("it is no RMSNorm or LayerNorm")
        low, w_low = (3 * random(rows, n)).bfloat16(), w.bfloat16()
        wanted = own(low, w_low)
        off = {k: different(ours(k, low, w_low), wanted) for k in found}
        best = min(found, key=lambda k: off[k])
        if off[best] > OTHER_ORDER:
            raise Left("it rounds in 16 bits as none here does")
        if best.casting is None:
            return best
        wanted = own(low, w)  # a float32 weight beside 16 bits
        best = best._replace(promotes=wanted.dtype == torch.float32)
        same = different(ours(best, low, w), wanted) <= OTHER_ORDER
        return best if same else best._replace(promotes=None)


def different(got: Tensor, wanted: Tensor) -> float:
    """The share of values that are not the same; all of them, if two differ by more than a rounding."""
    rounding = torch.finfo(wanted.dtype).eps
    if got.dtype != wanted.dtype or not torch.allclose(got, wanted, rtol=4 * rounding, atol=rounding):
        return 1.0
    if got.dtype == torch.float32:
        return 0.0
    return (got != wanted).float().mean().item()


def norm_forward(module: nn.Module, norm: Norm) -> Callable[..., Tensor]:
    original = type(module).forward

    def forward(self: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        weight: Any = self.weight
        other = norm.promotes is None and weight.dtype != x.dtype
        if other or isinstance(x, SHARDED) or isinstance(weight, SHARDED):
            return original(self, x)
        return norm(x, weight, self._parameters.get("bias"))

    return forward


# --- gated MLPs -------------------------------------------------------------------------------------


class MLP(NamedTuple):
    """names: of the children that make gate, up and what is returned; or gate and up as one."""

    activation: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.activation


WIDTH = 8


def activations(impl: str | None = None) -> dict[str, Callable[..., Tensor]]:
    return {
        "swiglu": functools.partial(functional.swiglu, impl=impl),
        "geglu": functools.partial(functional.geglu, impl=impl),
        "geglu, approximate 'tanh'": functools.partial(functional.geglu, approximate="tanh", impl=impl),
        "reglu": functools.partial(functional.reglu, impl=impl),
    }


def looks_like_mlp(module: nn.Module) -> bool:
    """Two or three children with weights, none of its own, and one argument."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return (
        len(weighted(module)) in (2, 3)
        and all(x is None for x in own)
        and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        and takes_one(module)
    )


def mlp_of(module: nn.Module) -> MLP:
    """Which gated unit of this library lies between which children; raises Left if none does."""
    names = weighted(module)
    with quiet() as generator:
        x = torch.randn(64, WIDTH, generator=generator, dtype=torch.float32)
        x *= torch.logspace(-1, LARGEST, 64, dtype=torch.float32)[:, None]
        for order in itertools.permutations(names):
            made = dict.fromkeys(order, WIDTH)
            if len(order) == 2:
                made[order[0]] *= 2
            layers: dict[str, Any] = {
                name: linear(torch.randn(n, WIDTH, generator=generator, dtype=torch.float32))
                for name, n in made.items()
            }
            twin = twin_of(module, _modules={**stateless(module), **layers})
            try:
                wanted = own_forward(twin, x)
            except Exception:  # these widths do not fit
                continue
            *first, last = (layers[name] for name in order)
            for activation, glu in activations("reference").items():
                if close_rows(last(glu(*(f(x) for f in first))), wanted):
                    return MLP(activation, order)
    raise Left("it is no SwiGLU, GeGLU or ReGLU")


def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ weight.T


def stateless(module: nn.Module) -> dict[str, Any]:
    """The children without weights, as functions that fire no hooks."""
    names = {*weighted(module)}
    return {n: c if c is None else c.forward for n, c in module._modules.items() if n not in names}


def mlp_forward(module: nn.Module, mlp: MLP) -> Callable[..., Tensor]:
    original, glu = type(module).forward, activations()[mlp.activation]
    *first, last = mlp.names

    def forward(self: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        if isinstance(x, SHARDED):
            return original(self, x)
        children: dict[str, Any] = self._modules
        return through_activation(children[last], glu, *[children[name](x) for name in first])

    return forward
