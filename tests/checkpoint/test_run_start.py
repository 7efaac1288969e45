"""Starting a run from a checkpoint: exactly, without the optimizer, from its weights alone; and what is refused."""

import functools
import json
import math
import os
import re
import shutil
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from token_files import byte_level_bpe
from toml_tables import MESSAGES
from train_cases import SMALL_RUN, config_from, copy_state, is_equal, pretrain, run_from, train

import megalite
from megalite.checkpoint import offline
from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.common import console
from megalite.common.exit_codes import ExitCode
from megalite.config.config_file import dump_config, parse_config_text
from megalite.config.option import EXECUTION, MODEL, option_spec, to_argv
from megalite.config.options import Config, ModelConfig, build
from megalite.generate.generation import load_model
from megalite.launch.rank_info import RankInfo
from megalite.parallel.mesh import Mesh
from megalite.training import train_step as step_module
from megalite.training.checkpointing.compatibility import apply_checkpoint_args, apply_model, model_differences
from megalite.training.checkpointing.initial_state import load_initial_state
from megalite.training.checkpointing.save import open_saver, save
from megalite.training.setup import SetupError
from megalite.training.state import InvalidResultError, Run
from megalite.training.train_step import train_step

ROOT = Path(__file__).resolve().parents[2]
SINGLE_PROCESS = Mesh.single_process()


def parse(*flags: str, base: list[str] | None = None) -> Config:
    return config_from([*(base or SMALL_RUN), "--train-iters", "6", *flags])


def make_run(*flags: str) -> tuple[Run, Config]:
    config = parse(*flags)
    return run_from(config), config


def save_step(run: Run, config: Config, **options: bool) -> None:
    """Train a step and save its checkpoint."""
    saver = open_saver(run, config)
    train_step(run)
    save(run, saver, dump_config(config), **options)
    saver.close()


def start_run(*flags: str) -> tuple[Run, Any, list[str]]:
    """Return a run that has loaded what its flags name, the location that it loaded, and its notes."""
    run, config = make_run(*flags)
    return run, *load_initial_state(run, config)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return copy_state(run, "model/")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """Save steps 1, 2 and 3 of one run; return the directory and the weights after each step."""
    save_dir = tmp_path_factory.mktemp("saved")
    run, config = make_run("--save", str(save_dir), "--save-interval", "1")
    weights_after = {}
    for step in (1, 2, 3):
        save_step(run, config)
        weights_after[step] = weights(run)
    return save_dir, weights_after


def test_ckpt_step_selects_the_checkpoint(saved: tuple[Path, dict]) -> None:
    save_dir, weights_after = saved
    run, location, notes = start_run("--load", str(save_dir), "--ckpt-step", "2")
    assert location is not None and location.name == "iter_0000002" and run.progress.step == 2 and notes == []
    assert is_equal(weights(run), weights_after[2]) and run.progress.consumed_samples == 16
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        start_run("--load", str(save_dir), "--ckpt-step", "7")


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_load_without_optimizer_and_weights_only(saved: tuple[Path, dict], precision: list[str]) -> None:
    save_dir, weights_after = saved
    cast = (lambda t: t.bfloat16()) if precision else (lambda t: t)
    expected = {name: cast(values) for name, values in weights_after[3].items()}
    run, _, notes = start_run("--load", str(save_dir), "--no-load-optim", *precision)
    assert run.progress.step == 3 and run.optimizer.num_updates == 0 and is_equal(weights(run), expected)
    assert not any(t.any() for t in copy_state(run, "optimizer.exp_avg").values()) and "start at zero" in notes[0]
    run, _, notes = start_run("--load", str(save_dir), "--finetune", *precision)
    assert run.progress.step == run.progress.consumed_samples == run.optimizer.num_updates == 0 and is_equal(
        weights(run), expected
    )
    if precision:  # the main weights are copies of the weights
        assert is_equal(_main(run, True), {name: weight.float() for name, weight in _main(run, False).items()})
    assert "start from scratch" in notes[0]
    assert train_step(run).loss > 0


