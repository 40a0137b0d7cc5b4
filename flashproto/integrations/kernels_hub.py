"""A folder in the layout of Hugging Face's Kernels Hub, with flash-attn's functions of this library.

    python -m flashproto.integrations.kernels_hub FOLDER

`kernels.get_local_kernel(FOLDER)` loads it, and transformers' continuous batching takes a repository
with it as attn_implementation="owner/name".  It is a copy of this package, in Python alone, with
relative imports and names of torch ops of its own, so that it, an installed flashproto and other
versions can live in one process.  Source: the layout of `kernels` 0.17, huggingface.co/docs/kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from .. import __version__
from .flash_attn import __all__ as EXPORTED

PACKAGE = Path(__file__).resolve().parents[1]
LEFT_OUT = ("__pycache__", "bench", "distributed")
VARIANTS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
HEAD = '"""flash-attn\'s functions on the kernels of flashproto {version}."""\n\n'


def write(folder: str | Path) -> list[Path]:
    """Write FOLDER/build/torch-cuda and torch-cpu; what was written there before is replaced.

    Args:
        folder: of the repository; made where it is missing.

    Returns: the two folders.

    Raises: ValueError: there is something in them that this function did not write.

    Example:
        >>> import tempfile
        >>> [x.name for x in write(tempfile.mkdtemp())]
        ['torch-cuda', 'torch-cpu']
    """
    made = [Path(folder) / "build" / variant for variant in VARIANTS]
    for place in made:
        if place.exists() and any(place.iterdir()) and not (place / PACKAGE.name).is_dir():
            raise ValueError(
                f"kernels_hub.write: folder has {place} with other files; it takes an empty one, or "
                "one that it wrote. Pass another folder."
            )
    for place, backend in zip(made, VARIANTS.values(), strict=True):
        shutil.rmtree(place, ignore_errors=True)
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(PACKAGE, place / PACKAGE.name, ignore=ignored)
        names = ",\n    ".join(EXPORTED)
        listed = "".join(f'    "{name}",\n' for name in EXPORTED)
        text = HEAD.format(version=__version__)
        text += f"from .flashproto.integrations.flash_attn import (\n    {names},\n)\n\n"
        (place / "__init__.py").write_text(f"{text}__all__ = [\n{listed}]\n")
        (place / "metadata.json").write_text(json.dumps(metadata(place, backend), indent=2) + "\n")
    return made


def metadata(place: Path, backend: str) -> dict[str, object]:
    """What `kernels` reads.  The id is the name of the module in sys.modules: by the files' text."""
    text = hashlib.sha256()
    for path in sorted(place.rglob("*.py")):
        text.update(str(path.relative_to(place)).encode() + path.read_bytes())
    return {
        "id": f"_flashproto_{backend}_{text.hexdigest()[:12]}",
        "name": "flashproto",
        "version": 1,
        "license": "MIT",
        "python-depends": ["einops"],
        "backend": {"type": backend},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.integrations.kernels_hub", description=write.__doc__
    )
    parser.add_argument("folder", type=Path)
    for place in write(parser.parse_args().folder):
        print(f"wrote {place}")


if __name__ == "__main__":
    main()
