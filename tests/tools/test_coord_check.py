"""tools/coord_check.py: activations keep their size at every width with muP, and the check notices if they do not."""

import json
import math
import shlex
from pathlib import Path

import pytest
from train_cases import config_from

from megalite.config import width_scaling
from megalite.kernels import dispatch
from tools import coord_check
from tools.verification.coordinate_check import ACTIVATIONS, Measurement, find_growth, scale_widths

SMALL = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --lr 0.01
 --init-method-std 0.2 --mock-data --vocab-size 60 --hidden-dropout 0 --attention-dropout 0 --device cpu"""
RUN = "--mock-data --vocab-size 60 --micro-batch-size 1 --lr 1 --train-iters 1 --device cpu"


def check(flags: str, *more: object) -> int:
    return coord_check.main([*shlex.split(flags), *map(str, more)]) or 0


def test_check_prints_sizes_and_writes_a_picture_and_json(tmp_path: Path, capsys) -> None:
    out, path = tmp_path / "sizes.png", tmp_path / "sizes.json"
    assert check(SMALL, "--widths", 1, 4, "--steps", 2, "--out", out, "--json", path) == 0
    printed = capsys.readouterr().out
    assert "with muP: root mean square of activations after 2 steps" in printed and "without muP" in printed
    assert out.read_bytes()[:4] == b"\x89PNG"
    content = json.loads(path.read_text())
    assert content["widths"] == [16, 64]
    for title in ("with muP", "without muP"):
        for measured in content["measurements"][title]:
            assert list(measured["sizes"]) == list(ACTIVATIONS)
            assert all(len(sizes) == 3 for sizes in measured["sizes"].values())
            assert all(len(changes) == 2 and min(changes) > 0 for changes in measured["changes"].values())
    assert max(content["growth"]["with muP"].values()) < 2 < max(content["growth"]["without muP"].values())


@pytest.mark.parametrize("rule", ["rates", "initial weights"])
def test_check_fails_if_mup_does_not_act(rule: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """This is the muP of EleutherAI/gpt-neox#956, whose rates were those of the base model at every width."""
    unchanged = {"input": 0.0, "hidden": 0.0, "output": 0.0}
    if rule == "rates":
        monkeypatch.setitem(width_scaling.LR_POWERS, "adam", unchanged)
    else:
        monkeypatch.setattr("megalite.parallel.spec.INIT_POWERS", unchanged)
    assert check(SMALL, "--widths", 1, 8, "--steps", 3) == 1
    assert "times as large as in the narrow model, above max_growth=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{SMALL} --widths 3", "widths=3 is a single width, with nothing to compare it with; give 1 and another"),
        (f"{SMALL} --out sizes.txt", "out=sizes.txt has no suffix of an image"),
        (f"{SMALL} --tp 2", "the layout has 2 model-parallel ranks, and the check runs in one process; drop it"),
        (f"{SMALL} --optimizer lamb", "use_mup=True with optimizer=lamb, for which there is no rule of rates by width"),
        (f"{SMALL} --kernels triton", "kernels=triton on CPU needs TRITON_INTERPRET=1"),
        (f"{SMALL} --load x", "the check starts from initial weights of every width; drop --load and its like"),
    ],
)
def test_unusable_flags_end_with_2(flags: str, message: str, capsys, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: dispatch.set_kernel_options("auto", "auto"))
    assert check(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--steps 1 --lr 0", "steps=1 of training do not change the embedding of the narrow model"),
        ("--steps 2 --lr 1e30", "with muP, the narrow model diverges within steps=2; give a lower --lr"),
    ],
)
def test_narrow_model_without_a_size_to_compare_with_ends_with_2(flags: str, message: str, capsys) -> None:
    assert check(f"{SMALL} --widths 1 2 {flags}") == 2
    assert message in capsys.readouterr().err


