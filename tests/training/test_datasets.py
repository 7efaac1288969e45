"""The datasets of a run, from the data and tokenizer flags of a Megatron-LM command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from token_files import byte_level_bpe
from train_cases import config_from

from megalite.config.options import Config
from megalite.data.errors import DataError
from megalite.training.datasets import DatasetBundle, build_datasets
from tools.preprocess.tokenize_run import preprocess
from tools.preprocess.workers import Job

SECRET = "ftp://me:hunter2@host/x"
GPT = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1.5e-4 --eval-iters 1""".split()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with GPT-2's two files and 60 documents that are tokenized with them."""
    out = tmp_path_factory.mktemp("gpt2")
    lines = [f"document {i} of a small corpus, ünïcode \u6f22\u5b57 {i * i}" for i in range(60)]
    byte_level_bpe(lines, 300).model.save(str(out))
    (out / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines), encoding="utf-8")
    files = {"vocab_file": str(out / "vocab.json"), "merge_file": str(out / "merges.txt")}
    job = Job({"tokenizer_type": "GPT2BPETokenizer", **files}, append_eod=True)
    preprocess([str(out / "text.jsonl")], str(out / "mine"), job)
    return out


def read(data_dir: Path, *flags: str) -> tuple[Config, DatasetBundle]:
    files = ["--vocab-file", str(data_dir / "vocab.json"), "--merge-file", str(data_dir / "merges.txt")]
    data = ["--data-path", str(data_dir / "mine_text_document")]
    config = config_from([*GPT, *files, *data, *flags])
    return config, build_datasets(config.data, 16, 1, 2)


def test_gpt3_script_line_opens_its_data(data_dir: Path) -> None:
    cache = ["--data-cache-path", str(data_dir / "cache"), "--num-workers", "2"]
    config, sources = read(data_dir, "--split", "949,50,1", *cache)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert (sources.vocab_size, sources.eod) == (300, 0)
    assert [dataset.name for dataset in sources.valid] == [""] and sources.test == []
    (note,) = sources.notes  # 0.06 documents for the test set are no error, as in Megatron-LM
    assert note.startswith("no test set: ") and "0 tokens in 0 documents" in note


def test_small_split_is_an_error_only_without_training_data(data_dir: Path) -> None:
    for split, valid, notes in (("'99,1,0'", 0, 1), ("1,0,0", 0, 0), ("3,1", 1, 0), ('"949, 50, 1"', 1, 1)):
        _, sources = read(data_dir, "--split", split)
        assert (len(sources.valid), len(sources.notes)) == (valid, notes), split
    with pytest.raises(DataError, match="split='0,1,1' leaves nothing to train on"):
        read(data_dir, "--split", "0,1,1")
    with pytest.raises(DataError, match="the train split has 0 tokens"):
        read(data_dir, "--split", "1,9999,0")


def test_fim_with_gpt2_files_uses_the_unknown_token(data_dir: Path) -> None:
    fim = ["--fim-data", "--fim-rate", "1.0", "--fim-spm-rate", "0.5", "--split", "1,0,0"]
    _, plain = read(data_dir, "--split", "1,0,0")
    _, sources = read(data_dir, *fim)
    assert [note.partition(" is not a token of ")[0] for note in sources.notes] == [
        f"fim_{name}_token='<fim_{name}>'" for name in ("prefix", "middle", "suffix", "pad")
    ]
    assert all("its unknown token, id 0, is used instead, as in Megatron-LM" in note for note in sources.notes)
    assert sources.ignored_label is None  # otherwise the ends of documents would not be learned
    index = np.arange(8)
    fim_tokens, plain_tokens = (s.train.samples(index) for s in (sources, plain))
    assert (fim_tokens == 0).sum() > (plain_tokens == 0).sum() and fim_tokens.shape == plain_tokens.shape
    _, evaluated = read(data_dir, *fim[:3], "--split", "3,1,0")
    assert evaluated.notes[-1].startswith("fim_data rearranges only the training data; Megatron-LM")
    with pytest.raises(DataError, match="fim_middle_token and fim_prefix_token are both id 65"):
        read(data_dir, *fim, "--fim-prefix-token", "a", "--fim-middle-token", "a")
    _, with_eod = read(data_dir, "--fim-data", "--fim-eod-token", "!", "--split", "1,0,0")
    assert with_eod.train.fim.eod == 1 and with_eod.eod == 0  # type: ignore[attr-defined]


def test_fewer_embedding_rows_than_tokens_are_refused(data_dir: Path) -> None:
    assert read(data_dir, "--padded-vocab-size", "304", "--split", "1,0,0")[0].model.make_vocab_size_divisible_by == 304
    with pytest.raises(DataError, match="padded_vocab_size=299 is below the vocabulary of 300"):
        read(data_dir, "--padded-vocab-size", "299")
    with pytest.raises(DataError, match="vocab_size=200 is below the 300 of .*vocab.json; leave it out"):
        read(data_dir, "--vocab-size", "200")


@pytest.mark.parametrize(
    "path, problem", [(SECRET, "has a password"), ("x" * 5000, "is longer than"), ("a\0b", "is not UTF-8")]
)
def test_paths_in_a_file_are_checked_like_flags(tmp_path: Path, path: str, problem: str) -> None:
    plain, per_split = tmp_path / "paths.txt", tmp_path / "paths.json"
    plain.write_text(f"1 {path}")
    per_split.write_text(json.dumps({"train": ["0.5", path], "valid": None, "test": None}))
    for flag, file in (("--data-args-path", plain), ("--per-split-data-args-path", per_split)):
        config = config_from([*GPT, flag, str(file), "--vocab-size", "300"])
        with pytest.raises(DataError, match=rf"{file.name}: a path in it {problem}") as error:
            build_datasets(config.data, 16, 1, 1)
        assert "hunter2" not in str(error.value)
