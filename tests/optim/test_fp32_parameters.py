"""Parameters that stay in fp32 in a bf16 model: trained as in one process, without a second copy, saved and planned."""

from pathlib import Path

import pytest
import torch
from full_tensors import OwnedShard, assemble, owned_shards
from ranks import run_ranks
from torch import Tensor
from train_cases import config_from, copy_state, is_equal, run_from

from megalite.config.config_file import dump_config
from megalite.config.options import Config
from megalite.parallel.spec import Box, TensorShard
from megalite.planning.run_plan import make_run_plan
from megalite.training.checkpointing.resume import LoadOptions, map_precision, resume
from megalite.training.checkpointing.save import open_saver, save
from megalite.training.state import Run
from megalite.training.train_step import train_step

STEPS = 3
# a decay for each channel, replicated gains, and a matrix in fp32, beside matrices in the dtype of the model
MIXER = """
import torch
from torch import nn
import megalite
from megalite.nn.linear import column_parallel_linear, row_parallel_linear
from megalite.parallel.spec import Constant, Normal, ParamSpec

class Decayed(nn.Module):
    letter = "D"

    def __init__(self, make_param, name, model, layer, spec, recomputed):
        super().__init__()
        D = model.hidden_size
        self.tp = make_param.mesh.tp
        self.up = make_param(ParamSpec(f"{name}.up", (D, D), ((0, "tp"),), init=Normal(0.2)))
        self.down = make_param(ParamSpec(f"{name}.down", (D, D), ((1, "tp"),), init=Normal(0.2)))
        self.A_log = make_param(
            ParamSpec(f"{name}.A_log", (D,), ((0, "tp"),), init=Normal(1.0), weight_decay=False, keep_fp32=True)
        )
        self.gain = make_param(
            ParamSpec(f"{name}.gain", (D,), partial_grad_axes=("tp",), init=Constant(1.0), keep_fp32=True)
        )
        self.taps = make_param(ParamSpec(f"{name}.taps", (4, D), ((1, "tp"),), init=Normal(0.5), keep_fp32=True))

    def forward(self, x_sBD, batch, ctx):
        x_sBD = (x_sBD * self.gain).to(x_sBD.dtype)
        (u_SBf,) = column_parallel_linear(x_sBD, [self.up], self.tp, ctx.wgrad_store)
        padded = nn.functional.pad(u_SBf, (0, 0, 0, 0, 3, 0))
        y_SBf = sum(self.taps[i] * padded[i : i + len(u_SBf)] for i in range(4)) * torch.exp(-torch.exp(self.A_log))
        return row_parallel_linear(y_SBf.to(u_SBf.dtype), self.down, self.tp, wgrad_store=ctx.wgrad_store)

megalite.register("mixer", "decayed", Decayed)
"""
KEPT = ("A_log", "gain", "taps")
FLAGS = """--num-layers 4 --hybrid-layer-pattern D-*-D-*- --hidden-size 32 --num-attention-heads 4 --seq-length 16
 --vocab-size 93 --make-vocab-size-divisible-by 32 --micro-batch-size 1 --global-batch-size 4 --mock-data --eval-iters 0
 --train-iters 9 --lr 1e-2 --init-method-std 0.3 --hidden-dropout 0 --attention-dropout 0 --clip-grad 0 --bf16
 --weight-decay 0.1 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --ddp-bucket-size 2000"""
OFFLOAD = "--optimizer-cpu-offload"
DP_LAYOUTS = {
    "dp2 zero0": (2, "--no-use-distributed-optimizer"),
    "dp2": (2, ""),
    "dp2 zero2": (2, "--zero-stage 2"),
    "dp2 zero3": (2, "--zero-stage 3"),
    "dp2 zero3 by chunk": (2, "--zero-stage 3 --reshard-after-forward chunk"),
    "dp2 offload": (2, f"{OFFLOAD} --optimizer-offload-fraction 0.6"),
    "dp2 zero3 host": (2, f"--zero-stage 3 {OFFLOAD} --param-cpu-offload"),
    "hybrid": (4, "--zero-stage 3 --num-distributed-optimizer-instances 2"),
    "hybrid optim": (4, "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"),
}
# other layouts and optimizers, whose sums have another order
LAYOUTS = {
    "tp2 zero3": (4, "--tp 2 --zero-stage 3"),
    "pp2 split": (2, "--pp 2 --split-backward"),
    "pp2 vpp2 zero3 recomputed": (
        4,
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --zero-stage 3 --recompute-granularity full "
        "--recompute-method uniform",
    ),
    "muon": (2, "--optimizer muon --zero-stage 2"),
    "muon tp2": (4, "--optimizer muon --tp 2 --zero-stage 3"),
    "lamb": (2, "--optimizer lamb --zero-stage 3"),
    "lars": (2, "--optimizer lars --lr 1"),
    "sgd": (2, "--optimizer sgd --zero-stage 3"),
}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "decayed.py"
    path.write_text(MIXER)
    return str(path)


