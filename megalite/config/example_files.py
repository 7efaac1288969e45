"""Where the examples that come with megalite are: below its programs in a wheel, beside the package in a clone."""

from pathlib import Path

_HERE = Path(__file__).resolve().parents[1]
FOLDERS = (_HERE / "programs" / "examples", _HERE.parent / "examples")


def example_dir(name: str) -> Path:
    """Return examples/`name`."""
    return next(folder / name for folder in FOLDERS if (folder / name).is_dir())
