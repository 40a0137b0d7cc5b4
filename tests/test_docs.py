"""What the documentation says by itself: docs/speed.md, README's table, docs/api.md and the tables of
docs/attention.md are up to date, every public docstring has an example that runs, and signatures show
all options."""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

import flashproto
from flashproto import backends, distributed, hooks, masks, nn
from flashproto.bench import __main__ as bench
from flashproto.bench import api, docs, features, plots, report, speed

RESULTS = speed.machines(docs.ROOT)
# Functions that take any keyword, and why.
ANY_KEYWORD = {
    "flashproto.explain": "the arguments of the function that it calls",
    "flashproto.nn.GPTConfig.preset": "the fields of GPTConfig, which its signature shows",
}
DOCUMENTED = dict(api.documented())


# --- what is generated ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["docs/speed.md", "docs/api.md", "docs/attention.md", "docs/determinism.md"]
)
def test_page_is_up_to_date(name: str) -> None:
    path = docs.ROOT / name
    text = docs.texts(docs.ROOT)[path]
    assert path.read_text() == text, f"{name} is stale: run python -m flashproto.bench docs"


def test_tables_of_attention_have_their_blocks() -> None:
    page = (docs.ROOT / "docs" / "attention.md").read_text()
    fill = partial(docs.filled_with, tables=features.TABLES, name="attention.md")
    assert fill(page) == page
    with pytest.raises(ValueError, match="lacks the lines <!-- table of pairs"):
        fill(page.replace("end of table of pairs", ""))


def test_masks_are_shown(tmp_path: Path) -> None:
    """Each function that makes one, by a picture that the command draws."""
    page = (docs.ROOT / "docs" / "attention.md").read_text()
    shown = re.findall(r"^\| `(masks\..*?)` \|.*\(pictures/(mask-.*)\.png\)", page, re.MULTILINE)
    drawn = [path.stem for path in features.draw(tmp_path)]
    assert [picture for _, picture in shown] == drawn
    written = " ".join(name for name, _ in shown)
    assert {*re.findall(r"masks\.(\w+)", written)} == set(masks.__all__) - {"Mask", "draw"}
    example = masks.causal() & masks.window(1023)
    assert f"```text\n{example}\n```" in page
    gallery = (docs.ROOT / "docs" / "masks.md").read_text()
    assert re.findall(r"\(pictures/(mask-.*)\.png\)", gallery) == drawn
    for name in drawn:
        assert (docs.ROOT / "docs" / "pictures" / f"{name}.png").stat().st_size < 8000


def test_table_of_the_readme_is_up_to_date() -> None:
    readme = (docs.ROOT / "README.md").read_text()
    filled = docs.filled(readme, docs.readme_table(RESULTS[0]))
    assert filled is not None, f"README.md lacks the lines {docs.BEGIN} and {docs.END}"
    assert readme == filled, "README.md's table is stale: run python -m flashproto.bench docs"


def test_table_fills_its_block_and_nothing_else() -> None:
    table = docs.readme_table(RESULTS[0])
    before = f"above\n{docs.BEGIN}\nan old table\n{docs.END}\nbelow"
    filled = docs.filled(before, table)
    assert filled is not None
    assert filled.startswith(f"above\n{docs.BEGIN}\n\nOn one ")
    assert filled.endswith(f"|\n\n{docs.END}\nbelow")
    assert docs.filled(filled, table) == filled
    assert docs.filled("no block", table) is None
    assert 8 <= table.count("\n| ") <= 17


def test_pages_name_no_commit_and_no_run() -> None:
    commits = {
        run["commit"] for results in RESULTS for data in results.values() for run in data["runs"]
    }
    for text in docs.texts(docs.ROOT).values():
        for commit in commits:
            assert text is None or commit is None or commit[:7] not in text


