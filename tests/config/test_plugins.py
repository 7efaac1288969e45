"""Parts of a user's own: each kind as an example of examples/plugins/, typed on real command lines; what is refused."""

import ast
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import documents
import numpy as np
import programs
import pytest
import torch
from documents import ROOT
from safetensors import safe_open
from train_cases import SMALL, config_from

import megalite
from megalite.config import plugins
from megalite.config.config_file import dump_config
from megalite.config.options import ConfigError
from megalite.config.registry import REGISTRIES
from megalite.data.datasets.map_dataset import MapDataset
from megalite.data.errors import DataError
from megalite.kernels.activation import find_activation_error, get_activation
from megalite.optim.lr import LrSchedule
from megalite.parallel.mesh import Mesh
from megalite.pipeline import schedule
from megalite.planning.model_state import state_dtypes_of
from megalite.planning.run_plan import make_run_plan
from megalite.training.callbacks import PluginMetrics

EXAMPLES = ROOT / "examples/plugins"
LINE = [*SMALL, "--device", "cpu"]
STEPS = "--train-iters 3 --lr-decay-iters 6".split()


def typed(folder: Path, *words: str, program: str = "pretrain_gpt.py", code: int = 0) -> str:
    done = programs.python(program, *words, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in rows(folder) if "train/loss" in row]


