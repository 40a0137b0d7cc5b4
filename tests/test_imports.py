"""Imports run one way (docs: the house): read from the sources, those inside functions included."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A room imports from rooms of lower floors, and within its own without circles.
FLOORS = {
    "kernels": 0,
    "reference": 0,
    "checks": 1,
    "backends": 2,
    "hooks": 3,
    "mask_values": 2,
    "mask_rules": 3,
    "masks": 4,
    "variant": 4,
    "configs": 5,
    "softmax_hooks": 4,
    "score_hooks": 4,
    "ops": 6,
    "functional": 7,
    "distributed": 8,
    "explain": 8,
    "nn": 9,
    "integrations": 10,
    "env": 9,
    "bench": 11,
    "examples": 12,
}
KERNELS_MAY_IMPORT = {"triton", "math", "os", "typing", "__future__"}
REFERENCE_MAY_IMPORT = {"torch", "math", "typing", "collections", "__future__"}


def modules() -> dict[str, Path]:
    """Name to file of each module; those of kernels/ are flashproto.kernels.*."""
    found = {}
    for path in (
        *ROOT.glob("flashproto/**/*.py"),
        *ROOT.glob("kernels/**/*.py"),
        *ROOT.glob("examples/*.py"),
    ):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[:2] == ["flashproto", "kernels"]:
            continue  # through the symbolic link
        if parts[0] == "kernels":
            parts = ["flashproto", *parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """What a module imports: names of modules, or of what is in them."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found.update(f"{start}.{alias.name}" for alias in node.names)
    return found


def module_of(imported: str) -> str | None:
    """The module of the project that an imported name is or is in; examples import one another flat."""
    while imported:
        if imported in MODULES:
            return imported
        imported = imported.rpartition(".")[0]
    return None


def edges() -> dict[str, set[str]]:
    graph = {}
    for name in MODULES:
        names = imports(name)
        if name.startswith("examples."):
            names |= {f"examples.{x}" for x in names}
        graph[name] = {found for x in names if (found := module_of(x)) is not None and found != name}
    return graph


def room(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] == "examples" else parts[1] if len(parts) > 1 else ""


def test_rooms_import_from_lower_floors() -> None:
    for name, targets in edges().items():
        if not room(name):
            continue  # flashproto/__init__.py
        assert room(name) in FLOORS, f"{name}: its room has no floor"
        for target in targets:
            if not room(target):
                continue
            same = room(target) == room(name)
            assert same or FLOORS[room(target)] < FLOORS[room(name)], f"{name} imports {target}"


def test_no_circles() -> None:
    graph = edges()
    graph = {n: {t for t in targets if room(t)} for n, targets in graph.items() if room(n)}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                walk(target, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_kernels_import_triton_and_one_another_alone() -> None:
    for name in MODULES:
        if name.startswith("flashproto.kernels."):
            for imported in imports(name):
                inside = imported.startswith("flashproto.kernels.")
                assert inside or imported.split(".")[0] in KERNELS_MAY_IMPORT, (
                    f"{name} imports {imported}"
                )


def test_reference_imports_torch_alone() -> None:
    for name in MODULES:
        if name.startswith("flashproto.reference"):
            for imported in imports(name):
                inside = imported.startswith("flashproto.reference")
                top = imported.split(".")[0]
                assert inside or top in REFERENCE_MAY_IMPORT, f"{name} imports {imported}"
