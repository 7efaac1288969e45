"""The files next to a tokenizer.json: tokens and settings, read in the order and precedence of transformers 5.

    tokenizer_config.json      added_tokens_decoder: id -> token; eos_token and other named tokens; extra special tokens
    special_tokens_map.json    without an added_tokens_decoder: named tokens, before those in tokenizer_config.json
    added_tokens.json          without an added_tokens_decoder: token -> id

Everything that transformers would add to a tokenizer.json is added by the same library, so that such a token in a text
becomes its one id. Content that cannot be used like this is refused with the file's name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import read_tokenizer_file

Json = dict[str, Any]
CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
MODEL = "tokenizer.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
REMEDY = "correct it, or write the tokenizer again with AutoTokenizer's save_pretrained"
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"


@dataclass(frozen=True)
class DeclaredToken:
    """A token that a file declares.

    added_token  an AddedToken of the library
    token_id     its id if `file` gives one
    file         the file that declares it
    """

    added_token: Any
    token_id: int | None
    file: Path


@dataclass(frozen=True)
class TokenizerSettings:
    """The tokens and settings of a tokenizer directory.

    tokens          in the order in which they get ids
    eos             the text of the token that ends a document
    splits_special  True if a special token that is written out in a text is cut into pieces
    prefix_space    whether a space is put before a text; None: not specified
    """

    tokens: Sequence[DeclaredToken] = ()
    eos: str | None = None
    splits_special: bool = False
    prefix_space: bool | None = None

    def declares(self, content: str) -> bool:
        """Return True if a file gives the token an id."""
        return any(
            declared.token_id is not None and declared.added_token.content == content for declared in self.tokens
        )


@dataclass
class _CollectedTokens:
    """The tokens that have been read so far.

    named     eos_token and other tokens with a name
    extra     special tokens without names; None if there is no such key
    declared  tokens with ids, by id
    """

    named: dict[str, Any] = field(default_factory=dict)
    extra: list[Any] | None = None
    declared: dict[int, DeclaredToken] = field(default_factory=dict)


def read_settings(directory: Path, own_tokens: Sequence[Json] = ()) -> TokenizerSettings:
    """Read the tokens and settings of a tokenizer directory.

    `own_tokens` is added_tokens of the tokenizer.json in `directory`. Raises DataError.
    """
    path = directory / CONFIG
    config = _read_json_object(path)
    collected = _CollectedTokens()
    _add_named(collected, config, path)
    if _EXTRA in config or _OLDER_EXTRA in config:  # an empty one also replaces special_tokens_map.json's
        _add_extra(collected, config.get(_EXTRA) or config.get(_OLDER_EXTRA) or [], path)
    if "added_tokens_decoder" in config:
        for number, value in _require_object(config["added_tokens_decoder"], path).items():
            _declare(collected, _parse_token_id(number, path), _parse_token(value, path), path)
    else:
        _add_older(collected, directory, own_tokens)
    prefix_space, eos = config.get("add_prefix_space"), collected.named.get("eos_token")
    return TokenizerSettings(
        _ordered_tokens(collected, directory, own_tokens),
        None if eos is None else eos.content,
        config.get("split_special_tokens") is True,
        prefix_space if isinstance(prefix_space, bool) else None,
    )


def _add_older(collected: _CollectedTokens, directory: Path, own_tokens: Sequence[Json]) -> None:
    """Read special_tokens_map.json, added_tokens.json and the tokenizer.json's own tokens.

    An added_tokens_decoder in tokenizer_config.json replaces all three.
    """
    path = directory / SPECIAL_MAP
    special_map = _read_json_object(path)
    _add_named(collected, special_map, path, special=True)
    if _EXTRA in special_map:
        _add_extra(collected, special_map[_EXTRA], path)
    elif collected.extra is None and _OLDER_EXTRA in special_map:
        _add_extra(collected, special_map[_OLDER_EXTRA], path)
    special = {collected.named[key].content for key in NAMED if key in collected.named}
    special |= {token.content for token in collected.extra or ()}
    path = directory / ADDED
    for content, number in _read_json_object(path).items():
        flags = {"normalized": content not in special, "special": content in special}
        _declare(collected, _parse_token_id(number, path), _parse_token({"content": content, **flags}, path), path)
    for record in own_tokens:
        _declare(collected, record["id"], _parse_token(record, directory / MODEL), directory / MODEL)


def _add_named(collected: _CollectedTokens, table: Json, path: Path, special: bool = False) -> None:
    """Read the keys such as eos_token. `special` makes a record's token special."""
    for key, value in table.items():
        if key.endswith("_token") and isinstance(value, str | dict):
            if special and isinstance(value, dict):
                value = {**value, "special": True}
            collected.named[key] = _parse_token(value, path)