def plugin(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(f"import megalite\n{text}\n", "utf-8")
    return name


@pytest.fixture(scope="module")
def mish(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on two ranks that has an activation of its own, and the file that has it."""
    folder = tmp_path_factory.mktemp("mish")
    (folder / "mine.py").write_text((EXAMPLES / "activation.py").read_text("utf-8"), "utf-8")
    words = ["--plugin", "mine.py", "--activation", "mish", *LINE, *STEPS, "--save", "run"]
    typed(folder, *words, "--nproc", "2", "--tp", "2")
    return folder


def test_activation_trains_on_ranks_and_its_source_is_recorded(mish: Path) -> None:
    sha256 = hashlib.sha256((mish / "mine.py").read_bytes()).hexdigest()
    assert f'plugin = ["mine.py"]  # sha256: mine.py {sha256}' in (mish / "run/run_config.toml").read_text("utf-8")
    assert len(losses(mish / "run")) == 3
    typed(mish, "--config", "run/run_config.toml", "--nproc", "1", "--tp", "1", "--save", "one")
    assert losses(mish / "one") == pytest.approx(losses(mish / "run"), rel=1e-5)
    typed(mish, *LINE, *STEPS, "--save", "gelu")
    assert losses(mish / "gelu") != pytest.approx(losses(mish / "run"), rel=1e-5)


def test_resume_needs_the_plugin_and_reports_changed_source(mish: Path) -> None:
    on = [*LINE, "--train-iters", "4", "--lr-decay-iters", "6", "--load", "run"]
    said = typed(mish, *on, code=2)
    assert "run/iter_0000003 was written with plugin='mine.py' (sha256 " in said and "add --plugin mine.py" in said
    (mish / "other").mkdir(exist_ok=True)
    (mish / "other/mine.py").write_text((mish / "mine.py").read_text("utf-8") + "# longer\n", "utf-8")
    said = typed(mish, "--plugin", "other/mine.py", "--activation", "mish", *on, "--save", "on")
    (note,) = [line for line in said.splitlines() if "differs from the one in" in line]
    assert note.startswith("note: plugin='mine.py' differs from the one in run/iter_0000003: sha256 ")
    typed(mish, "--plugin", "mine.py", "--activation", "mish", *on, "--save", "on")
    assert "differs from the one in" not in (mish / "on/log.txt").read_text("utf-8").split("note: ")[-1]


def test_checkpoint_cannot_load_a_plugin(mish: Path) -> None:
    """Its configuration and its state name a plugin, whose file is there; programs that read it do not run it."""
    own, mark = (mish / "mine.py").read_text("utf-8"), mish / "it ran"
    (mish / "mine.py").write_text(f"{own}\nopen('it ran', 'w').close()\n", "utf-8")
    said = typed(mish, "--load", "run", "--to-hf", "hf", program="tools/convert_checkpoint.py", code=3)
    assert "add --plugin mine.py" in said
    assert "or give the --plugin that registers it" in typed(mish, "run", "run", program="tools/diff.py", code=2)
    for program, words in (("report", "run --out page"), ("checkpoint", "inspect run/iter_0000003"), ("runs", ".")):
        typed(mish, *words.split(), program=f"tools/{program}.py")
    said = typed(mish, *LINE, "--use-checkpoint-args", "--load", "run", "--train-iters", "4", code=2)
    assert "was written with plugin='mine.py'" in said and not mark.exists()
    typed(mish, "run", "run", "--plugin", "mine.py", program="tools/diff.py")
    assert mark.exists()  # it does run where its user names it
    said = typed(mish, "--config", "run/run_config.toml", "--dry-run")
    assert "note: plugin='mine.py' is run, because the configuration names it" in said
    (mish / "mine.py").write_text(own, "utf-8")


def test_lr_schedule_plugin(tmp_path: Path) -> None:
    words = ["--plugin", str(EXAMPLES / "lr_schedule.py"), "--lr-decay-style", "power", "--lr-warmup-iters", "1"]
    typed(tmp_path, *words, *LINE, "--train-iters", "5", "--min-lr", "0.001", "--save", "run")
    rates = [row["train/lr"] for row in rows(tmp_path / "run") if "train/lr" in row]  # after each step
    assert rates == pytest.approx([0.01, *(0.001 + 0.009 * (1 - (n / 4) ** 2) for n in range(1, 5))])
    on = ["--train-iters", "6", "--lr-decay-iters", "5", "--load", "run", "--save", "run"]
    said = typed(tmp_path, *words[2:], *LINE, *on, code=2)
    assert "lr_decay_style='power' is not one of" in said and "or give the --plugin that registers it" in said
    said = typed(tmp_path, *LINE, *on, code=2)
    assert "add --plugin lr_schedule.py" in said


def test_optimizer_plugin_works_at_every_zero_stage(tmp_path: Path) -> None:
    words = ["--plugin", str(EXAMPLES / "optimizer.py"), "--optimizer", "lion", *LINE, *STEPS, "--lr", "1e-3"]
    typed(tmp_path, *words, "--save", "alone")
    typed(tmp_path, *words, "--nproc", "2", "--zero-stage", "3", "--save", "shared")
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    saved = json.loads((tmp_path / "shared/iter_0000003/manifest.json").read_text("utf-8"))["tensors"]
    assert {name.partition("/")[0] for name in saved} == {"model", "optimizer.exp_avg"}
    kept = [state_dtypes_of(config_from(line).optim, matrix=True) for line in (words, [*LINE, *STEPS])]
    assert kept == [(None,), (None, None)]  # the planner counts one state


def test_dataset_plugin_is_shuffled_counted_and_resumed(tmp_path: Path) -> None:
    words = ["--plugin", str(EXAMPLES / "dataset.py"), "--dataset", "sums", "--tokenizer-type", "ByteTokenizer"]
    words += [word for word in LINE if word not in ("--mock-data", "--vocab-size", "93")]
    typed(tmp_path, *words, "--train-iters", "4", "--save", "whole")
    typed(tmp_path, *words, "--train-iters", "2", "--lr-decay-iters", "4", "--save", "parts")
    typed(tmp_path, *words, "--train-iters", "4", "--load", "parts", "--save", "parts", "--nproc", "2")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    state = json.loads((tmp_path / "parts/iter_0000004/manifest.json").read_text("utf-8"))["state"]
    (source,) = state["data"]["sources"]
    assert source["name"] == "dataset sums" and source["tokens"] == 4 * 8 * 16 and source["documents"] == 32
    said = typed(tmp_path, *words, "--train-iters", "4", "--split", "1,1,1", "--mock-data", "--dry-run", code=2)
    assert "split=1,1,1 applies to token files, and dataset=sums has none" in said
    assert "mock_data and dataset exclude each other" in said
    said = typed(tmp_path, *words[2:], "--train-iters", "4", code=2)
    assert "dataset='sums' is unknown; give the --plugin that registers it" in said


def test_map_dataset_samples_come_once_per_epoch() -> None:
    rows_of = np.arange(7 * 5).reshape(7, 5)
    data = MapDataset("mine", rows_of, 4, seed=1, split="train")
    epochs = [data.samples(np.arange(7) + 7 * epoch) for epoch in (0, 1)]
    assert all(sorted(map(tuple, epoch)) == sorted(map(tuple, rows_of)) for epoch in epochs)
    assert (
        (epochs[0] != epochs[1]).any()
        and data.num_tokens == 28
        and data.count_tokens_and_documents(range(3)) == (12, 3)
    )
    assert data.resume([(8, 2), (4, 3)]) is None and (data.samples(np.array([0])) == epochs[0][5]).all()
    assert data.locate(2, 3).startswith("dataset mine, sample ") and "7 samples, 2.00 epochs" in data.describe(14)
    other = MapDataset("mine", rows_of + 1, 4, seed=1, split="train")
    assert other.digest != data.digest == MapDataset("mine", rows_of, 4, seed=2, split="valid").digest
    for wrong in (rows_of[:, :4], rows_of.astype(float)):
        with pytest.raises(DataError, match=r"dataset mine: its sample \d is .*; give seq_length \+ 1 = 5 token ids"):
            MapDataset("mine", wrong, 4, seed=1, split="train").samples(np.arange(2))
    with pytest.raises(DataError, match=r"dataset mine: its sample \d cannot be built: .*; correct the plugin"):
        MapDataset("mine", [[1, [2]]] * 7, 4, seed=1, split="train").samples(np.arange(2))
    with pytest.raises(DataError, match="has no samples of test"):
        MapDataset("mine", rows_of[:0], 4, seed=1, split="test")


def test_failing_component_is_named_before_the_run(tmp_path: Path) -> None:
    plugin(tmp_path, "megalite.register('tokenizer_type', 'mine', lambda asked: int('x'))")
    said = typed(tmp_path, "--plugin", "mine.py", *LINE, *STEPS, "--tokenizer-type", "mine", code=2)
    assert said == f"pretrain_gpt.py: {tmp_path}/mine.py:2: invalid literal for int() with base 10: 'x'\n"


def test_invalid_component_results_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin(tmp_path, """for name, rate in {"none": None, "text": "1", "nan": float("nan"), "down": -0.5}.items():
    megalite.register("lr_decay_style", name, lambda lr, n, rate=rate: rate)
class Mine:
    state_dtypes, update_ = {}, print
    from_config = staticmethod(lambda o: [])
megalite.register("optimizer", "mine", Mine)
@megalite.register("pipeline_schedule", "made")
def made(rank, place, groups):
    yield from one_f_one_b(rank, place, groups)
from megalite.pipeline.schedule import one_f_one_b
""")  # fmt: skip
    config = config_from([*LINE, *STEPS, "--plugin", "mine.py", "--optimizer", "mine", "--pipeline-schedule", "made"])
    for style in ("none", "text", "nan", "down"):
        with pytest.raises(ValueError, match=rf"lr_decay_style='{style}' gives .* at sample 3; give a finite"):
            LrSchedule(1.0, 0.0, style, 0, 10).at(3)
    with pytest.raises(
        ValueError,
        match=r"optimizer='mine': from_config\(options\) gives \[\], whose state_dtypes "
        r"is not a dict; return",
    ):
        make_run_plan(config, 1, 93)
    assert schedule.build_schedule("made", 2, 4) == schedule.build_schedule("1f1b", 2, 4)


def test_tokenizer_plugin_preprocesses_trains_and_generates(tmp_path: Path) -> None:
    own = ["--plugin", str(EXAMPLES / "tokenizer.py")]
    (tmp_path / "t.jsonl").write_text('{"text": "the quick brown fox jumps over a lazy dog"}\n' * 40, "utf-8")
    words = ["--input", "t.jsonl", "--output-prefix", "d", "--append-eod", "--tokenizer-type", "Characters"]
    typed(tmp_path, *words, *own, "--workers", "2", program="tools/preprocess_data.py")
    said = typed(tmp_path, "d_text_document", "--tokenizer-type", "Characters", "--document", "1", *own,
                 program="tools/inspect_data.py")  # fmt: skip
    assert "the quick brown fox" in said
    line = [word for word in LINE if word not in ("--mock-data", "--vocab-size", "93")]
    line += [
        "--data-path",
        "d_text_document",
        "--tokenizer-type",
        "Characters",
        "--split",
        "1,0,0",
        "--eval-iters",
        "0",
    ]
    typed(tmp_path, *own, *line, *STEPS, "--save", "run")
    speak = ["--load", "run", "--prompt", "the q", "--max-new-tokens", "3", "--device", "cpu", "--nproc", "2"]
    said = typed(tmp_path, *speak, *own, "--tensor-model-parallel-size", "2", program="tools/generate.py")
    assert said.startswith("[step 3] the q")
    model = megalite.load(tmp_path / "run", device="cpu", plugins=own[1:])
    assert model.tokenizer.name == "Characters" and model.generate("the q", 2)
    said = typed(tmp_path, *speak[:-2], program="tools/generate.py", code=3)
    assert "run/iter_0000003 was written with plugin='tokenizer.py'" in said
    text = f"{(EXAMPLES / 'tokenizer.py').read_text('utf-8')}\nALPHABET = ALPHABET[::-1]\n"
    (tmp_path / "tokenizer.py").write_text(text, "utf-8")
    said = typed(tmp_path, "--plugin", "tokenizer.py", *line, *STEPS, code=3)
    assert "d_text_document: made with Characters (fingerprint " in said


def test_metric_plugin_is_independent_of_layout_and_callbacks_run(tmp_path: Path) -> None:
    own = [str(EXAMPLES / "metric.py"), str(EXAMPLES / "callback.py")]
    words = ["--plugin", *own, "--activation", "watched_gelu", *LINE, *STEPS, "--bf16"]
    words += ["--log-interval", "2", "--eval-interval", "1", "--tensorboard-dir", "board"]
    said = typed(tmp_path, *words, "--save", "one")
    assert said.count("counting: done after 3 updates") == 1
    again = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    said = typed(tmp_path, *words, "--save", "four", "--nproc", "4", "--tp", "2", "--pp", "2", *again)
    assert said.count("counting: done after 3 updates") == 1
    one, four = ([row for row in rows(tmp_path / name) if "train/loss" in row] for name in ("one", "four"))
    assert [row["metric/updates"] for row in one] == [1.0, 2.0, 3.0]
    for mine, theirs in zip(one, four, strict=True):
        layers = mine["metric/quiet/layers"]
        assert len(layers) == 4 and all(0 < share < 1 for share in layers)
        assert mine["metric/quiet"] == pytest.approx(sum(layers) / 4)
        assert theirs["metric/quiet/layers"] == pytest.approx(layers, abs=0.01)
        assert theirs["metric/updates"] == mine["metric/updates"] and "metric/updates/layers" not in mine
    assert one[0]["metric/quiet/layers"] == pytest.approx(four[0]["metric/quiet/layers"], abs=1e-3)  # same weights
    said = typed(tmp_path, *words, "--compile", "--dry-run", code=2)
    assert "compile=True with metric=quiet" in said
    config_from(words)
    figures = PluginMetrics([], Mesh.single_process(), 2)
    megalite.log("quiet", 3.0, 4)
    megalite.log("quiet", torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert figures.reduce_and_reset() == {
        "metric/quiet": 0.5,
        "metric/quiet/layers": [None, None],
        "metric/updates": None,
    }
    assert figures.reduce_and_reset()["metric/quiet"] is None


def test_pipeline_schedule_plugin_trains_and_a_deadlock_is_refused(tmp_path: Path) -> None:
    own = ["--plugin", str(EXAMPLES / "pipeline_schedule.py")]
    words = [*LINE, *STEPS, "--global-batch-size", "12"]
    typed(tmp_path, *words, "--save", "one")
    typed(tmp_path, *words, *own, "--pipeline-schedule", "eager", "--nproc", "4", "--pp", "4", "--save", "four")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    drawn = typed(tmp_path, "schedule", "--schedule", "eager", *own, "--text", program="tools/plot.py")
    assert drawn != typed(tmp_path, "schedule", "--text", program="tools/plot.py")
    body = """from megalite.pipeline.schedule import Action, Op
@megalite.register('pipeline_schedule', '{}')
def row(rank, place, groups):
    f, b = ([Action(op, rank, i) for i in range(sum(groups))] for op in (Op.F, Op.B))
    return {}
"""
    for name, row, said in (
        ("hangs", "f[:1] + b[:2] + f[1:] + b[2:]", "would hang: these actions wait for each other: B0.1, B1.1"),
        (
            "short",
            "f + b[1:]",
            "rank 0 of 2 has B0.0 0 times, not 1; each F and B of its stages must appear exactly once",
        ),
        ("other", "f + b + [Action(Op.F, 1 - rank, 0)]", "rank 0 of 2 has F1.0 1 times, not 0"),
    ):
        plugin(tmp_path, body.format(name, row))
        found = typed(tmp_path, "--plugin", "mine.py", "--pipeline-schedule", name, *words, "--nproc", "2", "--pp", "2",
                      "--rampup-batch-size", "4", "4", "24", code=2)  # fmt: skip
        assert f"pipeline_schedule='{name}'" in found and said in found, found


def test_family_plugin_converts_and_plans(tmp_path: Path) -> None:
    own, convert = ["--plugin", str(EXAMPLES / "family.py")], "tools/convert_checkpoint.py"
    sizes = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2".split()
    words = ["--preset", "tiny", *LINE[LINE.index("--micro-batch-size") :], *sizes, *STEPS, "--save", "run"]
    typed(tmp_path, *words, "--seq-length", "16", "--max-position-embeddings", "16")
    typed(tmp_path, "--load", "run", "--to-hf", "acme", "--family", "acme", *own, program=convert)
    said = json.loads((tmp_path / "acme/config.json").read_text("utf-8"))
    assert said["model_type"] == "acme" and said["width"] == 32 and said["depth"] == 2
    with safe_open(tmp_path / "acme/model.safetensors", "np") as file:
        assert {"tokens.weight", "blocks.1.wkv.weight", "output.weight"} <= {*file.keys()}
    typed(tmp_path, "--from-hf", "acme", "--save", "again", *own, program=convert)
    for source in ("run", "again"):
        typed(tmp_path, "--load", source, "--to-hf", f"llama-{source}", "--family", "llama", program=convert)
    same = [(tmp_path / f"llama-{source}/model.safetensors").read_bytes() for source in ("run", "again")]
    assert same[0] == same[1]
    other = ["--from-hf", "acme", "--save", "other"]
    assert "model_type='acme' is not one of llama, " in typed(tmp_path, *other, program=convert, code=3)
    assert "no second reading" in typed(tmp_path, *other, "--check-bits", *own, program=convert, code=3)
    plan = ["--hf", "acme", "--num-gpus", "1", "--global-batch-size", "8"]
    assert "MFU" in typed(tmp_path, *plan, *own, program="tools/plan.py")


ACTIVATION = """import torch
from torch.nn.functional import gelu, relu, silu
from megalite.kernels.activation import Activation, get_activation
GELU, SWIGLU, BIASED = map(get_activation, ("gelu_erf", "swiglu", "gelu"))
def doubled(u, da):
    a, du = GELU.backward(u, da)
    return a, 2 * du
def half_doubled(u, da):
    a, du = SWIGLU.backward(u, da)
    return a, torch.cat([du[..., :du.shape[-1] // 2], 2 * du[..., du.shape[-1] // 2:]], -1)
def doubled_bias(u, da, bias):
    a, du, dbias = BIASED.backward(u, da, bias)
    return a, du, 2 * dbias
def in_fp32(u):
    return gelu(u.float()).to(u.dtype)
def backward_in_fp32(u, da, factor=1):
    a, du = GELU.backward(u.float(), da.float())
    return a.to(u.dtype), factor * du.to(u.dtype)
def rounded(u):
    return u.round()
def straight_through(u, da):
    return u.round(), da
"""
GRADIENTS = {  # an Activation, and what is wrong with it
    "GELU": "",
    "SWIGLU": "",
    "BIASED": "",
    "Activation(relu, lambda u, da: (relu(u), da * (u > 0)))": "",
    "Activation(in_fp32, backward_in_fp32)": "",
    "Activation(lambda u: relu(u.float()).to(u.dtype), lambda u, da: (relu(u), da * (u > 0)))": "",
    "Activation(rounded, straight_through, surrogate=True)": "",
    "Activation(rounded, straight_through)": "wrong gradient",
    "Activation(GELU.forward, doubled)": r"wrong gradient: backward gives .* at u=.* derivative is .*, 2 times as much",
    "Activation(in_fp32, lambda u, da: backward_in_fp32(u, da, 2))": "2 times as much",
    "Activation(GELU.forward, lambda u, da: (GELU.forward(u), -GELU.backward(u, da)[1]))": "-1 times as much",
    "Activation(lambda u: gelu(u), get_activation('gelu').backward)": "wrong gradient",  # that of the tanh form
    "Activation(SWIGLU.forward, half_doubled, width=2)": "wrong gradient",
    "Activation(BIASED.forward, doubled_bias, takes_bias=True)": "dbias is not the sum of du",
    "Activation(SWIGLU.forward, SWIGLU.backward)": r"with width=1 gives \(5, 2\) in .*forward's a where \(5, 4\) in",
    "Activation(GELU.forward, lambda u, da: GELU.backward(u, da)[1])": r"does not give \(a, du\)",
    "Activation(GELU.forward, lambda u, da: (u, GELU.backward(u, da)[1]))": "first result is not forward's",
    "Activation(lambda u: gelu(u).double(), GELU.backward)": "in torch.float64 as forward's a where .* in torch.bfloat16",
    "Activation(lambda u: u.relu_(), lambda u, da: (relu(u), da * (u > 0)))": "changes its input",
    "Activation(SWIGLU.forward, SWIGLU.backward, 2, swiglu_constants=(7.0, 1.702))": r"is not SwiGLU with swiglu_constants=\(7.0, 1.702\), .*; leave swiglu_constants out",
    "type('Mine', (), dict(forward=1, backward=2, width=1, takes_bias=False))": "give an Activation of megalite.kernels",
    "Activation(lambda u: u @ 3, GELU.backward)": r"mine.py:24: TypeError: .*; correct the plugin",
}


@pytest.mark.parametrize(("part", "said"), GRADIENTS.items())
def test_activation_gradient_equals_autograd(
    part: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *LINE,
        *STEPS,
        "--plugin",
        plugin(tmp_path, f"{ACTIVATION}megalite.register('activation', 'mine', {part})"),
    ]
    if said:
        with pytest.raises(ConfigError, match=f"^plugin='mine.py': .*{said}"):
            config_from(words)
    else:
        assert config_from(words).operations.plugin == ("mine.py",)


@pytest.mark.parametrize("name", [*REGISTRIES["activation"].built_in])
def test_built_in_activations_pass_the_plugin_checks(name: str) -> None:
    assert find_activation_error(get_activation(name)) == ""


def test_verify_detects_a_gradient_that_is_wrong_in_one_process(tmp_path: Path) -> None:
    """Both of its runs would share it, and agree."""
    part = "Activation(GELU.forward, doubled)"
    name = plugin(tmp_path, f"{ACTIVATION}megalite.register('activation', 'mine', {part})")
    words = ["--plugin", name, "--activation", "mine", *LINE, *STEPS, "--nproc", "2", "--tp", "2", "--steps", "1"]
    said = typed(tmp_path, *words, program="tools/verify.py", code=2)
    assert said.startswith("verify.py: plugin='mine.py': ") and "2 times as much" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "raise ValueError('one\\n two')": "mine.py:2: ValueError: one two; correct the plugin",
        "class E(Exception):\n    __str__ = None\nraise E": "mine.py:4: E: <exception str() failed>; correct the plugin",
        "megalite.register('metric', 'mine')": "metric='mine' is None; give 'layer', ",
        "boom = 1 / 0": "mine.py:2: ZeroDivisionError: division by zero; correct the plugin",
        "def f(:": "mine.py:2: SyntaxError: ",
        "import sys; sys.exit(0)": "mine.py:2: SystemExit: 0",
        "raise GeneratorExit": "mine.py:2: GeneratorExit; correct the plugin",
        "class E(BaseException): ...\nraise E('one')": "mine.py:3: E: one; correct the plugin",
        "raise ValueError('x' * 5_000_000)": "xx ... (5,000,012 characters) ... xx",
        "megalite.register('activation', 'gelu', 3)": "activation='gelu' is taken; choose another name",
        "megalite.register('activation', 'relu6', 3)": "has no forward and no backward and no width",
        "megalite.register('activation', 'a b', 3)": "activation='a b' is not a name; use letters",
        "megalite.register('activator', 'relu6', 3)": "'activator' is not a kind of component; use one of activation",
        "megalite.register('metric', 'mine', 'tensor')": "metric='mine' is 'tensor'; give 'layer', ",
        "megalite.register('callback', 'mine', 3)": "callback='mine' is 3; give an object with methods for events",
        "megalite.register('dataset', 'mine', lambda a: a)": "dataset='mine' does not take 3 arguments; give a function",
        "megalite.log('mine', 1.0)": "metric='mine' is not registered; megalite.register('metric', 'mine', 'layer' or ",
    }.items(),
)
def test_failing_plugin_ends_the_command(text: str, said: str, tmp_path: Path) -> None:
    name = plugin(tmp_path, text)
    found = typed(tmp_path, "--plugin", name, *LINE, *STEPS, "--save", "run", "--nproc", "2", code=2)
    assert found.startswith("pretrain_gpt.py: plugin='mine.py': ") and len(found.splitlines()) == 1, found
    assert said in found and not (tmp_path / "run").exists() and len(found) < 3000


ENDS = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit()": "SystemExit",
    "sys.exit(256)": "SystemExit: 256",  # whose lowest byte is 0
    "raise GeneratorExit": "GeneratorExit",
    "raise StopIteration": "StopIteration",
    "raise Own('y' * 5_000_000)": "Own: yy",
}
ENDING = """
import os, sys
class Own(BaseException): ...
def end(*_):
    {}
"""
CALLED = """
class Called:
    on_train_step_end = end
megalite.register("callback", "called", Called())
"""


def ended(folder: Path, *words: str, program: str = "pretrain_gpt.py") -> str:
    """What a command says that user code ends, which must not be success. At once: nothing waits for a time-out."""
    done = programs.python(program, *words, cwd=folder)
    assert done.returncode not in (0, 120) and len(done.stdout + done.stderr) < 40_000, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("statement", ENDS)
def test_any_exception_of_a_callback_is_an_error(statement: str, tmp_path: Path) -> None:
    name = plugin(tmp_path, ENDING.format(statement) + CALLED)
    said = ended(tmp_path, "--plugin", name, *LINE, *STEPS, "--save", "run")
    status = json.loads((tmp_path / "run/status.json").read_text("utf-8"))
    assert status["outcome"] == "crash" and status["reason"].startswith(ENDS[statement]), status["reason"][:500]
    assert ENDS[statement] in said and "mine.py" in said and len(status["reason"]) < 3000


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise GeneratorExit", "os._exit(0)"])
def test_rank_ended_by_user_code_ends_the_run(statement: str, tmp_path: Path) -> None:
    """On all ranks at once, and on the second alone."""
    for number, which in enumerate(("", "if dist.get_rank() == 1:\n        ")):
        name = plugin(tmp_path, "import torch.distributed as dist" + ENDING.format(which + statement) + CALLED)
        ended(tmp_path, "--plugin", name, *LINE, *STEPS, "--save", f"run{number}", "--nproc", "2")
        status = json.loads((tmp_path / f"run{number}/status.json").read_text("utf-8"))
        assert status["outcome"] == "crash" and status["reason"], status


PARTS = {  # of user code that ends the process when it is called: the words of commands that call it
    "lr_decay_style": "--lr-decay-style mine",
    "activation": "--activation mine",
    "tokenizer_type": "--tokenizer-type mine --vocab-size 93",
    "dataset": "--dataset mine",
    "pipeline_schedule": "--pipeline-schedule mine --pp 2",
}
MADE = """
from megalite.kernels.activation import Activation
from megalite.data.tokenizers.tokenizer import Tokenizer
class Speaks(Tokenizer):
    def __init__(self):
        self.eod, self.vocab_size = 92, 93
        self.set_identity("mine", "mine", b"mine")
    def encode_batch(self, texts):
        return end()
    def decode(self, ids):
        return ""
megalite.register("lr_decay_style", "mine", lambda lr, n: end())
megalite.register("activation", "mine", Activation(end, end))
megalite.register("tokenizer_type", "mine", end)
megalite.register("tokenizer_type", "speaks", lambda asked: Speaks())
megalite.register("dataset", "mine", lambda split, length, tokenizer: end())
megalite.register("pipeline_schedule", "mine", lambda rank, place, groups: end())
"""


SPEAKS = """
import megalite, torch
from megalite.kernels.activation import Activation
from megalite.data.tokenizers.tokenizer import Tokenizer
class Speaks(Tokenizer):
    def __init__(self):
        self.eod, self.vocab_size = 92, 93
        self.set_identity("mine", "mine", b"mine")
    def encode_batch(self, texts):
        end()
        return [[1] for _ in texts]
    def decode(self, ids):
        return ""
def twice(u):
    end()
    return 2 * u
megalite.register("tokenizer_type", "speaks", lambda asked: Speaks())
megalite.register("activation", "mine", Activation(twice, lambda u, da: (2 * u, 2 * da)))
"""


@pytest.mark.parametrize("kind", PARTS)
def test_component_that_exits_is_an_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training, and of a plan, which calls parts without a run."""
    name = plugin(tmp_path, ENDING.format("sys.exit(0)") + MADE)
    line = [word for word in LINE if kind != "dataset" or word != "--mock-data"]
    own = ["--plugin", name, *PARTS[kind].split()]
    assert "SystemExit: 0" in ended(tmp_path, *line, *STEPS, *own, "--save", "run", "--nproc", "2")
    if kind in ("activation", "pipeline_schedule"):
        said = ended(tmp_path, *line, *own, "--num-gpus", "2", program="tools/plan.py")
        assert said.startswith("plan.py: ") and "mine.py:6: SystemExit: 0; correct the plugin" in said
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalite.api.Popen", programs.Popen)
    with pytest.raises((megalite.ConfigError, megalite.CommandError), match="SystemExit: 0"):
        megalite.train(megalite.Config([*line, *STEPS, *own], nproc=2), quiet=True)


def test_tokenizer_that_exits_makes_no_data(tmp_path: Path) -> None:
    name = plugin(tmp_path, ENDING.format("sys.exit(0)") + MADE)
    (tmp_path / "t.jsonl").write_text('{"text": "a text"}\n' * 40, "utf-8")
    for kind in ("mine", "speaks"):
        for workers in ("1", "2"):
            words = f"--input t.jsonl --output-prefix d --tokenizer-type {kind} --workers {workers} --plugin {name}"
            assert "SystemExit: 0" in ended(tmp_path, *words.split(), program="tools/preprocess_data.py")
            assert not list(tmp_path.glob("d*.idx"))


def test_model_that_exits_does_not_end_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer and the activation of a model that is loaded into the caller's process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalite.api.Popen", programs.Popen)
    name = plugin(tmp_path, ENDING.format("sys.exit(0) if 'gone' in os.environ else None") + SPEAKS)
    words = ["--plugin", name, *LINE, *STEPS, "--tokenizer-type", "speaks", "--activation", "mine", "--save", "run"]
    megalite.train(megalite.Config(words), quiet=True)
    model = megalite.load("run", plugins=[name])
    assert len(model.generate(["a"], 2)) == 1 and model.logits([[1]]).shape == (1, 1, 93)
    monkeypatch.setenv("gone", "1")
    for call in (lambda: model.generate(["a"], 2), lambda: model.logits([[1]])):
        with pytest.raises(megalite.ConfigError, match=r"mine.py:\d+: SystemExit: 0 before the work was done"):
            call()


def test_plugin_help_ends_the_program(tmp_path: Path) -> None:
    for program in ("pretrain_gpt.py", "tools/plan.py", "tools/preprocess_data.py"):
        assert typed(tmp_path, "--help", program=program)


def test_invalid_plugin_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin(tmp_path, "")
    os.mkdir("open")
    os.chmod("open", 0o777)
    os.symlink("../mine.py", "open/link.py")
    os.symlink("mine.py", "link.py")
    plugin(tmp_path / "open", "")
    for word, said in {
        "none.py": "No such file", "no_such_module": "neither FILE", "../x": "neither", "open/link.py": "is a link"
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"plugin='{word}' cannot be read \(.*{said}"):
            config_from([*LINE, "--plugin", word])
    with pytest.raises(ConfigError, match="mine.py is the name of two files; rename one"):
        config_from([*LINE, "--plugin", "mine.py", "open/mine.py"])
    assert config_from([*LINE, *STEPS, "--plugin", "link.py"]).operations.plugin == ("link.py",)  # one's own folder


def test_plugins_of_file_and_command_line_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    body = """from megalite.kernels.activation import get_activation
megalite.register('activation', '{}', get_activation('squared_relu'))"""
    for number in "123":
        plugin(tmp_path, body.format(f"act{number}"), f"part{number}.py")
    (tmp_path / "run.toml").write_text('plugin = "part1.py"\nactivation = "act3"\n', "utf-8")
    words = [*LINE, *STEPS, "--config", "run.toml", "--plugin", "part2.py", "--plugin", "part3", "part1.py"]
    config = config_from(words)
    assert config.operations.plugin == ("part1.py", "part2.py", "part3") and config.model.activation == "act3"
    assert {*REGISTRIES["activation"]} > {"act1", "act2", "act3"} and list(plugins.plugin_hashes()) == [
        *config.operations.plugin
    ]
    assert "# sha256: part1.py " in dump_config(config)
    part = REGISTRIES["activation"].get("act2")
    config_from([*LINE, *STEPS, "--plugin", "part2.py"])
    assert REGISTRIES["activation"].get("act2") is part  # its code has run once
    plugin(tmp_path, body.format("act4"), "part2.py")
    config_from([*LINE, *STEPS, "--plugin", "part2.py"])
    assert list(REGISTRIES["activation"].plugin_components) == ["act4"]
    plugins.load_plugins(["part2.py"], {"part2.py": b"import megalite\n" + body.format("act5").encode()})  # as ranks do
    assert list(REGISTRIES["activation"].plugin_components) == ["act5"]
    with pytest.raises(ConfigError, match="activation='act1' is not one of .*, or give the --plugin that registers it"):
        config_from([*LINE, *STEPS, "--activation", "act1"])
    with pytest.raises(ValueError, match="registered outside of a plugin"):
        plugins.register("activation", "mine", part)


def written(folder: Path, *words: str, code: int = 0) -> str:
    return typed(folder, "megalite", "plugin", *words, program="-m", code=code)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_written_example_of_each_kind_loads(kind: str, tmp_path: Path) -> None:
    said = written(tmp_path, kind.replace("_", "-"))
    (file,) = tmp_path.iterdir()
    text = file.read_text("utf-8")
    assert said.startswith(f"{file.name} is an example of {kind}. ") and f"megalite train --plugin {file.name} " in said
    assert "examples/plugins" not in text and f"--plugin {file.name} " in text
    assert re.search(rf"register\(\"{kind}\"", text)
    plugins.load_plugins([str(file)])
    assert REGISTRIES[kind].plugin_components


def test_written_example_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine", "utf-8")
    os.symlink("elsewhere.py", tmp_path / "link.py")
    for words, said in {
        "activation --out mine.py": "out=mine.py already exists; give another name, or remove it",
        "activation --out link.py": "out=link.py already exists; give another name, or remove it",
        "activation --out none/mine.py": "out=none/mine.py cannot be written: No such file or directory; give another path",
        "activation --out mine": "out=mine does not end in .py, by which --plugin recognizes a file; give mine.py",
        "activation --out s3://bucket/mine.py": "a local path",
        "tokenizer": "'tokenizer' is not a kind of component; give one of ",
        "--out mine.py": "a kind is missing; give one of ",
    }.items():
        found = written(tmp_path, *words.split(), code=2)
        assert said in found and "Traceback" not in found, found
        if said.endswith("one of "):
            assert all(kind in found for kind in REGISTRIES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "mine.py"]
    assert (tmp_path / "mine.py").read_text("utf-8") == "mine"
    listed = written(tmp_path)
    assert all(re.search(rf"^  {kind} +\S", listed, re.MULTILINE) for kind in REGISTRIES)
    odd = 'my "own"/act ivation.py'
    (tmp_path / odd).parent.mkdir()
    assert f"--plugin '{odd}' " in written(tmp_path, "activation", "--out", odd)
    plugins.load_plugins([str(tmp_path / odd)])


SIGNATURES = {
    kind: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for kind, text in re.findall(
        r"^### `(\w+)`\n(.*?)(?=^##)", (ROOT / "docs/plugins.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_plugins_page_has_a_skeleton_of_each_kind(kind: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIGNATURES[kind][0], "utf-8")
    plugins.load_plugins([str(tmp_path / "mine.py")])
    (name,) = REGISTRIES[kind].plugin_components
    assert name.lower() == "mine"


def shown_of_megalite() -> list[tuple[str, ast.stmt]]:
    """(module, class or function) of the blocks below the skeletons."""
    found = list[tuple[str, ast.stmt]]()
    for blocks in SIGNATURES.values():
        for block in blocks[1:]:
            first, *more = re.split(r"^# (megalite[\w.]+)\n", block, flags=re.MULTILINE)
            assert not first and more, block
            for module, text in zip(more[::2], more[1::2], strict=True):
                found += [(module, node) for node in ast.parse(text).body]
    return found


def parts_of(node: ast.stmt) -> tuple[dict[str, tuple[str, str]], dict[str, ast.FunctionDef]]:
    """Of a class: field -> its type and default; method -> its definition."""
    assert isinstance(node, ast.ClassDef)
    fields = {
        ast.unparse(one.target): (ast.unparse(one.annotation), ast.unparse(one.value) if one.value else "")
        for one in node.body
        if isinstance(one, ast.AnnAssign)
    }
    return fields, {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize(("module", "node"), shown_of_megalite(), ids=lambda one: getattr(one, "name", one))
def test_plugins_page_shows_current_signatures(module: str, node: ast.stmt) -> None:
    """Names, types, defaults; of a class some of its fields and methods."""
    name = getattr(node, "name", "")
    tree = ast.parse((ROOT / f"{module.replace(chr(46), chr(47))}.py").read_text("utf-8"))
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
    real = classes[name]
    if isinstance(node, ast.FunctionDef):
        assert isinstance(real, ast.FunctionDef)
        assert signature(node) == signature(real)
        return
    fields, methods = parts_of(node)
    real_fields, real_methods = parts_of(real)
    for base in getattr(real, "bases", []):  # fields of the class above it, as a Naming's of a Family
        above = classes.get(ast.unparse(base))
        real_fields = (parts_of(above)[0] if above else {}) | real_fields
    assert fields and fields == {field: real_fields.get(field) for field in fields}
    assert all(signature(one) == signature(real_methods[one.name]) for one in methods.values())


def signature(node: ast.FunctionDef) -> str:
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else ''}"


def test_plugins_page_family_converts(tmp_path: Path) -> None:
    plugin(tmp_path, SIGNATURES["family"][0])
    sizes = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2".split()
    words = ["--preset", "tiny", *LINE[LINE.index("--micro-batch-size") :], *sizes, *STEPS, "--save", "run"]
    typed(tmp_path, *words, "--seq-length", "16", "--max-position-embeddings", "16")
    convert = [["--load", "run", "--to-hf", "mine", "--family", "mine"], ["--from-hf", "mine", "--save", "again"]]
    for line in convert:
        typed(tmp_path, *line, "--plugin", "mine.py", program="tools/convert_checkpoint.py")
    with safe_open(tmp_path / "mine/model.safetensors", "np") as file:
        assert file.get_tensor("model.layers.1.wqkv.weight").shape == (64, 32)
    for source in ("run", "again"):
        words = ["--load", source, "--to-hf", f"llama-{source}", "--family", "llama"]
        typed(tmp_path, *words, program="tools/convert_checkpoint.py")
    same = [(tmp_path / f"llama-{source}/model.safetensors").read_bytes() for source in ("run", "again")]
    assert same[0] == same[1]


@pytest.mark.nightly(guards=("docs/plugins.md", "examples/plugins", "megalite/config/plugins.py"))
def test_plugins_page_commands(tmp_path: Path) -> None:
    """Every command of it, typed in an empty folder."""
    shown = next(text for language, text in documents.fences(ROOT / "docs/plugins.md") if language == "python")
    assert (EXAMPLES / "lr_schedule.py").read_text("utf-8").endswith(f'"""\n\n{shown}')
    typed_ones = [command for command in documents.commands() if command.place.startswith("plugins.md: megalite")]
    assert {command.words[1] for command in typed_ones} == {"plugin", "train", "verify", "plan", "plot"}
    for command in typed_ones:
        short = ["--num-layers", "2", "--device", "cpu"] * (command.words[1] in ("train", "verify"))
        done = programs.python("-m", "megalite", *command.words[1:], *short, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, f"{command.place}\n{done.stdout}{done.stderr}"
