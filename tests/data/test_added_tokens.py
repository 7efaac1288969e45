"""Tokens and settings next to a tokenizer.json: the ids equal AutoTokenizer's, or an error names the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_files import byte_level_bpe

from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import find_tokenizer_in
from tools import train_tokenizer
from tools.preprocess.fast_tokenizer import accelerate

Json = dict[str, Any]
CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEXTS = [
    "",
    "some words <tool> and<tool>more",
    "  <tool>  <|im_end|>\n\n<pad>",
    "</s> <s></s> text</s>",
    "<|end|><|im_end|> w<x> [PAD]",
    "<tool",
]
LINES = [f"some words and more text, number {i} </s> <s>" for i in range(60)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a byte-level BPE of 300 tokens.

    <|end|> is an added token; <s> and </s> are plain entries of the vocabulary.
    """
    directory = tmp_path_factory.mktemp("tokenizer")
    model = byte_level_bpe(LINES, 300)
    content = json.loads(model.to_str())
    vocab = content["model"]["vocab"]
    for token in ("<s>", "</s>"):
        vocab[token] = max(vocab.values()) + 1
    token_id = max(vocab.values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": token_id, "content": "<|end|>", **flags})
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


def size(base: Path) -> int:
    content = json.loads((base / "tokenizer.json").read_text())
    return max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])) + 1


def write_files(base: Path, directory: Path, files: Json) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def assert_ids_equal_transformers(directory: Path) -> None:
    """Assert that every text has the ids of AutoTokenizer, and that the end of a document is its eos_token."""
    from transformers import AutoTokenizer

    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(directory))
    auto_tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert tokenizer.encode(text) == auto_tokenizer(text).input_ids, text
    assert tokenizer.vocab_size == max(auto_tokenizer.get_vocab().values()) + 1
    if auto_tokenizer.eos_token is not None:
        assert tokenizer.eod == auto_tokenizer.eos_token_id


def config(**values: Any) -> Json:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **values}


def record(content: str, **flags: bool) -> Json:
    defaults = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **defaults, **flags}


def cases(first_id: int) -> dict[str, Json]:
    """Return files by case; `n` is the first free id."""
    tools = {str(first_id): record("<tool>"), str(first_id + 1): record("<|im_end|>")}
    return {
        "nothing": {},
        "added_tokens_decoder": {CONFIG: config(added_tokens_decoder=tools)},
        "and as eos_token": {CONFIG: config(added_tokens_decoder=tools, eos_token="<|im_end|>")},
        "text around it taken away": {
            CONFIG: config(added_tokens_decoder={str(first_id): record("<tool>", lstrip=True, rstrip=True)})
        },
        "a token that is not special": {
            CONFIG: config(added_tokens_decoder={str(first_id): record("<tool>", special=False, normalized=True)})
        },
        "added_tokens.json": {CONFIG: config(), ADDED: {"<tool>": first_id, "<|im_end|>": first_id + 1}},
        "added_tokens.json, and as eos_token": {
            CONFIG: config(eos_token="<|im_end|>"),
            ADDED: {"<|im_end|>": first_id},
        },
        "both, the older one is not read": {
            CONFIG: config(added_tokens_decoder={str(first_id): record("<tool>")}),
            ADDED: {"<|im_end|>": first_id + 1},
        },
        "special_tokens_map.json before tokenizer_config.json": {CONFIG: config(), SPECIAL_MAP: {"eos_token": "</s>"}},
        "special_tokens_map.json with a record": {CONFIG: config(), SPECIAL_MAP: {"eos_token": record("</s>")}},
        "special_tokens_map.json beside an added_tokens_decoder": {
            CONFIG: config(added_tokens_decoder=tools),
            SPECIAL_MAP: {"eos_token": "</s>"},
        },
        "a named token that is an entry of the vocabulary": {CONFIG: config(eos_token="</s>", bos_token="<s>")},
        "a named token that is nowhere": {CONFIG: config(pad_token="<pad>")},
        "extra special tokens": {CONFIG: config(extra_special_tokens=["<tool>", "<x>"])},
        "additional special tokens": {CONFIG: config(additional_special_tokens=["<tool>", "<x>"])},
        "extra special tokens with names": {CONFIG: config(extra_special_tokens={"tool_token": "<tool>"})},
        "a name of its own": {CONFIG: config(tool_token="<tool>")},
        "split_special_tokens": {CONFIG: config(split_special_tokens=True, added_tokens_decoder=tools)},
        "add_prefix_space, as the tokenizer.json has it": {CONFIG: config(add_prefix_space=False)},
        "add_bos_token": {CONFIG: config(add_bos_token=True, bos_token="<s>", add_eos_token=False)},
    }


