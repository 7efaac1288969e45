"""What stands beside a tokenizer.json: tokens and settings, read in the order and precedence of transformers 5.

    tokenizer_config.json      added_tokens_decoder: id -> token; eos_token and other named tokens; extra special tokens
    special_tokens_map.json    without an added_tokens_decoder: named tokens, before those of tokenizer_config.json
    added_tokens.json          without an added_tokens_decoder: token -> id

All that transformers would add to a tokenizer.json is added by the same library, so that such a token in a text becomes
its one id. What is there and cannot be taken like that is refused with the file's name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import read

Json = dict[str, Any]
CONFIG, SPECIAL_MAP, ADDED, MODEL = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
REMEDY = "correct it, or write the tokenizer anew with AutoTokenizer's save_pretrained"
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"


@dataclass(frozen=True)
class Declared:
    """`token`: an AddedToken of the library. `number`: its id where `file` says one."""

    token: Any
    number: int | None
    file: Path


@dataclass(frozen=True)
class Settings:
    """`tokens`: in the order in which they get ids. `eos`: the text of the token that ends a document. `splits`: a
    special token that a text writes out is cut into pieces. `prefix_space`: whether a text begins with a space; None:
    not said."""

    tokens: Sequence[Declared] = ()
    eos: str | None = None
    splits: bool = False
    prefix_space: bool | None = None

    def declares(self, content: str) -> bool:
        """Whether a file gives the token an id."""
        return any(one.number is not None and one.token.content == content for one in self.tokens)


@dataclass
class _Files:
    """What is read so far. `named`: eos_token and the like; `extra`: special tokens without names, None if there is no
    such key; `declared`: those with ids."""

    named: dict[str, Any] = field(default_factory=dict)
    extra: list[Any] | None = None
    declared: dict[int, Declared] = field(default_factory=dict)


def read_settings(folder: Path, own_tokens: Sequence[Json] = ()) -> Settings:
    """`own_tokens`: added_tokens of the tokenizer.json in `folder`. Raises DataError."""
    config, path = _object(folder / CONFIG), folder / CONFIG
    files = _Files()
    _add_named(files, config, path)
    if _EXTRA in config or _OLDER_EXTRA in config:  # an empty one also takes the place of special_tokens_map.json's
        _add_extra(files, config.get(_EXTRA) or config.get(_OLDER_EXTRA) or [], path)
    if "added_tokens_decoder" in config:
        for number, value in _table(config["added_tokens_decoder"], path).items():
            _declare(files, _id(number, path), _token(value, path), path)
    else:
        _add_older(files, folder, own_tokens)
    space, eos = config.get("add_prefix_space"), files.named.get("eos_token")
    return Settings(
        _in_order(files, folder, own_tokens),
        None if eos is None else eos.content,
        config.get("split_special_tokens") is True,
        space if isinstance(space, bool) else None,
    )


def _add_older(files: _Files, folder: Path, own_tokens: Sequence[Json]) -> None:
    """special_tokens_map.json, added_tokens.json and the tokenizer.json's own tokens, which an added_tokens_decoder in
    tokenizer_config.json replaces."""
    path = folder / SPECIAL_MAP
    special_map = _object(path)
    _add_named(files, special_map, path, special=True)
    if _EXTRA in special_map:
        _add_extra(files, special_map[_EXTRA], path)
    elif files.extra is None and _OLDER_EXTRA in special_map:
        _add_extra(files, special_map[_OLDER_EXTRA], path)
    special = {files.named[key].content for key in NAMED if key in files.named}
    special |= {token.content for token in files.extra or ()}
    path = folder / ADDED
    for content, number in _object(path).items():
        flags = {"normalized": content not in special, "special": content in special}
        _declare(files, _id(number, path), _token({"content": content, **flags}, path), path)
    for record in own_tokens:
        _declare(files, record["id"], _token(record, folder / MODEL), folder / MODEL)


def _add_named(files: _Files, table: Json, path: Path, special: bool = False) -> None:
    """Keys as eos_token. `special`: where a record does not say it."""
    for key, value in table.items():
        if key.endswith("_token") and isinstance(value, str | dict):
            flag = {"special": True} if special and isinstance(value, dict) else {}
            files.named[key] = _token({**value, **flag} if isinstance(value, dict) else value, path)


def _add_extra(files: _Files, value: Any, path: Path) -> None:
    """Special tokens without a name: a list, or a table of tokens by other names."""
    if isinstance(value, dict):
        files.named |= {key: _token(token, path) for key, token in value.items()}
        return
    if not isinstance(value, list):
        raise DataError(f"{path}: {_EXTRA} is neither a list of tokens nor a table; correct it")
    have = {token.content for token in files.extra or ()}
    more = [_token(token, path) for token in value]
    files.extra = [*(files.extra or ()), *(token for token in more if token.content not in have)]


def _declare(files: _Files, number: int, token: Any, path: Path) -> None:
    files.declared[number] = Declared(token, number, path)


def _in_order(files: _Files, folder: Path, own_tokens: Sequence[Json]) -> list[Declared]:
    """Those with ids in the order of these, then the named ones, then the others, without repetitions. Raises DataError
    for a token without an id that is described twice, in different ways."""
    named = {token.content for token in files.named.values()}
    result = [files.declared[number] for number in sorted(files.declared)]
    have_ids = {record["content"] for record in own_tokens} | {one.token.content for one in result}
    names = [key for key in NAMED if key in files.named] + [key for key in files.named if key not in NAMED]
    others = dict[str, Any]()
    for token in (*(files.named[name] for name in names), *(files.extra or ())):
        first = others.setdefault(token.content, token)
        if repr(first) != repr(token) and token.content not in have_ids:
            raise DataError(f"{folder}: two descriptions of the token {token.content!r} differ; {REMEDY}")
    result += [Declared(token, None, folder / CONFIG) for token in others.values() if token.content not in have_ids]
    for one in result:
        one.token.special = one.token.special or one.token.content in named
    return result


def _token(value: Any, path: Path) -> Any:
    """A token that is written as its text or as a record. Raises DataError."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise DataError(f"{path}: {str(value)[:60]} is not a token, a text or a record with content; correct it")
    return AddedToken(content, **{flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)})