def _add_extra(collected: _CollectedTokens, value: Any, path: Path) -> None:
    """Read special tokens without a standard name: a list, or a table of tokens by other names. Raises DataError."""
    if isinstance(value, dict):
        collected.named |= {key: _parse_token(token, path) for key, token in value.items()}
        return
    if not isinstance(value, list):
        raise DataError(f"{path}: {_EXTRA} is neither a list of tokens nor a table; correct it")
    earlier = collected.extra or []
    present = {token.content for token in earlier}
    tokens = [_parse_token(token, path) for token in value]
    collected.extra = [*earlier, *(token for token in tokens if token.content not in present)]


def _declare(collected: _CollectedTokens, number: int, token: Any, path: Path) -> None:
    collected.declared[number] = DeclaredToken(token, number, path)


def _ordered_tokens(collected: _CollectedTokens, directory: Path, own_tokens: Sequence[Json]) -> list[DeclaredToken]:
    """Return tokens with ids in the order of the ids, then named tokens, then the others, without duplicates.

    Raises DataError for a token without an id that has two different descriptions.
    """
    named = {token.content for token in collected.named.values()}
    result = [collected.declared[number] for number in sorted(collected.declared)]
    with_id = {record["content"] for record in own_tokens} | {declared.added_token.content for declared in result}
    standard_names = [key for key in NAMED if key in collected.named]
    other_names = [key for key in collected.named if key not in NAMED]
    without_id = dict[str, Any]()
    tokens = [collected.named[key] for key in standard_names + other_names]
    for token in [*tokens, *(collected.extra or ())]:
        first = without_id.setdefault(token.content, token)
        if repr(first) != repr(token) and token.content not in with_id:
            raise DataError(f"{directory}: two descriptions of the token {token.content!r} differ; {REMEDY}")
    result += [
        DeclaredToken(token, None, directory / CONFIG) for token in without_id.values() if token.content not in with_id
    ]
    for declared in result:
        declared.added_token.special = declared.added_token.special or declared.added_token.content in named
    return result


def _parse_token(value: Any, path: Path) -> Any:
    """Return the AddedToken of a token that is written as its text or as a record. Raises DataError."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise DataError(f"{path}: {str(value)[:60]} is not a token, a text or a record with content; correct it")
    return AddedToken(content, **{flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)})


def _parse_token_id(value: Any, path: Path) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, bool | float) or number < 0:
        raise DataError(f"{path}: {str(value)[:60]} is not the id of a token; correct it")
    return number


def _require_object(value: Any, path: Path) -> Json:
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object where one is needed; correct it")
    return value


def _read_json_object(path: Path) -> Json:
    """Return the JSON object in a file, or {} if the file does not exist. Raises DataError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_tokenizer_file(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON object: {error}") from error
    return _require_object(value, path)


def add_tokens(model: Any, settings: TokenizerSettings) -> bool:
    """Add the tokens to a tokenizers.Tokenizer; return True if this changes it.

    Raises DataError if a token has another id than its file gives it.
    """
    before = added_tokens_by_id(model)
    model.add_tokens([declared.added_token for declared in settings.tokens])
    model.encode_special_tokens = settings.splits_special
    for declared in settings.tokens:
        content = declared.added_token.content
        number = model.token_to_id(content)
        if declared.token_id not in (None, number):
            problem = f"{content!r} is token {declared.token_id} there, but {number} in the tokenizer"
            raise DataError(f"{declared.file}: {problem}; {REMEDY}")
    return settings.splits_special or added_tokens_by_id(model) != before


def added_tokens_by_id(model: Any) -> Mapping[int, str]:
    """Return the added tokens of a tokenizers.Tokenizer with all their flags, by id."""
    return {number: repr(token) for number, token in model.get_added_tokens_decoder().items()}


def begins_with_space(model: Json) -> bool | None:
    """Return whether a tokenizer.json puts a space before a text; None if it has no step that could."""
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


def _steps(component: Any, key: str) -> list[Json]:
    """Return the steps of a normalizer or pre-tokenizer; sequences, listed under `key`, are flattened."""
    if not isinstance(component, dict):
        return []
    inner = component.get(key)
    if isinstance(inner, list):
        return [step for item in inner for step in _steps(item, key)]
    return [component]