def test_misspelled_load_suggests_similar_directories(saved: tuple[Path, dict], tmp_path: Path) -> None:
    (tmp_path / "run-seven").symlink_to(saved[0])
    (tmp_path / "run-even").mkdir()  # similar, but empty
    wrong = str(tmp_path / "run-sevn")
    _, location, notes = start_run("--load", wrong)
    message = f"load={wrong!r} holds no checkpoint, but {tmp_path}/run-seven does"
    assert location is None
    assert notes == [f"{message}: the run starts from scratch; --exit-on-missing-checkpoint stops it"]
    with pytest.raises(SetupError, match="run-seven does; drop --exit-on-missing"):
        start_run("--load", wrong, "--exit-on-missing-checkpoint")
    _, _, notes = start_run("--load", str(tmp_path / "other"))
    assert "holds no checkpoint and does not exist: the run starts" in notes[0]


def test_pretrained_checkpoint_needs_an_empty_load(saved: tuple[Path, dict], tmp_path: Path) -> None:
    save_dir, weights_after = saved
    run, location, _ = start_run("--load", str(tmp_path), "--pretrained-checkpoint", str(save_dir))
    assert location is not None and run.progress.step == 0 and is_equal(weights(run), weights_after[3])
    run, *_ = start_run("--load", str(save_dir), "--pretrained-checkpoint", "/no/such")  # is not read
    assert run.progress.step == 3
    with pytest.raises(SetupError, match="pretrained_checkpoint=.* holds no checkpoint"):
        start_run("--pretrained-checkpoint", str(tmp_path))


def test_weights_only_checkpoint_reports_its_missing_state(tmp_path: Path) -> None:
    run, config = make_run("--save", str(tmp_path), "--save-interval", "1", "--no-save-optim", "--bf16")
    save_step(run, config, optimizer=not config.checkpoint.no_save_optim)
    assert {name.partition("/")[0] for name in offline.open_checkpoint(tmp_path).manifest.tensors} == {"model"}
    load = ["--load", str(tmp_path), "--bf16"]
    with pytest.raises(SetupError, match="holds no optimizer state: add --no-load-optim"):
        start_run(*load)
    with pytest.raises(SetupError, match="(?s)activation: 'squared_relu' here.*holds no optimizer state"):
        start_run(*load, "--squared-relu")  # both are reported
    resumed, *_ = start_run(*load, "--no-load-optim")
    assert is_equal(weights(resumed), weights(run)) and resumed.progress.step == 1


@pytest.mark.parametrize("case", sorted(MESSAGES["resumes"]))
def test_resume_mismatch_message_is_short(saved: tuple[Path, dict], case: str) -> None:
    flags, remedy, *texts = MESSAGES["resumes"][case]
    run, config = make_run("--load", str(saved[0]), *flags.split())
    before = weights(run)
    with pytest.raises(SetupError) as error:
        load_initial_state(run, config)
    lines = str(error.value).splitlines()
    assert len(lines) <= 8 and remedy in lines[-1], lines
    for text in texts:
        assert text in str(error.value), str(error.value)
    assert is_equal(weights(run), before) and run.progress.step == 0


@pytest.mark.parametrize("run_flags,checkpoint_flags,line", MESSAGES["models"]["rows"])
def test_changed_weight_semantics_is_a_mismatch(run_flags: str, checkpoint_flags: str, line: str) -> None:
    differences = model_differences(
        parse(*run_flags.split()).model, parse(*checkpoint_flags.split()).model, "the checkpoint"
    )
    assert any(text.startswith(line) for text in differences) if line else differences == []


def _main(run: Run, half: bool) -> dict[str, torch.Tensor]:
    """Return the main weights by the parameter's name: the weights themselves unless those are in `half` precision."""
    kind = "optimizer.main/" if half else "model/"
    return {name.removeprefix(kind): data for name, data in copy_state(run, kind).items()}


PRECISIONS = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16"]}


@pytest.mark.parametrize("before,after", [(a, b) for a in PRECISIONS for b in PRECISIONS if a != b])
def test_resume_in_another_precision_keeps_the_main_weights(before: str, after: str, tmp_path: Path) -> None:
    run, config = make_run("--save", str(tmp_path), "--save-interval", "1", *PRECISIONS[before])
    save_step(run, config)
    main, moments = _main(run, before != "fp32"), copy_state(run, "optimizer.exp_avg_sq/")
    run, _, notes = start_run("--load", str(tmp_path), *PRECISIONS[after])
    assert is_equal(_main(run, after != "fp32"), main) and is_equal(copy_state(run, "optimizer.exp_avg_sq/"), moments)
    weight_dtype = getattr(torch, run.optimizer.shard_dtypes()["model"])
    half = {name: data.to(weight_dtype) for name, data in main.items()}
    assert is_equal(_main(run, False), half) and run.progress.step == 1
    assert any("the main weights continue bit for bit" in note for note in notes)
    assert run.loss_scaler.dynamic == (after == "fp16") and math.isfinite(train_step(run).loss)


