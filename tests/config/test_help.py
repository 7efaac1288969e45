"""--help: what a newcomer needs, a group, everything."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config import cli, help
from megalite.config.field import flag_of, spellings
from megalite.config.options import SECTIONS, options
from megalite.models.families import PRESETS

ROOT = Path(__file__).resolve().parents[2]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def asked(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "pretrain_gpt.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_the_first_page_holds_fifteen_flags_examples_and_groups() -> None:
    page = help.help_text("", sorted(PRESETS))
    begin, _, rest = page.partition("examples:")
    first = help.PAGES["first"].split()
    assert flags_in(begin) == {flag_of(name) for name in first}
    assert len(first) == 15 and "--tensor-model-parallel-size INT, --tp INT" in begin
    examples = re.findall(r"^  # .*\n((?:.*\\\n)*.*)$", rest, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example.replace("\\\n", " "))
        cli.read(words[next(i for i, word in enumerate(words) if word.startswith("--")) :], PRESETS)  # raises if wrong
    assert set(re.findall(r"--help (\w+)", rest)) == {*SECTIONS, "all"} == {*help.PAGES["groups"], "all"}


def test_each_flag_is_on_the_page_of_its_group_and_on_that_of_all() -> None:
    every = flags_in(help.help_text("all", ["one"]))
    pages = {section: flags_in(help.help_text(section, ["one"])) for section in SECTIONS}
    assert every == set().union(*pages.values()) and {"--preset", "--config"} <= every
    for section, f in options():
        assert spellings(f)[0][0] in pages[section]
    assert {"--tensor-model-parallel-size", "--no-overlap-grad-reduce"} <= {*asked("--help", "all").stdout.split()}


PAGES = {"": None, "--lr 3": None, "--help": "", "-h": "", "--help data": "data", "--help=data": "data"}


@pytest.mark.parametrize("line,page", [*PAGES.items(), ("--lr 3 --help --bf16", ""), ("--lr 3 -h all --bf16", "all")])
def test_the_word_behind_help_is_its_page(line: str, page: str | None) -> None:
    assert help.asked_for(line.split()) == page


def test_a_page_that_is_none_is_answered_with_the_nearest() -> None:
    done = asked("--help", "dta")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pretrain_gpt.py: --help dta is not a page of the help; did you mean data?\n"
    assert "give one of model, parallel, train" in asked("--help", "xyz").stderr


def test_help_needs_few_modules_and_no_torch() -> None:
    """0.2 to 0.3 s; what takes time are imports."""
    words = [sys.executable, "-X", "importtime", "pretrain_gpt.py", "--help"]
    imported = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stderr
    assert "megalite.config.help" in imported and not re.search(r"\| +(torch|numpy|rich)\b", imported)
    assert imported.count("import time:") < 300  # 213 with Python 3.11, whose own are 99
