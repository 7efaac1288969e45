"""Every kind of tokenizer: ids, end of document, fingerprint, one error for unusable files, and the fast engine."""

import base64
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import toml_tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_files import byte_level_bpe

from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import EDGE_CASE_TEXTS
from megalite.data.tokenizers.tiktoken_tokenizer import ENCODINGS, PATTERNS
from megalite.data.tokenizers.tokenizer import Tokenizer
from tools.preprocess import fast_tokenizer
from tools.preprocess.bad_records import ValidTexts
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate
from tools.preprocess.tokenize_run import preprocess
from tools.preprocess.workers import Job
from tools.train_tokenizer import split_pieces, train_hugging_face, train_sentencepiece

TEXTS = ["hello world\n\n\tx = 1  # two  spaces\r\n", "ünïcødé 漢字 \u0000 🙂", "", "</s> <|endoftext|> 12345"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a SentencePiece model, and a byte-level BPE as tokenizer.json and as vocab.json + merges.txt."""
    out = tmp_path_factory.mktemp("tokenizers")
    lines = [f"hello world {i} and some more text, number {i * i}" for i in range(300)]
    (out / "corpus.txt").write_text("\n".join(lines))
    train_sentencepiece(split_pieces(ValidTexts([str(out / "corpus.txt")], ["text"])), str(out / "spm"), 340, 1)
    bpe = byte_level_bpe(lines, 350)
    (out / "hf").mkdir()
    bpe.save(str(out / "hf" / "tokenizer.json"))
    bpe.model.save(str(out))
    write_ranks(out)
    return out


def write_ranks(out: Path) -> None:
    """Write all bytes, and some words with all their prefixes, as a .tiktoken file and as Megatron-LM's list."""
    merged_tokens = [b"hello", b" world", b" number", b" text", b"\n\n", b"12", "漢字".encode(), "ü".encode()]
    ranks = dict.fromkeys(
        [*(bytes([i]) for i in range(256)), *(token[:n] for token in merged_tokens for n in range(2, len(token) + 1))]
    )
    encoded = [base64.b64encode(token).decode() for token in ranks]
    (out / "small.tiktoken").write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(encoded)))
    table = [{"rank": rank, "token_bytes": token, "token_str": None} for rank, token in enumerate(encoded)]
    (out / "ranks.json").write_text(json.dumps(table))
    (out / "tekken.json").write_text(json.dumps({"config": {}, "vocab": table}))


def make(directory: Path, kind: str) -> Tokenizer:
    if kind == "ByteTokenizer":
        return build_tokenizer(kind)
    if kind == "TikTokenizer":
        return build_tokenizer(kind, str(directory / "small.tiktoken"), tiktoken_pattern="cl100k")
    if kind == "NullTokenizer":
        return build_tokenizer(kind, vocab_size=100)
    if kind == "GPT2BPETokenizer":
        return build_tokenizer(kind, vocab_file=str(directory / "vocab.json"), merge_file=str(directory / "merges.txt"))
    return build_tokenizer(kind, str(directory / ("hf" if kind == "HuggingFaceTokenizer" else "spm.model")))


REAL = [f"{name}Tokenizer" for name in ("SentencePiece", "Llama2", "HuggingFace", "GPT2BPE", "Byte")] + ["TikTokenizer"]


@pytest.mark.parametrize("kind", REAL)
def test_tokenizer_round_trips_text(directory: Path, kind: str) -> None:
    tokenizer = make(directory, kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert len(tokenizer.encode("hello world")) < 8 or kind == "ByteTokenizer"  # the vocabulary is used
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


@pytest.mark.parametrize("kind", REAL)
def test_flat_ids_equal_the_lists(directory: Path, kind: str) -> None:
    tokenizer = make(directory, kind)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.lists(st.one_of(st.text(max_size=40), st.sampled_from(TEXTS)), max_size=6))
    def check(texts: list[str]) -> None:
        ids, lengths = tokenizer.encode_concatenated(texts)
        lists = tokenizer.encode_batch(texts)
        assert lengths.tolist() == [len(id_list) for id_list in lists]
        assert ids.tolist() == [i for id_list in lists for i in id_list] and ids.dtype.kind in "iu"

    check()


