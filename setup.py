"""All else is in pyproject.toml.  A wheel without kernels/ would install, and run nothing."""

from pathlib import Path

from setuptools import setup

if not Path(__file__).with_name("flashproto").joinpath("kernels").is_dir():
    raise SystemExit(
        "flashproto/kernels is no link to the folder kernels/; git on Windows leaves a file there. "
        "Run: git config core.symlinks true && git checkout flashproto/kernels"
    )
setup()
