"""gigatoken in the place of a tokenizer: the same ids, or it is not used."""

import json
import logging
import random
import sys
from pathlib import Path

import pytest
import tokenizers
from data.test_tokenizer import make, write_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer_json import NASTY
from megalite.data.tokenizers.tokenizer_types import build_tokenizer
from tools.preprocess import fast_tokenizer
from tools.preprocess.fast_tokenizer import FastTokenizer, accelerate
from tools.preprocess.rejects import GoodTexts
from tools.train_tokenizer import cut, train, train_hugging_face

WORDS = (" zyxwvut", " qponmlk")  # frequent in what the tokenizers are made of, and not in NASTY
KINDS = ["HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "TikTokenizer"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One byte-level BPE in three forms, and a SentencePiece model."""
    out = tmp_path_factory.mktemp("fast")
    code = "def function_{}(self, value: int) -> str:\n    return f'{{value}} is {}'  # it's one"
    lines = [code.format(i, i * i) for i in range(400)]
    letters = random.Random(0)
    lines += [" ".join("".join(letters.choices("aeionrst", k=5)) for _ in range(12)) for _ in range(200)]
    text = "\n\n".join([*lines, *[f"some{WORDS[0]} and{WORDS[1]}, naïve café"] * 400])
    (out / "corpus.txt").write_text(text)
    texts = GoodTexts([str(out / "corpus.txt")], ["text"])
    train(cut(texts), str(out / "spm"), 500, 1)
    train_hugging_face(cut(texts), str(out / "hf"), 600, 1)
    model = tokenizers.Tokenizer.from_file(str(out / "hf" / "tokenizer.json"))
    model.model.save(str(out))
    write_ranks(out)
    return out


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
    model = tokenizers.Tokenizer.from_file(str(directory / "hf" / "tokenizer.json"))
    model.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single="<|endoftext|> <|endoftext|> $A !", special_tokens=[("<|endoftext|>", 0), ("!", model.token_to_id("!"))]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    reference = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    fast = accelerate(reference)
    assert isinstance(fast, FastTokenizer)
    assert fast.encode_batch(["a b", "", "c"]) == reference.encode_batch(["a b", "", "c"])
    assert fast.encode("")[:2] == [0, 0]


def other_engine(directory: Path) -> object:
    """A model that differs from that of `directory` in the ids of WORDS, which are exchanged."""
    import gigatoken

    table = json.loads((directory / "hf" / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    a, b = (word.replace(" ", "Ġ") for word in WORDS)
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return gigatoken.Tokenizer.from_json(json.dumps(table))


def test_a_difference_refuses_it_and_names_the_text(directory: Path, monkeypatch, caplog) -> None:
    reference = make(directory, "HuggingFaceTokenizer")
    engine = other_engine(directory)
    word = WORDS[0]
    monkeypatch.setattr(reference, "load_gigatoken", lambda: engine)
    assert isinstance(accelerate(reference), FastTokenizer)  # the built-in texts do not hold that word
    with caplog.at_level(logging.WARNING):
        assert accelerate(reference, ["fine", f"x{word}"]) is reference
    assert f"other ids than {directory}/hf/tokenizer.json from the text {f'x{word}'!r}" in caplog.text


def test_a_difference_on_the_way_ends_the_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tokenizer, "CHECK_EVERY", 10)
    reference = make(directory, "HuggingFaceTokenizer")
    word = WORDS[0]
    fast = FastTokenizer(reference, other_engine(directory))
    fast.encode_flat([word] * 7)  # not checked: these were compared before the run
    fast.encode_flat([word] * 3 + ["fine"] + [word] * 9)  # document 10 is, and is the same
    with pytest.raises(DataError, match="gigatoken makes other ids than .*hf/tokenizer.json from the text"):
        fast.encode_flat([word])


def test_without_the_package_the_reference_works(directory: Path, monkeypatch, caplog) -> None:
    reference = make(directory, "HuggingFaceTokenizer")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with caplog.at_level(logging.INFO):
        assert accelerate(reference) is reference
    assert "pip install gigatoken" in caplog.text


def test_what_it_cannot_read_stays_with_the_reference(directory: Path, tmp_path: Path) -> None:
    for tokenizer in (build_tokenizer("ByteTokenizer"), build_tokenizer("NullTokenizer", vocab_size=9)):
        assert accelerate(tokenizer) is tokenizer
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False}
    unigram["vocab"] = [["</s>", 0.0], ["a", -1.0], ["b", -2.0]]
    model = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": unigram}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model | {"post_processor": None, "decoder": None}))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert accelerate(tokenizer) is tokenizer
