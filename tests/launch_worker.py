"""Calls launchers with random arguments and compares what they launch with what Triton would launch.

Runs in a process of its own, without the interpreter and without a GPU: compiling and the entry point
in C are stood in for by a kernel that remembers under which of Triton's own keys it was compiled.
Prints how many calls went through a kernel found by the own key, how many kernels there are, how many
calls a bound launch made, and how many one that makes its results.

    python tests/launch_worker.py SEED
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch._C._dynamo import guards
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature


class Devices:
    """What launches ask torch for; the tensors are on device -1, the index of CPU tensors."""

    count, current = 1, -1

    @classmethod
    @contextlib.contextmanager
    def on(cls, index: int) -> Iterator[None]:
        before, cls.current = cls.current, index
        yield
        cls.current = before


torch._C._cuda_getDevice = lambda: Devices.current
torch.cuda.device_count = lambda: Devices.count  # type: ignore[assignment]
torch.cuda.device = Devices.on  # type: ignore[assignment, misc]
torch._C._cuda_getCurrentRawStream = lambda device: 7

from flashproto.ops import launch, triton_entry  # noqa: E402
from flashproto.ops.memory import Memory, New, Part  # noqa: E402

launch.memory.empty_strided_cuda = guards._empty_strided_cpu
New.past_dispatcher = True  # type: ignore[assignment, method-assign]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (
    0,
    1,
    2,
    8,
    15,
    16,
    17,
    4096,
    -1,
    -16,
    -17,
    2**31 - 1,
    2**31 - 16,
    2**31,
    2**31 + 8,
    -(2**31),
)
INTEGERS += (-(2**31) - 1, -(2**31) - 16, 2**40, 2**40 + 1, 2**63 - 1, 2**63, 2**63 + 16)
NUMBERS = (*INTEGERS, True, False, 0.0, 1.0, 16.0, 0.125)


@triton.jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["M"])
def toy_kernel(
    x_ptr, w_ptr, y_ptr, stride, M, N, seed, eps, hook,
    CENTERED: tl.constexpr, R: tl.constexpr, C: tl.constexpr = 64,
):  # fmt: skip
    pass


BINDER = create_function_from_signature(
    toy_kernel.signature, toy_kernel.params, CUDABackend(GPUTarget("cuda", 90, 32))
)


class Compiled:
    """A kernel compiled under one of Triton's keys."""

    def __init__(self, key: str) -> None:
        self.key = key

    def launch(self, *arguments: Any) -> None:
        assert Devices.current == -1, "launched while another device is current"
        launched.append((self.key, arguments))


compiled: dict[str, Compiled] = {}
launched: list[tuple[str, tuple[Any, ...]]] = []


