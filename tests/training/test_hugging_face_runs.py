"""Runs that load and export Hugging Face directories, under any layout. Contradictory options are refused."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hugging_face_cases import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    copy_model,
    in_fp64,
    load_in_fp64,
    model_cache,
    with_depths,
    write_tokenizer,
)
from pairwise import nightly_except
from ranks import run_ranks
from safetensors.torch import load_file
from token_files import byte_level_bpe, limit_file_size
from train_cases import config_from, run_from

import pretrain_gpt
from megalite.checkpoint.storage.location import CheckpointError, OtherRankError
from megalite.config.config_file import dump_config
from megalite.config.options import Config
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.generate import generation as generate
from megalite.interop.huggingface import model_files as hf_files
from megalite.launch.rank_info import RankInfo
from megalite.nn.loss_sums import LossSums
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.parallel.mesh import build_mesh
from megalite.training.batch import to_device
from megalite.training.checkpointing import initial_state as origin
from megalite.training.checkpointing.save import open_saver, save
from megalite.training.job.export_hf import export
from megalite.training.job.preflight import preflight
from megalite.training.setup import SetupError
from megalite.training.state import Run
from megalite.training.train_step import train_step
from tools import convert_checkpoint, train_tokenizer

CPU = torch.device("cpu")
BASE = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --eval-iters 0 --seq-length 16 "
    "--hidden-dropout 0 --attention-dropout 0 --device cpu"
)
LAYOUTS = {
    "tp2 pp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "tp2 dp2": "--tensor-model-parallel-size 2",
    "pp2 vpp2 dp2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
}
FAMILIES = ("llama", "gpt2", "qwen2", "gpt_neox", "qwen3", "qwen3_moe", "deepseek_v3", "mamba2", "nemotron_h")
EXPERTS = ["--tensor-model-parallel-size 2 --expert-model-parallel-size 2"]
EXPERTS += [EXPERTS[0] + " --expert-tensor-parallel-size 2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function from a family to (model of transformers, its directory); models have four layers."""
    return model_cache(tmp_path_factory.mktemp("hf"), num_layers=4)


def parse(model_dir: Path | str, *flags: str, base: str = BASE) -> Config:
    return config_from([*base.split(), "--load", str(model_dir), *flags])


def hugging_face_config(model_dir: Path, *flags: str, base: str = BASE) -> Config:
    return origin.complete_config(parse(model_dir, "--use-checkpoint-args", *flags, base=base))


def start_from_model(config: Config, dtype: torch.dtype | None = None) -> Run:
    run = run_from(config, dtype=dtype)
    assert origin.load_external_model(run, config) is not None
    return run


def batches_of(run: Run, sample: int) -> list[Batch]:
    return [to_device(host, CPU) for host in run.train_loader.get(sample, 4)[0]]


def tokens_of(batches: list[Batch]) -> list[torch.Tensor]:
    return [torch.cat([b.tokens_SB, b.labels_SB[-1:]]).T for b in batches if b.labels_SB is not None]


def first_step(model_dir: str, flags: str) -> tuple[float, list[torch.Tensor]]:
    """Return this rank's loss and tokens [B, S + 1] of the first step of a run that starts from a model."""
    run = start_from_model(hugging_face_config(Path(model_dir), *flags.split()))
    tokens = tokens_of(batches_of(run, 0))
    return train_step(run).loss, tokens


def _first_steps(model_dir: str, layouts: list[str]) -> list[float]:
    return [first_step(model_dir, layout)[0] for layout in layouts]


@pytest.mark.parametrize("name", FAMILIES)
def test_first_loss_equals_transformers_under_every_layout(models, name: str) -> None:
    model, model_dir = models(name)
    loss, tokens = first_step(str(model_dir), "")
    with torch.no_grad():
        expected = float(model(ids := torch.cat(tokens), labels=ids).loss)
    assert expected > 1.05 * torch.tensor(float(VOCAB_SIZE)).log()  # random weights would give less
    assert loss == pytest.approx(expected, rel=2e-6)
    layouts = [flags for flags in LAYOUTS.values() if name == "llama" or flags == LAYOUTS["tp2 pp2"]]
    layouts += EXPERTS if name in ("qwen3_moe", "deepseek_v3", "nemotron_h") else ["--tensor-model-parallel-size 4"]
    for losses in run_ranks(4, _first_steps, str(model_dir), layouts):
        assert losses == pytest.approx([expected] * len(layouts), rel=1e-5)


