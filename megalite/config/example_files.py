"""The directory of megalite's examples: among its programs in a wheel, next to the package in a clone."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
EXAMPLE_DIRS = (_PACKAGE / "programs" / "examples", _PACKAGE.parent / "examples")


def example_dir(name: str) -> Path:
    """Return the directory examples/`name`."""
    return next(path / name for path in EXAMPLE_DIRS if (path / name).is_dir())
