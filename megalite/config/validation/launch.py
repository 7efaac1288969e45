"""Contradictions in the options of a launch: names, directories, the backend, dry runs and profiles."""

import re
from collections.abc import Iterator

from megalite.config.options import Config
from megalite.config.problems import Problem, exclusive, options_set, value_of


def launch_problems(config: Config) -> Iterator[Problem]:
    log, operations = config.log, config.operations
    parallel, train = config.parallel, config.train
    if log.name and log.run_dir:
        yield exclusive("name", "run_dir")
    for name in options_set(config, "run_dir", "data_cache_path", "export_hf"):
        path = value_of(config, name)
        if "://" in path:
            yield Problem(f"{name}={path!r} is a URL; give a local directory", options=(name,))
    if parallel.distributed_backend == "mpi":
        yield Problem(
            "distributed_backend=mpi is in none of torch's wheels; mpirun starts ranks of nccl and gloo too: remove it",
            options=("distributed_backend",),
        )
    if parallel.distributed_backend == "nccl" and parallel.device == "cpu":
        yield Problem(
            "distributed_backend=nccl does not run on device=cpu; use gloo", options=("distributed_backend", "device")
        )
    if train.dry_run_rank is not None and not train.dry_run:
        yield Problem(
            f"dry_run_rank={train.dry_run_rank} has no effect without a dry run; add --dry-run",
            options=("dry_run_rank", "dry_run"),
        )
    if operations.profile and operations.profile_step_end <= operations.profile_step_start:
        yield Problem(
            f"profile_step_end={operations.profile_step_end} is not above "
            f"profile_step_start={operations.profile_step_start}; raise it",
            options=("profile", "profile_step_end", "profile_step_start"),
        )


def run_name_problems(config: Config) -> Iterator[Problem]:
    name = config.log.name
    if name is not None and not re.fullmatch(r"\w[\w.+=,-]{0,79}", name):
        yield Problem(
            f"name={name!r} cannot name a directory in runs; use at most 80 letters, digits and - _ . + = ,",
            options=("name",),
        )
