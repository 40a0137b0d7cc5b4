"""A recipe as one Python function, written for it, which hands addresses to Triton's entry point in C:

    def run(t0, t1):
        a0 = t0.data_ptr()
        a1 = t1.data_ptr()
        if entry0 is None or (a0 | a1) & 15 or hooked():
            return plain(t0, t1)
        t2 = empty_strided_cuda(c0, c1, c2)
        a2 = t2.data_ptr()
        stream = current_stream(c3)
        entry0(c4, 1, 1, stream, *middle0, a0, a1, a2, *c5)
        return t2

About a microsecond is what such a function takes beside the launch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import exchange_buffers, private
from .recipe import (
    Boxed,
    Compute,
    Exchange,
    Keep,
    Launch,
    Make,
    Operand,
    Recipe,
    Table,
    Zeroed,
    is_aligned,
    operands_in,
)


def runner(recipe: Recipe, elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The recipe as a function of its inputs.

    elsewhere: the same for inputs that start at multiples of 16 bytes where those of the recipe do not,
    or the other way round.
    """
    launches = [step for step in recipe.steps if isinstance(step, Launch)]
    quick = recipe.device.type == "cuda" and all(private.has_entry(x.kernel) for x in launches)

    def plain(*inputs: Tensor | None) -> Any:
        pattern = tuple(x is None or is_aligned(x) for x in inputs)
        if pattern != recipe.pattern:
            return elsewhere(*inputs)
        if not quick or private.hooked() or private.is_capturing():
            return recipe.execute(*inputs)
        # The first run clears no words, as runs under capture do: nothing is compiled there.
        pairs, recipe.passed_first_launch = recipe.passed_first_launch, True
        compiled: list[Any] = []
        results = recipe.execute(*inputs, entries=compiled, pairs=pairs)
        if pairs or not any(x.clears for x in launches):
            found = [private.entry(x) for x in compiled]
            if all(x is not None for x in found):
                resolve(found)
        return results

    if not quick:
        return plain
    source, constants = _source(recipe)
    run, resolve = _factory(source)(*constants, plain)
    return run


@functools.lru_cache(1024)
def _factory(source: str) -> Callable[..., Any]:
    names = {
        "hooked": private.hooked,
        "current_device": private.current_device,
        "current_stream": private.current_stream,
        "empty_strided_cuda": private.empty_strided_cuda,
        "is_capturing": private.is_capturing,
        "take": exchange_buffers.take,
        "give": exchange_buffers.give,
    }
    exec(source, names)
    return names["factory"]


def _source(recipe: Recipe) -> tuple[str, list[Any]]:
    """The text of a function factory(*constants, plain) -> (run, resolve), and the constants.

    Recipes of one structure have one text, which is compiled once.
    """
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c{len(constants) - 1}"

    body: list[str] = []
    launches: list[Launch] = []
    addressed = {
        x.variable
        for step in recipe.steps
        if isinstance(step, Launch)
        for x in operands_in(tuple(step.arguments.values()))
    }

    def tensor(x: Operand) -> str:
        if recipe.is_whole(x):
            return f"t{x.variable}"
        own = recipe.whole[x.variable]
        assert own is not None and x.dtype == own.dtype, "views of another dtype are for launches alone"
        shape, strides = constant(x.shape), constant(x.strides)
        start = f"t{x.variable}.storage_offset() + {constant(x.offset // x.dtype.itemsize)}"
        return f"t{x.variable}.as_strided({shape}, {strides}, {start})"

    def address(x: Operand) -> str:
        return f"a{x.variable} + {constant(x.offset)}" if x.offset else f"a{x.variable}"

    def addresses(variable: int) -> list[str]:
        return [f"a{variable} = t{variable}.data_ptr()"] if variable in addressed else []

    def lines_of(step: Make | Compute | Launch | Keep) -> list[str]:
        if isinstance(step, Keep):
            made, name = f"t{step.variable}", f"{constant(step.name)}, stream"
            making = [line for x in itertools.islice(steps, step.steps) for line in lines_of(x)]
            making.append(f"if tables is not None: tables[{name}] = {made}")
            return [
                f"tables = None if is_capturing() else getattr({tensor(step.of)}, 'tables', None)",
                f"{made} = None if tables is None else tables.get(({name}))",
                f"if {made} is None:",
                *(f"    {line}" for line in making),
                *addresses(step.variable),
            ]
        if isinstance(step, Make):
            shape, strides, dtype, _ = map(constant, step.new)
            made = f"t{step.variable} = empty_strided_cuda({shape}, {strides}, {dtype})"
            return [made, *addresses(step.variable)]
        if isinstance(step, Compute):
            called = f"{constant(step.function)}({', '.join(map(tensor, step.operands))})"
            if step.variable is None:
                return [called]
            return [f"t{step.variable} = {called}", *addresses(step.variable)]
        launches.append(step)
        return _launch_source(step, len(launches) - 1, recipe.device, constant, address)

    steps = iter(recipe.steps)
    for step in steps:
        body += lines_of(step)
    if launches:
        body.insert(0, f"stream = current_stream({constant(recipe.device.index)})")
    inputs = [f"t{i}" for i in range(recipe.inputs)]
    given = [i for i in range(recipe.inputs) if i in addressed]
    conditions = [f"entry{k} is None" for k in range(min(len(launches), 1))]
    if given and all(recipe.aligned[i] for i in given):
        conditions.append(f"({' | '.join(f'a{i}' for i in given)}) & 15")
    elif given:
        pattern = constant(tuple(recipe.aligned[i] for i in given))
        conditions.append(f"({', '.join(f'a{i} & 15 == 0' for i in given)},) != {pattern}")
    if any(x.clears for x in launches):
        conditions.append("is_capturing()")
    if private.several_devices():
        conditions.append(f"current_device() != {constant(recipe.device.index)}")
    conditions.append("hooked()")
    results = ["None" if x is None else tensor(x) for x in recipe.returns]
    body.append(f"return {', '.join(results)}" if results else "return None")
    head = [f"a{i} = t{i}.data_ptr()" for i in given]
    entries = [f"(entry{k}, middle{k}, encoding{k})" for k in range(len(launches))]
    variables = [f"{x}{k}" for k in range(len(launches)) for x in ("entry", "middle", "encoding")]
    lines = [
        f"def factory({', '.join([f'c{i}' for i in range(len(constants))] + ['plain'])}):",
        *(f"    {x} = None" for x in variables),
        "    def resolve(entries):",
        *([f"        nonlocal {', '.join(variables)}"] if variables else []),
        f"        {', '.join(entries)}, = entries" if entries else "        return",
        f"    def run({', '.join(inputs)}):",
        *(f"        {line}" for line in head),
        f"        if {' or '.join(conditions)}:",
        f"            return plain({', '.join(inputs)})",
        *(f"        {line}" for line in body),
        "    return run, resolve",
    ]
    return "\n".join(lines), constants


