"""The picture of samples is drawn from what the program reads."""

import sys
from pathlib import Path

import programs
import pytest

from megalite.data.errors import DataError
from tools.plot_samples import COLOURS, LENGTHS, draw

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plot_samples.py"


def test_every_part_of_the_picture_is_there() -> None:
    figure = draw(list(LENGTHS), "10,1,1", 16, 1)
    texts = [{t.get_text() for t in axis.texts} for axis in figure.axes]
    assert {"train", "valid", "test", *map(str, range(12))} <= texts[0]
    assert {f"window {j}" for j in range(7)} <= texts[1]  # 97 tokens of training documents
    samples = sorted(text for text in texts[2] if text.startswith("sample"))
    assert sorted(text.split("window ")[1] for text in samples) == list("0123456")  # each window once
    bins = sorted(text for text in texts[3] if text.startswith("sample"))
    assert sorted(text.split("bin ")[1] for text in bins) == list("012345")
    assert not {"10", "11"} & (texts[1] | texts[2] | texts[3])  # only training documents are trained on
    tokens = sum(patch.get_width() for patch in figure.axes[0].patches)
    assert tokens == sum(LENGTHS)
    places = sum(patch.get_width() for patch in figure.axes[3].patches)
    assert places == 6 * 17
    assert "documents cut: 1 (above: 4)" in figure.axes[3].get_title(loc="left")
    assert len(set(COLOURS)) == len(LENGTHS)  # no two documents look alike
    with pytest.raises(DataError, match="fewer than one sample of seq_length 200"):
        draw(list(LENGTHS), "10,1,1", 200, 1)


def test_tool(tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    command = [sys.executable, str(TOOL), "--lengths", "30", "4", "9", "12", "--split", "3,1,0", "--seq-length", "10"]
    programs.run([*command, "--out", str(out)], ok=True, timeout=60)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    got = programs.run([*command, "--split", "0,1"], capture_output=True, text=True, timeout=60)
    assert got.returncode == 2 and got.stderr.startswith("plot_samples.py: ") and "split" in got.stderr
