"""A run that is killed and restarted is the same run (C12, I7).

With other numbers of ranks it still reads every sample once, in the same order.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import toml_tables
from fault_runs import drill
from soak import KINDS, soak
from token_files import write_documents
from train_cases import read_metric

from megalite.optim.zero.param_bucket import ParamBucket

SAMPLES, BATCH = 240, 8  # SAMPLES in an epoch
DATA_FLAGS = "--split 1,0,0 --eval-iters 0 --save-interval 2 --global-batch-size 8 --micro-batch-size 2".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a source of SAMPLES samples of 16 tokens and a label per epoch."""
    rng, remaining, documents = np.random.default_rng(1), SAMPLES * 16 + 1, list[list[int]]()
    while remaining:
        documents.append(rng.integers(0, 93, min(remaining, int(rng.integers(5, 40)))).tolist())
        remaining -= len(documents[-1])
    return str(write_documents(tmp_path_factory.mktemp("data") / "a", documents))


def _record_samples(base: Path, rank: int) -> None:
    """Write step, sample ids and tokens of each training step to a file per rank."""
    from megalite.training import train_step as module

    log, train_step = open(base / f"read-{rank}.jsonl", "a", buffering=1), module.train_step  # noqa: SIM115

    def recorded_step(run, *args, **options):  # type: ignore[no-untyped-def]
        hosts, _ = run.train_loader.get(run.progress.consumed_samples, BATCH)
        batches = list(hosts)
        rows = [(int(i), batch.tokens_SB[:, b].tolist()) for batch in batches for b, i in enumerate(batch.sample_ids_B)]
        result = train_step(run, *args, **options)
        log.write(json.dumps([run.progress.step, rows]) + "\n")
        return result

    module.train_step = recorded_step  # type: ignore[assignment]


def read_samples(base: Path) -> dict[int, list[tuple[int, list[int]]]]:
    """Return step -> the samples of all ranks in the last attempt of that step, in order of their ids."""
    steps: dict[int, dict[int, list[int]]] = {}
    for directory in sorted({path.parent for path in base.glob("*/read-*.jsonl")}):
        steps_of_attempt: dict[int, dict[int, list[int]]] = {}
        for path in directory.glob("read-*.jsonl"):
            for line in path.read_text().splitlines():
                step, rows = json.loads(line)
                for i, tokens in rows:
                    assert i not in steps_of_attempt.setdefault(step, {}), f"sample {i} twice in step {step}"
                    steps_of_attempt[step][i] = tokens
        steps |= steps_of_attempt
    return {step: sorted(rows.items()) for step, rows in sorted(steps.items())}


