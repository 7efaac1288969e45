"""Tokens and settings beside a tokenizer.json: ids as those of AutoTokenizer, or a refusal that names the file."""

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
    """A byte-level BPE of 300 tokens with <|end|> as an added one; <s> and </s> are plain entries of its vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = byte_level_bpe(LINES, 300)
    described = json.loads(model.to_str())
    vocab = described["model"]["vocab"]
    for token in ("<s>", "</s>"):
        vocab[token] = max(vocab.values()) + 1
    number = max(vocab.values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"].append({"id": number, "content": "<|end|>", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def size(base: Path) -> int:
    described = json.loads((base / "tokenizer.json").read_text())
    return max(*described["model"]["vocab"].values(), *(token["id"] for token in described["added_tokens"])) + 1


def folder_of(base: Path, target: Path, files: Json) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    for name, content in files.items():
        (target / name).write_text(json.dumps(content))
    return target


def same(folder: Path) -> None:
    """Every text has the ids of AutoTokenizer, and the end of a document is its eos_token."""
    from transformers import AutoTokenizer

    ours, theirs = build_tokenizer("HuggingFaceTokenizer", str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    if theirs.eos_token is not None:
        assert ours.eod == theirs.eos_token_id


def config(**values: Any) -> Json:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **values}


def record(content: str, **flags: bool) -> Json:
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


def cases(n: int) -> dict[str, Json]:
    """`n`: the first free id."""
    tools = {str(n): record("<tool>"), str(n + 1): record("<|im_end|>")}
    return {
        "nothing": {},
        "added_tokens_decoder": {CONFIG: config(added_tokens_decoder=tools)},
        "and as eos_token": {CONFIG: config(added_tokens_decoder=tools, eos_token="<|im_end|>")},
        "text around it taken away": {
            CONFIG: config(added_tokens_decoder={str(n): record("<tool>", lstrip=True, rstrip=True)})
        },
        "a token that is not special": {
            CONFIG: config(added_tokens_decoder={str(n): record("<tool>", special=False, normalized=True)})
        },
        "added_tokens.json": {CONFIG: config(), ADDED: {"<tool>": n, "<|im_end|>": n + 1}},
        "added_tokens.json, and as eos_token": {CONFIG: config(eos_token="<|im_end|>"), ADDED: {"<|im_end|>": n}},
        "both, the older one is not read": {
            CONFIG: config(added_tokens_decoder={str(n): record("<tool>")}),
            ADDED: {"<|im_end|>": n + 1},
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
    same(folder_of(base, tmp_path / "here", cases(size(base))[case]))


REFUSED: dict[str, tuple[Json, str]] = {  # files -> what is said
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
    files, reason = REFUSED[case]
    with pytest.raises(DataError, match=reason):
        build_tokenizer("HuggingFaceTokenizer", str(folder_of(base, tmp_path / "here", files)))


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


def numbered(base: Path, contents: list[str]) -> dict[str, int]:
    """Token -> the id that it has, or the next free one."""
    from tokenizers import Tokenizer

    model, result = Tokenizer.from_file(str(base / "tokenizer.json")), dict[str, int]()
    for content in contents:
        model.add_tokens([content])
        number = model.token_to_id(content)
        assert number is not None
        result[content] = number
    return result


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.fixed_dictionaries({}, optional=FILES))
def test_random_tokenizer_files_equal_transformers_or_are_refused(base: Path, files: Json, tmp_path: Path) -> None:
    files = json.loads(json.dumps(files))
    if ADDED in files:
        files[ADDED] = numbered(base, files[ADDED])
    records = files.get(CONFIG, {}).get("added_tokens_decoder")
    if records is not None:
        numbers = numbered(base, [one["content"] for one in records])
        files[CONFIG]["added_tokens_decoder"] = {str(numbers[one["content"]]): one for one in records}
    files.setdefault(CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    folder = folder_of(base, tmp_path / "here", files)
    try:
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    except DataError as error:
        assert "token" in str(error)
        return
    same(folder)


def test_fingerprint_changes_only_with_the_tokens(base: Path, tmp_path: Path) -> None:
    def fingerprint(files: Json) -> str:
        return build_tokenizer("HuggingFaceTokenizer", str(folder_of(base, tmp_path / "here", files))).fingerprint

    plain, n = fingerprint({CONFIG: config()}), size(base)
    described = json.loads((base / "tokenizer.json").read_text())["added_tokens"]
    own = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in described}
    assert fingerprint({CONFIG: config(added_tokens_decoder=own)}) == plain  # all is in the tokenizer.json already
    others = [{CONFIG: config(added_tokens_decoder={**own, str(n): record("<tool>")})}]
    others += [{CONFIG: config(split_special_tokens=True)}, {CONFIG: config(), ADDED: {"<x>": n}}]
    assert len({plain, *map(fingerprint, others)}) == 4


def test_fast_engine_is_not_used_with_cut_special_tokens(base: Path, tmp_path: Path) -> None:
    folder = folder_of(base, tmp_path / "here", {CONFIG: config(split_special_tokens=True)})
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert accelerate(tokenizer) is tokenizer


def slow_folder(kind: str, folder: Path) -> Path:
    """A model directory of the formats before tokenizer.json."""
    folder.mkdir()
    if kind == "GPT2BPETokenizer":
        byte_level_bpe(LINES, 300).model.save(str(folder))
    else:
        train_tokenizer.train_sentencepiece(train_tokenizer.split_pieces(LINES), str(folder / "tokenizer"), 330, 1)
    return folder


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "Llama2Tokenizer"])
def test_tokens_missing_in_an_older_format_are_refused(kind: str, tmp_path: Path) -> None:
    folder = slow_folder(kind, tmp_path / "model")
    options = find_tokenizer_in(folder)
    assert options["tokenizer_type"] == kind
    n = build_tokenizer(**options).vocab_size
    (folder / ADDED).write_text(json.dumps({"<tool>": n}))
    with pytest.raises(DataError, match=f"{ADDED}: the token '<tool>', which .* lacks; write a tokenizer.json"):
        find_tokenizer_in(folder)
    (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": {str(n): record("<tool>")}}))
    with pytest.raises(DataError, match=f"{CONFIG}: the token '<tool>', which .* lacks"):
        find_tokenizer_in(folder)
    for key in ("split_special_tokens", "add_prefix_space"):
        (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": {}, key: True}))
        with pytest.raises(DataError, match=f"{CONFIG}: .*{key}=true"):
            find_tokenizer_in(folder)
    (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": {}, "add_prefix_space": False}))
    assert find_tokenizer_in(folder) == options