def _losses_by_name(model_dir: str, layouts: list[str]) -> list[dict[str, float]]:
    """Return this rank's losses of the first step, for each layout."""
    return [
        dict(train_step(start_from_model(hugging_face_config(Path(model_dir), *flags.split()))).losses)
        for flags in layouts
    ]


def test_depths_start_from_a_model_under_every_layout(tmp_path: Path) -> None:
    """The last stage of a pipeline has a copy of the embedding, which is read from the files like the first one's."""
    model_dir, _ = with_depths("glm4_moe", tmp_path)
    (expected,) = _losses_by_name(str(model_dir), [""])
    assert {"loss", "mtp_1_loss", "mtp_2_loss"} <= expected.keys() and len(set(expected.values())) == len(expected)
    layouts = ["--pipeline-model-parallel-size 2", EXPERTS[0], "--zero-stage 3"]
    for ranks_losses in run_ranks(2, _losses_by_name, str(model_dir), layouts):
        for layout, losses in zip(layouts, ranks_losses, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), layout


TEN_STEPS = "--train-iters 10 --lr 0.01 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1"
TRAINED_LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "ZeRO-3": "--zero-stage 3",
    "cp2": "--context-parallel-size 2",
}


def _train_ten_steps(model_dir: str, layouts: list[str]) -> list[list[float]]:
    """Return this rank's loss of each of ten steps in fp64, for each layout."""
    losses = []
    for flags in layouts:
        config = hugging_face_config(Path(model_dir), *TEN_STEPS.split(), *flags.split())
        run = start_from_model(config, torch.float64)
        losses.append([train_step(run).loss for _ in range(10)])
    return losses


def ten_batches(model_dir: Path) -> list[torch.Tensor]:
    """Return the tokens [B, S + 1] of each of ten steps."""
    run = run_from(hugging_face_config(model_dir, *TEN_STEPS.split()))
    return [torch.cat(tokens_of(batches_of(run, 4 * step))) for step in range(10)]


def train_transformers(model_dir: Path, batches: list[torch.Tensor]) -> list[float]:
    """Return the losses of a transformers model in fp64 with AdamW of torch, without decay of norms and biases."""
    model = load_in_fp64(model_dir)
    with in_fp64():
        model.get_input_embeddings().padding_idx = None  # it would have no gradient, but data has no padding
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
        losses = []
        for ids in batches:
            logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_ten_steps_equal_transformers_under_every_layout(models, name: str) -> None:
    _, model_dir = models(name)
    expected = train_transformers(model_dir, ten_batches(model_dir))
    assert expected[-1] < 0.95 * expected[0]
    (losses,) = _train_ten_steps(str(model_dir), [""])
    assert losses == pytest.approx(expected, rel=1e-10)
    for ranks_losses in run_ranks(2, _train_ten_steps, str(model_dir), list(TRAINED_LAYOUTS.values())):
        for layout, losses in zip(TRAINED_LAYOUTS, ranks_losses, strict=True):
            assert losses == pytest.approx(expected, rel=1e-10), layout


def test_half_precision_run_keeps_exact_main_weights(models) -> None:
    model, model_dir = models("llama")
    config = hugging_face_config(model_dir, "--bf16")
    run = run_from(config)
    loaded = origin.load_external_model(run, config)
    assert loaded is not None and "llama in float32" in loaded[1][0]
    shards = {e.name: e.data for e in run.optimizer.checkpoint_shards()}
    word = model.model.embed_tokens.weight.detach()
    main = shards["optimizer.main/embedding.word"].view(VOCAB_SIZE, -1)
    assert torch.equal(main, word)
    assert torch.equal(shards["model/embedding.word"].view(VOCAB_SIZE, -1), word.bfloat16())