def test_split_patterns_equal_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    import regex
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})  # only the definitions, no download
    for name, (pattern, special) in ENCODINGS.items():
        source = openai_public.ENCODING_CONSTRUCTORS[name]()
        assert source["special_tokens"] == special
        # $ is the very end in tiktoken's engine; Python's also matches before a newline at the end
        actual, expected = (regex.compile(p.replace("$", r"\Z")) for p in (PATTERNS[pattern], source["pat_str"]))
        for text in EDGE_CASE_TEXTS:
            assert actual.findall(text) == expected.findall(text), (name, text[:60])
    # Megatron-LM's patterns split digits one by one; v2 also splits words at capitals, and adds slashes to signs
    text = "camelCase 12\r\n\n x it's a//\n/b"
    assert regex.findall(PATTERNS["v1"], text) == "camelCase| |1|2|\r\n\n| x| it|'s| a|//\n|/b".split("|")
    assert regex.findall(PATTERNS["v2"], text) == "camel|Case| |1|2|\r\n\n| x| it|'s| a|//\n/|b".split("|")


def test_tiktoken_lines(directory: Path, tmp_path: Path) -> None:
    small = make(directory, "TikTokenizer")
    ranks = len((directory / "small.tiktoken").read_bytes().splitlines())
    assert (small.eod, small.vocab_size) == (ranks, ranks + 1)
    assert small.encode("a<|endoftext|>") == [97, ranks]  # a special token in a text is that token, as in Megatron-LM
    path = tmp_path / "cl100k_base.tiktoken"  # the name gives the pattern, which the file lacks
    path.write_bytes((directory / "small.tiktoken").read_bytes())
    named = build_tokenizer("TikTokenizer", str(path))
    assert (named.eod, named.vocab_size) == (100257, 100277)
    assert named.encode("hello world 123") == small.encode("hello world 123")
    with pytest.raises(DataError, match="cl100k_base.tiktoken: .*100256"):
        named.decode([100256])


def test_tiktoken_json_equals_megatrons(directory: Path) -> None:
    file = str(directory / "ranks.json")
    ranks = len(json.loads(Path(file).read_text()))
    v2 = build_tokenizer("TikTokenizer", file)
    assert (v2.vocab_size, v2.eod) == (ranks + 1000, 2)
    assert v2.encode("a</s>b<SPECIAL_999>") == [1097, 2, 1098, 999]
    assert v2.decode(v2.encode("hello ü 漢字")) == "hello ü 漢字"
    assert v2.fingerprint == build_tokenizer("TikTokenizer", file, tiktoken_pattern="v2").fingerprint
    assert v2.fingerprint != build_tokenizer("TikTokenizer", file, tiktoken_pattern="v1").fingerprint
    cut = build_tokenizer("TikTokenizer", file, vocab_size=1257)
    assert (cut.vocab_size, max(cut.encode("hello"))) == (1257, 1256) and cut.fingerprint != v2.fingerprint
    assert build_tokenizer("TikTokenizer", str(directory / "tekken.json")).encode("hello") == v2.encode("hello")


WRONG = toml_tables.read_table("data/tokenizers")
BAD_RANKS = [
    *WRONG["ranks"],
    ("[" * 100_000, "", "not JSON"),
    (json.dumps([{"rank": i, "token_bytes": "AA=="} for i in range(300)]), "", "same bytes"),
    ("".join(f"{base64.b64encode(bytes([i])).decode()} {i // 2}\n" for i in range(256)), "gpt2", "have the same rank"),
]


@pytest.mark.parametrize(("content", "pattern", "reason"), BAD_RANKS, ids=range(len(BAD_RANKS)))
def test_bad_tiktoken_ranks_are_one_error(tmp_path: Path, content: str, pattern: str, reason: str) -> None:
    (tmp_path / "ranks").write_text(content)
    with pytest.raises(DataError, match=reason):
        build_tokenizer("TikTokenizer", str(tmp_path / "ranks"), tiktoken_pattern=pattern or None)


