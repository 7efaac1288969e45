"""Using a resharded weight raises an error that names it. Without the check, reading freed memory ends the process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from train_cases import ROOT, run_from

from megalite.models.gpt import Stage
from megalite.nn.parameter import spec_of
from megalite.optim.zero.resharded_parameter import ReshardedParameter, use_message
from megalite.training.train_step import train_step

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 4 --train-iters 4 --lr 0.01 --mock-data --vocab-size 94 --make-vocab-size-divisible-by 8
 --eval-iters 0 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --zero-stage 3
 --untie-embeddings-and-output-weights"""
BUILD = f"""
from dataclasses import replace
import sys
import torch
sys.path[:0] = [{str(ROOT / "tests" / "support")!r}]
from train_cases import config_from
from megalite.nn.parameter import spec_of
from megalite.optim.zero.sync import BucketSync, ZeroConfig
from megalite.parallel.mesh import abstract_mesh
from megalite.planning.run_plan import make_run_plan
config = config_from({FLAGS!r})
plan = make_run_plan(config, 2, config.data.vocab_size)
mesh = replace(abstract_mesh(2, 0, **plan.shape.mesh_sizes), device=torch.device("cpu"))
sync = BucketSync(plan.balance.build_stages(mesh, torch.float32, deferred=True), mesh, zero_config=ZeroConfig(3))
[p] = [p for p in sync.parameters if spec_of(p).name == "layers.1.mlp.down"]
"""
# ways to read a weight: an elementwise operation, in a list, through a view of it, in place, by its address
USES = (
    "(p + 1).sum()",
    "torch.add(torch.zeros(()), other=p)",
    "torch.cat([torch.zeros(1, p.shape[1]), p])",
    "p[0] + 1",
    "p.t().sum()",
    "p.data.sum()",
    "p.detach().zero_()",
    "p.data_ptr()",
)
TRY_USE = """
try:
    {use}
except RuntimeError as error:
    print(error)
"""


def test_uses_of_a_resharded_weight_are_errors(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BUILD + "".join(TRY_USE.format(use=use) for use in USES))
    ended = subprocess.run([sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr[-300:]}"
    errors = ended.stdout.splitlines()
    assert len(errors) == len(USES)
    assert all(line.startswith("layers.1.mlp.down is used while its weights are resharded") for line in errors)
    assert all("'layers.1'" in line for line in errors)


class _Scale(torch.autograd.Function):
    """A function outside of torch's dispatch, as plugins have them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.mean()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _step_that_reads_another_unit() -> tuple[str, list[type]]:
    """Return the error of a step in which a layer reads the embedding, and the classes of its own weights meanwhile."""
    run = run_from(FLAGS)
    [stage] = run.pipeline.stages
    assert isinstance(stage, Stage) and stage.embedding is not None
    embedding = next(p for p in stage.embedding.parameters() if len(p.shape) == 2)
    classes: list[type] = []

    def read_embedding(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        classes.extend(type(p) for p in module.parameters())
        return _Scale.apply(args[0], embedding), *args[1:]  # type: ignore[no-untyped-call]

    train_step(run)
    stage.blocks[1].register_forward_pre_hook(read_embedding)
    with pytest.raises(RuntimeError) as error:
        train_step(run)
    assert all(
        type(p) is (ReshardedParameter if spec_of(p).is_2d else nn.Parameter) for p in stage.embedding.parameters()
    )
    return str(error.value), classes


def test_message_of_several_weights_is_plural() -> None:
    assert use_message(["a", "b"], "layers.1").startswith("a, b are used while their weights are resharded;")


def test_a_step_names_the_weight_that_another_unit_owns() -> None:
    """The weights of the running unit are plain parameters, which torch does not dispatch: the check costs nothing."""
    for error, classes in run_ranks(2, _step_that_reads_another_unit):
        assert error.startswith("embedding.word is used while its weights are resharded") and "'embedding'" in error
        assert len(classes) > 4 and set(classes) == {nn.Parameter}
