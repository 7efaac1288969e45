"""Packages that only some options need, and the error where one is not installed: exit code 3, as for missing files."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.config.options import LogConfig

CODE = 3  # training/logging/run_dir.py: Exit.PREFLIGHT
PIP_EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "matplotlib": "plots", "transformers": "all"}
PIP_EXTRAS |= {"pyyaml": "translate"}
PIP_EXTRAS |= dict.fromkeys(("zstandard", "pyarrow", "fsspec", "tiktoken"), "data")  # of pyproject.toml


class MissingPackageError(Exception):
    """Its text is that of `needs`."""


def missing_package_message(what: str, package: str) -> str:
    """
    >>> needs("--png", "matplotlib")
    '--png needs the package matplotlib; pip install matplotlib (or megalite[plots])'
    """
    extra = f" (or megalite[{PIP_EXTRAS[package]}])" if package in PIP_EXTRAS else ""
    return f"{what} needs the package {package}; pip install {package}{extra}"


def missing_packages(log: LogConfig) -> list[str]:
    """One line for each option of a run whose package is not installed; imports none of them."""
    wanted = (("tensorboard_dir", log.tensorboard_dir, "tensorboard"), ("wandb_project", log.wandb_project, "wandb"))
    wanted = ((f"{option}={value!r}", package) for option, value, package in wanted if value is not None)
    return [
        missing_package_message(option, package)
        for option, package in wanted
        if importlib.util.find_spec(package) is None
    ]
