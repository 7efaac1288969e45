"""Fill-in-the-middle can be undone, neither loses nor adds tokens, and happens as often as it should."""

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from token_files import byte_level_bpe, write_documents

from megalite.data.datasets.batches import Batches
from megalite.data.datasets.blended_dataset import BlendedDataset
from megalite.data.datasets.fim_dataset import REENCODED, FimDataset, FimOptions, apply_fim, rearrange_documents
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.datasets.permutation import fold
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import SentencePieceTokenizer, Tokenizer

PRE, MID, SUF, PAD, EOD, SPLIT = range(6)
SAMPLE = st.lists(st.one_of(st.integers(6, 99), st.sampled_from([EOD, EOD, SPLIT])), min_size=1, max_size=80)


def fim(rate: float, spm_rate: float = 0.5, **options: object) -> FimOptions:
    return FimOptions(rate, spm_rate, PRE, MID, SUF, PAD, EOD, **{"characters": False, **options})  # type: ignore[arg-type]


def undo(tokens: list[int]) -> list[int]:
    """Return the original of a sample that was not cut, from its sentinels alone."""
    out, i = [], 0
    while i < len(tokens):
        if tokens[i] != PRE:
            out.append(tokens[i])
            i += 1
            continue
        suffix, middle = tokens.index(SUF, i), tokens.index(MID, i)
        end = next((j for j in range(middle, len(tokens)) if tokens[j] in (EOD, SPLIT, PRE)), len(tokens))
        out += tokens[i + 1 : suffix] + tokens[middle + 1 : end] + tokens[suffix + 1 : middle]
        i = end
    return out


@settings(max_examples=150)
@given(
    sample=SAMPLE,
    rate=st.sampled_from([0, 0.5, 1]),
    spm_rate=st.sampled_from([0, 0.5, 1]),
    fragments=st.sampled_from([None, 0, 0.5, 1]),
    key=st.integers(0, 2**64 - 1),
)
def test_fim_can_be_undone_without_loss(
    sample: list[int], rate: float, spm_rate: float, fragments: float | None, key: int
) -> None:
    tokens = np.array(sample)
    split = SPLIT if fragments is not None else None
    options = fim(rate, spm_rate, split=split, fragment_rate=fragments)
    if split is None:
        tokens[tokens == SPLIT] = 6
    out, source = rearrange_documents(tokens, key, options)
    assert undo(out.tolist()) == tokens.tolist()
    is_original = source != REENCODED
    assert sorted(source[is_original].tolist()) == list(range(len(tokens)))
    assert np.array_equal(out[is_original], tokens[source[is_original]])
    assert set(out[~is_original].tolist()) <= {PRE, MID, SUF}
    assert len(out) == len(tokens) + 3 * int((out == PRE).sum())
    documents = sum(bool(part) for part in "".join("." if t == EOD else "x" for t in sample).split("."))
    num_chosen = int((out == PRE).sum())
    if fragments is None:
        assert num_chosen == {0: 0, 1: documents}.get(rate, num_chosen)

    trimmed, trimmed_source = apply_fim(tokens, key, options)
    assert np.array_equal(trimmed, out[: len(tokens)]) and np.array_equal(trimmed_source, source[: len(tokens)])


def test_fim_rates_and_uniform_cuts() -> None:
    tokens = np.array([*[10] * 9, EOD] * 20)
    documents, num_chosen, num_spm, lengths = 0, 0, 0, np.zeros((2, 10), np.int64)
    for key in range(300):
        out, _ = rearrange_documents(tokens, fold("rates", key), fim(0.3, 0.25))
        for text in "".join(map(str, np.minimum(out, EOD + 1).tolist())).split(str(EOD))[:-1]:
            documents += 1
            if text[0] == str(PRE):
                num_chosen += 1
                num_spm += text[1] == str(SUF) and text[2] != str(MID)  # not an empty prefix and suffix
                if text[1] != str(SUF):
                    lengths[0, text.index(str(SUF)) - 1] += 1
    assert documents == 6000
    assert abs(num_chosen / documents - 0.3) < 4 * (0.3 * 0.7 / documents) ** 0.5
    # only its frequency distinguishes an SPM from a PSM with an empty prefix: P(prefix empty) = 1 - (9/10)^2 = 0.19
    spm_share = 0.25 * (1 - 0.01) + 0.75 * (0.19 - 0.01)
    assert abs(num_spm / num_chosen - spm_share) < 4 * (spm_share * (1 - spm_share) / num_chosen) ** 0.5
    # the prefix is the smaller of two uniform cuts in 0..9: P(prefix = k) = (19 - 2 k) / 100
    expected = num_chosen * 0.75 * (19 - 2 * np.arange(10)) / 100
    assert ((lengths[0, 1:] - expected[1:]) ** 2 / expected[1:]).sum() < 28  # 9 cells: 0.1 % of fair draws exceed 27.9


