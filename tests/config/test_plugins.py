"""User plugins: each kind runs as an example of examples/plugins/ on real command lines; invalid ones are refused."""

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
from train_cases import SMALL_RUN, config_from

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
from megalite.training.callbacks import Callback
from megalite.training.plugin_metrics import PluginMetrics

EXAMPLES = ROOT / "examples/plugins"
LINE = [*SMALL_RUN, "--device", "cpu"]
STEPS = "--train-iters 3 --lr-decay-iters 6".split()


def run_program(directory: Path, *args: str, program: str = "pretrain_gpt.py", code: int = 0) -> str:
    result = programs.run_python(program, *args, cwd=directory)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]


def read_losses(run_dir: Path) -> list[float]:
    return [row["train/loss"] for row in read_rows(run_dir) if "train/loss" in row]


def write_plugin(directory: Path, text: str, name: str = "mine.py") -> str:
    (directory / name).write_text(f"import megalite\n{text}\n", "utf-8")
    return name


@pytest.fixture(scope="module")
def mish(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two ranks with a plugin's activation; return the directory with the run and the plugin."""
    directory = tmp_path_factory.mktemp("mish")
    (directory / "mine.py").write_text((EXAMPLES / "activation.py").read_text("utf-8"), "utf-8")
    args = ["--plugin", "mine.py", "--activation", "mish", *LINE, *STEPS, "--save", "run"]
    run_program(directory, *args, "--nproc", "2", "--tp", "2")
    return directory


def test_activation_trains_on_ranks_and_its_source_is_recorded(mish: Path) -> None:
    sha256 = hashlib.sha256((mish / "mine.py").read_bytes()).hexdigest()
    assert f'plugin = ["mine.py"]  # sha256: mine.py {sha256}' in (mish / "run/run_config.toml").read_text("utf-8")
    assert len(read_losses(mish / "run")) == 3
    run_program(mish, "--config", "run/run_config.toml", "--nproc", "1", "--tp", "1", "--save", "one")
    assert read_losses(mish / "one") == pytest.approx(read_losses(mish / "run"), rel=1e-5)
    run_program(mish, *LINE, *STEPS, "--save", "gelu")
    assert read_losses(mish / "gelu") != pytest.approx(read_losses(mish / "run"), rel=1e-5)


def test_resume_needs_the_plugin_and_reports_changed_source(mish: Path) -> None:
    resume_flags = [*LINE, "--train-iters", "4", "--lr-decay-iters", "6", "--load", "run"]
    output = run_program(mish, *resume_flags, code=2)
    assert "run/iter_0000003 was written with plugin='mine.py' (sha256 " in output and "add --plugin mine.py" in output
    (mish / "other").mkdir(exist_ok=True)
    (mish / "other/mine.py").write_text((mish / "mine.py").read_text("utf-8") + "# longer\n", "utf-8")
    output = run_program(mish, "--plugin", "other/mine.py", "--activation", "mish", *resume_flags, "--save", "on")
    (note,) = [line for line in output.splitlines() if "differs from the one in" in line]
    assert note.startswith("note: plugin='mine.py' differs from the one in run/iter_0000003: sha256 ")
    run_program(mish, "--plugin", "mine.py", "--activation", "mish", *resume_flags, "--save", "on")
    assert "differs from the one in" not in (mish / "on/log.txt").read_text("utf-8").split("note: ")[-1]


def test_checkpoint_cannot_load_a_plugin(mish: Path) -> None:
    """Programs that read a checkpoint do not run the plugin that its configuration and state name."""
    source, marker = (mish / "mine.py").read_text("utf-8"), mish / "it ran"
    (mish / "mine.py").write_text(f"{source}\nopen('it ran', 'w').close()\n", "utf-8")
    output = run_program(mish, "--load", "run", "--to-hf", "hf", program="tools/convert_checkpoint.py", code=3)
    assert "add --plugin mine.py" in output
    assert "or give the --plugin that registers it" in run_program(mish, "run", "run", program="tools/diff.py", code=2)
    for program, args in (("report", "run --out page"), ("checkpoint", "inspect run/iter_0000003"), ("runs", ".")):
        run_program(mish, *args.split(), program=f"tools/{program}.py")
    output = run_program(mish, *LINE, "--use-checkpoint-args", "--load", "run", "--train-iters", "4", code=2)
    assert "was written with plugin='mine.py'" in output and not marker.exists()
    run_program(mish, "run", "run", "--plugin", "mine.py", program="tools/diff.py")
    assert marker.exists()  # it does run if the user names it
    output = run_program(mish, "--config", "run/run_config.toml", "--dry-run")
    assert "note: plugin='mine.py' is run, because the configuration names it" in output
    (mish / "mine.py").write_text(source, "utf-8")


def test_lr_schedule_plugin(tmp_path: Path) -> None:
    args = ["--plugin", str(EXAMPLES / "lr_schedule.py"), "--lr-decay-style", "power", "--lr-warmup-iters", "1"]
    run_program(tmp_path, *args, *LINE, "--train-iters", "5", "--min-lr", "0.001", "--save", "run")
    rates = [row["train/lr"] for row in read_rows(tmp_path / "run") if "train/lr" in row]  # after each step
    assert rates == pytest.approx([0.01, *(0.001 + 0.009 * (1 - (n / 4) ** 2) for n in range(1, 5))])
    resume_flags = ["--train-iters", "6", "--lr-decay-iters", "5", "--load", "run", "--save", "run"]
    output = run_program(tmp_path, *args[2:], *LINE, *resume_flags, code=2)
    assert "lr_decay_style='power' is not one of" in output and "or give the --plugin that registers it" in output
    output = run_program(tmp_path, *LINE, *resume_flags, code=2)
    assert "add --plugin lr_schedule.py" in output


def test_mixer_plugin_has_the_same_losses_under_every_layout(tmp_path: Path) -> None:
    args = ["--plugin", str(EXAMPLES / "mixer.py"), *LINE, *STEPS]
    run_program(tmp_path, *args, "--hybrid-layer-pattern", "S-*-SS", "--save", "alone")
    layouts = {
        "tp": ("S-*-SS", "--nproc 2 --tp 2 --recompute-granularity full --recompute-method uniform"),
        "pp": ("S|-*-SS", "--nproc 2 --pp 2 --split-backward"),
        "dp": ("S-*-SS", "--nproc 2 --zero-stage 3"),
    }
    for name, (pattern, layout) in layouts.items():
        run_program(tmp_path, *args, "--hybrid-layer-pattern", pattern, *layout.split(), "--save", name)
        assert read_losses(tmp_path / name) == pytest.approx(read_losses(tmp_path / "alone"), rel=1e-5)
    saved = json.loads((tmp_path / "pp/iter_0000003/manifest.json").read_text("utf-8"))["tensors"]
    assert "model/layers.2.short_convolution.kernel" in saved
    resume_flags = ["--train-iters", "4", "--lr-decay-iters", "6", "--load", "pp", "--save", "on"]
    output = run_program(tmp_path, *args[: -len(STEPS)], *resume_flags, "--hybrid-layer-pattern", "S-*-SS")
    assert "resumed from pp/iter_0000003" in output
    output = run_program(tmp_path, "alone", "pp", program="tools/diff.py", code=2)
    assert f"needs a plugin of these runs; add --plugin {EXAMPLES / 'mixer.py'}" in output
    output = run_program(tmp_path, "alone", "pp", *args[:2], program="tools/diff.py", code=1)
    assert "hybrid_layer_pattern" in output
    flags = ["--hybrid-layer-pattern", "S-*-SS", "--context-parallel-size", "2", "--nproc", "2"]
    output = run_program(tmp_path, *args, *flags, code=2)
    assert "context_parallel_size=2: mixer 'short_convolution' of hybrid_layer_pattern='S-*-SS' does not " in output


@pytest.mark.parametrize(
    "name,letter,message",
    [
        ("mine", "E", "has letter='E'; give a letter of A-Z or a-z other than -, E"),
        ("mine", "SS", "has letter='SS'; give a letter of A-Z or a-z other than -, E"),
        ("mlp", "S", "is a part of parameters' names; use lower-case letters, digits and _, and not mlp or moe"),
    ],
)
def test_mixer_plugin_with_a_bad_letter_or_name_is_refused(
    name: str, letter: str, message: str, tmp_path: Path
) -> None:
    text = f"class M:\n    letter = {letter!r}\n    def __init__(self, a, b, c, d, e, f): ...\n"
    file = write_plugin(tmp_path, f"{text}megalite.register('mixer', {name!r}, M)")
    with pytest.raises(ConfigError, match=re.escape(f"mixer={name!r} {message}")):
        plugins.load_plugins([str(tmp_path / file)])


NORM_MIXER = """
from torch import nn
from megalite.parallel.spec import ParamSpec

class M(nn.Module):
    letter = "Q"
    normalize = False

    def __init__(self, make_param, name, model, layer, spec, recomputed):
        super().__init__()
        self.w = {parameter}
        self.activation = self.dropout = len

    def forward(self, x, batch, ctx):
        assert self.normalize is False and self.activation is self.dropout is len
        return x * self.w

megalite.register("mixer", "mine", M)
"""


@pytest.mark.parametrize(
    "parameter,message",
    [
        (
            "make_param(ParamSpec(f'{name}.norm.weight', (model.hidden_size,)))",
            "is the name of another one, of the mixer or",
        ),
        ("make_param(ParamSpec(f'{name}.post_norm.weight', (model.hidden_size,)))", "of the mixer or of a norm of its"),
        ("make_param(ParamSpec('w', (model.hidden_size,)))", "mixer='mine': parameter 'w' is not NAME.something"),
        ("nn.Parameter(__import__('torch').ones(1))", "has parameter w, which make_param did not create; use make_par"),
        ("make_param(ParamSpec(f'{name}.w', (model.hidden_size,), partial_grad_axes=('tp',)))", ""),
    ],
)
def test_parameters_of_a_mixer_fit_a_checkpoint(parameter: str, message: str, tmp_path: Path) -> None:
    """`--compile` also leaves the mixer's own attributes alone."""
    write_plugin(tmp_path, NORM_MIXER.replace("{parameter}", parameter))
    flags = [*LINE, *STEPS, "--plugin", "mine.py", "--hybrid-layer-pattern", "Q-*-", "--sandwich-norm", "--save", "run"]
    flags[flags.index("--num-layers") + 1] = "2"
    output = run_program(tmp_path, *flags, code=2 if message else 0)
    assert message in output and "Traceback" not in output
    if not message:
        compiled = run_program(tmp_path, *flags[:-2], "--compile", "--save", "compiled")
        assert read_losses(tmp_path / "compiled") == pytest.approx(read_losses(tmp_path / "run"), rel=1e-4), compiled


RECURRENT_MIXER = """
import torch
from torch import nn
from megalite.parallel.spec import ParamSpec

class R(nn.Module):
    letter = "R"

    def __init__(self, make_param, name, model, layer, spec, recomputed):
        super().__init__()
        self.layer = layer
        self.w = make_param(ParamSpec(f"{name}.w", (model.hidden_size,), partial_grad_axes=("tp",)))

    def forward(self, x, batch, ctx):
        cache, (S, B, D) = ctx.cache, x.shape
        h = x.new_zeros(B, D) if cache is None else cache.states.get(self.layer, x.new_zeros(B, D))
        outputs = []
        for t in range(S):
            new = 0.5 * h + x[t]
            outputs.append(new)
            h = new if cache is None else torch.where((t < cache.num_new_B)[:, None], new, h)
        if cache is not None:
            cache.states[self.layer] = h
        return torch.stack(outputs) * (1 + self.w)

megalite.register("mixer", "recurrent", R)
"""


def test_recurrent_mixer_generates_the_same_text_alone_and_in_a_batch(tmp_path: Path) -> None:
    write_plugin(tmp_path, RECURRENT_MIXER)
    sizes = "--num-layers 3 --hybrid-layer-pattern R-*-R --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    train = f"--plugin mine.py {sizes} --init-method-std 0.3 --micro-batch-size 2 --train-iters 2 --lr 1e-2 --mock-data"
    run_program(tmp_path, *train.split(), "--tokenizer-type", "ByteTokenizer", "--eval-iters", "0", "--save", "run")
    generate = ["--load", "run", "--plugin", "mine.py", "--temperature", "0", "--max-new-tokens", "8"]

    def completions(*prompts: str) -> list[str]:
        flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
        output = run_program(tmp_path, *generate, *flags, "--json", program="tools/generate.py")
        return [json.loads(line)["text"] for line in output.splitlines() if line.startswith("{")]

    assert completions("ab", "a much longer one") == [*completions("ab"), *completions("a much longer one")]


def test_mixer_does_not_see_documents_or_ambiguous_letters(tmp_path: Path) -> None:
    for name in ("a", "b"):
        text = NORM_MIXER.replace("{parameter}", "None").replace('"mine"', f'"mine_{name}"')
        write_plugin(tmp_path, text, f"{name}.py")
    flags = [*LINE, *STEPS, "--hybrid-layer-pattern", "Q-*-", "--reset-attention-mask"]
    flags[flags.index("--num-layers") + 1] = "2"
    with pytest.raises(
        ConfigError, match="reset_attention_mask=True: mixer 'mine_a' of .* does not separate documents"
    ):
        config_from([*flags, "--plugin", str(tmp_path / "a.py")])
    flags[-1:] = ["--eval-requests", "x.jsonl"]
    with pytest.raises(ConfigError, match="eval_requests=x.jsonl: mixer 'mine_a' of .* does not separate documents"):
        config_from([*flags, "--plugin", str(tmp_path / "a.py")])
    plugins.load_plugins([str(tmp_path / "b.py")])
    with pytest.raises(ConfigError, match="letter"):
        config_from([*flags, "--plugin", str(tmp_path / "a.py"), "--plugin", str(tmp_path / "b.py")])


def test_optimizer_plugin_works_at_every_zero_stage(tmp_path: Path) -> None:
    args = ["--plugin", str(EXAMPLES / "optimizer.py"), "--optimizer", "lion", *LINE, *STEPS, "--lr", "1e-3"]
    run_program(tmp_path, *args, "--save", "alone")
    run_program(tmp_path, *args, "--nproc", "2", "--zero-stage", "3", "--save", "shared")
    assert read_losses(tmp_path / "shared") == pytest.approx(read_losses(tmp_path / "alone"), rel=1e-5)
    saved = json.loads((tmp_path / "shared/iter_0000003/manifest.json").read_text("utf-8"))["tensors"]
    assert {name.partition("/")[0] for name in saved} == {"model", "optimizer.exp_avg"}
    state_dtypes = [state_dtypes_of(config_from(line).optim, matrix=True) for line in (args, [*LINE, *STEPS])]
    assert state_dtypes == [(None,), (None, None)]  # the planner counts one state


def test_dataset_plugin_is_shuffled_counted_and_resumed(tmp_path: Path) -> None:
    args = ["--plugin", str(EXAMPLES / "dataset.py"), "--dataset", "sums", "--tokenizer-type", "ByteTokenizer"]
    args += [word for word in LINE if word not in ("--mock-data", "--vocab-size", "93")]
    run_program(tmp_path, *args, "--train-iters", "4", "--save", "whole")
    run_program(tmp_path, *args, "--train-iters", "2", "--lr-decay-iters", "4", "--save", "parts")
    run_program(tmp_path, *args, "--train-iters", "4", "--load", "parts", "--save", "parts", "--nproc", "2")
    assert read_losses(tmp_path / "parts") == pytest.approx(read_losses(tmp_path / "whole"), rel=1e-5)
    state = json.loads((tmp_path / "parts/iter_0000004/manifest.json").read_text("utf-8"))["state"]
    (source,) = state["data"]["sources"]
    assert source["name"] == "dataset sums" and source["tokens"] == 4 * 8 * 16 and source["documents"] == 32
    output = run_program(tmp_path, *args, "--train-iters", "4", "--split", "1,1,1", "--mock-data", "--dry-run", code=2)
    assert "split=1,1,1 applies to token files, and dataset=sums has none" in output
    assert "mock_data and dataset exclude each other" in output
    output = run_program(tmp_path, *args[2:], "--train-iters", "4", code=2)
    assert "dataset='sums' is unknown; give the --plugin that registers it" in output


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
    write_plugin(tmp_path, "megalite.register('tokenizer_type', 'mine', lambda asked: int('x'))")
    output = run_program(tmp_path, "--plugin", "mine.py", *LINE, *STEPS, "--tokenizer-type", "mine", code=2)
    assert output == f"pretrain_gpt.py: {tmp_path}/mine.py:2: invalid literal for int() with base 10: 'x'\n"


def test_invalid_component_results_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plugin(tmp_path, """for name, rate in {"none": None, "text": "1", "nan": float("nan"), "down": -0.5}.items():
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
    plugin_flags = ["--plugin", str(EXAMPLES / "tokenizer.py")]
    (tmp_path / "t.jsonl").write_text('{"text": "the quick brown fox jumps over a lazy dog"}\n' * 40, "utf-8")
    args = ["--input", "t.jsonl", "--output-prefix", "d", "--append-eod", "--tokenizer-type", "Characters"]
    run_program(tmp_path, *args, *plugin_flags, "--workers", "2", program="tools/preprocess_data.py")
    inspect_args = ["d_text_document", "--tokenizer-type", "Characters", "--document", "1"]
    output = run_program(tmp_path, *inspect_args, *plugin_flags, program="tools/inspect_data.py")
    assert "the quick brown fox" in output
    run_flags = [word for word in LINE if word not in ("--mock-data", "--vocab-size", "93")]
    run_flags += [
        "--data-path",
        "d_text_document",
        "--tokenizer-type",
        "Characters",
        "--split",
        "1,0,0",
        "--eval-iters",
        "0",
    ]
    run_program(tmp_path, *plugin_flags, *run_flags, *STEPS, "--save", "run")
    generate_flags = ["--load", "run", "--prompt", "the q", "--max-new-tokens", "3", "--device", "cpu", "--nproc", "2"]
    output = run_program(
        tmp_path, *generate_flags, *plugin_flags, "--tensor-model-parallel-size", "2", program="tools/generate.py"
    )
    assert output.startswith("[step 3] the q")
    model = megalite.load(tmp_path / "run", device="cpu", plugins=plugin_flags[1:])
    assert model.tokenizer.name == "Characters" and model.generate("the q", 2)
    output = run_program(tmp_path, *generate_flags[:-2], program="tools/generate.py", code=3)
    assert "run/iter_0000003 was written with plugin='tokenizer.py'" in output
    text = f"{(EXAMPLES / 'tokenizer.py').read_text('utf-8')}\nALPHABET = ALPHABET[::-1]\n"
    (tmp_path / "tokenizer.py").write_text(text, "utf-8")
    output = run_program(tmp_path, "--plugin", "tokenizer.py", *run_flags, *STEPS, code=3)
    assert "d_text_document: made with Characters (fingerprint " in output


def test_metric_plugin_is_independent_of_layout_and_callbacks_run(tmp_path: Path) -> None:
    plugin_files = [str(EXAMPLES / "metric.py"), str(EXAMPLES / "callback.py")]
    args = ["--plugin", *plugin_files, "--activation", "watched_gelu", *LINE, *STEPS, "--bf16"]
    args += ["--log-interval", "2", "--eval-interval", "1", "--tensorboard-dir", "board"]
    output = run_program(tmp_path, *args, "--save", "one")
    assert output.count("counting: done after 3 updates") == 1
    recompute_flags = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    output = run_program(tmp_path, *args, "--save", "four", "--nproc", "4", "--tp", "2", "--pp", "2", *recompute_flags)
    assert output.count("counting: done after 3 updates") == 1
    one, four = ([row for row in read_rows(tmp_path / name) if "train/loss" in row] for name in ("one", "four"))
    assert [row["metric/updates"] for row in one] == [1.0, 2.0, 3.0]
    for row, row_of_four in zip(one, four, strict=True):
        layers = row["metric/quiet/layers"]
        assert len(layers) == 4 and all(0 < share < 1 for share in layers)
        assert row["metric/quiet"] == pytest.approx(sum(layers) / 4)
        assert row_of_four["metric/quiet/layers"] == pytest.approx(layers, abs=0.01)
        assert row_of_four["metric/updates"] == row["metric/updates"] and "metric/updates/layers" not in row
    assert one[0]["metric/quiet/layers"] == pytest.approx(four[0]["metric/quiet/layers"], abs=1e-3)  # same weights
    output = run_program(tmp_path, *args, "--compile", "--dry-run", code=2)
    assert "compile=True with metric=quiet" in output
    config_from(args)
    metrics = PluginMetrics([], Mesh.single_process(), 2)
    megalite.log("quiet", 3.0, 4)
    megalite.log("quiet", torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert metrics.reduce_and_reset() == {
        "metric/quiet": 0.5,
        "metric/quiet/layers": [None, None],
        "metric/updates": None,
    }
    assert metrics.reduce_and_reset()["metric/quiet"] is None


RECORDER = """
import torch
import torch.distributed as dist

class Recorder:
    def __init__(self, name):
        self.name = name
    def record(self, run, event, *values):
        with open(f"{self.name}.{dist.get_rank()}", "a") as file:
            print(event, run.progress.step, *values, file=file)
    def on_train_start(self, run):
        self.record(run, "on_train_start")
    def on_train_step_start(self, run):
        total = torch.ones(())
        dist.all_reduce(total)
        self.record(run, "on_train_step_start", int(total))
        with open(f"order.{dist.get_rank()}", "a") as file:
            print("start", self.name, file=file)
    def on_train_step_end(self, run, result):
        self.record(run, "on_train_step_end", result.loss)
        with open(f"order.{dist.get_rank()}", "a") as file:
            print("end", self.name, file=file)
    def on_log(self, run, metrics):
        self.record(run, "on_log", metrics["step"], metrics["steps"], metrics["loss"])
    def on_eval_end(self, run, name, loss):
        self.record(run, "on_eval_end", loss)
    def on_save_checkpoint(self, run):
        self.record(run, "on_save_checkpoint")
    def on_train_end(self, run, outcome):
        self.record(run, "on_train_end", outcome)

megalite.register("callback", "first", Recorder("first"))
megalite.register("callback", "second", Recorder("second"))
"""


def test_callback_events_have_their_order_and_arguments_on_all_ranks(tmp_path: Path) -> None:
    flags = [*LINE, *STEPS, "--log-interval", "3", "--eval-interval", "2", "--save", "run", "--save-interval", "2"]
    run_program(tmp_path, "--plugin", write_plugin(tmp_path, RECORDER), *flags, "--nproc", "2")
    events = [line.split() for line in (tmp_path / "first.0").read_text("utf-8").splitlines()]
    assert [tuple(event[:2]) for event in events] == [
        ("on_train_start", "0"),
        ("on_train_step_start", "0"),
        ("on_train_step_end", "1"),
        ("on_log", "1"),
        ("on_train_step_start", "1"),
        ("on_train_step_end", "2"),
        ("on_eval_end", "2"),
        ("on_save_checkpoint", "2"),
        ("on_train_step_start", "2"),
        ("on_train_step_end", "3"),
        ("on_log", "3"),
        ("on_save_checkpoint", "3"),
        ("on_eval_end", "3"),  # the validation set
        ("on_eval_end", "3"),  # the test set
        ("on_train_end", "3"),
    ]
    assert all(event[2] == "2" for event in events if event[0] == "on_train_step_start")  # of both ranks
    losses = [float(event[2]) for event in events if event[0] == "on_train_step_end"]
    assert [event[2:] for event in events if event[0] == "on_log"] == [
        ["1", "1", str(losses[0])],
        ["3", "2", str((losses[1] + losses[2]) / 2)],
    ]
    rows = read_rows(tmp_path / "run")
    validation_losses = [row.get("val/valid/loss", row.get("val/test/loss")) for row in rows if "train/loss" not in row]
    assert [float(event[2]) for event in events if event[0] == "on_eval_end"] == validation_losses
    assert events[-1][2] == "done"
    for name in ("first", "second"):
        for rank in (0, 1):
            assert (tmp_path / f"{name}.{rank}").read_text("utf-8") == (tmp_path / "first.0").read_text("utf-8")
    order = ["start second", "start first", "end first", "end second"] * 3  # the first is next to the step
    assert (tmp_path / "order.0").read_text("utf-8").splitlines() == order


def test_callbacks_can_override_each_event() -> None:
    """The events that `register` accepts are the methods of `Callback`, in its order and that of the page."""
    events = [name for name in vars(Callback) if not name.startswith("__")]
    assert REGISTRIES["callback"]._require_any == events
    section = (ROOT / "docs/plugins.md").read_text("utf-8").partition("### `callback`")[2]
    assert re.findall(r"def (on_\w+)", section) == events


def test_pipeline_schedule_plugin_trains_and_a_deadlock_is_refused(tmp_path: Path) -> None:
    plugin_flags = ["--plugin", str(EXAMPLES / "pipeline_schedule.py")]
    args = [*LINE, *STEPS, "--global-batch-size", "12"]
    run_program(tmp_path, *args, "--save", "one")
    run_program(
        tmp_path, *args, *plugin_flags, "--pipeline-schedule", "eager", "--nproc", "4", "--pp", "4", "--save", "four"
    )
    assert read_losses(tmp_path / "four") == pytest.approx(read_losses(tmp_path / "one"), rel=1e-5)
    drawn = run_program(tmp_path, "schedule", "--schedule", "eager", *plugin_flags, "--text", program="tools/plot.py")
    assert drawn != run_program(tmp_path, "schedule", "--text", program="tools/plot.py")
    body = """from megalite.pipeline.schedule import Action, Op
@megalite.register('pipeline_schedule', '{}')
def row(rank, place, groups):
    f, b = ([Action(op, rank, i) for i in range(sum(groups))] for op in (Op.F, Op.B))
    return {}
"""
    for name, row, message in (
        ("hangs", "f[:1] + b[:2] + f[1:] + b[2:]", "would hang: these actions wait for each other: B0.1, B1.1"),
        (
            "short",
            "f + b[1:]",
            "rank 0 of 2 has B0.0 0 times, not 1; each F and B of its stages must appear exactly once",
        ),
        ("other", "f + b + [Action(Op.F, 1 - rank, 0)]", "rank 0 of 2 has F1.0 1 times, not 0"),
    ):
        write_plugin(tmp_path, body.format(name, row))
        schedule_flags = ["--plugin", "mine.py", "--pipeline-schedule", name, "--nproc", "2", "--pp", "2"]
        output = run_program(tmp_path, *args, *schedule_flags, "--rampup-batch-size", "4", "4", "24", code=2)
        assert f"pipeline_schedule='{name}'" in output and message in output, output


def test_family_plugin_converts_and_plans(tmp_path: Path) -> None:
    plugin_flags, convert = ["--plugin", str(EXAMPLES / "family.py")], "tools/convert_checkpoint.py"
    sizes = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2".split()
    args = ["--preset", "tiny", *LINE[LINE.index("--micro-batch-size") :], *sizes, *STEPS, "--save", "run"]
    run_program(tmp_path, *args, "--seq-length", "16", "--max-position-embeddings", "16")
    run_program(tmp_path, "--load", "run", "--to-hf", "acme", "--family", "acme", *plugin_flags, program=convert)
    hf_config = json.loads((tmp_path / "acme/config.json").read_text("utf-8"))
    assert hf_config["model_type"] == "acme" and hf_config["width"] == 32 and hf_config["depth"] == 2
    with safe_open(tmp_path / "acme/model.safetensors", "np") as file:
        assert {"tokens.weight", "blocks.1.wkv.weight", "output.weight"} <= {*file.keys()}
    run_program(tmp_path, "--from-hf", "acme", "--save", "again", *plugin_flags, program=convert)
    for source in ("run", "again"):
        run_program(tmp_path, "--load", source, "--to-hf", f"llama-{source}", "--family", "llama", program=convert)
    weights = [(tmp_path / f"llama-{source}/model.safetensors").read_bytes() for source in ("run", "again")]
    assert weights[0] == weights[1]
    other_flags = ["--from-hf", "acme", "--save", "other"]
    assert "model_type='acme' is not one of llama, " in run_program(tmp_path, *other_flags, program=convert, code=3)
    assert "transformers cannot open acme" in run_program(
        tmp_path, *other_flags, "--check", *plugin_flags, program=convert, code=3
    )
    plan = ["--hf", "acme", "--num-gpus", "1", "--global-batch-size", "8"]
    assert "MFU" in run_program(tmp_path, *plan, *plugin_flags, program="tools/plan.py")


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
GRADIENTS = {  # an Activation -> the message about its gradient, if it is wrong
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
    "Activation(lambda u: gelu(u), get_activation('gelu').backward)": "wrong gradient",  # the gradient of the tanh form
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


@pytest.mark.parametrize(("activation", "message"), GRADIENTS.items())
def test_activation_gradient_equals_autograd(
    activation: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [
        *LINE,
        *STEPS,
        "--plugin",
        write_plugin(tmp_path, f"{ACTIVATION}megalite.register('activation', 'mine', {activation})"),
    ]
    if message:
        with pytest.raises(ConfigError, match=f"^plugin='mine.py': .*{message}"):
            config_from(argv)
    else:
        assert config_from(argv).operations.plugin == ("mine.py",)


@pytest.mark.parametrize("name", [*REGISTRIES["activation"].built_in])
def test_built_in_activations_pass_the_plugin_checks(name: str) -> None:
    assert find_activation_error(get_activation(name)) == ""


def test_verify_detects_a_gradient_that_is_wrong_in_one_process(tmp_path: Path) -> None:
    """Both runs of verify would share the wrong gradient, and agree."""
    activation = "Activation(GELU.forward, doubled)"
    name = write_plugin(tmp_path, f"{ACTIVATION}megalite.register('activation', 'mine', {activation})")
    args = ["--plugin", name, "--activation", "mine", *LINE, *STEPS, "--nproc", "2", "--tp", "2", "--steps", "1"]
    output = run_program(tmp_path, *args, program="tools/verify.py", code=2)
    assert (
        output.startswith("verify.py: plugin='mine.py': ") and "2 times as much" in output and output.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_failing_plugin_ends_the_command(text: str, message: str, tmp_path: Path) -> None:
    name = write_plugin(tmp_path, text)
    output = run_program(tmp_path, "--plugin", name, *LINE, *STEPS, "--save", "run", "--nproc", "2", code=2)
    assert output.startswith("pretrain_gpt.py: plugin='mine.py': ") and len(output.splitlines()) == 1, output
    assert message in output and not (tmp_path / "run").exists() and len(output) < 3000


ENDS = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit()": "SystemExit",
    "sys.exit(256)": "SystemExit: 256",  # its lowest byte is 0
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


def run_failing_program(directory: Path, *args: str, program: str = "pretrain_gpt.py") -> str:
    """Run a command that user code ends, and return its output. It must fail at once, without waiting for a timeout."""
    result = programs.run_python(program, *args, cwd=directory)
    assert result.returncode not in (0, 120) and len(result.stdout + result.stderr) < 40_000, result.stderr[-4000:]
    return result.stdout + result.stderr


@pytest.mark.parametrize("statement", ENDS)
def test_any_exception_of_a_callback_is_an_error(statement: str, tmp_path: Path) -> None:
    name = write_plugin(tmp_path, ENDING.format(statement) + CALLED)
    output = run_failing_program(tmp_path, "--plugin", name, *LINE, *STEPS, "--save", "run")
    status = json.loads((tmp_path / "run/status.json").read_text("utf-8"))
    assert status["outcome"] == "crash" and status["reason"].startswith(ENDS[statement]), status["reason"][:500]
    assert ENDS[statement] in output and "mine.py" in output and len(status["reason"]) < 3000


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise GeneratorExit", "os._exit(0)"])
def test_rank_ended_by_user_code_ends_the_run(statement: str, tmp_path: Path) -> None:
    """User code ends all ranks at once, then only the second."""
    for number, condition in enumerate(("", "if dist.get_rank() == 1:\n        ")):
        name = write_plugin(
            tmp_path, "import torch.distributed as dist" + ENDING.format(condition + statement) + CALLED
        )
        run_failing_program(tmp_path, "--plugin", name, *LINE, *STEPS, "--save", f"run{number}", "--nproc", "2")
        status = json.loads((tmp_path / f"run{number}/status.json").read_text("utf-8"))
        assert status["outcome"] == "crash" and status["reason"], status


PARTS = {  # a kind of component that ends the process when it is called -> the flags that call it
    "lr_decay_style": "--lr-decay-style mine",
    "activation": "--activation mine",
    "tokenizer_type": "--tokenizer-type mine --vocab-size 93",
    "dataset": "--dataset mine",
    "pipeline_schedule": "--pipeline-schedule mine --pp 2",
}
COMPONENTS = """
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


TOKENIZER_AND_ACTIVATION = """
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
    """Training calls the component, and planning calls some kinds without a run."""
    name = write_plugin(tmp_path, ENDING.format("sys.exit(0)") + COMPONENTS)
    base_flags = [word for word in LINE if kind != "dataset" or word != "--mock-data"]
    plugin_flags = ["--plugin", name, *PARTS[kind].split()]
    assert "SystemExit: 0" in run_failing_program(
        tmp_path, *base_flags, *STEPS, *plugin_flags, "--save", "run", "--nproc", "2"
    )
    if kind in ("activation", "pipeline_schedule"):
        output = run_failing_program(tmp_path, *base_flags, *plugin_flags, "--num-gpus", "2", program="tools/plan.py")
        assert output.startswith("plan.py: ") and "mine.py:6: SystemExit: 0; correct the plugin" in output
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalite.api.Popen", programs.Popen)
    with pytest.raises((megalite.ConfigError, megalite.CommandError), match="SystemExit: 0"):
        megalite.train(megalite.Config([*base_flags, *STEPS, *plugin_flags], nproc=2), quiet=True)


def test_tokenizer_that_exits_makes_no_data(tmp_path: Path) -> None:
    name = write_plugin(tmp_path, ENDING.format("sys.exit(0)") + COMPONENTS)
    (tmp_path / "t.jsonl").write_text('{"text": "a text"}\n' * 40, "utf-8")
    for kind in ("mine", "speaks"):
        for workers in ("1", "2"):
            args = f"--input t.jsonl --output-prefix d --tokenizer-type {kind} --workers {workers} --plugin {name}"
            assert "SystemExit: 0" in run_failing_program(tmp_path, *args.split(), program="tools/preprocess_data.py")
            assert not list(tmp_path.glob("d*.idx"))


def test_model_that_exits_does_not_end_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer and the activation belong to a model that is loaded into the caller's process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalite.api.Popen", programs.Popen)
    name = write_plugin(
        tmp_path, ENDING.format("sys.exit(0) if 'gone' in os.environ else None") + TOKENIZER_AND_ACTIVATION
    )
    args = ["--plugin", name, *LINE, *STEPS, "--tokenizer-type", "speaks", "--activation", "mine", "--save", "run"]
    megalite.train(megalite.Config(args), quiet=True)
    model = megalite.load("run", plugins=[name])
    assert len(model.generate(["a"], 2)) == 1 and model.logits([[1]]).shape == (1, 1, 93)
    monkeypatch.setenv("gone", "1")
    for call in (lambda: model.generate(["a"], 2), lambda: model.logits([[1]])):
        with pytest.raises(megalite.ConfigError, match=r"mine.py:\d+: SystemExit: 0 before the work was done"):
            call()


def test_plugin_help_ends_the_program(tmp_path: Path) -> None:
    for program in ("pretrain_gpt.py", "tools/plan.py", "tools/preprocess_data.py"):
        assert run_program(tmp_path, "--help", program=program)


def test_invalid_plugin_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plugin(tmp_path, "")
    os.mkdir("open")
    os.chmod("open", 0o777)
    os.symlink("../mine.py", "open/link.py")
    os.symlink("mine.py", "link.py")
    write_plugin(tmp_path / "open", "")
    for value, reason in {
        "none.py": "No such file", "no_such_module": "neither FILE", "../x": "neither", "open/link.py": "is a link"
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"plugin='{value}' cannot be read \(.*{reason}"):
            config_from([*LINE, "--plugin", value])
    with pytest.raises(ConfigError, match="mine.py is the name of two files; rename one"):
        config_from([*LINE, "--plugin", "mine.py", "open/mine.py"])
    assert config_from([*LINE, *STEPS, "--plugin", "link.py"]).operations.plugin == (
        "link.py",
    )  # the user's own directory


def test_plugins_of_file_and_command_line_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    body = """from megalite.kernels.activation import get_activation
megalite.register('activation', '{}', get_activation('squared_relu'))"""
    for number in "123":
        write_plugin(tmp_path, body.format(f"act{number}"), f"part{number}.py")
    (tmp_path / "run.toml").write_text('plugin = "part1.py"\nactivation = "act3"\n', "utf-8")
    argv = [*LINE, *STEPS, "--config", "run.toml", "--plugin", "part2.py", "--plugin", "part3", "part1.py"]
    config = config_from(argv)
    assert config.operations.plugin == ("part1.py", "part2.py", "part3") and config.model.activation == "act3"
    assert {*REGISTRIES["activation"]} > {"act1", "act2", "act3"} and list(plugins.plugin_hashes()) == [
        *config.operations.plugin
    ]
    assert "# sha256: part1.py " in dump_config(config)
    component = REGISTRIES["activation"].get("act2")
    config_from([*LINE, *STEPS, "--plugin", "part2.py"])
    assert REGISTRIES["activation"].get("act2") is component  # its code has run once
    write_plugin(tmp_path, body.format("act4"), "part2.py")
    config_from([*LINE, *STEPS, "--plugin", "part2.py"])
    assert list(REGISTRIES["activation"].plugin_components) == ["act4"]
    plugins.load_plugins(["part2.py"], {"part2.py": b"import megalite\n" + body.format("act5").encode()})  # as ranks do
    assert list(REGISTRIES["activation"].plugin_components) == ["act5"]
    with pytest.raises(ConfigError, match="activation='act1' is not one of .*, or give the --plugin that registers it"):
        config_from([*LINE, *STEPS, "--activation", "act1"])
    with pytest.raises(ValueError, match="registered outside of a plugin"):
        plugins.register("activation", "mine", component)


def write_example(directory: Path, *args: str, code: int = 0) -> str:
    return run_program(directory, "megalite", "plugin", *args, program="-m", code=code)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_written_example_of_each_kind_loads(kind: str, tmp_path: Path) -> None:
    output = write_example(tmp_path, kind.replace("_", "-"))
    (file,) = tmp_path.iterdir()
    text = file.read_text("utf-8")
    assert (
        output.startswith(f"{file.name} is an example of {kind}. ")
        and f"megalite train --plugin {file.name} " in output
    )
    assert "examples/plugins" not in text and f"--plugin {file.name} " in text
    assert re.search(rf"register\(\"{kind}\"", text)
    plugins.load_plugins([str(file)])
    assert REGISTRIES[kind].plugin_components


def test_written_example_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine", "utf-8")
    os.symlink("elsewhere.py", tmp_path / "link.py")
    for flags, message in {
        "activation --out mine.py": "out=mine.py already exists; give another name, or remove it",
        "activation --out link.py": "out=link.py already exists; give another name, or remove it",
        "activation --out none/mine.py": "out=none/mine.py cannot be written: No such file or directory; give another path",
        "activation --out mine": "out=mine does not end in .py, by which --plugin recognizes a file; give mine.py",
        "activation --out s3://bucket/mine.py": "a local path",
        "tokenizer": "'tokenizer' is not a kind of component; give one of ",
        "--out mine.py": "a kind is missing; give one of ",
    }.items():
        output = write_example(tmp_path, *flags.split(), code=2)
        assert message in output and "Traceback" not in output, output
        if message.endswith("one of "):
            assert all(kind in output for kind in REGISTRIES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "mine.py"]
    assert (tmp_path / "mine.py").read_text("utf-8") == "mine"
    kinds_text = write_example(tmp_path)
    assert all(re.search(rf"^  {kind} +\S", kinds_text, re.MULTILINE) for kind in REGISTRIES)
    quoted_path = 'my "own"/act ivation.py'
    (tmp_path / quoted_path).parent.mkdir()
    assert f"--plugin '{quoted_path}' " in write_example(tmp_path, "activation", "--out", quoted_path)
    plugins.load_plugins([str(tmp_path / quoted_path)])


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


def signatures_of_megalite() -> list[tuple[str, ast.stmt]]:
    """Return (module, class or function) of the blocks below the skeletons."""
    signatures = list[tuple[str, ast.stmt]]()
    for blocks in SIGNATURES.values():
        for block in blocks[1:]:
            first, *more = re.split(r"^# (megalite[\w.]+)\n", block, flags=re.MULTILINE)
            assert not first and more, block
            for module, text in zip(more[::2], more[1::2], strict=True):
                signatures += [(module, node) for node in ast.parse(text).body]
    return signatures


def fields_and_methods(node: ast.stmt) -> tuple[dict[str, tuple[str, str]], dict[str, ast.FunctionDef]]:
    """Return a class's fields, with type and default, and its methods."""
    assert isinstance(node, ast.ClassDef)
    fields = {
        ast.unparse(statement.target): (
            ast.unparse(statement.annotation),
            ast.unparse(statement.value) if statement.value else "",
        )
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    return fields, {statement.name: statement for statement in node.body if isinstance(statement, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("module", "node"), signatures_of_megalite(), ids=lambda statement: getattr(statement, "name", statement)
)
def test_plugins_page_shows_current_signatures(module: str, node: ast.stmt) -> None:
    """Names, types and defaults are compared; the page may leave out fields and methods of a class."""
    name = getattr(node, "name", "")
    tree = ast.parse((ROOT / f"{module.replace(chr(46), chr(47))}.py").read_text("utf-8"))
    classes = {
        statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef | ast.FunctionDef)
    }
    definition = classes[name]
    if isinstance(node, ast.FunctionDef):
        assert isinstance(definition, ast.FunctionDef)
        assert signature(node) == signature(definition)
        return
    fields, methods = fields_and_methods(node)
    actual_fields, actual_methods = fields_and_methods(definition)
    for base in getattr(definition, "bases", []):  # inherited fields, as a Family's of Naming
        base_class = classes.get(ast.unparse(base))
        actual_fields = (fields_and_methods(base_class)[0] if base_class else {}) | actual_fields
    assert fields and fields == {field: actual_fields.get(field) for field in fields}
    assert all(signature(statement) == signature(actual_methods[statement.name]) for statement in methods.values())


def signature(node: ast.FunctionDef) -> str:
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else ''}"


def test_plugins_page_family_converts(tmp_path: Path) -> None:
    write_plugin(tmp_path, SIGNATURES["family"][0])
    sizes = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2".split()
    args = ["--preset", "tiny", *LINE[LINE.index("--micro-batch-size") :], *sizes, *STEPS, "--save", "run"]
    run_program(tmp_path, *args, "--seq-length", "16", "--max-position-embeddings", "16")
    convert = [["--load", "run", "--to-hf", "mine", "--family", "mine"], ["--from-hf", "mine", "--save", "again"]]
    for convert_flags in convert:
        run_program(tmp_path, *convert_flags, "--plugin", "mine.py", program="tools/convert_checkpoint.py")
    with safe_open(tmp_path / "mine/model.safetensors", "np") as file:
        assert file.get_tensor("model.layers.1.wqkv.weight").shape == (64, 32)
    for source in ("run", "again"):
        args = ["--load", source, "--to-hf", f"llama-{source}", "--family", "llama"]
        run_program(tmp_path, *args, program="tools/convert_checkpoint.py")
    weights = [(tmp_path / f"llama-{source}/model.safetensors").read_bytes() for source in ("run", "again")]
    assert weights[0] == weights[1]


@pytest.mark.nightly(guards=("docs/plugins.md", "examples/plugins", "megalite/config/plugins.py"))
def test_plugins_page_commands(tmp_path: Path) -> None:
    """Every command of the page runs in an empty directory."""
    example = next(text for language, text in documents.fenced_blocks(ROOT / "docs/plugins.md") if language == "python")
    assert (EXAMPLES / "lr_schedule.py").read_text("utf-8").endswith(f'"""\n\n{example}')
    commands = [command for command in documents.all_commands() if command.location.startswith("plugins.md: megalite")]
    assert {command.argv[1] for command in commands} == {"plugin", "train", "verify", "plan", "plot"}
    for command in commands:
        short = ["--num-layers", "2", "--device", "cpu"] * (command.argv[1] in ("train", "verify"))
        result = programs.run_python("-m", "megalite", *command.argv[1:], *short, cwd=tmp_path, timeout=300)
        assert result.returncode == 0, f"{command.location}\n{result.stdout}{result.stderr}"
