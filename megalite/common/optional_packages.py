"""Packages that only some options need, and the error if one is not installed (exit code 3, as for missing files)."""

import contextlib
import sys
from collections.abc import Iterator

# packages whose GPU kernels transformers calls if they can be imported, with tensors of a CPU too
KERNEL_PACKAGES_OF_TRANSFORMERS = ("fla", "causal_conv1d", "mamba_ssm")
PIP_EXTRAS = {  # package -> the extra in pyproject.toml that installs it
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "matplotlib": "plots",
    "transformers": "all",
    "pyyaml": "translate",
    "lm-eval": "eval",
    "zstandard": "data",
    "pyarrow": "data",
    "fsspec": "data",
    "tiktoken": "data",
    "fla-core": "fla",
}


@contextlib.contextmanager
def hidden_packages(*names: str) -> Iterator[None]:
    """Make packages fail to import within the block."""
    imported = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: an ImportError
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(imported)


class MissingPackageError(Exception):
    """A package is not installed; the text is that of `missing_package_message`."""


def missing_package_message(what: str, package: str) -> str:
    """Return what needs the package, and how to install it.

    >>> missing_package_message("--png", "matplotlib")
    '--png needs the package matplotlib; pip install matplotlib (or megalite[plots])'
    """
    extra = f" (or megalite[{PIP_EXTRAS[package]}])" if package in PIP_EXTRAS else ""
    return f"{what} needs the package {package}; pip install {package}{extra}"