def _launch_source(
    step: Launch,
    k: int,
    device: torch.device,
    constant: Callable[[Any], str],
    address: Callable[[Operand], str],
) -> list[str]:
    """The lines that launch: arguments in the order of the kernel's parameters, plain ones together."""
    lines: list[str] = []
    handed: list[str] = []
    plain: list[Any] = []
    boxes = 0

    def flush() -> None:
        if plain:
            handed.append(f"*{constant(tuple(plain))}")
            plain.clear()

    def nested(x: Any) -> str:
        if isinstance(x, Operand):
            return address(x)
        if isinstance(x, tuple):
            return f"({''.join(nested(y) + ', ' for y in x)})"
        return constant(x)

    pair = next((x for x in step.arguments.values() if isinstance(x, Exchange)), None)
    if pair is not None:
        wanted = f"{constant(device)}, {constant(pair.words)}"
        if step.clears:
            lines.append(f"pair = take({wanted})")
        else:
            lines.append(f"words = {constant(exchange_buffers.zeros)}({wanted})")
    for p in step.kernel.params:
        x = step.arguments.get(p.name, p.default)
        if isinstance(x, (Operand, Boxed, Table, Exchange, Zeroed)) or operands_in(x):
            flush()
        if isinstance(x, Operand):
            handed.append(address(x))
        elif isinstance(x, Boxed):
            name = f"{p.name}_{k}"
            lines.append(f"{name} = {constant(x.tma_descriptors)}[{address(x.operand)}]")
            if private.DIRECT:
                encode = f"{name}.encode(encoding{k}[{boxes}])"
                lines.append(f"if {name}.encoded is None: {encode}")
            handed.append(f"*{name}.encoded" if private.DIRECT else name)
            boxes += 1
        elif isinstance(x, Table):
            lines.append(f"{p.name}_{k} = {constant(x.make)}()")
            handed.append(f"{p.name}_{k}.data_ptr()")
        elif isinstance(x, Zeroed):
            zeroed = f"{constant(exchange_buffers.zeroed)}({constant(device)}, {constant(x.words)})"
            lines.append(f"{p.name}_{k} = {zeroed}")
            handed.append(f"{p.name}_{k}.data_ptr()")
        elif isinstance(x, Exchange):
            words = ("pair.used" if x.used else "pair.fresh") if step.clears else "words"
            handed.append(f"{words}.data_ptr()")
        elif operands_in(x):
            handed.append(nested(x))
        else:
            plain.append(x)
    flush()
    arguments = ", ".join(handed)
    arguments = f"({arguments},)" if private.PACKED else arguments
    lines.append(f"entry{k}({constant(step.programs)}, 1, 1, stream, *middle{k}, {arguments})")
    if step.clears:
        lines.append("give(pair)")
    return lines