@pytest.mark.parametrize("case", cases(0))
def test_added_token_ids_equal_transformers(base: Path, case: str, tmp_path: Path) -> None:
    assert_ids_equal_transformers(write_files(base, tmp_path / "here", cases(size(base))[case]))


REFUSED: dict[str, tuple[Json, str]] = {  # case -> (files, error message)
    "another id": (
        {CONFIG: config(added_tokens_decoder={"7": record("<tool>")})},
        f"{CONFIG}: '<tool>' is token 7 there",
    ),
    "a hole": ({CONFIG: config(), ADDED: {"<tool>": 1000}}, f"{ADDED}: '<tool>' is token 1000 there"),
    "a space": ({CONFIG: config(add_prefix_space=True)}, f"{CONFIG}: has add_prefix_space=true"),
    "eos that is nowhere": ({CONFIG: config(eos_token="<missing>")}, "no end-of-document token among <missing>"),
    "no id": ({CONFIG: config(added_tokens_decoder={"x": record("<tool>")})}, f"{CONFIG}: x is not the id of a token"),
    "no token": ({CONFIG: config(added_tokens_decoder={"1": 5})}, f"{CONFIG}: 5 is not a token"),
    "no content": ({CONFIG: config(), SPECIAL_MAP: {"pad_token": {}}}, f"{SPECIAL_MAP}: .* is not a token"),
    "a list": ({CONFIG: config(), ADDED: ["<tool>"]}, f"{ADDED}: not a JSON object"),
    "extra": ({CONFIG: config(extra_special_tokens="<tool>")}, f"{CONFIG}: extra_special_tokens is neither"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_change_ids_are_refused(base: Path, case: str, tmp_path: Path) -> None:
    files, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        build_tokenizer("HuggingFaceTokenizer", str(write_files(base, tmp_path / "here", files)))


WORDS = st.sampled_from(["<tool>", "<|im_end|>", "<pad>", "</s>", "<s>", "<|end|>", "<x>", "some"])
FLAGS = st.fixed_dictionaries({}, optional=dict.fromkeys(("lstrip", "rstrip", "normalized", "special"), st.booleans()))
RECORDS = st.builds(lambda content, flags: {**record(content), **flags}, WORDS, FLAGS)
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
ANY = st.one_of(WORDS, st.none())
FILES = {
    CONFIG: st.fixed_dictionaries(
        {"tokenizer_class": st.just("PreTrainedTokenizerFast")},
        optional={
            **dict.fromkeys(NAMES, ANY),
            "added_tokens_decoder": st.lists(RECORDS, max_size=4),
            "extra_special_tokens": st.lists(WORDS, max_size=2),
            "additional_special_tokens": st.lists(WORDS, max_size=2),
            "tool_token": WORDS,
            "split_special_tokens": st.booleans(),
        },
    ),
    SPECIAL_MAP: st.fixed_dictionaries(
        {}, optional={**dict.fromkeys(NAMES, st.one_of(WORDS, RECORDS)), "additional_special_tokens": st.lists(WORDS)}
    ),
    ADDED: st.lists(WORDS, max_size=3, unique=True),
}


def ids_of(base: Path, contents: list[str]) -> dict[str, int]:
    """Return for each token the id that it has, or the next free one."""
    from tokenizers import Tokenizer

    model, result = Tokenizer.from_file(str(base / "tokenizer.json")), dict[str, int]()
    for content in contents:
        model.add_tokens([content])
        token_id = model.token_to_id(content)
        assert token_id is not None
        result[content] = token_id
    return result


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.fixed_dictionaries({}, optional=FILES))
def test_random_tokenizer_files_equal_transformers_or_are_refused(base: Path, files: Json, tmp_path: Path) -> None:
    files = json.loads(json.dumps(files))
    if ADDED in files:
        files[ADDED] = ids_of(base, files[ADDED])
    records = files.get(CONFIG, {}).get("added_tokens_decoder")
    if records is not None:
        ids = ids_of(base, [token["content"] for token in records])
        files[CONFIG]["added_tokens_decoder"] = {str(ids[token["content"]]): token for token in records}
    files.setdefault(CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    directory = write_files(base, tmp_path / "here", files)
    try:
        build_tokenizer("HuggingFaceTokenizer", str(directory))
    except DataError as error:
        assert "token" in str(error)
        return
    assert_ids_equal_transformers(directory)


def test_fingerprint_changes_only_with_the_tokens(base: Path, tmp_path: Path) -> None:
    def fingerprint(files: Json) -> str:
        return build_tokenizer("HuggingFaceTokenizer", str(write_files(base, tmp_path / "here", files))).fingerprint

    plain, first_id = fingerprint({CONFIG: config()}), size(base)
    added_tokens = json.loads((base / "tokenizer.json").read_text())["added_tokens"]
    own_tokens = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in added_tokens}
    assert (
        fingerprint({CONFIG: config(added_tokens_decoder=own_tokens)}) == plain
    )  # these tokens are in the tokenizer.json already
    other_files = [{CONFIG: config(added_tokens_decoder={**own_tokens, str(first_id): record("<tool>")})}]
    other_files += [{CONFIG: config(split_special_tokens=True)}, {CONFIG: config(), ADDED: {"<x>": first_id}}]
    assert len({plain, *map(fingerprint, other_files)}) == 4


def test_fast_engine_is_not_used_with_cut_special_tokens(base: Path, tmp_path: Path) -> None:
    directory = write_files(base, tmp_path / "here", {CONFIG: config(split_special_tokens=True)})
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(directory))
    assert accelerate(tokenizer) is tokenizer


