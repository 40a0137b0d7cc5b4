"""What kernels are compiled for, of calls that are made on tensors of a CPU: their launches are written
down and not run.  A script, for Triton must not be in its interpreter:

    compile_keys.py        of flashproto.bench.first_calls, by backend what `compiled` says, as JSON
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from flashproto import backends
from flashproto.bench import first_calls
from flashproto.ops import attention_hopper, attention_triton, call
from flashproto.ops.recipe import Boxed, Compute, Launch, Operand, Recipe, Table

DEVICE = torch.device("cpu")


def key_of(x: Any, specialize: bool, align: bool) -> Any:
    """What an argument adds to the key of a compiled kernel."""
    if isinstance(x, Operand):
        return str(x.dtype), x.aligned
    if isinstance(x, Boxed):
        first = x.tma_descriptors.first
        return str(x.operand.dtype), tuple(first.block_shape), str(first.layout)
    if isinstance(x, Table):
        return "a table"
    if isinstance(x, tuple):  # of which Triton looks at every number
        return tuple(key_of(y, True, True) for y in x)
    return native_specialize_impl(CUDABackend, x, False, specialize, align)


def key(step: Launch) -> tuple[Any, ...]:
    parts: list[Any] = [step.kernel.__name__, tuple(sorted(step.options.items()))]
    for p in step.kernel.params:
        x = step.arguments.get(p.name)
        plain = not p.do_not_specialize, not p.do_not_specialize_on_alignment
        parts.append((p.name, str(x) if p.is_constexpr else key_of(x, *plain)))
    return tuple(parts)


class Recorded:
    """Stands for what runs recipes: `keys` are those of their launches."""

    def __init__(self) -> None:
        self.keys: list[tuple[Any, ...]] = []

    def runner(self, recipe: Recipe, elsewhere: Any) -> Any:
        def run(*inputs: Any) -> Any:
            assert not any(isinstance(step, Compute) for step in recipe.steps)
            self.keys += [key(step) for step in recipe.steps if isinstance(step, Launch)]
            made = [
                None if x is None else torch.empty_strided(x.shape, x.strides, dtype=x.dtype)
                for x in recipe.returns
            ]
            return made[0] if len(made) == 1 else tuple(made)

        return run


Compiled = dict[str, list[list[tuple[str, list[str]]]]]


def compiled(impl: str, recorded: Recorded) -> Compiled:
    """{variant: of each step the kernels that are compiled, with the parameters in which they differ
    from those of the same name before}."""
    sizes = first_calls.SIZES["cuda"]
    found: Compiled = {}
    for name, make in first_calls.calls(impl, DEVICE, sizes, torch.bfloat16).items():
        seen: dict[Any, None] = {}
        found[name] = []
        for n in range(1 + len(first_calls.CHANGES)):
            recorded.keys.clear()
            function, leaves = make(n)
            out = function()
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            new = [x for x in dict.fromkeys(recorded.keys) if x not in seen]
            found[name].append([(x[0], differences(x, seen)) for x in new])
            seen.update(dict.fromkeys(new))
    return found


def differences(x: tuple[Any, ...], seen: dict[Any, None]) -> list[str]:
    pairs = [(a, b) for old in seen if old[0] == x[0] for a, b in zip(x, old, strict=True)]
    return sorted({str(a[0]) for a, b in pairs if a != b})


def main() -> None:
    recorded = Recorded()
    backends.device_reasons = lambda backend, device: ()
    call.runner = recorded.runner
    attention_triton.capability = lambda device: (9, 0)
    attention_hopper.multiprocessors = lambda device: 132
    print(json.dumps({impl: compiled(impl, recorded) for impl in backends.KERNELS}))


if __name__ == "__main__":
    main()