def test_gpt2_files_give_transformers_ids(directory: Path) -> None:
    from transformers import GPT2Tokenizer

    tokenizer = make(directory, "GPT2BPETokenizer")
    gpt2 = GPT2Tokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))
    texts = [
        *TEXTS,
        *EDGE_CASE_TEXTS,
        "a<|endoftext|>b",
        "e\u0301\u200d\U0001f469\u200d\U0001f4bb \u00a0\u3000x\ufeff\u0085 ﬁ ﷽",
    ]
    assert [tokenizer.encode(text) for text in texts] == [gpt2(text).input_ids for text in texts]
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.unk_id) == (gpt2.eos_token_id, len(gpt2), gpt2.unk_token_id)


def test_byte_and_null_tokenizers() -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 256, 0xC3, 0xA9, 0xC3]) == "aé\ufffd"
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.encode("17 4\n 99") == [17, 4, 99] and tokenizer.decode([17, 4, 99]) == "17 4 99"
    ids, lengths = tokenizer.encode_concatenated(["1 2", "", "3"])
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 3], [2, 0, 1])
    reasons = {"one 2": "reads ids, as in '17 4 25', not 'one 2'", "1 100": "has ids 0 to 99, not 1 to 100"}
    for text, reason in reasons.items():
        with pytest.raises(DataError, match=rf"NullTokenizer\(100\) {reason}"):
            tokenizer.encode(text)


def test_fingerprint_is_unique_and_stable(directory: Path, tmp_path: Path) -> None:
    fingerprints = {make(directory, kind).fingerprint for kind in REAL} | {make(directory, "NullTokenizer").fingerprint}
    assert len(fingerprints) == 6  # Llama2Tokenizer reads the same model as SentencePieceTokenizer
    copy = tmp_path / "renamed.model"
    copy.write_bytes((directory / "spm.model").read_bytes())
    renamed = build_tokenizer("GPTSentencePieceTokenizer", str(copy))
    assert renamed.fingerprint == make(directory, "SentencePieceTokenizer").fingerprint
    assert build_tokenizer("NullTokenizer", vocab_size=7).fingerprint != make(directory, "NullTokenizer").fingerprint


