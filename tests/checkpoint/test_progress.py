"""Saving and loading say that they run and how far, in either style of the log."""

import functools
import re
from pathlib import Path

import programs
import pytest
from cover import rarely
from test_start import SMALL, built

from megalite.config import console
from megalite.train.start.origin import start_run


def test_a_line_now_and_then_and_none_for_what_is_short(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    one = console.told("loading X", 50, "tensors")
    for _ in range(50):
        now[0] += 0.5
        one.add(1)
    assert capsys.readouterr().out.splitlines() == ["loading X: 20 of 50 tensors", "loading X: 40 of 50 tensors"]


@pytest.mark.parametrize("style", rarely(["megalite", "megatron"], ["megalite"], str, guards=("megalite/checkpoint",)))
def test_saving_and_loading_speak(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    where = str(tmp_path / "run")
    words = f"--lr-decay-iters 9 --save {where} --load {where} --save-interval 2 --log-style {style}".split()
    for iters in ("2", "3"):
        done = programs.python("pretrain_gpt.py", *SMALL, *words, "--train-iters", iters, ok=True)
    wanted = {
        "megalite": (
            rf"^saving checkpoint at step 3 to {where}\nsaved iter_0000003 in [\d.]+ s \([\d.e-]+ GiB, [\d.e-]+ GiB/s\)",
            rf"^loading {where}/iter_0000002 \([\d.e-]+ GiB\)$(.|\n)*^resumed from {where}/iter_0000002 at step 2$",
        ),
        "megatron": (
            rf"^saving checkpoint at iteration       3 to {where} in megalite format$(.|\n)*"
            rf"^  successfully saved checkpoint from iteration       3 to {where} \[ t 1/1, p 1/1 \]$",
            rf"^ loading distributed checkpoint from {where} at iteration 2$(.|\n)*"
            rf"^  successfully loaded checkpoint from {where} \[ t 1/1, p 1/1 \] at iteration 2$",
        ),
    }
    for line in wanted[style]:
        assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    if style == "megalite":  # and how far, where it takes long
        monkeypatch.setattr(console, "Bar", functools.partial(console.Bar, every_s=0))
        run, _ = built("--load", where, "--lr-decay-iters", "9")
        capsys.readouterr()
        start_run(*built("--load", where, "--lr-decay-iters", "9"))
        run.close()
        assert re.search(rf"loading {where}/iter_0000003: [\d.e-]+ of [\d.e-]+ GiB that this", capsys.readouterr().out)
