"""Runs on files: blends that change during a run, named validation sets, and the data usage in checkpoints."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import train_cases
from program_runs import load_json_lines, load_losses, load_status, run_pretrain
from token_files import write_documents
from train_cases import SMALL_RUN, TP2_PP2, config_from

from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.training.datasets import build_datasets
from tools import checkpoint, preprocess_data, train_tokenizer
from tools.preprocess.indexed_writer import IndexedWriter
from tools.preprocess.tokenize_run import make_info

FLAGS = [f for f in SMALL_RUN if f != "--mock-data"] + ["--tokenizer-type", "NullTokenizer", "--vocab-size", "94"]


def data_usage(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of `checkpoint.py data-usage`."""
    assert checkpoint.main(["data-usage", str(directory)]) == 0
    return capsys.readouterr().out.splitlines()


def train(run_dir: Path, *flags: object) -> dict[int, float]:
    """Train on one rank in this process and return the losses."""
    assert train_cases.pretrain(config_from([*map(str, flags), "--run-dir", str(run_dir)])) == 0
    return load_losses(run_dir)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return two sources of 40 documents and 3000 tokens each; the second has 4 bytes per token."""
    directory, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(1)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=94)
    for k, name in enumerate("ab"):
        with IndexedWriter(directory / name, np.uint16) as writer:
            for _ in range(40):
                writer.add([*rng.integers(0, 40, 74) + 40 * k, 93])
            info = make_info(tokenizer, 40, 3000, ["x.txt"])
            writer.finish({**info, "bytes": 12_000} if name == "b" else info)
    return str(directory / "a"), str(directory / "b")


def test_changed_blend_continues_with_unread_data(files: tuple[str, str], tmp_path: Path, capsys) -> None:
    a, b = files
    save = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--save-interval", "50", "--split", "1,0,0"]
    steps = ["--train-iters", "8"]
    first = run_pretrain(*FLAGS, *TP2_PP2, *save, *steps, "--data-path", 1, a, 1, b, "--exit-interval", "5")
    assert first.returncode == 75, first.stderr
    changed_flags = ["--seq-length", "8", "--data-path", 3, b, 1, a]
    second = run_pretrain(*FLAGS, "--nproc", "2", *save, *steps, *changed_flags, check=True)
    assert "note: the blend changed: from sample 40 on" in second.stdout
    lines = data_usage(tmp_path / "run", capsys)
    usage = {line.split()[0]: line.split()[1:] for line in lines[2:4]}
    assert usage == {a: ["368", usage[a][1], "0.123"], b: ["464", usage[b][1], "0.155"]}  # 20 * 16 + 6 * 8, 18 * 8
    assert 0 < int(usage[a][1]) < 40
    assert load_status(tmp_path / "run")["tokens"] == 368 + 464
    assert lines[-1] == f"samples 40 to 64: 8 tokens each, 0.7500 {b}, 0.2500 {a}"
    seed_flags = ["--seed", "5", "--train-iters", "9", "--lr-decay-iters", "8"]
    third = run_pretrain(*FLAGS, *save, *steps, *changed_flags, *seed_flags)
    assert third.returncode == 3 and "data so far came in the order of seed 1234" in third.stderr


def test_validation_sets_have_names_and_losses(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = files
    flags = ["--train-data-path", a, "--valid-data-path", f"a={a}", "b=", b, "--run-dir", tmp_path]
    run_pretrain(*FLAGS, *TP2_PP2, *flags, "--train-iters", "4", "--eval-interval", "2", check=True)
    metrics = load_json_lines(tmp_path / "metrics.jsonl")
    sets = [{k for k in row if k.startswith("val/")} for row in metrics if any(k.startswith("val/") for k in row)]
    assert sets == [{"val/a/loss", "val/a/ppl"}, {"val/b/loss", "val/b/ppl", "val/b/bpb"}] * 2
    last = {k: v for row in metrics for k, v in row.items()}
    assert last["val/a/loss"] < last["val/b/loss"]  # it has only seen a
    assert last["val/b/bpb"] == pytest.approx(last["val/b/loss"] / np.log(2) / 4)


def test_path_lists_can_come_from_files(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = files
    (tmp_path / "blend.txt").write_text(f"0.5 {a}\n0.5 {b}\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": [0.5, a, 0.5, b], "valid": [b], "test": None}))
    flags = [*FLAGS, "--split", "1,0,0", "--train-iters", "2"]
    blend = train(tmp_path / "blend", *flags, "--data-args-path", tmp_path / "blend.txt", "--no-mmap-bin-files")
    split = train(tmp_path / "split", *flags, "--per-split-data-args-path", tmp_path / "splits.json")
    assert blend == split and len(blend) == 2


def test_source_given_twice_is_one_source(files: tuple[str, str], tmp_path: Path) -> None:
    a, b = files
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"{a}{suffix}")
    twice = ["0.5", a, "0.3", b, "0.2", str(tmp_path / "link")]
    (tmp_path / "blend.txt").write_text(" ".join(twice))
    (tmp_path / "splits.json").write_text(json.dumps({"train": twice, "valid": twice, "test": [a, a]}))
    note = f"{a} is in the blend more than once, as {a} and as {tmp_path / 'link'}: it is read once"
    for data_flags in (
        ["--data-path", *twice],
        ["--data-args-path", tmp_path / "blend.txt"],
        ["--per-split-data-args-path", tmp_path / "splits.json"],
        ["--train-data-path", *twice, "--valid-data-path", *twice, "--test-data-path", a, a],
    ):
        config = config_from([*FLAGS, "--train-iters", "2", *map(str, data_flags)])
        sources = build_datasets(config.data, 16, 2, 8)
        for blend in [sources.train, *(named.data for named in [*sources.valid, *sources.test])]:
            assert [source.name for source in blend.datasets] in ([a, b], [a])
        assert sources.notes[0].startswith(note) and sources.notes[1].startswith(f"valid set: {note}")
        assert sources.notes[2].startswith(("test set: ", "no test set: "))
    expected = train(tmp_path / "one", *FLAGS, "--train-iters", "2", "--data-path", 0.7, a, 0.3, b)
    actual = train(tmp_path / "two", *FLAGS, "--train-iters", "2", "--data-path", *twice)
    assert expected == actual


def test_unread_sources_are_named(files: tuple[str, str]) -> None:
    a, b = files
    argv = [*FLAGS, "--train-iters", "4", "--dry-run", "--data-path", "0.999", a, "0.001", b]
    output = run_pretrain(*argv, "--eval-iters", "2", check=True).stdout
    assert f"WARNING: none of the 32 samples comes from {b}: its weight is worth 0.032 of one" in output
    assert re.search(rf"validation +WARNING: none of the 16 samples comes from {b}", output)
    assert "WARNING" not in run_pretrain(*argv, "--train-iters", "1000", "--eval-iters", "0", check=True).stdout


def test_bad_validation_sets_are_refused(files: tuple[str, str]) -> None:
    a, b = files
    for flags, text in (
        (["1", a, "1", b], "prefixes without weights"),
        ([a, b, "--validation-set-names", "x"], "1 names for 2 sets"),
        ([a, a], "two validation sets are called 'a'"),
    ):
        base = ["--train-data-path", a, "--multiple-validation-sets", "--train-iters", "2", "--valid-data-path"]
        config = config_from([*FLAGS, *base, *flags])
        with pytest.raises(DataError, match=text):
            build_datasets(config.data, 16, 2, 8)


@pytest.fixture(scope="module")
def only_ends(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a source whose documents consist only of their end token."""
    return str(write_documents(tmp_path_factory.mktemp("ends") / "e", [[93]] * 600))