# ---- options
MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
MODEL += "--ffn-hidden-size 48 --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --vocab-size 93 "
MODEL += "--use-rotary-position-embeddings --rotary-base 500000 --use-rope-scaling "
MODEL += "--untie-embeddings-and-output-weights"


def test_contradictory_options_are_named_together(models) -> None:
    _, model_dir = models("llama")
    config = origin.complete_config(parse(model_dir, *MODEL.split()))
    assert config.model.num_layers == 4 and config.data.tokenizer_type is None
    wrong_flags = f"{MODEL} --num-layers 6 --squared-relu --norm-epsilon 1e-5 --vocab-size 95 --ckpt-step 3"
    with pytest.raises(SetupError) as error:
        origin.complete_config(parse(model_dir, *wrong_flags.split()))
    lines = str(error.value).splitlines()
    assert len(lines) == 5 and sum("--use-checkpoint-args" in line for line in lines) == 3
    for text in (
        "num_layers: 6 here, 4 in",
        "activation: 'squared_relu' here, 'swiglu' in",
        "norm_epsilon: 1e-05 here, 1e-06 in",
        "vocab_size: 95 here, 93 in",
        "; drop --vocab-size",
        "ckpt_step=3, but",
    ):
        assert text in str(error.value)
    with pytest.raises(SetupError, match="num_layers=6, but 4 in .*; drop the option"):
        hugging_face_config(model_dir, "--num-layers", "6")
    gpt2_args = [models("gpt2")[1], *"--num-layers 4 --hidden-size 32 --num-attention-heads 4".split()]
    assert origin.complete_config(parse(*gpt2_args, "--max-position-embeddings", str(SEQ_LENGTH)))
    with pytest.raises(SetupError, match="max_position_embeddings: 16 here, 48 in"):
        origin.complete_config(parse(*gpt2_args))


def test_tokenizer_next_to_the_model_is_the_default(models, tmp_path: Path) -> None:
    model_dir = copy_model(models("llama")[1], tmp_path / "model")
    assert (
        config := hugging_face_config(model_dir)
    ).data.tokenizer_type is None and config.data.vocab_size == VOCAB_SIZE
    write_tokenizer(model_dir, VOCAB_SIZE - 20)
    data = hugging_face_config(model_dir, "--reset-position-ids").data  # needs the id of the end of a document
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", str(model_dir))
    assert preflight(hugging_face_config(model_dir), RankInfo())[1].vocab_size == data.vocab_size == VOCAB_SIZE
    null_data = hugging_face_config(
        model_dir, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)
    ).data
    assert null_data.tokenizer_type == "NullTokenizer" and null_data.tokenizer_model is None
    with pytest.raises(SetupError, match="vocab_size: 94 here, 93 in"):
        hugging_face_config(model_dir, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE + 1))
    other_dir = copy_model(model_dir, tmp_path / "other")
    write_tokenizer(other_dir, VOCAB_SIZE + 7)
    assert hugging_face_config(other_dir).data.tokenizer_type is None  # more tokens than rows
    with pytest.raises(SetupError, match="vocab_size: 100 here, 93 in"):
        hugging_face_config(model_dir, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(other_dir))
    config_without_vocabulary = parse(tmp_path, *"--num-layers 1 --hidden-size 8 --num-attention-heads 2".split())
    with pytest.raises(SetupError, match="vocab_size is not set"):
        preflight(origin.complete_config(config_without_vocabulary), RankInfo())