def test_fim_fragment_rate() -> None:
    tokens = np.array(([*[10] * 5, SPLIT] * 8 + [EOD]) * 5)
    num_without, counts = 0, []
    for key in range(200):
        out, _ = rearrange_documents(tokens, fold("fragments", key), fim(0.5, 0, split=SPLIT, fragment_rate=0.25))
        for text in np.split(out, np.flatnonzero(out == EOD))[:5]:
            count = int((text == PRE).sum())
            num_without += count == 0
            counts.append(count)
    assert abs(np.mean(counts) / 8 - 0.5 * 0.25) < 0.01  # a document is chosen, then each of its fragments
    expected = 0.5 + 0.5 * 0.75**8
    assert abs(num_without / len(counts) - expected) < 4 * (expected * (1 - expected) / len(counts)) ** 0.5


@pytest.mark.parametrize(
    ("change", "message"), [({"middle": PRE}, "fim_middle_token and fim_prefix_token are both id 0")]
)
def test_fim_contradictory_options_are_refused(change: dict[str, float | str], message: str) -> None:
    values = {"rate": 0.5, "spm_rate": 0.5, "prefix": PRE, "middle": MID, "suffix": SUF, "pad": PAD, "eod": EOD}
    with pytest.raises(DataError, match=message):
        FimOptions(**{**values, **change})  # type: ignore[arg-type]


Codecs = dict[str, tuple[Tokenizer, FimOptions]]
# for cuts between characters, with real tokenizers
LINES = [f"def function_{i}(x):\n    return x + {i * i}  # ünïcode 漢字 {i}\n" for i in range(200)]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Codecs:
    """Return a byte-level BPE, and a SentencePiece model that puts a space before the first word."""
    out = tmp_path_factory.mktemp("codecs")
    names = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    bpe = byte_level_bpe(LINES, 420, names)
    options = dict(model_type="bpe", vocab_size=420, hard_vocab_limit=False, byte_fallback=True, minloglevel=2)
    options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["\n"])
    options |= dict(sentence_iterator=iter(line.strip() for line in LINES), model_prefix=str(out / "spm"))
    sentencepiece.SentencePieceTrainer.train(**options)
    spm = SentencePieceTokenizer(out / "spm.model")
    v = spm.vocab_size
    return {
        "bpe": (HuggingFaceTokenizer("bpe", "test", bpe, 0, []), FimOptions(1, 0.5, 1, 2, 3, 4, 0)),
        "spm": (spm, FimOptions(1, 0.5, v, v + 1, v + 2, v + 3, spm.eod)),
    }


def texts(ids: list[int], codec: Tokenizer, options: FimOptions) -> list[str]:
    """Return the original texts of the documents in `ids`.

    The ids of a document are decoded together, so that a lost space shows.
    """
    names = {options.prefix: PRE, options.middle: MID, options.suffix: SUF}
    shifted = [names.get(i, i + 6 if i != options.eod else EOD) for i in ids]
    out: list[list[int]] = [[]]
    for i in undo(shifted):
        out.append([]) if i == EOD else out[-1].append(i - 6)
    return [codec.decode(part) for part in out]


@pytest.mark.parametrize("kind", ["bpe", "spm"])
@settings(max_examples=80)
@given(
    documents=st.lists(st.one_of(st.text(max_size=25), st.sampled_from(LINES)), min_size=1, max_size=4),
    key=st.integers(0, 2**64 - 1),
)
def test_fim_keeps_text_between_characters(kind: str, codecs: Codecs, documents: list[str], key: int) -> None:
    codec, options = codecs[kind]
    ids = [codec.encode(text) for text in documents]
    assume(not any(options.eod in part for part in ids))  # no text spells the end-of-document token
    tokens = np.array(sum(([*part, options.eod] for part in ids), [])[:-1], np.int64)
    out, _ = rearrange_documents(tokens, key, options, codec)
    assert texts(out.tolist(), codec, options) == [codec.decode(part) for part in ids]
    assert int((out == options.prefix).sum()) == sum(bool(part) for part in ids)


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_fim_cuts_fall_within_tokens(kind: str, codecs: Codecs) -> None:
    codec, options = codecs[kind]
    ids = np.array(codec.encode("".join(LINES[:3])), np.int64)
    boundaries = {len(codec.decode(ids[:k].tolist())) for k in range(len(ids) + 1)}
    num_within, num_reencoded = 0, 0
    for key in range(60):
        out, source = rearrange_documents(ids, fold("within", key), options, codec)
        num_reencoded += bool((source == REENCODED).all())
        prefix = out.tolist()[1 : out.tolist().index(options.suffix)]
        num_within += len(codec.decode(prefix)) not in boundaries
    assert num_reencoded == 60  # plain text can always be encoded again
    assert num_within > 10


def test_fim_cuts_between_tokens_within_a_character(codecs: Codecs) -> None:
    codec, options = codecs["bpe"]
    ids = np.array(codec.encode("🙂 and so on")[1:], np.int64)  # starts within the bytes of the first character
    out, source = rearrange_documents(ids, 3, options, codec)
    assert sorted(source[source != REENCODED].tolist()) == list(range(len(ids)))
    assert len(out) == len(ids) + 3


