"""docs/api.md from the docstrings of the public names: what each module lists in __all__.

A docstring is paragraphs and blocks that begin with a name and a colon: Args, Returns, Raises, Source,
Example.  An example is a doctest, which tests/test_docs.py runs.
"""

from __future__ import annotations

import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = (
    "flashproto",
    "flashproto.masks",
    "flashproto.nn",
    "flashproto.distributed",
    "flashproto.hooks",
    "flashproto.backends",
)
BLOCK = re.compile(r"^(Args|Returns|Raises|Source|Shapes|Example)\b([^:\n]*):\s*(.*)$")
WIDTH = 100

HEAD = """# The public functions and modules

Written by `python -m flashproto.bench docs` from the docstrings, which `help()` shows too. A test runs
every example, with these lines before it:

```python
import tempfile

import torch

import flashproto
from flashproto import backends, distributed, hooks, masks, nn
```

`impl` of every function names a backend, None chooses: see [backends](#flashprotobackends).
"""


def public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def documented() -> Iterator[tuple[str, Any]]:
    """The full name of each public function and class, and of each of their public methods that has a
    docstring, with the object."""
    for module in map(import_module, MODULES):
        for name, thing in public(module).items():
            if callable(thing):
                yield f"{module.__name__}.{name}", thing
                yield from methods(f"{module.__name__}.{name}", thing)


def methods(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Public methods that the class itself documents, or a base of it that only this package uses."""
    known = public(import_module("flashproto.nn"))
    for base in inspect.getmro(thing) if inspect.isclass(thing) else ():
        if base is not thing and (base.__name__ in known or "flashproto" not in base.__module__):
            break
        for method, value in vars(base).items():
            value = inspect.unwrap(getattr(value, "__func__", value))
            if not method.startswith("_") and inspect.isfunction(value) and value.__doc__:
                yield f"{name}.{method}", value


# --- one name ------------------------------------------------------------------------------------


def annotation(x: Any) -> str:
    return x if isinstance(x, str) else getattr(x, "__name__", str(x))


def signature(name: str, thing: Any) -> str:
    """The call with types and defaults, on one line or one line a parameter."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return name
    empty = inspect.Parameter.empty
    found = inspect.signature(thing)
    parts: list[str] = []
    kinds = inspect.Parameter
    previous = None
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls") and not parts:
            continue
        if parameter.kind == kinds.KEYWORD_ONLY and previous not in (
            kinds.KEYWORD_ONLY,
            kinds.VAR_POSITIONAL,
        ):
            parts.append("*")
        previous = parameter.kind
        text = str(parameter).partition(":")[0].partition("=")[0].strip()  # with its stars
        typed = parameter.annotation is not empty
        text += f": {annotation(parameter.annotation)}" if typed else ""
        if parameter.default is not empty:
            text += f" = {parameter.default!r}" if typed else f"={parameter.default!r}"
        parts.append(text)
    returns = found.return_annotation
    arrow = "" if returns in (empty, None, "None") else f" -> {annotation(returns)}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def escaped(line: str) -> str:
    return line if line.startswith("    ") else line.replace("*", "\\*")


def code(text: str) -> str:
    """A doctest as code whose results are comments."""
    shown = []
    for example in doctest.DocTestParser().get_examples(text):
        shown += example.source.splitlines()
        shown += [f"# {line}" for line in example.want.splitlines()]
    return "```python\n" + "\n".join(shown) + "\n```"


def arguments(lines: list[str]) -> str:
    """A block's entries as a list; deeper lines continue an entry."""
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif line:
            entries.append(line)
    named = re.compile(r"^(\w+(?:, \w+)*): ")
    return "\n".join("- " + named.sub(r"`\1`: ", escaped(entry)) for entry in entries)


def block_of(lines: list[str], inline: bool) -> list[str]:
    """The lines that belong to a block: up to a blank line or the next block where its text begins
    beside its name, else those that are indented."""
    n = 0
    if inline:
        while n < len(lines) and lines[n].strip() and not BLOCK.match(lines[n]):
            n += 1
    else:
        while n < len(lines) and (not lines[n].strip() or lines[n].startswith(" ")):
            n += 1
    return lines[:n]


def markdown(docstring: str) -> str:
    """A docstring's paragraphs and blocks."""
    parts: list[str] = []
    paragraph: list[str] = []
    lines = docstring.splitlines()
    while lines:
        line = lines.pop(0)
        found = BLOCK.match(line)
        if line and found is None:
            paragraph.append(escaped(line))
            continue
        parts.append("\n".join(paragraph))
        paragraph = []
        if found is None:
            continue
        head, more, first = found.groups()
        block = block_of(lines, bool(first))
        del lines[: len(block)]
        if head == "Example":
            parts.append(code("\n".join(block)))
        elif head == "Args" and not first:
            parts += [f"**{head}{more}**:", arguments(block)]
        else:
            text = " ".join(line.strip() for line in [first, *block])
            parts.append(f"**{head}{more}**: {escaped(text.strip())}")
    parts.append("\n".join(paragraph))
    return "\n\n".join(part for part in parts if part)


def heading(name: str, thing: Any) -> str:
    """Of a class another one than of a function of the same letters."""
    return f"{'class ' * inspect.isclass(thing)}`{name.removeprefix('flashproto.')}`"


def entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### {heading(name, thing)}"
    if not callable(thing):
        yield ", ".join(f"`{x!r}`" for x in thing) + "."
        return
    yield f"```python\n{signature(name, thing)}\n```"
    yield markdown(inspect.getdoc(thing) or "")
    for method, function in methods(name, thing):
        yield f"**Method** `{method.rpartition('.')[2]}`"
        yield f"```python\n{signature('.' + method.rpartition('.')[2], function)}\n```"
        yield markdown(inspect.cleandoc(function.__doc__ or ""))


# --- the page ------------------------------------------------------------------------------------


def headline(module: ModuleType) -> str:
    """The first sentence of a module's docstring, as a heading."""
    first = (module.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")
    return first.removesuffix(".").removesuffix(": the public functions")


def groups() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(heading, introduction, names with their objects): the functions of flashproto by the module that
    holds them, and the other modules whole."""
    top, *others = map(import_module, MODULES)
    by_module: dict[str, dict[str, Any]] = {}
    for name, thing in public(top).items():
        by_module.setdefault(thing.__module__, {})[f"flashproto.{name}"] = thing
    for module in sorted(
        by_module, key=lambda name: (not name.startswith("flashproto.functional"), name)
    ):
        if module not in MODULES:
            yield headline(import_module(module)), "", by_module[module]
    for other in others:
        _, _, rest = inspect.cleandoc(other.__doc__ or "").partition("\n\n")
        things = {f"{other.__name__}.{name}": thing for name, thing in public(other).items()}
        introduction = "\n\n".join([headline(other) + ".", *map(escaped, filter(None, [rest]))])
        yield f"`{other.__name__}`", introduction, things


def page() -> str:
    contents, parts = [], []
    for title, introduction, things in groups():
        parts += [f"## {title}", introduction]
        links = []
        for name, thing in things.items():
            anchor = re.sub(r"[`.]", "", heading(name, thing)).lower().replace(" ", "-")
            links.append(f"[{name.removeprefix('flashproto.')}](#{anchor})")
            parts += entry(name, thing)
        contents.append(f"- {title}: {', '.join(links)}")
    return "\n\n".join(part for part in [HEAD.strip(), "\n".join(contents), *parts] if part) + "\n"