def test_restart_uses_the_checkpoint_not_the_model(models, tmp_path: Path) -> None:
    _, model_dir = models("qwen2")
    restart_flags = ("--pretrained-checkpoint", str(model_dir), "--save", str(tmp_path / "run"), "--save-interval", "1")
    config = hugging_face_config(tmp_path / "run", *restart_flags)
    run = run_from(config)
    saver = open_saver(run, config)
    assert saver is not None and origin.load_external_model(run, config) is not None
    train_step(run)
    save(run, saver, "num_layers = 4\n")
    saver.close()
    assert origin.external_weights_dir(config) is None and origin.load_external_model(run, config) is None
    direct = parse(model_dir, "--use-checkpoint-args", "--save", str(tmp_path / "other"), "--save-interval", "1")
    run = run_from(config := origin.complete_config(direct))
    loaded = origin.load_external_model(run, config)
    assert loaded is not None and "--pretrained-checkpoint" in loaded[1][1]


# ---- a directory that one rank cannot read
BROKEN_WEIGHT = "layers.3.mlp.down_proj.weight"  # in the last layer: rank 1 reads it, rank 0 does not
Failure = tuple[bool, str]  # (whether the error is another rank's, its text)


def _fails(load: object) -> Failure:
    with pytest.raises(CheckpointError) as error:
        load()  # type: ignore[operator]
    return isinstance(error.value, OtherRankError), str(error.value)


def _starts(base: str) -> list[Failure]:
    """Return how this rank's run and generator fail to start: read error, damaged file, directory without a model."""
    import torch.distributed as dist

    rank = dist.get_rank()
    model_dir = Path(base) / f"rank{rank}"  # nodes may have copies of their own
    config = hugging_face_config(model_dir, "--pipeline-model-parallel-size", "2")
    run = run_from(config, ranks=RankInfo(rank, 2))
    failures, real_read = [], hf_files._read

    def read(handle: Any, name: str, path: Path) -> torch.Tensor:
        if rank == 1 and name.endswith(BROKEN_WEIGHT):
            raise CheckpointError(f"{path}: {name} cannot be read (Input/output error)")
        return real_read(handle, name, path)

    hf_files._read = read
    failures.append(_fails(lambda: origin.load_external_model(run, config)))
    mesh = build_mesh(tp=1, pp=2, device=CPU)
    failures.append(_fails(lambda: generate.load_model(model_dir, mesh)))
    hf_files._read = real_read
    if rank == 1:
        (model_dir / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes()[:-1])
    failures.append(_fails(lambda: origin.load_external_model(run, config)))
    without_model = replace(config, checkpoint=replace(config.checkpoint, load=f"{base}/nothing"))
    other_config = config if rank == 0 else without_model
    failures.append(_fails(lambda: origin.load_external_model(run, other_config)))
    return failures


def test_unreadable_model_on_one_rank_ends_all(models, tmp_path: Path) -> None:
    for rank in (0, 1):
        write_tokenizer(copy_model(models("llama")[1], tmp_path / f"rank{rank}"), VOCAB_SIZE)
    first, second = run_ranks(2, _starts, str(tmp_path))
    expected = [*[f"{BROKEN_WEIGHT} cannot be read"] * 2, "not a complete safetensors file", "rank 0 sees it"]
    for other_rank, broken_rank, text in zip(first, second, expected, strict=True):
        assert other_rank[0] and "rank 1 failed while reading the weights of" in other_rank[1]
        assert not broken_rank[0] and "rank 1" in broken_rank[1] and text in broken_rank[1]


# ---- --export-hf
def program(*flags: str, **options: bool) -> subprocess.CompletedProcess[str]:
    return programs.run_python("pretrain_gpt.py", *BASE.split(), *flags, **options)


LAUNCHES = ["one process", "tp2 pp2, saving"]


@pytest.mark.parametrize("launch", nightly_except(LAUNCHES, LAUNCHES[1:], str, guards=("megalite/interop",)))
def test_run_from_a_model_directory_to_another(models, launch: str, tmp_path: Path) -> None:
    """Train with a learning rate of zero: the exported weights are those loaded, bit for bit."""
    model_dir = copy_model(models("llama")[1], tmp_path / "model")
    write_tokenizer(model_dir, VOCAB_SIZE - 20)
    flags = ["--load", str(model_dir), "--use-checkpoint-args", "--lr", "0", "--run-dir", str(tmp_path / "run")]
    flags += ["--export-hf", str(tmp_path / "out"), "--log-interval", "1"]
    if launch != "one process":
        flags += [*LAYOUTS["tp2 pp2"].split(), "--nproc", "4", "--save", str(tmp_path / "run"), "--save-interval", "1"]
    result = program(*flags, check=True)
    assert f"starts from {model_dir} at step 0" in result.stdout and "weights of llama in float32" in result.stdout
    assert f"exported to {tmp_path / 'out'}: llama" in result.stdout
    a, b = load_file(model_dir / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model_dir / name).read_bytes()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]  # no temporary is left