def test_wide_model_that_diverges_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(width_scaling.LR_POWERS, "adam", {"input": 0.0, "hidden": 30.0, "output": 0.0})
    path, out = tmp_path / "sizes.json", tmp_path / "sizes.png"
    assert check(SMALL, "--widths", 1, 16, "--steps", 3, "--json", path, "--out", out) == 1
    assert "times as large as in the narrow model" in capsys.readouterr().err
    narrow, wide = json.loads(path.read_text())["measurements"]["with muP"]
    assert None not in narrow["sizes"]["logits"] and wide["sizes"]["logits"][-1] is None
    assert out.stat().st_size > 0


def test_growth_is_not_a_number_where_a_size_is_not() -> None:
    def measured(size: float) -> Measurement:
        return Measurement({"logits": [1.0, size]}, {"logits": [1.0]}, [1.0])

    for sizes in ([1.0, 1.2, math.nan], [1.0, math.nan, 1.2]):
        assert math.isnan(find_growth([measured(size) for size in sizes])["logits"])


def test_wider_models_have_more_heads_of_the_same_size() -> None:
    flags = f"""{RUN} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention
     --num-query-groups 2 --seq-length 8 --num-experts 4 --moe-ffn-hidden-size 24 --experimental-attention-variant kda
     --linear-attention-freq [1,0] --linear-num-key-heads 2 --linear-num-value-heads 2"""
    model = config_from(flags).model
    wide = scale_widths(model, 4)
    assert (wide.hidden_size, wide.num_attention_heads, wide.num_kv_groups) == (128, 16, 8)
    assert (wide.head_size, wide.ffn_size, wide.expert_ffn_size) == (8, 512, 96)
    assert (wide.linear_num_key_heads, wide.linear_num_value_heads) == (8, 8)
    assert (wide.linear_key_head_dim, wide.num_experts) == (model.linear_key_head_dim, 4)


WIDE = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 0.004
 --init-method-std 0.1 --mock-data --vocab-size 60 --hidden-dropout 0 --attention-dropout 0 --device cpu"""
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --norm-epsilon 1e-5"
HEADS = "--linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 4 --linear-num-value-heads 4"
KINDS = {
    "gpt, 64 to 1024": ("1 4 16", ""),
    "untied, sgd": ("1 8", "--untie-embeddings-and-output-weights --optimizer sgd --lr 0.1"),
    "muon": ("1 8", f"{LLAMA} --optimizer muon"),
    "grouped queries with norms": ("1 8", f"{LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm"),
    "experts": ("1 8", f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64"),
    "latents": (
        "1 8",
        f"{LLAMA} --multi-latent-attention --kv-lora-rank 16 --q-lora-rank 16 --qk-head-dim 12 --v-head-dim 16 "
        "--qk-pos-emb-head-dim 4 --qk-layernorm",
    ),
    "gated delta net": (
        "1 4",
        f"{LLAMA} {HEADS} --experimental-attention-variant gated_delta_net --linear-attention-freq [1,1]",
    ),
    "kimi delta attention": (
        "1 4",
        f"{LLAMA} {HEADS} --experimental-attention-variant kda --linear-attention-freq [1,1]",
    ),
    "mamba": (
        "1 4",
        f"{LLAMA} --hybrid-layer-pattern M-M- --mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 1 "
        "--mamba-num-heads 8",
    ),
}


@pytest.mark.nightly(guards=("megalite/config/width_scaling.py",))
@pytest.mark.timeout(300)
@pytest.mark.parametrize("widths, flags", KINDS.values(), ids=KINDS)
def test_activations_keep_their_size_with_mup_only(widths: str, flags: str, tmp_path: Path) -> None:
    assert check(f"{WIDE} {flags} --widths {widths} --json {tmp_path / 'sizes.json'}") == 0
    growth = json.loads((tmp_path / "sizes.json").read_text())["growth"]
    assert max(growth["with muP"].values()) < 1.5
    assert max(growth["without muP"].values()) > 3
