"""Breakages of what guards a run, each with the test that must fail with it.

They are planted (support/replacements.py) in every process that the test starts: startup/sitecustomize.py.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from mistakes import dropout_masks_are_those_of_tp_rank_0
from replacements import Replacement
from torch import Tensor

from megalite.checkpoint.manager import async_save, retention, saver
from megalite.checkpoint.storage import local_storage
from megalite.data.datasets.batches import Batches
from megalite.launch import local_launcher, rendezvous
from megalite.models import gpt
from megalite.parallel import mesh
from megalite.training import replica_check, train_step
from megalite.training.checkpointing import resume

SAVE_ORDER = "tests/checkpoint/test_saver.py::test_save_order_survives_a_power_cut"
SKIPPED_STEP = "tests/training/test_train_step.py::test_all_ranks_skip_a_non_finite_step[dp4]"


@dataclass(frozen=True)
class Breakage(Replacement):
    """A breakage and the test that must fail."""

    test: str


BREAKAGES: dict[str, Breakage] = {}


def breakage(owner: Any, original: str, test: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function to BREAKAGES. The arguments are the fields of Breakage."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        BREAKAGES[function.__name__] = Breakage(function, owner, original, test)
        return function

    return add


# ---- checkpoints


@breakage(local_storage, "fsync_path", SAVE_ORDER)
def directory_is_not_synced_after_the_rename(fsync_path: Any, path: Path) -> None:
    is_staging = path.name.startswith(".")
    if is_staging or not path.is_dir():
        fsync_path(path)


@breakage(local_storage.LocalStorage, "publish", SAVE_ORDER)
def checkpoint_is_renamed_before_it_is_synced(publish: Any, storage: Any, staging_dir: Path, final: Path) -> None:
    with mock.patch.object(local_storage, "fsync_path"):
        publish(storage, staging_dir, final)
    for path in (final / "manifest.json", final / "COMPLETE", final, final.parent):
        local_storage.fsync_path(path)


@breakage(retention, "is_complete", "tests/checkpoint/test_saver.py::test_retention_deletes_only_complete_checkpoints")
def incomplete_directories_count_as_checkpoints(_: Any, checkpoint: Any) -> bool:
    return True


@breakage(
    saver, "run_on_all_ranks", "tests/checkpoint/test_saver.py::test_full_disk_on_one_rank_is_an_error_on_all[at once]"
)
def error_of_a_writer_is_only_printed(
    run_on_all_ranks: Any, mesh: Any, function: Callable[[], Any], action: str
) -> Any:
    def print_error() -> Any:
        try:
            return function()
        except Exception as error:
            print(error)

    return run_on_all_ranks(mesh, print_error, action)


@breakage(async_save, "wait_for_rank_files", "tests/checkpoint/test_saver.py::test_rank_0_commits_after_the_last_file")
def background_save_is_committed_before_all_ranks_have_written(_: Any, *args: Any) -> None:
    pass


@breakage(
    resume,
    "_read_run_state",
    "tests/chaos/test_dead_ranks.py::"
    "test_failed_save_commits_nothing_and_the_run_resumes[killed with its file written]",
)
def resumed_run_starts_its_data_again(read_run_state: Any, *args: Any) -> Any:
    saved = read_run_state(*args)
    return replace(saved, progress={**saved.progress, "consumed_samples": 0})


# ---- steps


@breakage(train_step, "all_reduce_", SKIPPED_STEP)
def maximum_of_the_norms_drops_a_nan(all_reduce: Any, packed: Tensor, world: Any) -> Tensor:
    return all_reduce(packed, world, dist.ReduceOp.MAX)


@breakage(train_step, "all_reduce_", SKIPPED_STEP)
def every_rank_uses_its_own_norm(all_reduce: Any, packed: Tensor, world: Any) -> Tensor:
    local_norm_sq = packed[0].item()
    all_reduce(packed, world)
    packed[0] = local_norm_sq
    return packed


@breakage(train_step, "_reduce_step_sums", "tests/training/test_train_step.py::test_all_ranks_decide_equally[]")
def only_rank_0_may_ask_for_a_stop(
    reduce_step_sums: Any, run: Any, host_batches: Any, want_stop: bool, *args: Any
) -> Any:
    return reduce_step_sums(run, host_batches, want_stop and run.mesh.world.is_first, *args)


breakage(gpt, "dropout", "tests/layouts/test_layouts.py::test_layout_equals_one_process_in_fp32[gpt dropout tp2]")(
    dropout_masks_are_those_of_tp_rank_0
)


@breakage(
    replica_check,
    "_find_differences",
    "tests/training/test_replica_checks.py::test_flipped_bit_is_detected_and_named[one of two]",
)
def differences_of_replicas_are_not_reported(find_differences: Any, run: Any) -> tuple[str, list[Any]]:
    find_differences(run)
    return "", []


# ---- data


@breakage(Batches, "_check", "tests/data/test_batches.py::test_ids_outside_the_vocabulary_name_file_and_document")
def ids_outside_the_vocabulary_are_accepted(_: Any, batches: Batches, ids: Any, tokens: Any) -> None:
    pass


@breakage(Batches, "__init__", "tests/data/test_batches.py::test_every_sample_has_one_position")
def all_dp_ranks_read_the_same_samples(
    init: Any, batches: Batches, dataset: Any, micro_batch_size: int, dp_rank: int, *args: Any, **kwargs: Any
) -> None:
    init(batches, dataset, micro_batch_size, 0, *args, **kwargs)


# ---- processes


@breakage(mesh, "set_group_timeout", "tests/training/test_hang.py::test_every_group_has_the_given_timeout")
def one_group_keeps_its_first_timeout(set_group_timeout: Any, timeout: Any, group: Any) -> None:
    if group.group_desc != "pp_grad":
        set_group_timeout(timeout, group)


@breakage(local_launcher, "safe_start", "tests/training/test_signals.py::test_signal_saves_and_stops[SIGTERM-two]")
@contextlib.contextmanager
def fork_server_dies_of_signals(safe_start: Any) -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, local_launcher.BLOCKED_SIGNALS)
    with safe_start():
        yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@breakage(rendezvous, "agree_on_prefix", "tests/launch/test_rendezvous.py::test_prefixes_in_one_store_differ")
def two_rendezvous_have_the_same_prefix(agree_on_prefix: Any, *args: Any, **kwargs: Any) -> str:
    agree_on_prefix(*args, **kwargs)
    return "prefix"