def test_end_of_document_comes_from_the_configuration(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes((directory / "hf" / "tokenizer.json").read_bytes())
    plain = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    for value in ("!", {"content": "!", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        named = build_tokenizer("HuggingFaceTokenizer", str(file))
        assert named.decode([named.eod]) == "!"
        assert named.fingerprint != plain.fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<missing>"}))
    with pytest.raises(DataError, match="no end-of-document token among <missing>"):
        build_tokenizer("HuggingFaceTokenizer", str(file))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match="tokenizer_config.json: not a JSON object"):
        build_tokenizer("HuggingFaceTokenizer", str(file))


@pytest.mark.parametrize("kind,options,reason", WRONG["bad"])
def test_unusable_tokenizer_is_one_error(kind: str, options: dict, reason: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("garbage").write_bytes(b"\x08\x96\x01 not a model \xff")
    Path("tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=reason):
        build_tokenizer(kind, **options)


HOSTILE: dict[str, dict[str, object]] = {  # changes of a tokenizer.json: the first panics when read, others when used
    "a table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAgAAAAAA="}},
    "a special token that is none": {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                                        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]}},
    "a pattern that explodes": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "invert": False,
                                                  "behavior": "Isolated"}},
    "no unknown token": {"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                                   "max_input_chars_per_word": 100, "vocab": {"<|endoftext|>": 0}}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_panic_in_a_library_is_one_error(directory: Path, tmp_path: Path, name: str, capfd) -> None:
    """Rust code of the library raises a BaseException that no `except Exception` catches, here or in a worker."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads((directory / "hf" / "tokenizer.json").read_text()) | HOSTILE[name]))
    with pytest.raises(DataError, match=r"tokenizer.json"):
        build_tokenizer("HuggingFaceTokenizer", str(file)).encode("a" * 40 + "!")
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a" * 40 + "!"}) + "\n")
    job = Job({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(file)})
    with pytest.raises(DataError, match=r"tokenizer.json"):
        preprocess([str(texts)], str(tmp_path / "out"), job, workers=1 if name == "a table that is none" else 2)
    assert "Traceback" not in capfd.readouterr().err


def test_malformed_sentencepiece_model_is_one_error(directory: Path, tmp_path: Path) -> None:
    """The library quotes the bytes in its message, which then is not valid text."""
    good, num_errors = (directory / "spm.model").read_bytes(), 0
    for byte in range(128, 256):
        (tmp_path / "spm.model").write_bytes(good[: 20 + byte % 8] + bytes([byte]) + good[21 + byte % 8 :])
        try:
            build_tokenizer("SentencePieceTokenizer", str(tmp_path / "spm.model"))
        except DataError as error:
            num_errors += 1
            assert "is not a SentencePiece model" in str(error)
    assert num_errors


def test_pipe_and_missing_package_are_named(directory: Path, tmp_path: Path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    for kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer"):
        with pytest.raises(DataError, match="is not a regular file"):
            build_tokenizer(kind, str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match="pip install tiktoken"):
        make(directory, "TikTokenizer")


def test_tokenizer_libraries_are_imported_lazily() -> None:
    code = (
        "import sys; from megalite.data.tokenizers.build_tokenizer import build_tokenizer; import megalite.data.datasets.batches;"
        "build_tokenizer('NullTokenizer', vocab_size=5); import tools.preprocess.tokenize_run;"
        "print([m for m in ('torch', 'sentencepiece', 'tokenizers', 'tiktoken', 'gigatoken') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


# ---- gigatoken in place of a tokenizer: the same ids, or it is not used
WORDS = (" zyxwvut", " qponmlk")  # frequent in the text that the tokenizers are trained on, not in EDGE_CASE_TEXTS
FAST = ["HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "TikTokenizer"]


@pytest.fixture(scope="module")
def fast_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one byte-level BPE in three forms, and a SentencePiece model."""
    out = tmp_path_factory.mktemp("fast")
    code = "def function_{}(self, value: int) -> str:\n    return f'{{value}} is {}'  # it's one"
    lines = [code.format(i, i * i) for i in range(400)]
    letters = random.Random(0)
    lines += [" ".join("".join(letters.choices("aeionrst", k=5)) for _ in range(12)) for _ in range(200)]
    text = "\n\n".join([*lines, *[f"some{WORDS[0]} and{WORDS[1]}, naïve café"] * 400])
    (out / "corpus.txt").write_text(text)
    texts = ValidTexts([str(out / "corpus.txt")], ["text"])
    train_sentencepiece(split_pieces(texts), str(out / "spm"), 500, 1)
    train_hugging_face(split_pieces(texts), str(out / "hf"), 600, 1)
    model = tokenizers.Tokenizer.from_file(str(out / "hf" / "tokenizer.json"))
    model.model.save(str(out))
    write_ranks(out)
    return out


@pytest.mark.parametrize("kind", FAST)
def test_fast_ids_equal_the_reference(fast_directory: Path, kind: str) -> None:
    reference = make(fast_directory, kind)
    fast = accelerate(reference, ["some text"])
    assert isinstance(fast, FastTokenizer)
    assert (fast.name, fast.fingerprint) == (reference.name, reference.fingerprint)
    assert (fast.vocab_size, fast.eod) == (reference.vocab_size, reference.eod)
    texts = [*EDGE_CASE_TEXTS, (fast_directory / "corpus.txt").read_text()[:50_000]]
    expected = reference.encode_batch(texts)
    assert fast.encode_batch(texts) == expected and fast.encode(texts[3]) == expected[3]
    ids, lengths = fast.encode_concatenated(texts)
    assert lengths.tolist() == [len(ids_of_text) for ids_of_text in expected] and len(ids) == lengths.sum()
    assert fast.decode(expected[3]) == texts[3]
    assert fast.encode_batch([]) == [] and fast.encode_concatenated([])[1].tolist() == []

    letters = st.characters(exclude_categories=["Cs"])
    fragments = st.sampled_from(
        ["</s>", "<|endoftext|>", "'s", "'LL", "  ", "\r\n", "123456", "def ", "<s>", "_a", "é"]
    )

    @settings(max_examples=40, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.lists(st.lists(st.one_of(fragments, st.text(letters, max_size=12)), max_size=8).map("".join), max_size=5))
    def check(texts: list[str]) -> None:
        assert fast.encode_batch(texts) == reference.encode_batch(texts)

    check()


def test_fast_tokenizer_keeps_special_tokens_around_texts(fast_directory: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(fast_directory / "hf" / "tokenizer.json"))
    model.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single="<|endoftext|> <|endoftext|> $A !", special_tokens=[("<|endoftext|>", 0), ("!", model.token_to_id("!"))]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    reference = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    fast = accelerate(reference)
    assert isinstance(fast, FastTokenizer)
    assert fast.encode_batch(["a b", "", "c"]) == reference.encode_batch(["a b", "", "c"])
    assert fast.encode("")[:2] == [0, 0]


def other_engine(fast_directory: Path) -> object:
    """Return a model that differs from that of `fast_directory` in the ids of WORDS, which are swapped."""
    import gigatoken

    table = json.loads((fast_directory / "hf" / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    a, b = (word.replace(" ", "Ġ") for word in WORDS)
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return gigatoken.Tokenizer.from_json(json.dumps(table))


def test_fast_tokenizer_concatenates_without_lists_of_ids(
    fast_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make(fast_directory, "HuggingFaceTokenizer")
    fast = accelerate(reference)
    assert isinstance(fast, FastTokenizer)
    expected = reference.encode_batch(["one text", "another"])
    monkeypatch.setattr(fast, "encode_batch", None)  # the slow default calls it
    ids, lengths = fast.encode_concatenated(["one text", "another"])
    assert ids.tolist() == [*expected[0], *expected[1]] and lengths.tolist() == [len(expected[0]), len(expected[1])]


def test_fast_tokenizer_with_a_difference_is_refused(fast_directory: Path, monkeypatch, caplog) -> None:
    reference = make(fast_directory, "HuggingFaceTokenizer")
    engine = other_engine(fast_directory)
    word = WORDS[0]
    monkeypatch.setattr(reference, "load_gigatoken", lambda: engine)
    assert isinstance(accelerate(reference), FastTokenizer)  # the built-in texts do not hold that word
    with caplog.at_level(logging.WARNING):
        assert accelerate(reference, ["fine", f"x{word}"]) is reference
    assert f"other ids than {fast_directory}/hf/tokenizer.json from the text {f'x{word}'!r}" in caplog.text


def test_fast_tokenizer_difference_during_a_run_ends_it(fast_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tokenizer, "CHECK_INTERVAL", 10)
    reference = make(fast_directory, "HuggingFaceTokenizer")
    word = WORDS[0]
    fast = FastTokenizer(reference, other_engine(fast_directory))
    fast.encode_concatenated([word] * 7)  # not checked: these were compared before the run
    fast.encode_concatenated([word] * 3 + ["fine"] + [word] * 9)  # document 10 is, and is the same
    with pytest.raises(DataError, match="gigatoken makes other ids than .*hf/tokenizer.json from the text"):
        fast.encode_concatenated([word])


def test_without_the_fast_package_the_reference_is_used(fast_directory: Path, monkeypatch, caplog) -> None:
    reference = make(fast_directory, "HuggingFaceTokenizer")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with caplog.at_level(logging.INFO):
        assert accelerate(reference) is reference
    assert "pip install gigatoken" in caplog.text


def test_unsupported_tokenizers_stay_with_the_reference(fast_directory: Path, tmp_path: Path) -> None:
    for tokenizer in (build_tokenizer("ByteTokenizer"), build_tokenizer("NullTokenizer", vocab_size=9)):
        assert accelerate(tokenizer) is tokenizer
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}
    unigram["vocab"] = [["</s>", 0.0], ["a", -1.0], ["b", -2.0]]
    model = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": unigram}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model | {"post_processor": None, "decoder": None}))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert accelerate(tokenizer) is tokenizer
