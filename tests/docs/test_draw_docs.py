"""The programs that draw the pictures of the documents run with the current package."""

import importlib
from pathlib import Path

import pytest

from tools.plots.style import NARROW, save

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = sorted(path.stem for path in DOCS.glob("draw_*.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_pictures_of_the_documents_can_be_drawn(name: str, tmp_path: Path) -> None:
    picture = importlib.import_module(f"docs.{name}").picture()
    save(picture, tmp_path / "picture.png", NARROW)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (DOCS / f"{picture.name}.png").is_file()
