"""Packages that only some options need, and the error if one is not installed (exit code 3, as for missing files)."""

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


class MissingPackageError(Exception):
    """A package is not installed; the text is that of `missing_package_message`."""


def missing_package_message(what: str, package: str) -> str:
    """Return what needs the package, and how to install it.

    >>> missing_package_message("--png", "matplotlib")
    '--png needs the package matplotlib; pip install matplotlib (or megalite[plots])'
    """
    extra = f" (or megalite[{PIP_EXTRAS[package]}])" if package in PIP_EXTRAS else ""
    return f"{what} needs the package {package}; pip install {package}{extra}"
