"""README.md, AGENTS.md and docs/*.md: short where it has to be, links and files that exist, samples
that run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.run import get_args_parser

import flashproto

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
LARGEST = 15_360
NOT_A_USERS = ("TRITON_INTERPRET", "FLASHPROTO_IMPL")

# The numbers that this project gives its own commits, runs, steps and issues mean nothing to a reader.
OWN_NUMBERS = re.compile(
    r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b"
    r"|(?<![\w-])(?:runs?|steps?|commits?|issues?) (?:no\. ?)?#?(?:\d+|[IVX]{2,})\b",
    re.IGNORECASE,
)


ONE_BY_ONE = """
for number, sample in enumerate({samples!r}, 1):
    exec(compile(sample, f"sample {{number}}", "exec"), {{"__name__": "__main__"}})
"""


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def python(code: str, folder: Path, **variables: str) -> str:
    """Run `code` in a process of its own, with Triton compiled where there is a GPU, as a user does."""
    environment = {k: v for k, v in os.environ.items() if k not in NOT_A_USERS}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def anchors(text: str) -> set[str]:
    """The names under which GitHub links to headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert README.stat().st_size <= LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    path = ROOT / name
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        found = path.parent / target if target else path
        assert found.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{name} links to {link}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/changelog.md"])
def test_files_that_are_named_exist(name: str) -> None:
    """A path in the text, `kernels/norm.py` or `norm.py` alone, is one of this tree."""
    text = (ROOT / name).read_text()
    for found in set(re.findall(r"(?<![\w/.-])[\w./*-]*\w\.py\b", text)):
        whole = [*ROOT.glob(found)] if "/" in found else []
        parts = [
            match
            for room in ("kernels", "flashproto", "tests", "examples", "docs")
            for match in (ROOT / room).glob(f"**/{found}")
        ]
        assert whole or parts, f"{name} names {found}"
    rooms = r"(?<![\w/.-])((?:kernels|flashproto|tests|examples|docs)/(?:[\w-]+/)*)(?![\w*])"
    for found in set(re.findall(rooms, text)):
        assert (ROOT / found).is_dir(), f"{name} names {found}"


@pytest.mark.parametrize("name", ["README.md", "docs/speed.md", "docs/attention.md", "docs/api.md"])
def test_no_numbers_of_our_own(name: str) -> None:
    found = OWN_NUMBERS.search((ROOT / name).read_text())
    assert found is None, f"{name} has {found[0]!r}"


def test_what_is_a_number_of_our_own() -> None:
    for text in ("of 1a3e2b6", "step 74", "steps 42 and 73", "run XIV", "Issue #38", "at da3a1f2."):
        assert OWN_NUMBERS.search(text), text
    for text in ("1200 steps", "H200", "runs/gpt-1", "--steps 2400", "16384", "e4m3fn", "effaced"):
        assert not OWN_NUMBERS.search(text), text


@pytest.mark.parametrize("command", ["train_gpt.py", "pytest"])
def test_commands_that_ci_runs_stand_once(command: str) -> None:
    assert len(re.findall(rf"^python3 -m venv .*{command}", README.read_text(), re.MULTILINE)) == 1


@pytest.mark.parametrize("name", [n for n in NAMES if blocks(ROOT / n, "python")])
def test_samples_run(name: str, tmp_path: Path) -> None:
    if name == "docs/api.md":
        pytest.skip("signatures, and examples of docstrings, which test_docs.py runs")
    samples = [
        sample
        for sample in blocks(ROOT / name, "python")
        # Tests of doors have what these need.
        if not re.search(r"flashproto\.integrations|^from transformers", sample, re.MULTILINE)
    ]
    # In one process, which has imported torch by then, each with names of its own.
    python(ONE_BY_ONE.format(samples=samples), tmp_path)


def test_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    notebook = json.loads((ROOT / "examples" / "masks.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    python("\n".join("".join(cell["source"]) for cell in cells), tmp_path)


def test_environment_is_as_shown(tmp_path: Path) -> None:
    (shown,) = [block for block in blocks(README, "text") if block.startswith("backends on cpu")]
    assert shown in python("from flashproto.env import main; main([])", tmp_path)


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", text)) - {"--help"}


@pytest.mark.slow
def test_options_of_the_trainer_are_documented() -> None:
    """All of train_gpt.py, generate.py and prepare_data.py, and none that neither they nor torchrun
    have."""
    scripts = ("train_gpt.py", "generate.py", "prepare_data.py", "compare_losses.py")
    of_script = []
    for script in scripts:
        command = [sys.executable, str(ROOT / "examples" / script), "--help"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        of_script.append(options(done.stdout))
    training, generating, preparing, _ = of_script
    documented = options((ROOT / "docs" / "training.md").read_text())
    assert training | generating | preparing <= documented
    of_torchrun = options(get_args_parser().format_help())
    assert documented <= of_torchrun.union(*of_script)
    section = README.read_text().split("## Train a small GPT")[1].split("\n## ")[0]
    assert options(section) <= training | generating | preparing | of_torchrun


def table(heading: str) -> list[list[str]]:
    """The cells of the table behind a heading of README, without its first two lines."""
    rows = README.read_text().split(f"\n{heading}\n", 1)[1].split("\n|", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in ("|" + rows).splitlines()[2:]]


def test_lines_from_other_libraries() -> None:
    """Each new line runs; what it gives is what the old library documents, written out in PyTorch."""
    torch.manual_seed(0)
    heads = torch.randn(3, 2, 4, 6, 8)  # [B, H, S, D]
    tokens = heads.transpose(2, 3)  # [B, S, H, D], with whose heads and tokens in each other's place
    x, w, h, eps = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8), 1e-6
    classes, t = torch.randn(16, 8), torch.randint(16, (4,))
    of_old_line = {
        "F.scaled_dot_product_attention": (
            dict(zip("qkv", heads, strict=True)),
            F.scaled_dot_product_attention(*heads, is_causal=True),
        ),
        "flash_attn_func": (
            dict(zip("qkv", tokens, strict=True)),
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2),
        ),
        "liger_rms_norm": ({"x": x, "w": w, "eps": eps}, F.rms_norm(x, (8,), w, eps)),
        "rmsnorm": ({"x": x, "w": w, "eps": eps}, F.rms_norm(x, (8,), w, eps)),
        "liger_swiglu": ({"a": x, "b": h}, F.silu(x) * h),
        "LigerFusedLinearCrossEntropyLoss": (
            {"w": classes, "h": h, "t": t},
            F.cross_entropy(h @ classes.T, t),
        ),
    }
    rows = table("### Coming from another library")
    assert len(rows) == len(of_old_line)
    for _, old, new in rows:
        (wanted,) = [case for name, case in of_old_line.items() if old.startswith(f"`{name}(")]
        inputs, result = wanted
        given = eval(new.strip("`"), {"flashproto": flashproto, **inputs})
        torch.testing.assert_close(given, result, rtol=1e-5, atol=1e-5, msg=new)