@pytest.mark.nightly
def test_samples_come_once_in_order_over_kills_and_other_world_sizes(data: str, tmp_path: Path) -> None:
    """Train an epoch and two steps with dp 2 -> 4 -> 1 -> 2, with a kill -9 of a rank in each attempt but the last."""
    steps = SAMPLES // BATCH + 2
    flags = [*DATA_FLAGS, "--data-path", data, "--train-iters", str(steps), "--run-dir", str(tmp_path / "logs")]
    straight = drill(tmp_path / "s/a", 2, [*flags, "--run-dir", str(tmp_path / "s")], before=_record_samples)
    assert straight.code == 0, straight.outputs
    shared = [*flags, "--save", str(tmp_path / "k/run"), "--load", str(tmp_path / "k/run")]
    for name, world, fault in (
        ("a", 2, "step.after_update:1:9:kill"),
        ("b", 4, "step.after_reduce:3:20:kill"),
        ("c", 1, "data.get:0:28:kill"),
        ("d", 2, ""),
    ):
        end = drill(tmp_path / "k" / name, world, shared, fault, before=_record_samples)
        assert end.code == (137 if fault else 0), end.outputs
    expected, actual = read_samples(tmp_path / "s"), read_samples(tmp_path / "k")
    assert actual == expected and list(expected) == list(range(1, steps + 1))
    assert [i for rows in expected.values() for i, _ in rows] == list(range(steps * BATCH))
    assert len({tuple(tokens) for rows in list(expected.values())[: SAMPLES // BATCH] for _, tokens in rows}) == SAMPLES
    a, b = read_metric(tmp_path / "s"), read_metric(tmp_path / "logs")
    assert len(a) == steps and b == pytest.approx(a, rel=1e-4)


def _die_with_unsharded_weights(base: Path, rank: int) -> None:
    """Kill rank 1 in its fourth step, between the unshard of a layer and its reshard."""
    reshard, buckets = ParamBucket.reshard, list[ParamBucket]()

    def reshard_or_die(self: ParamBucket) -> None:
        if not self.is_resident:
            buckets.append(self)
        # 6 units at the start, and 20 in each step: 2 micro-batches of 6 forwards and of 4 backwards of layers
        if rank == 1 and len(buckets) == 76:
            (base / "struck").write_text("0")
            os.kill(os.getpid(), signal.SIGKILL)
        reshard(self)

    ParamBucket.reshard = reshard_or_die  # type: ignore[method-assign]


GATHERS = pytest.mark.nightly(
    guards=tuple(f"megalite/optim/zero/{m}.py" for m in ("sync", "param_bucket", "grad_bucket", "storage"))
    + ("megalite/nn/context_parallel.py", "megalite/nn/sequence_sharding.py")
)


TABLES = toml_tables.read_table("layouts/layouts")
expand = toml_tables.expander(TABLES["abbreviations"])
KILLED_MODELS = {
    "another ep": """--num-experts 8 --disable-bias-linear --moe-router-score-function sigmoid
     --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01""",
    "another tp, pp and cp": expand("MLA TIED MTP3 --hidden-dropout 0.1"),
    "states under another cp and tp": """--norm-epsilon 0.01 --hybrid-layer-pattern GKM-*
     --linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 6 --linear-value-head-dim 5
     --mamba-num-groups 2 --mamba-head-dim 8 --mamba-state-dim 4""",
}


@GATHERS
@pytest.mark.parametrize("name", TABLES["killed"])
def test_killed_run_resumes_in_another_layout(name: str, data: str, tmp_path: Path) -> None:
    """Compare with one process, after a kill -9 in each layout but the last; in ZeRO-3 while weights are unsharded."""
    flags = [*DATA_FLAGS, "--data-path", data, "--train-iters", "8", "--hidden-dropout", "0.1"]
    flags += KILLED_MODELS.get(name, "").split()
    straight = drill(tmp_path / "s/a", 1, [*flags, "--run-dir", str(tmp_path / "s")])
    assert straight.code == 0, straight.outputs
    logs, run = tmp_path / "logs", str(tmp_path / "k/run")
    shared = [*flags, "--run-dir", str(logs), "--save", run, "--load", run]
    for number, (world, layout, fault, step) in enumerate(TABLES["killed"][name]):
        before = _die_with_unsharded_weights if not number and not fault else None
        end = drill(tmp_path / "k" / str(number), world, [*shared, *expand(layout).split()], fault, before=before)
        assert end.code == (137 if fault or before else 0), end.outputs
        assert not step or f"iter_{step:07d}" in " ".join(end.outputs), end.outputs
    assert read_metric(logs)[-2:] == pytest.approx(read_metric(tmp_path / "s")[-2:], rel=1e-4)
    assert read_metric(logs) == pytest.approx(read_metric(tmp_path / "s"), rel=1e-4)
    if name == "another ep":
        counts = read_metric(logs, "moe/load")
        assert counts == read_metric(tmp_path / "s", "moe/load") and len(counts) == 8
    if "--mtp-num-layers" in flags:
        for depth in (1, 2, 3):
            losses, expected = (read_metric(path, f"train/mtp_{depth}_loss") for path in (logs, tmp_path / "s"))
            assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 8


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_run_with_random_faults_is_the_same_run(tmp_path: Path) -> None:
    """Inject faults for a minute. `python tests/chaos/soak.py 30 DIR` does it for half an hour."""
    table = soak(tmp_path / "out", seed=1, steps=240, number=len(KINDS))
    assert all(f"| {kind} |" in table for kind in KINDS) and "bit for bit the same" in table