def test_program_refuses_once_with_the_usage_exit_code(saved: tuple[Path, dict], tmp_path: Path) -> None:
    argv = [*SMALL_RUN, "--train-iters", "6", "--load", str(saved[0]), "--num-layers", "6", "--run-dir", str(tmp_path)]
    result = programs.run_python("pretrain_gpt.py", *argv, "--nproc", "2", "--pipeline-model-parallel-size", "2")
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("pretrain_gpt.py: ")]
    assert len(lines) == 4 and sum("num_layers: 6 here" in line for line in lines) == 1, result.stderr


def test_options_that_may_change_at_a_resume(saved: tuple[Path, dict]) -> None:
    flags = "--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.1 --ffn-hidden-size 128 --num-query-groups 4"
    run, *_ = start_run("--load", str(saved[0]), *flags.split(), "--group-query-attention", "--kv-channels", "8")
    assert run.progress.step == 3


# ---- the model's options from the checkpoint
WITHOUT_MODEL = """--micro-batch-size 2 --global-batch-size 8 --lr 0.01 --mock-data --eval-iters 1 --vocab-size 93
 --log-interval 1 --use-checkpoint-args""".split()


def test_use_checkpoint_args(saved: tuple[Path, dict], tmp_path: Path) -> None:
    save_dir, weights_after = saved
    config = parse("--load", str(save_dir), base=WITHOUT_MODEL)
    completed = apply_checkpoint_args(config)
    assert completed.model == parse().model
    run = run_from(completed)
    load_initial_state(run, completed)
    assert is_equal(weights(run), weights_after[3])
    changed = apply_checkpoint_args(parse("--load", str(save_dir), "--hidden-dropout", "0.3", base=WITHOUT_MODEL))
    assert changed.model.hidden_dropout == 0.3 and changed.model.num_layers == 4
    wrong = parse("--load", str(save_dir), "--num-layers", "8", "--swiglu", base=WITHOUT_MODEL)
    with pytest.raises(SetupError) as error:
        apply_checkpoint_args(wrong)
    assert "num_layers=8, but 4" in str(error.value) and "activation='swiglu', but 'gelu'" in str(error.value)
    with pytest.raises(SetupError, match="holds no checkpoint; give the model's options"):
        apply_checkpoint_args(parse("--load", str(tmp_path), base=WITHOUT_MODEL))
    assert apply_checkpoint_args(parse()) == parse()  # without --use-checkpoint-args


def test_use_checkpoint_args_reports_ignored_options(saved: tuple[Path, dict], tmp_path: Path, capsys) -> None:
    shutil.copytree(saved[0], tmp_path / "run")
    newest = max((tmp_path / "run").glob("iter_*"))
    (newest / "manifest.json").write_text("{")
    config = parse("--load", str(tmp_path / "run"), "--dry-run", base=WITHOUT_MODEL)
    assert apply_checkpoint_args(config).model == parse().model
    assert f"skipping {newest}" in capsys.readouterr().err
    for checkpoint_dir in (tmp_path / "run").glob("iter_*"):
        (checkpoint_dir / "manifest.json").write_text("{")
    with pytest.raises(SetupError, match="none in it can be read: .*manifest.json"):
        apply_checkpoint_args(config)


# the pattern of layers decides several other options, and has tests of its own (layouts/test_hybrid_patterns.py)
FIELDS = {f.name: f for f in fields(ModelConfig) if f.name != "hybrid_layer_pattern"}
# options of a checkpoint: values other than the defaults, as far as they can be combined
OTHERS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "kv_channels": 8,
    "group_query_attention": True, "num_query_groups": 2, "seq_length": 32, "max_position_embeddings": 64,
    "normalization": "RMSNorm", "activation": "gelu_erf", "position_embedding_type": "rope", "no_rope_freq": "2",
    "softmax_type": "learnable", "no_weight_decay_cond_type": "apply_wd_to_qk_layernorm", "window_size": (8, 0),
    "window_attn_skip_freq": "2", "cp_comm_type": ("a2a",), "num_experts": 4, "moe_layer_freq": "2", "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.05,),
    "moe_router_dtype": "fp64", "embedding_init_method_std": 0.01, "softmax_scale": 0.3, "rotary_local_base": 100.0,
    "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "q_lora_rank": 8, "rope_type": "yarn",
    "mtp_num_layers": 1, "qk_norm_epsilon": 1e-6, "moe_router_group_score_topk": 2,
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "4", "mamba_num_heads": 4,
    "norm_placement": "output", "linear_norm_epsilon": 1e-4, "mup_base_hidden_size": 16, "mup_base_head_dim": 4.0,
}  # fmt: skip


