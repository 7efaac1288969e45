"""The way from text files to token files with the tools, as a user runs them; bad input, and runs that end early."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
from data.conftest import Typed
from token_files import full_disk, read_documents

from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.sidecar import check_tokenizer, read_sidecar
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from tools import preprocess_data, python_corpus, train_tokenizer
from tools.preprocess import text_input
from tools.preprocess.bad_records import check_bad_fraction
from tools.preprocess.journal import Progress
from tools.preprocess.parse_records import SAMPLE_BYTES, parse_line
from tools.preprocess.tokenize_run import preprocess
from tools.preprocess.workers import Job

BYTES = Job({"tokenizer_type": "ByteTokenizer"})


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def test_preprocess_writes_documents_and_sidecar(tmp_path: Path, typed: Typed) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["abc", "", "d"])
    (tmp_path / "a.txt").write_text("xy\nz")
    paths = ["--input", tmp_path / "*.jsonl", tmp_path / "a.txt", "--output-prefix", tmp_path / "out/my"]
    options = "--tokenizer-type ByteTokenizer --append-eod --workers 2 --keep-sequential-samples"
    code, out, _ = typed(preprocess_data, *paths, *options.split())
    assert code == 0 and "3 documents, 11 tokens (uint16)" in out
    expected = [[*map(ord, text), 256] for text in ("abc", "d", "xy\nz")]  # the empty document is skipped
    assert read_documents(IndexedDataset(tmp_path / "out/my_text_document")) == expected
    tokenizer = build_tokenizer("ByteTokenizer")
    counts = dict(version=1, documents=3, tokens=11, records=4, empty=1, bad={}, append_eod=True)
    counts |= dict(bytes=8, source_bytes=74)
    tokenizer_info = {"name": "ByteTokenizer", "fingerprint": tokenizer.fingerprint, "vocab_size": 257, "eod": 256}
    sidecar = read_sidecar(tmp_path / "out/my_text_document")
    assert sidecar == counts | {"sources": ["b.jsonl", "a.txt"], "tokenizer": tokenizer_info}
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".bin", ".idx", ".json"]


def test_output_is_independent_of_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 2000)  # about 40 blocks
    write_jsonl(tmp_path / "a.jsonl", [f"document {i} " * (i % 17) for i in range(900)])
    contents = {}
    for workers in (1, 3):
        [prefix] = preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / f"w{workers}"), workers=workers, job=BYTES)
        contents[workers] = [Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx", ".json")]
    assert contents[1] == contents[3]
    assert len(IndexedDataset(prefix)) == 900 - 53


def test_each_key_gets_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "ab", "text": "c"}\n{"title": "d", "text": ""}\n')
    prefixes = preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "o"), replace(BYTES, keys=("text", "title")))
    assert [Path(p).name for p in prefixes] == ["o_text_document", "o_title_document"]
    assert [len(IndexedDataset(p)) for p in prefixes] == [1, 2]


BAD_LINES = {
    "not json": (b"{oops}", "Expecting property name"),
    "cut": (b'{"text": "abc', "Unterminated string"),
    "null": (b"null", "not a JSON object but NoneType"),
    "number": (b"17", "not a JSON object but int"),
    "list": (b'["text"]', "not a JSON object but list"),
    "missing key": (b'{"txt": "a"}', "key 'text' is missing"),
    "not a string": (b'{"text": 5}', "key 'text' is not a string"),
    "null text": (b'{"text": null}', "key 'text' is not a string"),
    "invalid utf-8": (b'{"text": "\xff"}', "can't decode byte 0xff"),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "byte order mark"),
    "raw nul": (b'{"text": "a\0b"}', "Invalid control character"),
    "lone surrogate": (b'{"text": "\\ud800"}', "surrogates not allowed"),
    "nan": (b'{"text": "a", "score": NaN}', "NaN is not JSON"),
    "same key twice": (b'{"text": "a", "text": "b"}', "same key twice"),
    "deep": (b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "Extra data"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_named_and_leaves_no_files(tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "fine"}\r\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=reason) as excinfo:
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), job=BYTES)
    assert f"{tmp_path / 'in.jsonl'}:3: " in str(excinfo.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_unusual_valid_lines_are_accepted() -> None:
    assert parse_line(b'  {"text": "a\\u0000b"}\r', ("text",)) == ["a\0b"]
    assert parse_line(b" \t\r", ("text",)) is None
    assert parse_line(b'{"text": "' + b"x" * 50_000_000 + b'"}', ("text",)) == ["x" * 50_000_000]


def test_full_disk_is_an_error_and_keeps_the_earlier_pair(tmp_path: Path, typed: Typed) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["first"])
    args = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", "--tokenizer-type", "ByteTokenizer"]
    assert typed(preprocess_data, *args, "--workers", 1)[0] == 0
    write_jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 200)
    with full_disk():
        code, _, stderr = typed(preprocess_data, *args, "--workers", 1)
    assert code == 3 and "File too large; nothing was written" in stderr
    assert len(IndexedDataset(tmp_path / "o_text_document")) == 1
    assert not list(tmp_path.glob("*.partial"))


def test_input_without_text_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(DataError, match="holds no text"):
        preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "o"), job=BYTES)
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="a.txt:1: .*can't decode byte 0xff in position 2"):
        preprocess([str(tmp_path / "a.txt")], str(tmp_path / "o"), job=BYTES)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    text = "\n".join(f"some words and number {i}" for i in range(400))
    (tmp_path / "t.txt").write_text(text)
    models = []
    for size in (300, 310):
        train_tokenizer.train_sentencepiece(train_tokenizer.split_pieces([text]), str(tmp_path / f"m{size}"), size, 1)
        models.append(str(tmp_path / f"m{size}.model"))
    jobs = [Job({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": model}, fast=True) for model in models]
    [prefix] = preprocess([str(tmp_path / "t.txt")], str(tmp_path / "o"), jobs[1])
    check_tokenizer(prefix, build_tokenizer("Llama2Tokenizer", models[1]))  # the same model under another name
    message = rf"made with {models[1]} \(vocabulary 310\), but this run has {models[0]} \(300\): give"
    with pytest.raises(DataError, match=message):
        check_tokenizer(prefix, build_tokenizer("SentencePieceTokenizer", models[0]))
    [small] = preprocess([str(tmp_path / "t.txt")], str(tmp_path / "s"), jobs[0])
    with pytest.raises(DataError, match=rf"made with {models[0]} \(fingerprint \w+\), but this run has {models[1]}"):
        check_tokenizer(small, build_tokenizer("SentencePieceTokenizer", models[1]))
    check_tokenizer(
        prefix, build_tokenizer("NullTokenizer", vocab_size=320)
    )  # accepted for any data if it is large enough
    message = r"m310.model \(vocabulary 310\), but this run has NullTokenizer\(300\) \(300\)"
    with pytest.raises(DataError, match=message):
        check_tokenizer(prefix, build_tokenizer("NullTokenizer", vocab_size=300))
    Path(prefix + ".json").write_text('{"tokenizer": {"fingerprint": 5}}')
    with pytest.raises(DataError, match="o_text_document.json: damaged"):
        check_tokenizer(prefix, build_tokenizer("SentencePieceTokenizer", models[1]))
    Path(prefix + ".json").unlink()  # data made by Megatron-LM has none
    check_tokenizer(prefix, build_tokenizer("SentencePieceTokenizer", models[1]))


def test_tokenizer_training_takes_text_evenly_up_to_a_bound() -> None:
    pieces = [f"{i:04d}" * 10 for i in range(1000)]
    sample = list(train_tokenizer.sample_pieces(iter(pieces), 40_000, 4_000))
    assert len(sample) == 100
    assert [int(piece[:4]) // 100 for piece in sample] == sorted([*range(10)] * 10)
    assert len(list(train_tokenizer.sample_pieces(iter(pieces), 40_000, 40_000))) == 1000


def test_tokenizer_training_limits_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(f"{'word ' * 700}\n" * 9)
    args = ["--input", str(tmp_path / "a.txt"), "--model-prefix", "m", "--max-sentences", "7"]
    sentences = list[str]()
    monkeypatch.setitem(train_tokenizer.TRAINERS, "SentencePieceTokenizer", lambda pieces, *_: sentences.extend(pieces))
    assert train_tokenizer.main(args) == 0 and len(sentences) == 7


def test_python_corpus(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    texts = {"b.py": "b = 1\n", "a/c.py": "c = 'ü'\n", "a/copy.py": "b = 1\n", "z.py": "z = 1\n"}
    texts |= {"tiny.py": "", "note.txt": "n", "site-packages/x.py": "x = 1\n"}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text * 20, encoding="utf-8")
    (root / "latin.py").write_bytes(b"# \xe9\n" * 30)
    contents = []
    for out in ("one", "two"):
        counts = python_corpus.write(root, tmp_path / out, valid_every=3)
        contents.append([(tmp_path / out / name).read_bytes() for name in ("train.jsonl", "valid.jsonl")])
        assert (counts["train"][0], counts["valid"][0]) == (2, 1)
    assert contents[0] == contents[1]
    lines = [json.loads(line) for part in contents[0] for line in part.splitlines()]
    assert sorted(line["path"] for line in lines) == ["a/c.py", "b.py", "z.py"]  # copy.py equals b.py
    assert all(line["text"] == (root / line["path"]).read_text(encoding="utf-8") for line in lines)


# ---- bad lines with --max-bad-fraction: skipped, counted by reason, sampled; and too many of them
REASONS = {
    **dict.fromkeys(("not json", "cut", "raw nul", "nan", "two objects"), "not-json"),
    **dict.fromkeys(("null", "number", "list"), "not-an-object"),
    **dict.fromkeys(("not a string", "null text"), "not-a-string"),
    **{"missing key": "key-missing", "invalid utf-8": "not-utf-8", "same key twice": "duplicate-key"},
    **{"deep": "nested-too-deeply", "byte order mark": "byte-order-mark", "lone surrogate": "lone-surrogate"},
}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_bad_line_is_skipped_and_counted(tmp_path: Path, workers: int) -> None:
    lines = [line for name in REASONS for line in (BAD_LINES[name][0], b'{"text": "fine"}', b"", b'{"text": ""}')]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    source = [str(tmp_path / "in.jsonl")]
    [prefix] = preprocess(source, str(tmp_path / "o"), workers=workers, max_bad_fraction=0.5, job=BYTES)
    assert len(IndexedDataset(prefix)) == len(REASONS)
    info = read_sidecar(prefix)
    assert info and (info["records"], info["empty"]) == (3 * len(REASONS), len(REASONS))
    reasons = list(REASONS.values())
    assert info["bad"] == {reason: reasons.count(reason) for reason in reasons}
    rows = [json.loads(line) for line in (tmp_path / "o.rejects.jsonl").read_bytes().splitlines()]
    rejects = [(row["file"], row["line"], row["reason"]) for row in rows]
    assert rejects == [(source[0], 1 + 4 * i, reason) for i, reason in enumerate(reasons)]
    for row, name in zip(rows, REASONS, strict=True):
        raw, detail = BAD_LINES[name]
        assert detail in row["detail"]
        assert row["text"] == raw[:SAMPLE_BYTES].decode("utf-8", "backslashreplace")


def test_shown_bad_lines_are_bounded_and_counts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 2000)
    path = tmp_path / "a.jsonl"
    path.write_bytes((b"[" + b"x" * 999 + b'\n{"text": "y"}\n{"text": 5}\n') * 150)
    preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.7, job=BYTES)
    raw = (tmp_path / "o.rejects.jsonl").read_bytes()
    rows = [json.loads(line)["reason"] for line in raw.splitlines()]
    assert {reason: rows.count(reason) for reason in rows} == {"not-json": 100, "not-a-string": 100}
    assert len(raw) < 200 * (SAMPLE_BYTES + 300)
    info = read_sidecar(tmp_path / "o_text_document")
    assert info and info["bad"] == {"not-json": 150, "not-a-string": 150}


def test_too_many_bad_lines_fail_unless_allowed(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 90 + b"17\n" * 10)
    args = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", "--workers", 1]
    args += ["--tokenizer-type", "ByteTokenizer", "--max-bad-fraction"]
    code, _, stderr = typed(preprocess_data, *args, 0.09)
    assert code == 3 and "10 of 100 lines are bad (10 not-an-object), more than max_bad_fraction=0.09" in stderr
    assert len((tmp_path / "o.rejects.jsonl.partial").read_bytes().splitlines()) == 10  # named in the message
    assert f"{tmp_path / 'o.rejects.jsonl.partial'}" in stderr
    assert not list(tmp_path.glob("*.idx"))
    code, _, stderr = typed(preprocess_data, *args, 0.1, "--resume")
    assert code == 0 and "left out: 0 texts without tokens; bad lines: 10 not-an-object" in stderr
    assert len(IndexedDataset(tmp_path / "o_text_document")) == 90


def test_hopeless_input_is_stopped_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 5000)
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 20_000)
    with pytest.raises(DataError, match="lines are bad .* key-missing") as excinfo:
        preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.01, job=replace(BYTES, keys=("content",)))
    assert int(str(excinfo.value).split(" of ")[1].split()[0]) < 4000


@pytest.mark.parametrize("bad,records,share", [(6, 100, 1.0), (1000, 1000, 0.2)])
def test_bad_record_limit(bad: int, records: int, share: float) -> None:
    check_bad_fraction(Progress(records=100, bad={"not-json": 5}), 0.05, 1.0, "see there")
    check_bad_fraction(Progress(records=999, bad={"not-json": 999}), 0.05, 0.9, "see there")  # too few to tell
    # all of the rest may be good
    check_bad_fraction(Progress(records=1000, bad={"not-json": 1000}), 0.05, 0.01, "see there")
    with pytest.raises(DataError):
        check_bad_fraction(Progress(records=records, bad={"not-json": bad}), 0.05, share, "see there")


def test_rejects_file_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n17\n')
    preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.5, job=BYTES)
    assert (tmp_path / "o.rejects.jsonl").exists()
    path.write_bytes(b'{"text": "x"}\n')
    preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=0.5, job=BYTES)
    assert sorted(p.suffix for p in tmp_path.glob("o*")) == [".bin", ".idx", ".json"]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_bad_fraction_is_refused(tmp_path: Path, fraction: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match="max_bad_fraction=.* is not a fraction"):
        preprocess([str(path)], str(tmp_path / "o"), max_bad_fraction=fraction, job=BYTES)


def test_standard_input_mixed_files_and_progress(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "b.txt").write_text("b")
    options = f"--output-prefix {tmp_path}/o --tokenizer-type ByteTokenizer --workers 2 --log-interval 1".split()
    lines = '{"text": "a"}\n{"text": "c"}'
    args = ["--input", "-", str(tmp_path / "b.txt"), *options, "--partitions", "4"]
    result = programs.run_python("tools/preprocess_data.py", *args, input=lines, check=True)
    assert "note: --partitions changes nothing" in result.stderr
    assert "2 documents, 2 tokens: " in result.stderr and "MB/s" in result.stderr
    data = IndexedDataset(tmp_path / "o_text_document")
    assert [chr(data.document(i)[0]) for i in range(len(data))] == ["a", "c", "b"]
    code, _, stderr = typed(preprocess_data, "--input", tmp_path / "b.txt", *options, "--overwrite")
    assert code == 0 and "% of the input" in stderr
    code, _, stderr = typed(preprocess_data, "--input", tmp_path / "b.txt", *options, "--split-sentences")
    assert code == 2 and "--split-sentences is for BERT and T5" in stderr


def test_template_with_end_of_text_adds_one_end(tmp_path: Path, typed: Typed) -> None:
    """A post-processor of the tokenizer.json appends </s>; without one --append-eod does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    library: Any = Tokenizer(models.WordLevel({"</s>": 0, "<s>": 1, "a": 2, "b": 3, "<unk>": 4}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    write_jsonl(tmp_path / "in.jsonl", ["a b", "b"])
    input_args = ["--input", tmp_path / "in.jsonl", "--tokenizer-type", "HuggingFaceTokenizer"]
    documents = {}
    for name, single in {"none": None, "both": "<s> $A </s>", "begin": "</s> $A"}.items():
        if single:
            library.post_processor = processors.TemplateProcessing(single, None, [("<s>", 1), ("</s>", 0)])
        (tmp_path / name).mkdir()
        library.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        output_args = [
            "--tokenizer-model",
            tmp_path / name,
            "--output-prefix",
            tmp_path / f"out-{name}",
            "--append-eod",
        ]
        code, _, stderr = typed(preprocess_data, *input_args, *output_args)
        assert code == 0 and ("ends each text with the end of a document already" in stderr) == (name == "both")
        documents[name] = read_documents(IndexedDataset(tmp_path / f"out-{name}_text_document"))
    assert documents["none"] == [[2, 3, 0], [3, 0]]
    assert documents["both"] == [[1, 2, 3, 0], [1, 3, 0]]
    assert documents["begin"] == [[0, 2, 3, 0], [0, 3, 0]]
