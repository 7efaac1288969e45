"""The tools for token files, as a user runs them: merge, inspect, verify, train a tokenizer."""

import functools
import json
import re
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from data.conftest import Typed
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import full_disk, read_documents

from megalite.common.console import ProgressBar
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.sidecar import read_sidecar
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer
from tools import (
    convert_checkpoint,
    inspect_data,
    merge_datasets,
    preprocess_data,
    python_corpus,
    report,
    sweep,
    train_tokenizer,
)
from tools.merge_datasets import document_blocks, expand_prefixes, merge
from tools.preprocess.indexed_writer import IndexedWriter
from tools.preprocess.tokenize_run import make_info


def write(prefix: Path, documents: list[list[int]], tokenizer: Tokenizer | None = None, dtype: type = np.uint16) -> str:
    """Write a pair, with prefix.json when a tokenizer is given, and return its prefix."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
        total = sum(map(len, documents))
        info = None if tokenizer is None else make_info(tokenizer, len(documents), total, [f"{prefix.name}.jsonl"])
        writer.finish(info)
    return str(prefix)


NULL = build_tokenizer("NullTokenizer", vocab_size=501)


# ---- merge_datasets.py
def test_merge_keeps_order_and_joins_the_sidecars(tmp_path: Path, typed: Typed) -> None:
    parts = tmp_path / "parts"
    write(parts / "b_text_document", [[5], []], NULL)
    write(parts / "a_text_document", [[1, 2], [3]], NULL)
    write(tmp_path / "last", [[7, 8, 9]], NULL)
    code, out, _ = typed(merge_datasets, "--input", parts, tmp_path / "last", "--output-prefix", tmp_path / "out/all")
    assert (code, out) == (0, f"{tmp_path / 'out/all'}: 5 documents, 7 tokens of 3 inputs\n")
    assert read_documents(IndexedDataset(tmp_path / "out/all")) == [[1, 2], [3], [5], [], [7, 8, 9]]
    info = read_sidecar(tmp_path / "out/all")
    assert info == make_info(NULL, 5, 7, ["a_text_document.jsonl", "b_text_document.jsonl", "last.jsonl"])
    at_once = write(tmp_path / "at_once", [[1, 2], [3], [5], [], [7, 8, 9]])
    for suffix in (".bin", ".idx"):  # the same bytes as when it is written at once
        assert (tmp_path / f"out/all{suffix}").read_bytes() == Path(at_once + suffix).read_bytes()
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".bin", ".idx", ".json"]


@settings(max_examples=25)
@given(
    files=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=12), min_size=1, max_size=4),
    tokens=st.integers(1, 12),
    documents=st.integers(1, 5),
)
def test_merge_keeps_all_documents(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[list[int]]], tokens: int, documents: int
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    prefixes = [write(directory / f"p{i}", file) for i, file in enumerate(files)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_datasets, "COPY_TOKENS", tokens)
        patch.setattr(merge_datasets, "INDEX_ENTRIES", documents)
        blocks = list(document_blocks(IndexedDataset(prefixes[0])))
        for first, last, begin, end in blocks:
            assert last - first == 1 or (end - begin <= tokens and last - first <= documents)
        count, tokens, _ = merge(prefixes, str(directory / "out"))
    expected = [document for file in files for document in file]
    assert read_documents(IndexedDataset(directory / "out")) == expected
    assert (count, tokens) == (len(expected), sum(map(len, expected)))


def test_merge_refuses_incompatible_inputs(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[1]], NULL)
    b = write(tmp_path / "b", [[1]], build_tokenizer("NullTokenizer", vocab_size=400))
    with pytest.raises(DataError, match=r"b was made with tokenizer NullTokenizer\(400\).*a with NullTokenizer\(501\)"):
        merge([a, b], str(tmp_path / "out"))
    with pytest.raises(DataError, match="wide holds int32 tokens, but .*a uint16"):
        merge([a, write(tmp_path / "wide", [[1]], NULL, np.int32)], str(tmp_path / "out"))
    with pytest.raises(DataError, match="output_prefix=.*is among the inputs"):
        merge([a], str(tmp_path / "x" / ".." / "a"))
    with pytest.raises(DataError, match="is given twice"):
        expand_prefixes([a, a])
    with pytest.raises(DataError, match="missing.idx: No such file"):
        merge([a, str(tmp_path / "missing")], str(tmp_path / "out"))
    with IndexedWriter(tmp_path / "two", np.uint16) as writer:  # two sequences in one document, like sentences
        writer.add_many(np.arange(4), np.array([2, 2]))
        writer.finish()
    index = (tmp_path / "two.idx").read_bytes()
    (tmp_path / "two.idx").write_bytes(index[:-24] + struct.pack("<qq", 0, 2) + index[-8:])
    with pytest.raises(DataError, match="consist of several sequences each"):
        merge([str(tmp_path / "two")], str(tmp_path / "out"))
    (tmp_path / "half").mkdir()
    with pytest.raises(DataError, match="holds no .idx file"):
        expand_prefixes([str(tmp_path / "half")])
    (tmp_path / "half" / "x.bin").touch()
    with pytest.raises(DataError, match="x.bin has no .idx beside it"):
        expand_prefixes([str(tmp_path / "half")])
    assert not list(tmp_path.glob("out*"))


def test_merge_with_a_missing_sidecar_writes_none(tmp_path: Path, typed: Typed) -> None:
    a, b = write(tmp_path / "a", [[1]], NULL), write(tmp_path / "b", [[2]])
    code, _, stderr = typed(merge_datasets, "--input", a, b, "--output-prefix", tmp_path / "out")
    assert code == 0 and f"no {tmp_path / 'out'}.json is written, as these inputs have none: {b}" in stderr
    assert len(IndexedDataset(tmp_path / "out")) == 2 and read_sidecar(tmp_path / "out") is None


@pytest.mark.parametrize(
    "tool,args",
    [
        (preprocess_data, "--input x --tokenizer-type ByteTokenizer --output-prefix"),
        (merge_datasets, "--input x --output-prefix"),
        (train_tokenizer, "--input x --vocab-size 300 --model-prefix"),
        (python_corpus, "--out"),
        (convert_checkpoint, "--from-hf x --save"),
        (convert_checkpoint, "--to-hf x --load"),
        (sweep, "x.toml --runs-dir"),
        (report, "x --out"),
    ],
)
def test_merge_does_not_create_a_directory_named_like_a_url(
    tool: ModuleType, args: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        tool.main([*args.split(), "s3://KEY:SECRET@b/x"])
    stderr = capsys.readouterr().err
    assert "a URL, and this takes a local path only" in stderr and "SECRET" not in stderr and not [*tmp_path.iterdir()]


def test_inspect_escapes_control_characters_of_a_sidecar(tmp_path: Path, typed: Typed) -> None:
    a, b = (write(tmp_path / name, [[1]], NULL) for name in "ab")
    info = json.loads((tmp_path / "b.json").read_text())
    info["tokenizer"] |= {"name": "\x1b[2J", "fingerprint": "0" * 64}
    (tmp_path / "b.json").write_text(json.dumps(info))
    code, _, stderr = typed(merge_datasets, "--input", a, b, "--output-prefix", tmp_path / "out")
    assert code == 3 and "\\x1b[2J 000000000000" in stderr and "\x1b" not in stderr


def test_merge_on_a_full_disk_leaves_nothing(tmp_path: Path, typed: Typed) -> None:
    a = write(tmp_path / "a", [[1] * 30_000] * 2)
    with full_disk():
        code, _, stderr = typed(merge_datasets, "--input", a, "--output-prefix", tmp_path / "out")
    assert code == 3 and "File too large; nothing was written" in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


# ---- inspect_data.py
def test_inspect_prints_a_histogram_of_lengths(tmp_path: Path, typed: Typed) -> None:
    prefix = write(tmp_path / "a", [[1] * n for n in (0, 1, 2, 3, 3, 7, 8, 100)], NULL)
    code, out, _ = typed(inspect_data, prefix, "--png", tmp_path / "a.png")
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"{prefix}: 8 documents, 124 tokens (uint16)"
    assert lines[1].startswith("made by NullTokenizer(501), vocabulary 501, end of document 500, fingerprint ")
    assert "mean 15.5" in out and "0%: 0  1%: 0  5%: 0  25%: 2  50%: 3  75%: 8  95%: 100" in out
    rows = {
        columns[0]: (int(columns[1]), len(columns[2])) for columns in map(str.split, lines[5:]) if len(columns) == 3
    }
    assert rows == {"0": (1, 17), "1": (1, 17), "2..3": (3, 50), "4..7": (1, 17), "8..15": (1, 17), "64..127": (1, 17)}
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_inspect_decodes_with_the_tokenizer_of_the_data(tmp_path: Path, typed: Typed) -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    prefix = write(tmp_path / "a", [[1], [*tokenizer.encode("hé\n"), 256]], tokenizer)
    code, out, _ = typed(inspect_data, prefix, "--document", 1, "--tokenizer-type", "ByteTokenizer")
    assert (code, out) == (0, "document 1: 5 tokens: 104 195 169 10 256\nhé\n\n")
    code, _, stderr = typed(inspect_data, prefix, "--document", 2)
    assert (code, stderr) == (3, "inspect_data.py: document=2 is outside 0..1\n")
    other = ["--document", 1, "--tokenizer-type", "NullTokenizer", "--vocab-size", 100]
    code, _, stderr = typed(inspect_data, prefix, *other)
    assert code == 3 and "made with ByteTokenizer (vocabulary 257), but" in stderr


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.sampled_from([0, 0, 3, 20]), max_size=9), min_size=1, max_size=12),
    chunk=st.integers(1, 12),
    copy_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_verify_names_the_first_bad_id(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    chunk: int,
    copy_tokens: int,
    data: st.DataObject,
) -> None:
    directory = tmp_path_factory.mktemp("verify")
    filled = [i for i, tokens in enumerate(documents) if tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect_data, "CHUNK", chunk)
        patch.setattr(merge_datasets, "COPY_TOKENS", copy_tokens)
        patch.setattr(merge_datasets, "INDEX_ENTRIES", 3)
        good_pair = IndexedDataset(write(directory / "a", documents, dtype=np.int32))
        bar = ProgressBar("", good_pair.num_tokens, quiet=True)
        report_lines = inspect_data.verify(good_pair, None, 21, 0, bar)
        assert bar.done == good_pair.num_tokens
        num_ended = sum(document[-1] == 0 for document in documents if document)
        assert f"id 0: {num_ended} of {len(filled)}" in report_lines
        inside = sum(document[:-1].count(0) for document in documents)
        assert (
            f"inside documents: {inside}" in report_lines
            and f"empty documents: {len(documents) - len(filled)}" in report_lines
        )
        if not filled:
            return
        document = data.draw(st.sampled_from(filled))
        token = data.draw(st.integers(0, len(documents[document]) - 1))
        bad_id = data.draw(st.sampled_from([-1, 21, 70000]))
        documents[document][token] = bad_id
        later = filled[-1]
        documents[later][-1] = bad_id  # the later fault must not be named
        position = sum(map(len, documents[:document])) + token
        with pytest.raises(DataError) as excinfo:
            bad_pair = IndexedDataset(write(directory / "b", documents, dtype=np.int32))
            inspect_data.verify(bad_pair, None, 21, 0, ProgressBar("", bad_pair.num_tokens, quiet=True))
        message = f"b.bin: document {document}, token {token} (position {position} of the file): id {bad_id} is outside"
        assert message in str(excinfo.value)


def test_verify_reports_a_sound_pair_and_exits_with_3_for_a_fault(tmp_path: Path, typed: Typed) -> None:
    verify = functools.partial(typed, inspect_data, "--verify")
    prefix = write(tmp_path / "a", [[1, 500], [], [2, 500, 3, 500], [4]], NULL)
    code, out, _ = verify(prefix)
    assert code == 0 and out.splitlines() == [
        f"{prefix}: sound: 4 documents, 7 tokens, ids below 501",
        "empty documents: 1",
        "documents that end with the end-of-document id 500: 2 of 3",
        "end-of-document ids inside documents: 1",
    ]
    assert "ids not negative" in verify(write(tmp_path / "b", [[1]]))[1]
    prefix = write(tmp_path / "c", [[1], [2, 501]], NULL)
    code, out, stderr = verify(prefix)
    assert (code, out) == (3, "")
    assert f"{prefix}.bin: document 1, token 1 (position 2 of the file): id 501 is outside" in stderr
    assert verify(prefix, "--vocab-size", "502")[0] == 0
    (tmp_path / "c.json").write_text(json.dumps(make_info(NULL, 3, 3, [])))
    code, _, stderr = verify(prefix, "--vocab-size", "502")
    assert code == 3 and "c.json: documents is 3, but the pair has 2" in stderr
    index = bytearray((tmp_path / "c.idx").read_bytes())
    index[34] = 2  # the length of document 0
    (tmp_path / "c.idx").write_bytes(index)
    code, _, stderr = verify(prefix)
    assert code == 3 and "c.idx: " in stderr


def test_check_index_is_independent_of_the_reader(tmp_path: Path) -> None:
    for name, change, reason in (
        ("lengths", np.array([1, -2], np.int32), "document 1: -2 tokens at byte 2"),
        ("lengths", np.array([1, 1], np.int32), "has 6 bytes, but the index accounts for 4"),
        ("pointers", np.array([0, 4]), "document 1: 2 tokens at byte 4, but the one before ends at byte 2"),
        ("document_indices", np.array([0, 2, 1]), r"document_indices\[2\] decreases"),
    ):
        data = IndexedDataset(write(tmp_path / "a", [[1], [2, 3]]))
        inspect_data.check_index(data)
        setattr(data, name, change)
        with pytest.raises(DataError, match=reason):
            inspect_data.check_index(data)


# ---- train_tokenizer.py
@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_trained_tokenizer_round_trips_every_text(tmp_path: Path, kind: str, typed: Typed) -> None:
    lines = (json.dumps({"text": f"word {i} and\nanother word, {i * i}\r\n"}) for i in range(400))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    args = ["--input", tmp_path / "a.jsonl", "--vocab-size", 300, "--model-prefix", tmp_path / "new/m"]
    code, out, _ = typed(train_tokenizer, *args, "--tokenizer-type", kind, "--workers", 1)
    name = "m.model" if kind == "SentencePieceTokenizer" else "m/tokenizer.json"
    assert (code, out) == (0, f"{tmp_path / 'new' / name}: 300 pieces\n")
    tokenizer = build_tokenizer(kind, str(tmp_path / "new" / ("m" if "json" in name else name)))
    assert tokenizer.vocab_size == 300 and not list(tmp_path.rglob("*.partial"))
    for text in ("word 12\r\n\tand 漢字 🙂 '#  ", " ", "\x00é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" another word")) < 6
    result = typed(train_tokenizer, *args[:-1], tmp_path / "b/m", "--tokenizer-type", kind, "--workers", 2)
    assert result[0] == 0
    retrained = build_tokenizer(kind, str(tmp_path / "b" / ("m" if "json" in name else name)))
    assert retrained.encode("word 7, another") == tokenizer.encode("word 7, another")


FEW = r"the text gives 2\d\d pieces only; give more text, or --vocab-size 2\d\d"
NO_ROOM = "no room for 256 bytes"


@pytest.mark.parametrize(
    "kind,text,size,reason",
    [
        ("HuggingFace", "abc abc", 100, f"{NO_ROOM} and <.endoftext.>; give 257 or more"),
        ("SentencePiece", "abc abc", 100, f"{NO_ROOM}, the characters of the text and .*; give 26. or"),
        *((kind, "abc abc", 9000, FEW) for kind in ("HuggingFace", "SentencePiece")),
        *((kind, "", 300, "the input holds no text") for kind in ("HuggingFace", "SentencePiece")),
    ],
)
def test_untrainable_tokenizer_is_one_error(
    tmp_path: Path, typed: Typed, kind: str, text: str, size: int, reason: str
) -> None:
    kind = f"{kind}Tokenizer"
    (tmp_path / "a.txt").write_text(text)
    args = ["--input", tmp_path / "a.txt", "--model-prefix", tmp_path / "m", "--tokenizer-type", kind, "--vocab-size"]
    code, _, stderr = typed(train_tokenizer, *args, size)
    assert code == 3 and re.fullmatch(rf"train_tokenizer.py: .*{reason}.*\n", stderr), stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    if max_size := re.search(r"or --vocab-size (\d+)", stderr):  # the suggested size fits
        code, _, stderr = typed(train_tokenizer, *args, max_size[1])
        assert (code, stderr) == (0, "")


TORN = {
    "torn": ('{"text": "ab', "Unterminated string"),
    "key missing": ('{"texts": "ab"}', "key 'text' is missing"),
    "null": ('{"text": null}', "key 'text' is not a string"),
    "lone surrogate": (r'{"text": "\ud800"}', "surrogates not allowed"),
    "not UTF-8": ("\udcff", "can't decode byte 0xff"),
}


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_tokenizer_training_names_or_skips_bad_lines(tmp_path: Path, typed: Typed, kind: str) -> None:
    good = [json.dumps({"text": f"word {i} and another word, {i * i}"}) for i in range(99)]
    args = ["--model-prefix", tmp_path / "m", "--tokenizer-type", kind, "--vocab-size", 290]
    for name, (line, reason) in TORN.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join([*good[:2], line, *good[2:]]), errors="surrogateescape")
        code, _, stderr = typed(train_tokenizer, "--input", path, *args)
        assert code == 3 and not (tmp_path / "m.model").exists() and not (tmp_path / "m").exists()
        location = rf"train_tokenizer.py: {re.escape(str(path))}:3: .*{reason}.*"
        expected = f"{location}; --max-bad-fraction leaves bad lines out\n"
        assert re.fullmatch(expected, stderr), stderr
    code, _, stderr = typed(train_tokenizer, "--input", path, *args, "--max-bad-fraction", "0.009")
    assert code == 3 and "1 of 100 lines are bad (1 not-utf-8), more than max_bad_fraction=0.009 of the input" in stderr
    assert f"; the first: {path}:3: " in stderr and stderr.count("\n") == 1
    code, _, stderr = typed(train_tokenizer, "--input", path, *args, "--max-bad-fraction", "0.01")
    assert code == 0 and stderr.startswith(
        f"train_tokenizer.py: left out: bad lines: 1 not-utf-8; the first: {path}:3: "
    )
    assert typed(train_tokenizer, "--input", path, *args, "--max-bad-fraction", "1")[0] == 3