def write_older_format(kind: str, directory: Path) -> Path:
    """Write a tokenizer in one of the formats before tokenizer.json, and return its directory."""
    directory.mkdir()
    if kind == "GPT2BPETokenizer":
        byte_level_bpe(LINES, 300).model.save(str(directory))
    else:
        train_tokenizer.train_sentencepiece(train_tokenizer.split_pieces(LINES), str(directory / "tokenizer"), 330, 1)
    return directory


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "Llama2Tokenizer"])
def test_tokens_missing_in_an_older_format_are_refused(kind: str, tmp_path: Path) -> None:
    directory = write_older_format(kind, tmp_path / "model")
    options = find_tokenizer_in(directory)
    assert options["tokenizer_type"] == kind
    first_id = build_tokenizer(**options).vocab_size
    (directory / ADDED).write_text(json.dumps({"<tool>": first_id}))
    with pytest.raises(DataError, match=f"{ADDED}: the token '<tool>', which .* lacks; write a tokenizer.json"):
        find_tokenizer_in(directory)
    (directory / CONFIG).write_text(json.dumps({"added_tokens_decoder": {str(first_id): record("<tool>")}}))
    with pytest.raises(DataError, match=f"{CONFIG}: the token '<tool>', which .* lacks"):
        find_tokenizer_in(directory)
    for key in ("split_special_tokens", "add_prefix_space"):
        (directory / CONFIG).write_text(json.dumps({"added_tokens_decoder": {}, key: True}))
        with pytest.raises(DataError, match=f"{CONFIG}: .*{key}=true"):
            find_tokenizer_in(directory)
    (directory / CONFIG).write_text(json.dumps({"added_tokens_decoder": {}, "add_prefix_space": False}))
    assert find_tokenizer_in(directory) == options