def test_export_replaces_an_earlier_export(models, tmp_path: Path) -> None:
    _, model_dir = models("gpt2")
    (tmp_path / ".out.part").write_text("in the way")
    save_flags = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    result = program(
        "--load", str(model_dir), "--use-checkpoint-args", "--export-hf", str(tmp_path / "out"), *save_flags
    )
    assert result.returncode == 0 and f"exported to {tmp_path / 'out'}: gpt2" in result.stdout, (
        result.stdout + result.stderr
    )
    assert not (tmp_path / ".out.part").exists()


@pytest.mark.parametrize("saves", [True, False], ids=["saved before", "weights alone, tp2"])
def test_failed_export_leaves_nothing(saves: bool, tmp_path: Path) -> None:
    """Limit files to 64 KiB. Without a checkpoint the temporary files of the ranks fail first."""
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 512 --max-position-embeddings 16"
    flags = [*BASE.split(), *shape.split(), "--run-dir", str(tmp_path / "run")]
    if saves:  # the run below is then complete, and only exports
        flags += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--save-interval", "2"]
        programs.run_python("pretrain_gpt.py", *flags, check=True)
    else:
        flags += ["--tensor-model-parallel-size", "2", "--nproc", "2"]
    flags += ["--export-hf", str(tmp_path / "out")]
    result = programs.run_python("pretrain_gpt.py", *flags, preexec_fn=limit_file_size)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{tmp_path}/{'' if saves else '.'}out" in result.stderr and "File too large" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and "exported" not in result.stdout, result.stdout + result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["outcome"] == "crash"
    if saves:
        result = programs.run_python("pretrain_gpt.py", *flags)
        assert result.returncode == 0 and f"exported to {tmp_path / 'out'}: " in result.stdout, (
            result.stdout + result.stderr
        )