def other_value(name: str) -> Any:
    """Return a value that is not the default."""
    default = FIELDS[name].default
    if name in OTHERS:
        return OTHERS[name]
    return (
        not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else 0.5 * default + 0.25
    )


# other options decide these, or they do not affect the weights
WITHOUT_EFFECT = ("bias_gelu_fusion", "openai_gelu", "add_position_embedding", "quick_geglu", "glu_linear_offset")
WITHOUT_EFFECT += ("activation_func_clamp_value", "enable_gpt_oss", "mup_attn_scale_power")
CHECKPOINT_MODEL = ModelConfig(**{name: other_value(name) for name in FIELDS})
SOURCES = ("flags", "file", "Python", "Python in underscores")


def config_with(source: str, name: str, value: Any, directory: Path) -> Config:
    """Return a configuration that takes the model from a checkpoint and sets one option in `source`."""
    if source == "flags":
        return config_from([*WITHOUT_MODEL, "--train-iters", "6", "--load", "x", *to_argv({name: value})])
    if source == "file":
        (directory / "run.toml").write_text(f"{name} = {json.dumps(value)}\n")
        return config_from(
            [*WITHOUT_MODEL, "--train-iters", "6", "--load", "x", "--config", str(directory / "run.toml")]
        )
    text = " ".join([*WITHOUT_MODEL, "--train-iters 6 --load x"])
    return megalite.Config(
        text.replace("-iters", "_iters") if "underscores" in source else text, **{name: value}
    ).options


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", FIELDS)
def test_explicit_option_wins_over_the_checkpoint_or_is_refused(name: str, source: str, tmp_path: Path) -> None:
    """This holds for every option of the model, even if its value is the default."""
    default, spec = FIELDS[name].default, option_spec(FIELDS[name])
    base_model = apply_model(config_with(source, "seed", 7, tmp_path), CHECKPOINT_MODEL, "it").model
    assert getattr(base_model, name) == (default if spec.resume == EXECUTION else other_value(name))
    equal_model = apply_model(config_with(source, name, other_value(name), tmp_path), CHECKPOINT_MODEL, "it").model
    assert equal_model == (replace(CHECKPOINT_MODEL, cp_comm_type=("a2a",) if name == "cp_comm_type" else ("auto",)))
    if default is None or spec.required:
        return
    config = config_with(source, name, default, tmp_path)
    if spec.resume == MODEL and name not in WITHOUT_EFFECT:
        with pytest.raises(SetupError, match=rf"^{name}=.*, but .* in it; drop the option"):
            apply_model(config, CHECKPOINT_MODEL, "it")
        return
    completed = apply_model(config, CHECKPOINT_MODEL, "it")
    assert getattr(completed.model, name) == default
    assert replace(completed.model, **{name: other_value(name)}) == replace(base_model, **{name: other_value(name)})
    reread = build(parse_config_text(dump_config(completed), "run_config.toml"))  # starts the same run
    assert apply_model(reread, CHECKPOINT_MODEL, "it").model == completed.model


@pytest.mark.parametrize(
    "activation, flags, message",
    [
        ("gelu_erf", "--openai-gelu", "openai_gelu=True, but False"),
        ("gelu_erf", "--no-bias-gelu-fusion", ""),
        ("gelu_erf", "--bias-gelu-fusion", "bias_gelu_fusion=True, but False"),
        ("gelu", "--no-bias-gelu-fusion", "bias_gelu_fusion=False, but True"),
        ("gelu", "--no-bias-gelu-fusion --openai-gelu", ""),
        ("gelu", "--openai-gelu", ""),
        ("swiglu", "--no-bias-gelu-fusion", ""),
        ("swiglu", "--gelu", "activation='gelu', but 'swiglu'"),
    ],
)
def test_gelu_variant_comes_from_megatron_flags(activation: str, flags: str, message: str) -> None:
    checkpoint_model = replace(parse().model, activation=activation, bias_gelu_fusion=activation != "gelu_erf")
    config = parse("--load", "x", *flags.replace("--gelu", "--activation gelu").split(), base=WITHOUT_MODEL)
    if message:
        with pytest.raises(SetupError, match=f"^{message} in it; drop the option$"):
            apply_model(config, checkpoint_model, "it")
    else:
        assert apply_model(config, checkpoint_model, "it").model.activation == activation


