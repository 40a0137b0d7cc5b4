"""What a kernel is compiled from: the definitions that its code leads to, as text.

Comments and docstrings do not count, nor do branches that a case's Kind leaves out: a change of what
one option alone reaches changes the text of kernels with that option, and of no others.

A name is followed to its definition in its module, or in a module of the same package that this one
imports.  What comes from elsewhere, Triton above all, is not in the text.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

KIND = "KIND"  # what all kernels call the Kind that they are compiled for


class Definition(NamedTuple):
    path: Path
    name: str


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((x.asname or x.name).partition(".")[0] for x in node.names)


@functools.cache
def module_of(path: Path) -> dict[str, ast.stmt]:
    """The statement of a module that binds a name last."""
    return {
        name: statement for statement in ast.parse(path.read_text()).body for name in bound(statement)
    }


def imported(path: Path, statement: ast.ImportFrom, name: str) -> Definition | Path | None:
    """What `from .module import name` brings: a definition, a module, or what lies elsewhere."""
    if not statement.level:
        return None
    own = next((x.name for x in statement.names if (x.asname or x.name) == name), name)
    folder = path.parents[statement.level - 1].joinpath(*(statement.module or "").split("."))
    for module in (folder / f"{own}.py", folder / own / "__init__.py"):
        if module.exists():
            return module
    module = folder.with_suffix(".py")
    return Definition(module if module.exists() else folder / "__init__.py", own)


class Pruned(ast.NodeTransformer):
    """Puts values in the place of KIND's fields and properties; drops branches that they rule out."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node  # whose methods may have another Kind

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == KIND:
            return ast.Constant(getattr(self.kind, node.attr))
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return ast.Constant(not node.operand.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """As Python's: what stands behind a value that decides does not count."""
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        left: list[ast.expr] = []
        for i, value in enumerate(node.values):
            known = isinstance(value, ast.Constant)
            if known and bool(value.value) is decides:
                left.append(value)
                break
            if not known or i == len(node.values) - 1:
                left.append(value)
        node.values = left
        return left[0] if len(left) == 1 else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        parts = [node.left, *node.comparators]
        if len(parts) == 2 and all(isinstance(x, ast.Constant) for x in parts):
            if isinstance(node.ops[0], ast.Eq):
                return ast.Constant(parts[0].value == parts[1].value)  # type: ignore[attr-defined]
            if isinstance(node.ops[0], ast.NotEq):
                return ast.Constant(parts[0].value != parts[1].value)  # type: ignore[attr-defined]
        return node

    def visit_If(self, node: ast.If) -> Any:
        node.test = self.visit(node.test)
        if isinstance(node.test, ast.Constant):
            taken = node.body if node.test.value else node.orelse
            return [y for x in taken for y in listed(self.visit(x))] or ast.Pass()
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self.visit(node.test)
        if isinstance(node.test, ast.Constant):
            return self.visit(node.body if node.test.value else node.orelse)
        return self.generic_visit(node)


def listed(found: Any) -> list[ast.stmt]:
    return found if isinstance(found, list) else [] if found is None else [found]


def without_docstring(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return statement


class Text(NamedTuple):
    text: str
    names: frozenset[str]  # all that it mentions
    attributes: frozenset[tuple[str, str]]  # x.y of its names
    calls: tuple[tuple[str, str], ...]  # functions, and what they are given for KIND


@functools.cache
def asked(at: Definition) -> tuple[str, ...]:
    """The fields of KIND that a definition mentions."""
    node = module_of(at.path)[at.name]
    found = {
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == KIND
    }
    return tuple(sorted(found))


class Values:
    """A Kind's fields, as far as a definition asks for them."""

    def __init__(self, of: tuple[tuple[str, Any], ...]) -> None:
        self.__dict__.update(of)


@functools.cache
def text_of(at: Definition, values: tuple[tuple[str, Any], ...] | None) -> Text:
    # Parsed anew, since it is changed.
    statement = next(x for x in reversed(ast.parse(at.path.read_text()).body) if at.name in bound(x))
    statement = without_docstring(statement)
    if values is not None:
        statement = ast.fix_missing_locations(Pruned(Values(values)).visit(statement))
    names, attributes, calls = set(), set(), []
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.add((node.value.id, node.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls.append((node.func.id, ast.unparse(given_for_kind(at, node) or ast.Constant(None))))
    return Text(ast.unparse(statement), frozenset(names), frozenset(attributes), tuple(calls))


def parameters(statement: ast.stmt | None) -> list[str]:
    if not isinstance(statement, ast.FunctionDef):
        return []
    return [x.arg for x in (*statement.args.posonlyargs, *statement.args.args)]


def resolved(path: Path, name: str) -> Definition | Path | None:
    """Where a name of a module is defined; a module's path for a module; None elsewhere."""
    statement = module_of(path).get(name)
    if isinstance(statement, ast.ImportFrom):
        found = imported(path, statement, name)
        return resolved(found.path, found.name) if isinstance(found, Definition) else found
    if statement is None or isinstance(statement, ast.Import):
        return None
    return Definition(path, name)


def given_for_kind(at: Definition, call: ast.Call) -> ast.expr | None:
    """What a call of a function that takes KIND gives for it; KIND itself for any other function."""
    assert isinstance(call.func, ast.Name)
    itself = ast.Name(KIND, ast.Load())
    to = resolved(at.path, call.func.id)
    names = parameters(module_of(to.path)[to.name]) if isinstance(to, Definition) else []
    if KIND not in names:
        return itself
    for keyword in call.keywords:
        if keyword.arg == KIND:
            return keyword.value
    place = names.index(KIND)
    if place >= len(call.args) or any(isinstance(x, ast.Starred) for x in call.args[: place + 1]):
        return None
    return call.args[place]


def texts(at: Definition, kind: Any) -> frozenset[str]:
    """All that a kernel is made of; kind None: with all branches.  What is given another Kind than the
    kernel has all branches too."""
    found: set[str] = set()
    start = at, kind is not None
    seen, left = {start}, [start]
    while left:
        here, pruned = left.pop()
        values = tuple((name, getattr(kind, name)) for name in asked(here)) if pruned else None
        text = text_of(here, values)
        found.add(f"{here.name}: {text.text}")
        reached = set()
        for name in text.names:
            given = {x for called, x in text.calls if called == name} or {KIND}
            reached |= {(resolved(here.path, name), pruned and x == KIND) for x in given}
        for name, attribute in text.attributes:
            module = resolved(here.path, name)
            if isinstance(module, Path):
                reached.add((resolved(module, attribute), False))
        for to in reached - seen:
            if isinstance(to[0], Definition):
                seen.add(to)
                left.append(to)
    return frozenset(found)