@pytest.mark.parametrize("kind", nightly_except(["json", "sentencepiece"], ["json"], str, guards=("megalite/interop",)))
def test_export_includes_a_renamed_tokenizer(kind: str, tmp_path: Path) -> None:
    """Export the tokenizer so that transformers finds it, without the files next to it."""
    import transformers

    (tmp_path / "vocab.json").write_text("{}")
    if kind == "json":
        byte_level_bpe(["the river rose"], 270, ["<unk>", "</s>"]).save(str(tmp_path / "mine.json"))
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "mine.json")]
    else:
        texts = ["the river rose in the night and fell\n" * 20]
        train_tokenizer.train_sentencepiece(train_tokenizer.split_pieces(texts), str(tmp_path / "mine"), 280, 1)
        flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "mine.model")]
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --mock-data --max-position-embeddings 16".split()
    run = ["--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "run"), "--save-interval", "2"]
    program(*flags, *shape, *run, "--export-hf", str(tmp_path / "out"), check=True)
    assert convert_checkpoint.main(["--load", str(tmp_path / "run"), "--to-hf", str(tmp_path / "tool")]) == 0
    text, own_tokenizer = "the river  rose", build_tokenizer(flags[1], flags[3])
    for directory in (tmp_path / "out", tmp_path / "tool"):
        assert not (directory / "vocab.json").exists() and (directory / "tokenizer.model").exists() == (kind != "json")
        tokenizer, config = (
            auto.from_pretrained(directory) for auto in (transformers.AutoTokenizer, transformers.AutoConfig)
        )
        assert tokenizer(text).input_ids == own_tokenizer.encode(text) and config.vocab_size == own_tokenizer.vocab_size
        assert tokenizer.eos_token_id == config.eos_token_id == own_tokenizer.eod


def test_plan_of_a_run_from_a_model_directory(models, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", str(models("llama")[1]), "--use-checkpoint-args", "--dry-run"]
    assert pretrain_gpt.main([*BASE.split(), *flags]) == 0
    assert "vocabulary 93, padded to 128" in capsys.readouterr().out


def _exported(model_dir: str, target: str, flags: str) -> str | None:
    config = hugging_face_config(Path(model_dir), "--export-hf", target, *flags.split())
    run = start_from_model(config)
    train_step(run)
    run.sync.wait_param_sync()
    return export(run, config, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_works_without_checkpoints(models, layout: str, tmp_path: Path) -> None:
    import transformers

    _, model_dir = models("gpt2" if layout == "tp2 pp2" else "qwen3")
    lines = run_ranks(4, _exported, str(model_dir), str(tmp_path / layout), LAYOUTS[layout])
    assert lines[0] is not None and lines[1:] == [None] * 3
    assert [p.name for p in tmp_path.iterdir()] == [layout]
    run = start_from_model(hugging_face_config(model_dir))
    train_step(run)
    batches = batches_of(run, 4)
    loss_sums = LossSums(run.loss_sums.head_losses, (), CPU)
    run.pipeline.evaluate(batches, ForwardContext(2, loss_sums=loss_sums))
    expected = float(loss_sums.local_values(run.mesh)[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / layout).eval()
    assert model.config.eos_token_id == 2
    ids = torch.cat(tokens_of(batches))
    with torch.no_grad():
        actual = float(model(ids, labels=ids).loss) * ids[:, 1:].numel()
    assert actual == pytest.approx(expected, rel=1e-5)


def _save_at_stages(stages: list[int], model_dir: str, target: str) -> None:
    """Train a step from a directory and save a checkpoint, at each ZeRO stage, with tp 2 and dp 2."""
    for stage in stages:
        flags = f"{LAYOUTS['tp2 dp2']} --zero-stage {stage} --save {target}/{stage} --save-interval 1"
        config = hugging_face_config(Path(model_dir), *flags.split())
        run = start_from_model(config)
        train_step(run)
        saver = open_saver(run, config)
        assert saver is not None
        save(run, saver, dump_config(config))
        saver.close()


def test_sharded_checkpoint_converts_bit_exactly(models, tmp_path: Path) -> None:
    _, model_dir = models("qwen3")
    run_ranks(4, _save_at_stages, [1, 3], str(model_dir), str(tmp_path))
    weights = [load_file(model_dir / "model.safetensors")]
    for stage in (1, 3):
        target = str(tmp_path / f"hf{stage}")
        assert convert_checkpoint.main(["--load", f"{tmp_path}/{stage}", "--to-hf", target, "--check-bits"]) == 0
        weights.append(load_file(f"{target}/model.safetensors"))
    initial, zero_1, zero_3 = weights
    assert zero_1.keys() == zero_3.keys() and all(torch.equal(zero_1[name], zero_3[name]) for name in zero_1)
    assert not any(
        torch.equal(zero_1[name].float(), initial[name].float()) for name in initial if name.endswith("proj.weight")
    )


def test_impossible_export_is_refused_before_training(tmp_path: Path) -> None:
    small = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 93"
    config = config_from([*BASE.split(), *small.split(), "--squared-relu", "--export-hf", str(tmp_path / "x")])
    message = "(?s)export_hf=.*no family of Hugging Face can express this model.*squared_relu"
    with pytest.raises(SetupError, match=message):
        preflight(config, RankInfo())
    (tmp_path / "mine").write_text("x")
    config = config_from([*BASE.split(), *small.split(), "--export-hf", str(tmp_path / "mine" / "x")])
    with pytest.raises(SetupError, match="nothing can be written in .*mine; give another directory"):
        preflight(config, RankInfo())
    result = program(*small.split(), "--export-hf", str(tmp_path), "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 2 and "is not empty; give a new directory" in result.stderr, result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