def test_options_that_contradict_in_combination_are_refused() -> None:
    checkpoint_model = replace(parse().model, num_attention_heads=4)
    config = parse("--load", "x", "--group-query-attention", "--num-query-groups", "2", base=WITHOUT_MODEL)
    with pytest.raises(SetupError, match="(?s)^group_query_attention=True, but False .*\nnum_query_groups=2, but None"):
        apply_model(config, checkpoint_model, "it")
    without_gqa = parse("--load", "x", "--num-query-groups", "2", base=WITHOUT_MODEL)
    assert apply_model(without_gqa, checkpoint_model, "it").model.num_kv_groups == 4


THIRDS = "--hidden-size 24 --ffn-hidden-size 48 --num-attention-heads 6 --seq-length 12 --max-position-embeddings 12"
EXPERTS = "--num-experts 6 --moe-ffn-hidden-size 24 --group-query-attention --num-query-groups 3 --position-embedding-type rope"
EXPERT_RUN = """--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.001 --moe-router-dtype fp64 --moe-router-load-balancing-type
 seq_aux_loss --ep 3 --expert-tensor-parallel-size 1 --num-query-groups 3 --moe-router-topk 2"""


@pytest.fixture(scope="module")
def thirds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two runs, one of a dense model with sizes that are multiples of 3 and one of experts; return their parent."""
    base_dir = tmp_path_factory.mktemp("thirds")
    for name, options in (("dense", ""), ("experts", EXPERTS)):
        flags = f"{THIRDS} {options} --save {base_dir / name} --save-interval 1"
        save_step(*make_run(*flags.split()))
    return base_dir


@pytest.mark.parametrize(
    "flags, code, notes, message",
    [
        ("--load dense --tp 3", 0, [], "tp 3"),
        ("--load dense --tp 3 --cp-comm-type a2a", 0, ["cp_comm_type"], "tp 3"),
        (f"--load experts --nproc 3 {EXPERT_RUN}", 0, [], "ep 3 x etp 1"),
        ("--load dense --moe-z-loss-coeff 0.1 --nproc 3", 0, ["moe_z_loss_coeff=0.1 has no effect"], "dp 3"),
        ("--load dense --tp 4", 2, [], "tensor_model_parallel_size=4 does not divide num_attention_heads=6: use 1, 2, 3 or 6"),
        ("--load experts --ep 4 --nproc 4", 2, [], "expert_model_parallel_size=4 does not divide num_experts=6"),
        ("--load dense --tp 3 --num-layers 0", 2, [], "num_layers=0 is not set; give --num-layers"),
        ("--load dense --tp 3 --cp 2 --cp-comm-type a2b", 2, [], "cp_comm_type=a2b is not available"),
        ("--load dense --window-size 4", 2, [], "is not two numbers"),
    ],
)  # fmt: skip
def test_validation_runs_after_checkpoint_options_are_read(
    thirds: Path, flags: str, code: int, notes: list[str], message: str
) -> None:
    """Options are checked against the checkpoint's model, also a tp that no placeholder for a size would allow."""
    argv = [*WITHOUT_MODEL, "--train-iters", "6", "--dry-run", "--global-batch-size", "24", *flags.split()]
    argv += [] if "--nproc" in flags else ["--nproc", "12"]
    result = programs.run_python("pretrain_gpt.py", *argv, cwd=thirds)
    assert result.returncode == code and message in result.stdout + result.stderr, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if "no effect" in line or "needs" in line]
    assert len(lines) == len(notes) and all(note in line for note, line in zip(notes, lines, strict=True)), (
        result.stderr
    )


