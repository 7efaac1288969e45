"""Runs that start from a Megatron-LM checkpoint of either format, and its vocabulary through both conversions."""

from pathlib import Path

import programs
import pytest
import test_convert_megatron_dist as dist_format
from make_fixtures import FIXTURES
from pairwise import nightly_except
from ranks import run_ranks
from test_convert_megatron import Case, V, tool, write
from train_cases import config_from, run_from

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.offline import open_checkpoint
from megalite.checkpoint.storage.location import is_megatron_checkpoint
from megalite.checkpoint.storage.storage import steps_in
from megalite.config.options import Config
from megalite.interop.megatron.torch_format import find_checkpoint
from megalite.training.checkpointing import initial_state as origin
from megalite.training.checkpointing.compatibility import checkpoint_config
from megalite.training.checkpointing.initial_state import load_initial_state
from megalite.training.setup import SetupError
from megalite.training.train_step import train_step

BASE = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --eval-iters 0 --device cpu "
    "--hidden-dropout 0 --attention-dropout 0 --use-checkpoint-args --finetune"
)
GPT, LLAMA = Case(), Case(groups=2, llama=True, tied=False)
TP2 = "--tensor-model-parallel-size 2"
FORMATS = ("torch", "torch_dist")
GUARDS = ("megalite/interop",)


def parse(load_dir: Path | str, *flags: str) -> Config:
    return origin.complete_config(config_from([*BASE.split(), "--load", str(load_dir), *flags]))


def first_loss(load_dir: str, flags: str) -> tuple[float, list[str]]:
    """Return (loss of the first step of a run that starts from `load_dir`, notes of its start) on this rank."""
    run = run_from(config := parse(load_dir, *flags.split()))
    _, notes = load_initial_state(run, config)
    loss = train_step(run).loss
    return loss, notes


def write_checkpoint(directory: Path, kind: str, case: Case) -> Path:
    if kind == "torch_dist":
        return dist_format.write(directory, case).parent
    write(directory, case, tp=2, pp=2)
    return directory


MODELS = {"gpt": GPT, "llama": LLAMA}
KINDS = {f"{kind}-{name}": (kind, case) for kind in FORMATS for name, case in MODELS.items()}


@pytest.mark.parametrize("name", nightly_except([*KINDS], ["torch-gpt", "torch_dist-llama"], str, guards=GUARDS))
def test_first_loss_equals_the_converted_checkpoint(name: str, tmp_path: Path) -> None:
    kind, case = KINDS[name]
    source_dir, converted_dir = write_checkpoint(tmp_path / "theirs", kind, case), tmp_path / "ours"
    assert tool("--from-megatron", source_dir, "--save", converted_dir, "--vocab-size", V) == 0
    expected, _ = first_loss(str(converted_dir), "")
    loss, notes = first_loss(str(source_dir), f"--vocab-size {V}")
    assert loss == expected and "weights of Megatron-LM's iter_0000007 in float32; step, optimizer" in notes[0]
    for layout in (f"--vocab-size {V} {TP2}", f"--vocab-size {V} {TP2} --bf16"):
        flag_sets = [f"{layout} --load {converted_dir}", layout]  # the last --load counts
        (converted_loss, source_loss) = (run_ranks(2, first_loss, str(source_dir), flags)[0][0] for flags in flag_sets)
        assert converted_loss == source_loss and source_loss == pytest.approx(
            expected, rel=3e-2 if "bf16" in layout else 1e-5
        )


@pytest.mark.parametrize("kind", FORMATS)
def test_pretrained_checkpoint_and_iteration_directory(kind: str, tmp_path: Path) -> None:
    source_dir, flags = write_checkpoint(tmp_path / "theirs", kind, GPT), f"--vocab-size {V}"
    expected, notes = first_loss(str(source_dir), flags)
    assert first_loss(str(iteration_dir := find_checkpoint(source_dir)), flags)[0] == expected
    with pytest.raises(SetupError, match="iter_0000007 is not the checkpoint of step 8; give its parent directory"):
        parse(str(iteration_dir), "--ckpt-step", "8")
    assert first_loss(str(source_dir), f"{flags} --ckpt-step 7")[0] == expected
    assert first_loss(str(tmp_path / "none"), f"{flags} --pretrained-checkpoint {source_dir}")[0] == expected
    message = "holds no such checkpoint, but the directory has iter_0000007; give --ckpt-step"
    with pytest.raises(SetupError, match=message):
        parse(source_dir, "--ckpt-step", "8", "--vocab-size", str(V))


