"""Breakages planted on purpose into a copy of the sources, one at a time, each with a test that must turn red."""

import functools
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("megalite", "tests", "tools", "pretrain_gpt.py", "pyproject.toml")
LIMIT_S = 150.0


@dataclass(frozen=True)
class Breakage:
    """`lines`: what stands in the package, in one place each, and what replaces it. `test`: what must turn red."""

    name: str
    test: str
    lines: tuple[tuple[str, str], ...]


BREAKAGES = [
    # ---- the eight of the plan
    Breakage(
        "the folder is not synced after the rename",
        "tests/checkpoint/test_saver.py::test_order_of_events_survives_a_power_cut",
        (("        shutil.rmtree(old, ignore_errors=True)\n        to_disk(final.parent)\n", "        shutil.rmtree(old, ignore_errors=True)\n"),),
    ),
    Breakage(
        "the maximum of the norms is taken, which drops a NaN",
        "tests/chaos/test_one_bad_number.py::test_all_ranks_skip_the_step_that_one_has_a_bad_number_in[dp4]",
        (("    all_reduce_(packed, mesh.world)\n", "    all_reduce_(packed, mesh.world, torch.distributed.ReduceOp.MAX)\n"),),
    ),
    Breakage(
        "a group is made without the time-out",
        "tests/train/test_hang.py::test_every_group_has_the_timeout_that_was_given",
        (
            ("dist.new_group(list(ranks), timeout=self.timeout, group_desc=name)", "dist.new_group(list(ranks), group_desc=name)"),
(
                "            set_group_timeout(timeout, axis.group)",
                '            axis.name == "pp_back" or set_group_timeout(timeout, axis.group)',
            ),
        ),
    ),
    Breakage(
        "ids beyond the vocabulary are let through",
        "tests/data/test_batches.py::test_ids_beyond_the_vocabulary_name_file_and_document",
        (("        self._check(ids, tokens)\n", ""),),
    ),
    Breakage(
        "the rename comes before the manifest is on disk",
        "tests/checkpoint/test_saver.py::test_order_of_events_survives_a_power_cut",
        (
            ('        for name in ("manifest.json", "COMPLETE"):\n            to_disk(part / name)\n        to_disk(part)\n', ""),
            ("        to_disk(final.parent)\n\n    def remove", '        for name in ("manifest.json", "COMPLETE"):\n            to_disk(final / name)\n        to_disk(final)\n        to_disk(final.parent)\n\n    def remove'),
        ),
    ),
    Breakage(
        "every rank draws its dropout as rank 0 does",
        "tests/test_layouts.py::test_layout_equals_one_process_in_fp32[gpt dropout tp2]",
        (("first = where.places_of(self.tp, x_sBD.shape[0])", "first = 0"),),
    ),
    Breakage(
        "directories that are no whole checkpoint count as kept ones",
        "tests/checkpoint/test_saver.py::test_keep_last_and_retain_touch_only_complete_ones",
        ((" and step not in self.damaged and is_complete(folder_of(self.directory, step)):", " and step not in self.damaged:"),),
    ),
    Breakage(
        "a writer's error is printed and forgotten",
        "tests/checkpoint/test_saver.py::test_a_disk_that_is_full_on_one_rank_is_an_error_on_all[at once]",
        (("        agree(error, mesh, doing)\n        raise\n", "        print(error)\n        result = None\n"),),
    ),
    # ---- and others
    Breakage(
        "only rank 0 may ask for a stop",
        "tests/train/test_step.py::test_all_ranks_decide_alike[]",
        (("fill_(float(want_stop))", "fill_(float(want_stop and mesh.world.is_first))"),),
    ),
    Breakage(
        "a rank judges by its own gradients whether a step is good",
        "tests/chaos/test_one_bad_number.py::test_all_ranks_skip_the_step_that_one_has_a_bad_number_in[dp4]",
        (("    all_reduce_(packed, mesh.world)\n", "    own = packed[0].item()\n    all_reduce_(packed, mesh.world)\n    packed[0] = own\n"),),
    ),
    Breakage(
        "the fork server dies of signals",
        "tests/train/test_signals.py::test_a_run_that_saves_saves_and_stops[SIGTERM-two]",
        (("            before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)\n", "            before = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"),),
    ),
    Breakage(
        "two meetings in one store have the same name",
        "tests/launch/test_meeting.py::test_meetings_in_one_store_have_different_names",
        (
            (
                'word = f"{socket.gethostname()} {rank} {os.getpid()} {time.time_ns()}"',
                'word = f"{socket.gethostname()} {rank} {os.getpid()}"',
            ),
        ),
    ),
    Breakage(
        "two data-parallel ranks read the same samples",
        "tests/data/test_batches.py::test_place_of_every_sample",
        ((".reshape(-1, self._dp, self._micro)[:, self._rank]", ".reshape(-1, self._dp, self._micro)[:, 0]"),),
    ),
    Breakage(
        "copies of weights are compared and nothing is said",
        "tests/train/test_watch.py::test_a_turned_bit_is_found_and_named[one of two]",
        (("            if rest and axis.is_first:", "            if len(rest) > 9 and axis.is_first:"),),
    ),
    Breakage(
        "a save in the background is committed before all ranks have written",
        "tests/checkpoint/test_saver.py::test_rank_0_commits_when_the_last_file_is_there",
        (("                wait_for_lists(self.part, self.mesh.world.size, self.give_up, confirm=self.confirm)\n", ""),),
    ),
    Breakage(
        "a resumed run begins its data again",
        "tests/checkpoint/test_dead_ranks.py::test_nothing_is_committed_and_the_run_goes_on[killed with its file written]",
        (("        setattr(run.state, name, value)\n", '        setattr(run.state, name, 0 if name == "consumed_samples" else value)\n'),),
    ),
]  # fmt: skip


def planted(breakage: Breakage) -> dict[str, str]:
    """The modules that it changes, by path. Raises ValueError if what it replaces is not there, once."""
    sources = dict(_sources())
    changed: dict[str, str] = {}
    for old, new in breakage.lines:
        there = [path for path, text in sources.items() if old in text]
        if len(there) != 1 or sources[there[0]].count(old) != 1:
            raise ValueError(f"{breakage.name}: {old!r} is in {len(there)} modules: plant it anew")
        changed[there[0]] = sources[there[0]] = sources[there[0]].replace(old, new)
    return changed


@functools.cache
def _sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted((ROOT / "megalite").rglob("*.py"))}


def rarely(breakage: Breakage) -> pytest.MarkDecorator:
    """With each commit where what it breaks was changed."""
    with suppress(ValueError):  # which a test of its own tells
        return pytest.mark.everything(guards=tuple(planted(breakage)))
    return pytest.mark.everything()


def plant(breakage: Breakage, folder: Path) -> None:
    """Into a copy of the sources."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for path, text in planted(breakage).items():
        (folder / path).write_text(text, "utf-8")


def verdict(breakage: Breakage, folder: Path) -> str:
    """red, or what else came of it in this empty folder: green, not collected, ..."""
    plant(breakage, folder)
    words = ["-x", "-p", "no:xdist", "--timeout", str(LIMIT_S - 10), f"--rootdir={folder}", breakage.test]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with programs.group([sys.executable, "-m", "pytest", *words], cwd=folder, env=env) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it hangs"
    if process.returncode == pytest.ExitCode.TESTS_FAILED and "ImportError" not in said and "SyntaxError" not in said:
        return "red"
    return "green" if process.returncode == 0 else f"exit code {process.returncode}: {said[-2000:]}"