def _id(value: Any, path: Path) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, bool | float) or number < 0:
        raise DataError(f"{path}: {str(value)[:60]} is not the id of a token; correct it")
    return number


def _table(value: Any, path: Path) -> Json:
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object where one is needed; correct it")
    return value


def _object(path: Path) -> Json:
    """{} where there is no such file. Raises DataError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON object: {error}") from error
    return _table(value, path)


def add_tokens(model: Any, settings: Settings) -> bool:
    """Add the tokens to a tokenizers.Tokenizer; returns whether they change it. Raises DataError where one has another
    id than its file says."""
    before = state(model)
    model.add_tokens([one.token for one in settings.tokens])
    model.encode_special_tokens = settings.splits
    for one in settings.tokens:
        found = model.token_to_id(one.token.content)
        if one.number not in (None, found):
            wrong = f"{one.token.content!r} is token {one.number} there, but {found} in the tokenizer"
            raise DataError(f"{one.file}: {wrong}; {REMEDY}")
    return settings.splits or state(model) != before


def state(model: Any) -> Mapping[int, str]:
    """The added tokens of a tokenizers.Tokenizer with all that is said of them, by id."""
    return {number: repr(token) for number, token in model.get_added_tokens_decoder().items()}


def begins_with_space(model: Json) -> bool | None:
    """Whether the tokenizer of a tokenizer.json puts a space before a text; None where it has no such step."""
    steps = [*_steps(model.get("normalizer"), "normalizers"), *_steps(model.get("pre_tokenizer"), "pretokenizers")]
    answers = []
    for step in steps:
        match step.get("type"):
            case "Prepend":
                answers.append(True)
            case "ByteLevel":
                answers.append(bool(step.get("add_prefix_space")))
            case "Metaspace":
                answers.append(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))
    return any(answers) if answers else None


def _steps(part: Any, key: str) -> list[Json]:
    if not isinstance(part, dict):
        return []
    inner = part.get(key)
    return [step for one in inner for step in _steps(one, key)] if isinstance(inner, list) else [part]