def _run(plugin: str, flags: str) -> Run:
    return run_from(f"{FLAGS} --plugin {plugin} {flags}")


def _is_kept(name: str) -> bool:
    return name.rpartition(".")[2] in KEPT


def _train(plugin: str, flags: str) -> tuple[list[float], list[OwnedShard]]:
    """Return the losses, and the weights and the optimizer state that this rank owns; check the dtypes."""
    run = _run(plugin, flags)
    losses = [train_step(run).loss for _ in range(STEPS)]
    run.sync.wait_param_sync()
    optimizer = run.optimizer
    for bucket in optimizer.buckets:
        names, owned, main = bucket.params.names, bucket.params.owned, bucket.main
        keeps_fp32 = all(map(_is_kept, names))
        assert keeps_fp32 or not any(map(_is_kept, names)), "fp32 weights have their own buckets"
        assert owned.dtype == (torch.float32 if keeps_fp32 else torch.bfloat16) and main.dtype == torch.float32
        assert (main.data_ptr() == owned.data_ptr()) == (keeps_fp32 and not bucket.is_offloaded and bool(len(owned))), (
            "one copy"
        )
        assert torch.equal(owned, main.to(owned.dtype))
    dtypes = {shard.name: shard.data.dtype for shard in optimizer.checkpoint_shards()}
    for name in dtypes:
        kind, _, parameter = name.partition("/")
        assert kind != "model" or (f"optimizer.main/{parameter}" in dtypes) == (not _is_kept(parameter))
    return losses, owned_shards(optimizer)


def _full(ranks: list[tuple[list[float], list[OwnedShard]]]) -> tuple[list[float], dict[str, Tensor]]:
    return ranks[0][0], assemble(shard for _, shards in ranks for shard in shards)


@pytest.fixture(scope="module")
def one_process(plugin: str) -> tuple[list[float], dict[str, Tensor]]:
    return _full(run_ranks(1, _train, plugin, "--micro-batch-size 2"))