def test_release_checkpoint_is_found_and_a_wrong_tracker_named(tmp_path: Path) -> None:
    source_dir = write_checkpoint(tmp_path, "torch", GPT)
    (source_dir / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(SetupError, match="iteration.txt names no such checkpoint, but the directory has iter_0000007"):
        parse(source_dir, "--vocab-size", str(V))
    (source_dir / "iter_0000007").rename(source_dir / "release")
    (source_dir / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert "Megatron-LM's release" in first_loss(str(source_dir), f"--vocab-size {V}")[1][0]


def test_contradictions_are_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    source_dir = write_checkpoint(tmp_path, "torch", LLAMA)
    with pytest.raises(SetupError, match="num_layers=3, but 4 in"):
        parse(source_dir, "--num-layers", "3")
    with pytest.raises(SetupError, match="vocab_size: 65 here, 64 in"):
        parse(source_dir, "--vocab-size", "65")
    with pytest.raises(
        SetupError, match="holds checkpoints of Megatron-LM, which megalite keeps; give another directory"
    ):
        parse(source_dir, "--save", str(source_dir))


@pytest.mark.parametrize("files", [("__0_0.distcp", ".metadata"), ("metadata.json",)], ids=["torch_dcp", "zarr"])
def test_unsupported_format_gives_a_remedy(files: tuple[str, ...], tmp_path: Path) -> None:
    iteration_dir = tmp_path / "iter_0000007"
    iteration_dir.mkdir()
    for name in files:
        (iteration_dir / name).write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(
        SetupError, match="the supported formats are torch_dist and torch; convert it there with --ckpt-convert-format"
    ):
        parse(tmp_path)


# ---- the vocabulary
def test_unknown_vocabulary_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source_dir = write_checkpoint(tmp_path / "theirs", "torch", GPT)
    _, notes = first_loss(str(source_dir), "")
    assert any("does not hold its true vocabulary" in note and "--vocab-size" in note for note in notes)
    assert tool("--from-megatron", source_dir, "--save", tmp_path / "ours") == 0
    assert "note: the checkpoint does not hold its true vocabulary" in capsys.readouterr().err
    write(tmp_path / "told", GPT, vocab_size=V)  # the value of --vocab-size in that run
    assert tool("--from-megatron", tmp_path / "told", "--save", tmp_path / "known") == 0
    assert "note" not in capsys.readouterr().err
    assert open_checkpoint(tmp_path / "known").manifest.state["vocab_size"] == V
    config = parse(tmp_path / "told")
    assert config.data.vocab_size == V


NULL, BYTES = (["--tokenizer-type", f"{kind}Tokenizer"] for kind in ("Null", "Byte"))


def tokenizer_name(flags: list[str]) -> str:
    return flags[-1] if flags else "none"


@pytest.mark.parametrize("tokenizer", nightly_except([[], NULL, BYTES], [BYTES], tokenizer_name, guards=GUARDS))
def test_vocabulary_round_trips(tokenizer: list[str], tmp_path: Path) -> None:
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
    flags += f" --train-iters 1 --lr 1 --mock-data --eval-iters 0 --device cpu --log-interval 1 --save {tmp_path}/run"
    size = [] if "ByteTokenizer" in tokenizer else ["--vocab-size", "101"]
    true_size = {0: 101, 2: 101 if size else 257}[len(tokenizer)]
    programs.run_python("pretrain_gpt.py", *flags.split(), *size, *tokenizer, check=True)
    tp = ["--target-tensor-parallel-size", "2"]
    assert tool("--load", tmp_path / "run", "--to-megatron", tmp_path / "there", *tp, "--check") == 0
    assert tool("--from-megatron", tmp_path / "there", "--save", tmp_path / "again", "--check") == 0
    first, reimported = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "again")
    assert reimported.manifest.state["vocab_size"] == first.manifest.state["vocab_size"] == true_size
    assert reimported.shape("model/embedding.word") == (true_size, 16)
    data = parse(tmp_path / "there", "--train-iters", "1").data
    assert data.tokenizer_type == (tokenizer[1] if tokenizer else None)
    run = run_from(parse(tmp_path / "there"))
    assert run.vocab_size == true_size


def test_stray_megatron_file_does_not_hide_a_checkpoint(tmp_path: Path) -> None:
    assert (
        tool("--from-megatron", write_checkpoint(tmp_path / "theirs", "torch", GPT), "--save", tmp_path / "ours") == 0
    )
    (tmp_path / "ours" / "iter_0000000" / ".metadata").write_bytes(b"")
    (tmp_path / "ours" / ".metadata").write_bytes(b"")
    assert steps_in(tmp_path / "ours") == [0] and not is_megatron_checkpoint(tmp_path / "ours" / "iter_0000000")
    assert parse(tmp_path / "ours", "--save", str(tmp_path / "ours")).model.num_layers == 4


# ---- the vocabulary of NullTokenizer, which once had one id more than --vocab-size
def test_embedding_rows_decide_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, GPT, tokenizer_type="NullTokenizer", vocab_size=V - 1, true_vocab_size=V)
    data = parse(tmp_path).data
    assert (data.tokenizer_type, data.vocab_size) == ("NullTokenizer", V)


def test_old_checkpoint_without_end_of_document_in_the_vocabulary() -> None:
    checkpoint_dir = FIXTURES / "0.1.0" / "fp64" / "iter_0000002"
    manifest = manifests.load_manifest(checkpoint_dir)
    rows = manifest.state["vocab_size"]
    old_options = f'\ntokenizer_type = "NullTokenizer"\nvocab_size = {rows - 1}\n'
    text = manifest.state["config"].replace(f"\nvocab_size = {rows}\n", old_options)
    for size in (rows, rows - 1):
        state = {**manifest.state, "config": text, "vocab_size": size}
        data = checkpoint_config(manifest._replace(state=state), checkpoint_dir).data
        assert (data.tokenizer_type, data.vocab_size) == ("NullTokenizer", size)