def test_command_writes_what_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "docs" / "results" / "card"
    results.mkdir(parents=True)
    for name in ("block.json", "norm.json", "launch.json"):
        shutil.copy(docs.ROOT / "docs" / "results" / "h200" / name, results)
    readme = tmp_path / "README.md"
    readme.write_text("# flashproto\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    bench.main(["docs"])
    assert "README.md has no block" in capsys.readouterr().out
    assert readme.read_text() == "# flashproto\n"
    readme.write_text(f"# flashproto\n{docs.BEGIN}\n{docs.END}\n")
    with pytest.raises(SystemExit, match=r"stale: README\.md"):
        bench.main(["docs", "--check"])
    bench.main(["docs"])
    assert "| Transformer block" in readme.read_text()
    page = (tmp_path / "docs" / "speed.md").read_text()
    assert re.findall(r"pictures/(\w+)\.png", page) == ["norm"]
    pictures = {path.stem for path in (tmp_path / "docs" / "pictures").iterdir()}
    assert pictures == {"norm", *(f"mask-{name}" for name in features.PICTURES)}
    with pytest.raises(SystemExit) as caught:
        bench.main(["docs", "--check"])
    assert not caught.value.code


def cell(unit: str, passes: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A cell of milliseconds; values are their reciprocals but for the unit ms."""
    made = {
        which: {n: {"ms": ms, "value": ms if unit == "ms" else 1000 / ms} for n, ms in results.items()}
        for which, results in passes.items()
    }
    return {"run": 0, "unit": unit, "passes": made}


CELLS = {
    "a 1x2": cell("GB/s", {"forward": {"flashproto[triton]": 2.0, "liger": 3.0, "quack": 4.0}}),
    "a 3x4": cell("GB/s", {"forward": {"flashproto[triton]": 2.0, "liger": 1.5, "quack": 4.0}}),
}


def test_a_faster_peer_is_named() -> None:
    (line,) = speed.summary(CELLS)
    assert "1.061 times the fastest peer in geometric mean (0.750 to 1.500)" in line
    assert line.endswith("a peer is faster in 1 of 2 cells: a 3x4 (Liger, 0.750)")
    head, _, first, second = speed.cells_table(CELLS).splitlines()
    assert head == "|  | flashproto[triton] | Liger | quack | times the fastest peer |"
    assert first == "| a 1x2 | 500 | 333 | 250 | 1.500 |"
    assert second == "| a 3x4 | 500 | 667 | 250 | 0.750 |"


def test_an_error_has_no_figure() -> None:
    failed = cell("ms", {"forward": {"flashproto": 2.0, "torch": 3.0}, "backward": {"flashproto": 4.0}})
    failed["passes"]["backward"]["torch"] = {"error": "RuntimeError: no such kernel"}
    assert (
        speed.cells_table({"a": failed}).splitlines()[2]
        == "| a | 2.00 / 4.00 | 3.00 / error | 1.500 / - |"
    )
    assert len(list(speed.summary({"a": failed}))) == 1


def test_memory_and_mfu_are_beside_the_times() -> None:
    last = "forward+backward"
    made = cell("ktokens/s", {"forward": {"liger": 1.0}, last: {"flashproto": 2.0, "liger": 4.0}})
    assert report.memory({"a": made}) == report.mfu({"a": made}) == []
    assert report.conclusion({"cells": {"a": made}}) == ""
    ours, liger = made["passes"][last].values()
    ours["peak_gib"] = liger["peak_gib"] = 3.0
    names = ["flashproto", "liger"]
    assert report.memory({"a": made}) == [[f"{last}, GiB", *names], ["a", "3.00", "3.00"]]
    ours["kept_gib"], made["peak"] = 1.5, 1000.0
    head, row = speed.titled(report.memory({"a": made})).splitlines()[::2]
    assert head == f"| {last}, kept / peak, GiB | flashproto | Liger |"
    assert row == "| a | 1.50 / 3.00 | - / 3.00 |"
    assert report.mfu({"a": made}) == [[f"{last}, MFU", *names], ["a", "50.0%", "25.0%"]]
    assert report.conclusion({"cells": {"a": made}}).count("\n") == 4


# --- plots ----------------------------------------------------------------------------------------


def test_bars_are_higher_where_a_contender_is_faster() -> None:
    timed = {
        "flashproto": {"ms": 2.0, "value": 9.0},
        "torch": {"ms": 4.0, "value": 5.0},
        "b": {"error": ""},
    }
    assert plots.heights(timed, "GB/s") == {"flashproto": 9.0, "torch": 5.0}
    assert plots.heights(timed, "ms") == {"flashproto": 1.0, "torch": 0.5}
    assert plots.heights({"torch": {"ms": 4.0}}, "ms") == {"torch": 1.0}
    assert plots.heights({}, "ms") == {}


def test_contenders_of_a_plot_have_colours_of_their_own() -> None:
    for results in RESULTS:
        for subject, data in results.items():
            cells = data.get("cells", {}).values()
            passes = [by_name for c in cells for by_name in c.get("passes", {}).values()]
            names = list({name for by_name in passes for name in by_name})
            assert len(set(plots.colours(names).values())) == len(names), subject
    one, other = (plots.colours(names) for names in (["fa4", "flex"], ["torch", "fa4"]))
    assert one["fa4"] == other["fa4"]


def test_plot_has_a_panel_for_each_pass_and_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.figure

    figures: list[Any] = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k))
    )
    passes = {"forward": {"flashproto": 2.0, "liger": 3.0}, "backward": {"flashproto": 2.0}}
    plots.plot({f"cell {i}": cell("GB/s", passes) for i in range(40)}, "Heading", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    (figure,) = figures
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["forward"] * 2 + ["backward"] * 2
    assert sum(len(axis.patches) for axis in figure.axes) == 40 * 3
    assert all(not axis.lines for axis in figure.axes)
    assert figure.get_size_inches()[0] == plots.WIDTH


def test_bars_carry_three_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.figure

    written: list[str] = []
    save = matplotlib.figure.Figure.savefig

    def look(figure: Any, *given: Any, **options: Any) -> None:
        written.extend(text.get_text() for text in figure.axes[0].texts)
        save(figure, *given, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", look)
    times = {f"torch{i}": ms for i, ms in enumerate((0.8, 30.0, 9000.0, 1e5))}
    plots.plot({"a": cell("GB/s", {"forward": times})}, "Heading", tmp_path / "a.png")
    assert written == ["1250", "33.3", "0.111", "0.0100"]


# --- docstrings and signatures --------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, thing in DOCUMENTED.items() if name.count(".") < 3])
def test_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, by the backend that is chosen there."""
    for names in ("_hooks", "_newest"):
        monkeypatch.setattr(hooks, names, dict(getattr(hooks, names)))
    torch.manual_seed(0)
    names = {"tempfile": tempfile, "torch": torch, "flashproto": flashproto}
    names |= {"backends": backends, "hooks": hooks, "masks": masks, "nn": nn}
    names |= {"distributed": distributed}
    things = [
        thing for other, thing in DOCUMENTED.items() if other == name or other.startswith(f"{name}.")
    ]
    assert ">>> " in (inspect.getdoc(things[0]) or ""), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    with processes.alone():
        for thing in things:
            example = doctest.DocTestParser().get_doctest(
                inspect.getdoc(thing) or "", dict(names), name, None, None
            )
            runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_has_what_help_needs(name: str) -> None:
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    assert text
    for line in text.splitlines():
        assert not re.match(r"^Example:?\s+\S", line), f"{name}: an example is a block of its own"


def signatures() -> dict[str, inspect.Signature]:
    """Of every public function, and of the constructor and every public method of a public class."""
    found = {}
    for name, thing in DOCUMENTED.items():
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                function = inspect.unwrap(getattr(value, "__func__", value))
                if inspect.isfunction(function) and (method[0] != "_" or method == "__init__"):
                    found[f"{name}.{method}"] = inspect.signature(function)
        else:
            found[name] = inspect.signature(thing)
    return found


def test_signatures_show_every_option() -> None:
    hidden = {
        name
        for name, signature in signatures().items()
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    }
    assert hidden == set(ANY_KEYWORD)


def test_signatures_have_types() -> None:
    for name in flashproto.__all__:
        if inspect.isfunction(function := getattr(flashproto, name)):
            parameters = inspect.signature(function).parameters.values()
            assert all(p.annotation is not inspect.Parameter.empty for p in parameters), name