@pytest.mark.parametrize(
    ("layout", "iters"), [(["--nproc", "2"], 9), ([*TP2_PP2], 9), ([], 1)], ids=["dp2", "pp2", "short"]
)
def test_run_without_counted_labels_ends(only_ends: str, tmp_path: Path, layout: list[str], iters: int) -> None:
    flags = [*FLAGS, *layout, "--split", "1,0,0", "--data-path", only_ends, "--eod-mask-loss", "--run-dir", tmp_path]
    run = run_pretrain(*flags, "--eval-iters", "0", "--train-iters", iters)
    assert run.returncode == 17, run.stderr
    last = min(iters, 3)
    text = f"step {last}: none of its 128 labels counts: --eod-mask-loss masks the label after each end of a document"
    assert text in run.stderr and f"({last} such step{'s' * (last > 1)} in a row)" in run.stderr
    assert run.stdout.count("WARNING: step") == last - 1
    assert load_status(tmp_path)["outcome"] == "bad-result"
    if last > 1:  # the steps before the last one were logged
        assert {row["train/loss"] for row in load_json_lines(tmp_path / "metrics.jsonl")} == {None}


def test_evaluation_without_counted_labels_has_no_loss(files: tuple[str, str], only_ends: str, tmp_path: Path) -> None:
    flags = [*FLAGS, "--train-data-path", files[0], "--valid-data-path", "a=", files[0], "ends=", only_ends]
    run = run_pretrain(
        *flags, "--eod-mask-loss", "--train-iters", "2", "--eval-interval", "1", "--run-dir", tmp_path, check=True
    )
    assert run.stdout.count("no label of the set ends counts, so it has no loss: --eod-mask-loss masks") == 2
    names = {name for row in load_json_lines(tmp_path / "metrics.jsonl") for name in row if name.startswith("val/")}
    assert names == {"val/a/loss", "val/a/ppl"}