# ---- the loop
def test_save_by_time_and_by_steps(tmp_path: Path) -> None:
    run, config = make_run("--save", str(tmp_path), "--save-interval-mins", "1e-9", "--save-retain-interval", "4")
    saver = open_saver(run, config)
    saved_steps: list[int] = []
    assert saver is not None and saver.keep_last == 1
    real = saver.save
    saver.save = lambda step, *a, **k: (saved_steps.append(step), real(step, *a, **k))[1]  # type: ignore[method-assign]
    assert train(run, config, tmp_path, saver).exit_code is ExitCode.DONE
    saver.close()
    assert saved_steps == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_save_without_an_interval_happens_at_the_end(tmp_path: Path) -> None:
    for steps, code in ((["--exit-interval", "4"], ExitCode.REQUEUE), ([], ExitCode.DONE)):
        assert pretrain(parse("--save", str(tmp_path), "--load", str(tmp_path), *steps), RankInfo()) == code
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


@pytest.mark.parametrize("kind", [InvalidResultError, KeyboardInterrupt])
def test_failed_save_is_reported_when_the_run_ends_otherwise(tmp_path: Path, monkeypatch, kind: type) -> None:
    """Neither a step nor another save follows that would report the failure."""
    failed, real = threading.Event(), step_module.train_step

    def write(*args: object) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    def step(run: Run, want_stop: bool, **options: Any) -> object:
        if run.progress.step == 2:
            assert failed.wait(10)
            raise kind("the end")
        return real(run, want_stop, **options)

    monkeypatch.setattr(manifests, "write_rank_file", write)
    monkeypatch.setattr(step_module, "train_step", step)
    if (child := os.fork()) == 0:  # after Ctrl-C the process ends without returning
        code = 99
        try:
            code = int(pretrain(parse("--save", str(tmp_path), "--save-interval", "2", "--async-save"), RankInfo()))
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = json.loads((tmp_path / "status.json").read_text())
    assert (code, status["outcome"]) == ((17, "bad-result") if kind is InvalidResultError else (130, "interrupted"))
    message = f"the last save, to {tmp_path}/.iter_0000002.part, failed: [Errno 28] No space left on device"
    assert status["reason"].endswith(f"; {message}") and status["checkpoint"] is None
    assert message in (tmp_path / "log.txt").read_text()


STYLES = {
    "megalite": (
        r"^saving checkpoint at step 3 to {}\nsaved iter_0000003 in [\d.]+ s \([\d.e-]+ GiB, [\d.e-]+ GiB/s\)",
        r"^loading {}/iter_0000002 \([\d.e-]+ GiB\)$(.|\n)*^resumed from {}/iter_0000002 at step 2$",
    ),
    "megatron": (
        r"^saving checkpoint at iteration       3 to {} in megalite format$(.|\n)*"
        r"^  successfully saved checkpoint from iteration       3 to {} \[ t 1/1, p 1/1 \]$",
        r"^ loading distributed checkpoint from {} at iteration 2$(.|\n)*"
        r"^  successfully loaded checkpoint from {} \[ t 1/1, p 1/1 \] at iteration 2$",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_save_and_load_are_logged(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A slow load also logs its progress."""
    run_dir = str(tmp_path / "run")
    flags = f"--lr-decay-iters 9 --save {run_dir} --load {run_dir} --save-interval 2 --log-style {style}".split()
    for iters in ("2", "3"):
        assert pretrain(parse(*flags, "--train-iters", iters)) == ExitCode.DONE
    output = capsys.readouterr().out
    for line in STYLES[style]:
        assert re.search(line.replace("{}", run_dir), output, re.MULTILINE), output
    monkeypatch.setattr(console, "ProgressBar", functools.partial(console.ProgressBar, every_s=0))
    start_run("--load", run_dir, "--lr-decay-iters", "9")
    assert re.search(rf"loading {run_dir}/iter_0000003: [\d.e-]+ of [\d.e-]+ GiB that this", capsys.readouterr().out)


def test_other_tokenizer_fingerprint_is_refused(tmp_path: Path) -> None:
    tokenizer_path, run_dir = str(tmp_path / "tokenizer.json"), str(tmp_path / "run")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer_path, "--vocab-size", "400"]
    flags += ["--load", run_dir, "--save", run_dir, "--save-interval", "1"]
    byte_level_bpe(["the same words, again and again"], 280).save(tokenizer_path)
    save_step(*make_run(*flags))
    byte_level_bpe(["other words here: nothing repeats"], 280).save(tokenizer_path)
    with pytest.raises(SetupError, match=r"tokenizer: .* here, .* in the checkpoint\nits tokenizer"):
        start_run(*flags)
    with pytest.raises(SetupError, match="restore the tokenizer that it was trained with"):
        load_model(tmp_path / "run", SINGLE_PROCESS)
