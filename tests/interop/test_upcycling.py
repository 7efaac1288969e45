"""Experts that start as copies of a dense model's feed-forward blocks.

If the probabilities sum to 1, the first loss is the dense model's, from every source and under every layout. A run
upcycles only once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_convert_megatron_dist as megatron
import torch
from full_tensors import assemble, owned_shards
from hugging_face_cases import create_model
from ranks import run_ranks
from test_convert_megatron import Case
from train_cases import config_from, run_from

from megalite.config.config_file import dump_config
from megalite.training.checkpointing import initial_state as origin
from megalite.training.checkpointing.initial_state import load_initial_state
from megalite.training.checkpointing.save import open_saver, save
from megalite.training.setup import SetupError
from megalite.training.train_step import train_step

BASE = """--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 0.01 --mock-data --eval-iters 0 --device cpu
 --seq-length 8 --hidden-dropout 0 --attention-dropout 0 --vocab-size 93"""
SHAPE = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --swiglu --ffn-hidden-size 48 --disable-bias-linear
 --position-embedding-type rope"""
ARGS = "--use-checkpoint-args"
EXPERTS = "--num-experts 4 --moe-layer-freq [0,1,1,0] --moe-router-dtype fp64"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
UPCYCLE, FP64 = "--moe-use-upcycling", 1e-12


def first_step(flags: str) -> tuple[float, list[Any], list[str]]:
    """Return (first loss, pieces of the weights before it, notes) of a run in fp64 on this rank, which may save."""
    run = run_from(config := origin.complete_config(config_from(f"{BASE} {flags}")), dtype=torch.float64)
    saver, notes = open_saver(run, config), load_initial_state(run, config)[1]
    pieces, loss = owned_shards(run.optimizer, "model/"), train_step(run).loss
    if saver is not None:
        save(run, saver, dump_config(config))
        saver.close()
    return loss, pieces, notes


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function: the program that wrote a dense model -> flags that start from this model."""
    base = tmp_path_factory.mktemp("dense")
    create_model("llama", base / "hugging_face", num_hidden_layers=4)
    megatron.write(base / "megatron", Case(groups=2, llama=True, tied=False))
    first_step(f"{SHAPE} --init-method-std 0.2 --save {base / 'megalite'}")
    extra_flags = {"megalite": "--finetune", "megatron": "--vocab-size 50"}
    return lambda name: f"--load {base / name} {extra_flags.get(name, '')}"


SPLIT = "--tp 2 --ep 2 --expert-tensor-parallel-size 2"
ROWS = {
    "experts split": ("hugging_face", EXPERTS, SPLIT),
    "experts split, sigmoids": ("megalite", SIGMOID, SPLIT),
    "ZeRO-3": ("megalite", EXPERTS, "--zero-stage 3"),
    "pp2 ep2 ZeRO-2, sigmoids": ("megatron", SIGMOID, "--pp 2 --ep 2 --zero-stage 2"),
}


@pytest.mark.parametrize("row", ROWS)
def test_upcycling_first_loss_equals_the_dense_model(dense: Callable[[str], str], row: str) -> None:
    source, experts, layout = ROWS[row]
    expected, pieces, _ = first_step(flags := f"{dense(source)} {ARGS}")
    loss, _, notes = first_step(flags := f"{flags} {experts} {UPCYCLE}")
    assert loss == pytest.approx(expected, rel=FP64) and any("a copy of its layer's" in note for note in notes)
    ranks = run_ranks(4, first_step, f"{flags} {layout}")
    assert [rank[0] for rank in ranks] == pytest.approx([expected] * 4, rel=FP64)
    weights, dense_weights = assemble(piece for rank in ranks for piece in rank[1]), assemble(pieces)
    routers = [weights.pop(f"model/layers.{n}.mlp.router") for n in (1, 2)]
    assert all(values.std() > 0.01 for values in routers)  # freshly initialized
    for name, values in weights.items():
        copies = values if ".experts." in name else [values]
        assert all(copy.equal(dense_weights[name.replace(".experts", "")]) for copy in copies), name


def test_upcycling_is_not_repeated_at_a_resume(dense: Callable[[str], str], tmp_path: Path) -> None:
    source = dense("megalite").replace("--load", "--pretrained-checkpoint").replace("--finetune", "")
    flags = f"{ARGS} {EXPERTS} {UPCYCLE} --load {tmp_path} --save {tmp_path} {source}"
    assert "a copy of its layer's" in " ".join(first_step(flags)[2])
    _, pieces, notes = first_step(flags)
    trained = [values for name, values in assemble(pieces).items() if ".experts." in name]
    assert notes == [] and len(trained) == 4 and not any(values[0].equal(values[1]) for values in trained)
    with pytest.raises(SetupError, match="moe_use_upcycling, but .* has num_experts=4; drop the flag"):
        first_step(f"{SHAPE} {EXPERTS} {UPCYCLE} --pretrained-checkpoint {tmp_path}")


HINT = ".*\nto make experts of a dense model, give --moe-use-upcycling"


@pytest.mark.parametrize("source,flags,message", [
    ("megalite", f"--finetune {SHAPE} {EXPERTS}", f"layers.1.mlp.down: nothing here{HINT}"),
    ("megalite", f"{SHAPE} {EXPERTS} {UPCYCLE}", f"num_experts: 4 here, None in{HINT}, and --finetune with --load"),
    ("megalite", f"--finetune {SHAPE} {EXPERTS} {UPCYCLE} --ffn-hidden-size 40", r"\(32, 40\) here, \(32, 48\) in"),
    ("hugging_face", f"{ARGS} {EXPERTS}", f"num_experts=4, but None in{HINT}"),
    ("hugging_face", f"{SHAPE} {EXPERTS}", f"num_experts: 4 here, None in{HINT}"),
    ("hugging_face", f"{SHAPE} {EXPERTS} {UPCYCLE} --num-layers 6 --moe-layer-freq 1", "num_layers: 6 here, 4 in"),
])  # fmt: skip
def test_upcycling_refuses_incompatible_models(
    dense: Callable[[str], str], source: str, flags: str, message: str
) -> None:
    with pytest.raises(SetupError, match=f"(?s){message}") as error:
        first_step(f"{dense(source).replace('--finetune', '')} {flags}")
    assert HINT in message or "to make experts" not in str(error.value)