PACKED = ["--document-packing", "best-fit", "--reset-attention-mask", "--reset-position-ids"]


def test_packed_documents_under_layouts_and_resume(files: tuple[str, str], tmp_path: Path, capsys) -> None:
    a, b = files
    flags = [*FLAGS, *PACKED, "--data-path", a, b, "--split", "1,0,0", "--train-iters", "6", "--save-interval", "50"]
    flags += ["--seq-length", "64", "--max-position-embeddings", "64"]
    single = run_pretrain(*flags, "--save", tmp_path / "one", check=True)
    assert "packed into" in single.stdout and "documents cut" in single.stdout
    resumed_flags = [*flags, "--save", tmp_path / "four", "--load", tmp_path / "four"]
    first_half = run_pretrain(*resumed_flags, *TP2_PP2, "--exit-interval", "3")
    assert first_half.returncode == 75, first_half.stderr
    run_pretrain(*resumed_flags, "--nproc", "2", check=True)
    assert load_losses(tmp_path / "four") == pytest.approx(load_losses(tmp_path / "one"), rel=1e-4)
    usages = [data_usage(tmp_path / name, capsys)[2:4] for name in ("one", "four")]
    assert usages[0] == usages[1] and len(usages[0]) == 2
    unpacked_flags = [f for f in resumed_flags if f not in PACKED]
    unpacked = run_pretrain(*unpacked_flags, "--train-iters", "8", "--lr-decay-iters", "6")
    assert unpacked.returncode == 3 and "document_packing was changed since the checkpoint" in unpacked.stderr


def test_fim_run(tmp_path: Path) -> None:
    special = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    text = "\n".join(f"def f{i}(x):\n    return x + {i} * {i * i}" for i in range(400))
    (tmp_path / "t.txt").write_text(text)
    lines = [json.dumps({"text": text[i : i + 300]}) + "\n" for i in range(0, 9000, 50)]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    tool_flags = ["--input", tmp_path / "t.txt", "--model-prefix", tmp_path / "spm", "--vocab-size", "300"]
    assert train_tokenizer.main([*map(str, tool_flags), "--special-tokens", *special]) == 0
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "spm.model"]
    tool_flags = ["--input", tmp_path / "t.jsonl", "--output-prefix", tmp_path / "d", "--append-eod", "--workers", "1"]
    assert preprocess_data.main([*map(str, tool_flags), *map(str, tokenizer)]) == 0
    plain = [f for f in SMALL_RUN if f not in ("--mock-data", "--vocab-size", "93")]
    flags = [*plain, *tokenizer, "--data-path", tmp_path / "d_text_document", "--split", "9,1,0", "--train-iters", "3"]
    fim = [*flags, "--fim-data", "--fim-rate", "1"]
    expected = train(tmp_path / "fim", *fim)
    run_pretrain(*fim, *TP2_PP2, "--run-dir", tmp_path / "tp", check=True)
    assert load_losses(tmp_path / "tp") == pytest.approx(expected, rel=1e-4)
    assert expected != train(tmp_path / "plain", *flags)
    config = config_from([*map(str, flags), "--fim-data", "--fim-pad-token", "<nope>"])
    with pytest.raises(DataError, match="fim_pad_token='<nope>' is not a token"):
        build_datasets(config.data, 16, 2, 8)


def test_ledger_of_mock_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["data-usage", str(tmp_path)]) == 3 and "no checkpoint" in capsys.readouterr().err
    train(tmp_path, *SMALL_RUN, "--train-iters", "1", "--save", tmp_path, "--save-interval", "1")
    assert any("generated data" in line for line in data_usage(tmp_path / "iter_0000001", capsys))