def test_fim_text_of_a_sentinel_stays_text(codecs: Codecs) -> None:
    codec, options = codecs["bpe"]
    assert codec.encode("<fim_middle>") == [options.middle]
    tokens = np.array(codec.encode("say <fim_mid") + codec.encode("dle> here"), np.int64)
    for key in range(30):
        out, _ = rearrange_documents(tokens, fold("spelled", key), options, codec)
        assert int((out == options.middle).sum()) == 1
        assert texts(out.tolist(), codec, options) == ["say <fim_middle> here"]


def test_fim_without_prefix_leaves_the_text_unchanged(codecs: Codecs) -> None:
    codec, options = codecs["bpe"]
    first, second = (codec.encode(text) for text in ("# licence text", "x = 1"))
    tokens = np.array([*first, options.eod, *second], np.int64)
    for characters in (False, True):
        no_prefix_options = FimOptions(1, 0, 1, 2, 3, 4, 0, no_prefix="# lic", characters=characters)
        out, _ = rearrange_documents(tokens, 1, no_prefix_options, codec)
        assert out[: len(first) + 1].tolist() == [*first, options.eod] and out[len(first) + 1] == options.prefix


def test_fim_fills_a_shorter_sample(codecs: Codecs) -> None:
    codec, options = codecs["bpe"]
    letters = np.array([codec.encode(letter)[0] for letter in "function_ return function_ return"], np.int64)
    out, source = apply_fim(letters, 5, options, codec)  # the encoded text takes fewer tokens than letters
    assert len(out) == len(letters) and out[-1] == options.pad and source[-1] == REENCODED
    untrimmed, _ = rearrange_documents(letters, 5, options, codec)
    assert out[: len(untrimmed)].tolist() == untrimmed.tolist() and set(out[len(untrimmed) :].tolist()) == {options.pad}


@pytest.fixture
def plain(tmp_path: Path) -> GPTDataset:
    texts = [[*range(10 + 20 * d, 10 + 20 * d + d % 13), EOD] for d in range(40)]
    return GPTDataset(IndexedDataset(write_documents(tmp_path / "a", texts, np.int32)), range(40), 32, 1)


def test_fim_samples_are_pure_and_keep_their_length(plain: GPTDataset) -> None:
    dataset = FimDataset(plain, fim(0.5), 7)
    samples = dataset.samples(np.arange(40))
    assert samples.shape == (40, 33) and samples.dtype == np.int64 and dataset.seq_length == 32
    for i in np.random.default_rng(0).permutation(40).tolist():
        assert np.array_equal(FimDataset(plain, fim(0.5), 7).samples(np.array([i]))[0], samples[i])
    assert not np.array_equal(samples, FimDataset(plain, fim(0.5), 8).samples(np.arange(40)))
    assert np.array_equal(FimDataset(plain, fim(0), 7).samples(np.arange(40)), plain.samples(np.arange(40)))
    repeated = dataset.samples(np.array([5, 5 + 10**6, 5]))
    assert np.array_equal(repeated[0], repeated[2]) and not np.array_equal(repeated[0], repeated[1])


def test_fim_samples_never_change() -> None:
    """A run resumed with another version needs the same samples, so these numbers are part of the format."""
    keys = [fold(1234, "fim", n) for n in (0, 5)]
    actual = [apply_fim(np.arange(10, 26), key, fim(1, rate))[0].tolist() for key in keys for rate in (0, 1)]
    # with an empty prefix the two forms are equal
    assert actual[:2] == [[PRE, SUF, *range(20, 26), MID, *range(10, 17)]] * 2
    assert actual[2:] == [[PRE, *range(10, 17), SUF, 25, MID, *range(17, 22)], [PRE, SUF, 25, MID, *range(10, 22)]]


def test_fim_where_names_the_document_of_a_moved_token(plain: GPTDataset) -> None:
    dataset = FimDataset(plain, fim(1), 7)
    moved = 0
    for i in range(10):
        for position, token in enumerate(dataset.samples(np.array([i]))[0].tolist()):
            text = dataset.locate(i, position)
            if token in (PRE, MID, SUF):
                assert text == f"fill-in-the-middle of sample {i}, position {position}"
            elif token != EOD:
                _, document, token_position = text.split(", ")
                assert token == 10 + 20 * int(document.split()[1]) + int(token_position.split()[1])
                moved += text != plain.locate(i, position)
    assert moved > 50


def test_fim_feeds_batches(plain: GPTDataset) -> None:
    dataset = FimDataset(plain, fim(1, 0.25), 7)
    assert Batches(dataset, 2, 0, 1, 900).at(0, 4)[0].tokens.shape == (2, 33)
    assert dataset.describe(3) == plain.describe(3) + "\nfill-in-the-middle: rate 1, SPM 0.25, cut between tokens"
    assert FimDataset(BlendedDataset([plain, plain], [1, 1]), fim(1), 1).samples(np.array([0]))[0].shape == (33,)