@pytest.mark.parametrize("layout", DP_LAYOUTS)
def test_data_parallel_layouts_train_as_one_process(
    layout: str, plugin: str, one_process: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Ranks with the micro-batches of one process sum the same two gradients, so all weights and moments are equal.

    Four ranks halve the micro-batches, which changes the order of sums.
    """
    world, flags = DP_LAYOUTS[layout]
    expected_losses, expected = one_process
    losses, actual = _full(run_ranks(world, _train, plugin, f"--micro-batch-size {4 // world} {flags}"))
    assert actual.keys() == expected.keys()
    assert losses == pytest.approx(expected_losses, rel=1e-6 if world == 2 else 2e-3)
    for name in expected:
        if world == 2:
            assert torch.equal(actual[name], expected[name]), name
        else:
            assert (actual[name] - expected[name]).norm() <= 0.1 * expected[name].norm(), name
    decays = expected["model/layers.0.decayed.A_log"]
    assert not torch.equal(decays, decays.bfloat16().double()), "they have more digits than bf16"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_and_optimizers_train_close_to_one_process(layout: str, plugin: str) -> None:
    world, flags = LAYOUTS[layout]
    optimizer = " ".join(flags.split()[:2]) if "--optimizer" in flags else ""
    rate = "--lr 1" if "lars" in flags else ""
    expected_losses, expected = _full(run_ranks(1, _train, plugin, f"{optimizer} {rate}"))
    losses, actual = _full(run_ranks(world, _train, plugin, flags))
    assert losses == pytest.approx(expected_losses, rel=2e-3)
    assert actual.keys() == expected.keys()
    for name in expected:
        if name.startswith("model/") and _is_kept(name):
            assert (actual[name] - expected[name]).norm() <= 0.02 * expected[name].norm(), name


def _save(run: Run, config: Config) -> None:
    saver = open_saver(run, config)
    assert saver is not None
    save(run, saver, dump_config(config))
    saver.wait()
    saver.close()


def _save_step(plugin: str, directory: str, flags: str) -> list[OwnedShard]:
    """Train a step, save it, and return the shards that this rank owns."""
    line = f"{FLAGS} --plugin {plugin} --save {directory} --save-interval 1 {flags}"
    run = run_from(line)
    train_step(run)
    _save(run, config_from(line))
    run.sync.wait_param_sync()
    return owned_shards(run.optimizer)


def _resumed(plugin: str, directory: str, flags: str) -> tuple[list[float], list[OwnedShard]]:
    line = f"{FLAGS} --plugin {plugin} {flags}"
    run = run_from(line)
    assert resume(run, directory, config_from(line), LoadOptions()) is not None
    run.sync.wait_param_sync()
    return [], owned_shards(run.optimizer)


def test_checkpoint_resumes_in_other_shards_and_precisions(plugin: str, tmp_path: Path) -> None:
    """A checkpoint of ZeRO-3 in bf16 resumes in one process, and in fp32 with every exact weight, and back."""
    saved = assemble(s for part in run_ranks(2, _save_step, plugin, str(tmp_path), "--zero-stage 3") for s in part)
    _, same = _full(run_ranks(1, _resumed, plugin, str(tmp_path), OFFLOAD))
    assert same.keys() == saved.keys() and all(torch.equal(same[name], saved[name]) for name in saved)

    def exact_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [name.partition("/")[2] for name in state if name.startswith("model/")]
        return {name: state.get(f"optimizer.main/{name}", state[f"model/{name}"]) for name in names}

    line = f"{FLAGS} --plugin {plugin}".replace("--bf16", "")
    config = config_from(f"{line} --save {tmp_path / 'fp32'} --save-interval 1")
    run = run_from(config)
    assert resume(run, str(tmp_path), config, LoadOptions()) is not None
    in_fp32 = {name: values.double() for name, values in copy_state(run, "model/").items()}
    expected = {f"model/{name}": values.flatten() for name, values in exact_weights(saved).items()}
    assert is_equal(in_fp32, expected)
    _save(run, config)
    _, back = _full(run_ranks(2, _resumed, plugin, str(tmp_path / "fp32"), "--zero-stage 2"))
    assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved)


def test_names_of_exact_weights_under_every_change_of_dtype() -> None:
    """If only one side keeps a parameter in fp32, its exact weights are read and written."""

    def shards(names: dict[str, torch.dtype]) -> list[TensorShard]:
        box = Box((0,), (1,))
        return [TensorShard(name, (1,), box, range(1), torch.zeros(1, dtype=dtype)) for name, dtype in names.items()]

    fp32 = {"model/a": torch.float32}
    rounded = {"model/a": torch.bfloat16, "optimizer.main/a": torch.float32}
    state = {"optimizer.exp_avg/a": torch.float32}
    for local, saved, pairs in (
        (fp32, fp32, {"model/a": "model/a"}),
        (rounded, rounded, {name: name for name in rounded}),
        (fp32, rounded, {"model/a": "optimizer.main/a"}),
        (rounded, fp32, {"optimizer.main/a": "model/a"}),
    ):
        local_shards = shards({**local, **state})
        saved_dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in {**saved, **state}.items()}
        mapped = map_precision(local_shards, saved_dtypes)
        sources = {local.name: shard.name for shard in mapped for local in local_shards if local.data is shard.data}
        assert sources == {**pairs, "optimizer.exp_avg/a": "optimizer.exp_avg/a"}


def _planned_and_actual_bytes(plugin: str, flags: str) -> list[tuple[int, int]]:
    """Return (planned, actual) bytes on this rank.

    They are those of weights, gradients, optimizer state and host memory, and those of the gradients in their
    reduction, of all buckets and of the resharded ones.
    """
    run = _run(plugin, flags)
    config = config_from(f"{FLAGS} --plugin {plugin} {flags}")
    state = make_run_plan(config, run.mesh.world.size, config.data.vocab_size).model_states.by_rank[0]
    sync, optimizer = run.sync, run.optimizer
    optimizer_bytes = 0
    for bucket in optimizer.buckets:
        if not bucket.is_offloaded:
            optimizer_bytes += sum(tensor.nbytes for tensor in bucket.state.values())
            if bucket.main.data_ptr() != bucket.params.owned.data_ptr():
                optimizer_bytes += bucket.main.nbytes
    reduced: dict[bool, int] = {True: 0, False: 0}  # by is_resident
    for grads in sync.grad_buckets:
        reduced[grads.is_resident] += grads.layout.size * (grads.sharding.reduce_dtype or grads.dtype).itemsize
    unit_buckets = [bucket for buckets in state.unit_buckets.values() for bucket in buckets]
    return [
        (sum(state.reduce_bytes.values()), sum(reduced.values())),
        (sum(bucket.numel * bucket.reduce_itemsize for bucket in unit_buckets), reduced[False]),
        (state.weights, sum(bucket.nbytes for bucket in sync.param_buckets)),
        (state.gradients, sum(bucket.nbytes for bucket in sync.grad_buckets)),
        (state.optimizer, optimizer_bytes),
        (state.host_bytes, optimizer.host_updater.host_bytes + sync.host_bytes),
    ]


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero2", "dp2 zero3", "dp2 offload", "dp2 zero3 host"])
def test_plan_has_the_bytes_of_every_dtype(layout: str, plugin: str) -> None:
    world, flags = DP_LAYOUTS[layout]
    for rows in run_ranks(world, _planned_and_actual_bytes, plugin, f"{flags} --grad-reduce-in-bf16"):
        assert all(planned == actual for planned, actual in rows), rows