def triton_key(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    _, specialization, options = BINDER(*arguments, **named)
    return f"{specialization} {sorted(options.items())}"


def launch_ordinarily(kernel: Any, programs: int, *arguments: Any, **named: Any) -> Compiled:
    key = triton_key(arguments, {k: v for k, v in named.items() if v is not None})
    return compiled.setdefault(key, Compiled(key))


def random_tensor(draw: random.Random) -> torch.Tensor:
    return torch.empty(64, dtype=draw.choice(DTYPES))[draw.choice((0, 0, 0, 1, 2, 4, 8)) :]


def random_argument(draw: random.Random, position: int) -> Any:
    """For a parameter of toy_kernel."""
    if position < 3:
        return None if position == 1 and draw.random() < 0.3 else random_tensor(draw)
    if position == 8:
        operand = random_tensor(draw), draw.choice(INTEGERS), draw.choice((None, 1, 5))
        return draw.choice((None, (), (operand, 0.5), ((operand, operand), (draw.choice(NUMBERS),))))
    return draw.choice(NUMBERS) if position < 8 else draw.choice((False, True))


def check(
    launch_toy: Any, arguments: tuple[Any, ...], given: dict[str, Any], named: dict[str, Any]
) -> bool:
    """Whether a launch went through a kernel found by the launcher's own key; it is then the right one,
    with the right arguments."""
    launch_toy(3, *arguments, **named)
    return check_launched(arguments, given | named)


def elsewhere(draw: random.Random) -> contextlib.AbstractContextManager[None]:
    """Now and then, where there are several devices, another one than the tensors' is current."""
    return Devices.on(draw.choice((-1, -1, 3)) if Devices.count > 1 else -1)


def check_bound(
    draw: random.Random, launch_toy: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> int:
    """How many launches, of tensors or addresses that differ in alignment, a bound launch made by
    itself."""
    memory = [x is not None and draw.random() < 0.5 for x in arguments[:3]]
    given = [
        Memory(0, x.dtype, -1) if only else x for x, only in zip(arguments[:3], memory, strict=True)
    ]
    arguments = (*arguments[:8], None, *arguments[9:])
    Devices.count = draw.choice((1, 2))
    again = launch_toy.bind(3, *given, *arguments[3:], **named)
    found = 0
    for start in (0, *(draw.choice((0, 0, 1, 8)) for _ in range(3))):
        tensors = [x if x is None else torch.empty(64, dtype=x.dtype)[start:] for x in arguments[:3]]
        with elsewhere(draw):
            again(*(x.data_ptr() if only else x for x, only in zip(tensors, memory, strict=True)))
        found += check_launched((*tensors, *arguments[3:]), named)
    return found


def check_making(
    draw: random.Random, launch_toy: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> int:
    """How many launches, of tensors or addresses that differ in alignment, a launch that makes its
    results made by itself."""
    x, w, _ = arguments[:3]
    y = New((64,), (1,), draw.choice(DTYPES), x.device)
    own = New((3, 4), (5, 1), draw.choice(DTYPES), x.device)
    bound: Any = draw.choice((w, None if w is None else Memory(0, w.dtype, -1), own, y.behind(16)))
    arguments = (*arguments[:8], None, *arguments[9:])
    Devices.count = draw.choice((1, 2))
    again = launch_toy.making(3, x, bound, y, *arguments[3:], **named)
    found = 0
    for start in (0, *(draw.choice((0, 0, 1, 8)) for _ in range(3))):
        x, *others = (None if t is None else torch.empty(64, dtype=t.dtype)[start:] for t in (x, w))
        given = [x]
        if bound is w and w is not None:
            given += others
        elif isinstance(bound, Memory):
            given += [others[0].data_ptr()]
        with elsewhere(draw):
            made = again(*given)
        if bound is own:
            others, made = made[:1], made[1]
            assert (others[0].shape, others[0].stride()) == ((3, 4), (5, 1))
        elif isinstance(bound, Part):
            others = [made[16:]]
        elif bound is None:
            others = [None]
        assert (made.shape, made.dtype) == ((64,), y.dtype)
        found += check_launched((x, *others, made, *arguments[3:]), named)
    return found


def check_launched(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    if not launched:
        return False
    ((key, (programs, y, z, stream, middle, *handed)),) = launched
    launched.clear()
    expected = triton_key(arguments, {k: v for k, v in named.items() if v is not None})
    assert key == expected, f"launched {key}, not {expected}"
    assert (programs, y, z, stream, middle) == (3, 1, 1, 7, "middle")
    if triton_entry.PACKED:
        (handed,) = handed
    addresses = [0 if x is None else x.data_ptr() for x in arguments[:3]]
    assert list(handed) == [*addresses, *arguments[3:], named["R"], named["C"]]
    assert [type(x) for x in handed[3:8]] == [type(x) for x in arguments[3:8]]
    return True


def main(seed: int) -> None:
    draw = random.Random(seed)
    launch._launch_ordinarily = launch_ordinarily
    triton_entry.entry = lambda kernel: triton_entry.Entry(kernel.launch, ("middle",), ())
    given = {"R": 4, "C": 128, "num_warps": 8}
    launch_toy = launch.launcher(toy_kernel, tensors=3, tuples=["hook"])
    launch_given = launch.launcher(toy_kernel, tensors=3, tuples=["hook"], **given)
    arguments = tuple(random_argument(draw, i) for i in range(10))
    found = bound = made = 0
    for _ in range(6000):
        # One argument at a time changes, so that calls that differ in little follow each other.
        i = draw.randrange(10)
        arguments = (*arguments[:i], random_argument(draw, i), *arguments[i + 1 :])
        maxnreg = draw.choice((None, 64))
        constants = {
            "R": draw.choice((1, 4)),
            "C": draw.choice((64, 128)),
            "num_warps": draw.choice((4, 8)),
        }
        for _ in range(2):
            found += check(launch_toy, arguments, {}, constants | {"maxnreg": maxnreg})
            found += check(launch_given, arguments, given, {"maxnreg": maxnreg})
        bound += check_bound(draw, launch_toy, arguments, constants)
        made += check_making(draw, launch_toy, arguments, constants)
    print(found, len(compiled), bound, made)


if __name__ == "__main__":
    main(int(sys.argv[1]))
