"""gigatoken in the place of a tokenizer: the same ids, or it is not used."""

import json
import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.data.tokenizers.tokenizer_json import NASTY
from megalite.data.tokenizers.tokenizer_types import build_tokenizer
from tools.preprocess import fast_tokenizer
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate, surround
from tools.preprocess.rejects import GoodTexts
from tools.train_tokenizer import cut, train, train_hugging_face

WORDS = (" zyxwvut", " qponmlk")  # frequent in what the tokenizers are made of, and not in NASTY
KINDS = ["HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "TikTokenizer"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One byte-level BPE in three forms, and a SentencePiece model."""
    out = tmp_path_factory.mktemp("fast")
    lines = [
        f"def function_{i}(self, value: int) -> str:\n    return f'{{value}} is {i * i}'  # it's one"
        for i in range(400)
    ]
    letters = random.Random(0)
    lines += [" ".join("".join(letters.choices("aeionrst", k=5)) for _ in range(12)) for _ in range(200)]
    text = "\n\n".join([*lines, *[f"some{WORDS[0]} and{WORDS[1]}, naïve café"] * 400])
    (out / "corpus.txt").write_text(text)
    texts = GoodTexts([str(out / "corpus.txt")], ["text"])
    train(cut(texts), str(out / "spm"), 500, 1)
    train_hugging_face(cut(texts), str(out / "bpe"), 600, 1)
    model = tokenizers.Tokenizer.from_file(str(out / "bpe" / "tokenizer.json"))
    model.model.save(str(out))
    return out


def make(directory: Path, kind: str) -> Tokenizer:
    if kind == "GPT2BPETokenizer":
        return build_tokenizer(kind, vocab_file=str(directory / "vocab.json"), merge_file=str(directory / "merges.txt"))
    if kind == "TikTokenizer":
        file = directory / "small.tiktoken"
        file.write_text("".join(f"{coded} {rank}\n" for rank, coded in enumerate(_ranks(directory))))
        return build_tokenizer(kind, str(file), tiktoken_pattern="cl100k")
    return build_tokenizer(kind, str(directory / ("bpe" if kind == "HuggingFaceTokenizer" else "spm.model")))


def _ranks(directory: Path) -> list[str]:
    """The pieces of tokenizer.json as base64, in the order of their merges."""
    import base64

    table = json.loads((directory / "vocab.json").read_text())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    others = [i for i in range(256) if i not in printable]
    byte_of = {chr(i): i for i in printable} | {chr(256 + k): i for k, i in enumerate(others)}
    pieces = sorted((rank, piece) for piece, rank in table.items() if piece != "<|endoftext|>")
    return [base64.b64encode(bytes(byte_of[c] for c in piece)).decode() for _, piece in pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_references(directory: Path, kind: str) -> None:
    reference = make(directory, kind)
    fast = accelerate(reference, ["some text"])
    assert isinstance(fast, FastTokenizer)
    assert (fast.name, fast.fingerprint) == (reference.name, reference.fingerprint)
    assert (fast.vocab_size, fast.eod) == (reference.vocab_size, reference.eod)
    texts = [*NASTY, (directory / "corpus.txt").read_text()[:50_000]]
    want = reference.encode_batch(texts)
    assert fast.encode_batch(texts) == want and fast.encode(texts[3]) == want[3]
    ids, lengths = fast.encode_flat(texts)
    assert lengths.tolist() == [len(one) for one in want] and len(ids) == lengths.sum()
    assert fast.decode(want[3]) == texts[3]
    assert fast.encode_batch([]) == [] and fast.encode_flat([])[1].tolist() == []

    letters = st.characters(exclude_categories=["Cs"])
    words = st.sampled_from(["</s>", "<|endoftext|>", "'s", "'LL", "  ", "\r\n", "123456", "def ", "<s>", "_a", "é"])

    @settings(max_examples=40, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.lists(st.lists(st.one_of(words, st.text(letters, max_size=12)), max_size=8).map("".join), max_size=5))
    def check(texts: list[str]) -> None:
        assert fast.encode_batch(texts) == reference.encode_batch(texts)

    check()


def test_special_tokens_around_every_text_are_kept(directory: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(directory / "bpe" / "tokenizer.json"))
    model.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single="<|endoftext|> <|endoftext|> $A !", special_tokens=[("<|endoftext|>", 0), ("!", model.token_to_id("!"))]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    reference = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    fast = accelerate(reference)
    assert isinstance(fast, FastTokenizer)
    assert fast.encode_batch(["a b", "", "c"]) == reference.encode_batch(["a b", "", "c"])
    assert fast.encode("")[:2] == [0, 0]


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6),
    st.lists(st.integers(0, 99), max_size=3),
    st.lists(st.integers(0, 99), max_size=3),
)
def test_surround(documents: list[list[int]], prefix: list[int], suffix: list[int]) -> None:
    flat = np.array([i for one in documents for i in one], np.uint32)
    ids, lengths = surround(flat, np.array([len(one) for one in documents], np.int64), prefix, suffix)
    want = [prefix + one + suffix for one in documents]
    assert ids.tolist() == [i for one in want for i in one] and lengths.tolist() == [len(one) for one in want]


def other_engine(directory: Path) -> object:
    """A model that differs from that of `directory` in the ids of WORDS, which are exchanged."""
    import gigatoken

    table = json.loads((directory / "bpe" / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    a, b = (word.replace(" ", "Ġ") for word in WORDS)
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return gigatoken.Tokenizer.from_json(json.dumps(table))


def test_a_difference_refuses_it_and_names_the_text(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make(directory, "HuggingFaceTokenizer")
    engine = other_engine(directory)
    word = WORDS[0]
    monkeypatch.setattr(reference, "load_gigatoken", lambda: engine)
    assert isinstance(accelerate(reference), FastTokenizer)  # the built-in texts do not hold that word
    with caplog.at_level(logging.WARNING):
        assert accelerate(reference, ["fine", f"x{word}"]) is reference
    assert f"other ids than {directory}/bpe/tokenizer.json from the text {f'x{word}'!r}" in caplog.text


def test_a_difference_on_the_way_ends_the_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tokenizer, "CHECK_EVERY", 10)
    reference = make(directory, "HuggingFaceTokenizer")
    word = WORDS[0]
    fast = FastTokenizer(reference, other_engine(directory))
    fast.encode_flat([word] * 7)  # not checked: these were compared before the run
    fast.encode_flat([word] * 3 + ["fine"] + [word] * 9)  # document 10 is, and is the same
    with pytest.raises(DataError, match="gigatoken makes other ids than .*bpe/tokenizer.json from the text"):
        fast.encode_flat([word])


def test_without_the_package_the_reference_works(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make(directory, "HuggingFaceTokenizer")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with caplog.at_level(logging.INFO):
        assert accelerate(reference) is reference
    assert "pip install gigatoken" in caplog.text


def test_what_it_cannot_read_stays_with_the_reference(directory: Path, tmp_path: Path) -> None:
    for tokenizer in (build_tokenizer("ByteTokenizer"), build_tokenizer("NullTokenizer", vocab_size=9)):
        assert accelerate(tokenizer) is tokenizer
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["</s>", 0.0], ["a", -1.0], ["b", -2.0]],
        "byte_fallback": False,
    }
    model = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": unigram}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model | {"post_processor": None, "decoder": None}))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert accelerate(tokenizer) is tokenizer
