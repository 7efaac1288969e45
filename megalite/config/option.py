"""One option: a field of a section's dataclass, with an `OptionSpec` in its metadata.

Each option is declared by one of four functions, named after the effect of a change when a run resumes:

    operational  neither model nor training changes: logging, and when the run saves, evaluates and stops
    execution    the same steps, computed differently: layout, kernels, recomputation
    training     a different training; the saved weights still fit
    model        the saved weights no longer fit
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field
from functools import cache, partial
from typing import Any

from megalite.common.tables import load_table
from megalite.config.registry import PLUGIN_HINT, Registry

OPERATIONAL, EXECUTION, TRAINING, MODEL = "operational", "execution", "training", "model"
_URL = re.compile(r"(?<![a-z0-9+.-])([a-z0-9+.-]*)://((?:[^/@\s]*|[^/@\s:]*:(?!\d+/)[^@\s]*)@)?", re.IGNORECASE)
_QUERY = re.compile(r"://[^?#\s]*([?#]\S*)")
_USER_PROTOCOLS = (
    "sftp",
    "ssh",
    "ftp",
    "ftps",
    "hdfs",
    "webhdfs",
    "smb",
    "abfs",
    "abfss",
    "wasb",
    "wasbs",
)  # in URLs of these, NAME@host is not a secret
_SAFE_QUERY = re.compile(r"\?(versionId|generation|download)=\w+|#\d+")  # only selects a version of the file
MAX_SHOWN = 200  # characters of a value in an error message
_PATH_OPTIONS = re.compile(
    r"\w+_(path|dir|file|folder)|tokenizer_model|eval_requests|save|save_local|load|pretrained_checkpoint|export_hf"
)
LIST_TYPES = ("ints", "floats", "strs")
# Linux allows 4095 and 255; the rest is for suffixes that are appended
MAX_PATH_BYTES = 4000
MAX_NAME_BYTES = 240


@dataclass(frozen=True)
class OptionSpec:
    """The properties of an option that its type and default do not express.

    resume              OPERATIONAL, EXECUTION, TRAINING or MODEL
    help                a line of --help and of the site's page of flags, with the unit of the value
    aliases             other flags: short ones, and flags of older releases of Megatron-LM and its forks; a flag with
                        =VALUE takes no value and sets the option to VALUE
    choices             the allowed values of a text; empty: any
    bare_value          the value of the flag without one, and of --FLAG=true; --FLAG=false then sets "off"
    required            the option must be set; 0 means "not set"
    minimum             the smallest allowed value
    exclusive_min       a lower bound that is not allowed itself
    exclusive_max       (an upper bound that is not allowed itself, the message for larger values)
    maximum             (the largest allowed value, the message for larger values)
    placeholder         a value that contradicts no other option: it replaces an unreadable value, so that the other
                        options can still be checked
    effective_property  the property of the section with the effective value; two runs agree in this option if their
                        effective values are equal
    acts_through        another option; this one has an effect only through its value, so two runs may differ in this
                        one if they agree in the other
    may_look_like_flag  a value may start with - and a letter; the next argument is one unless it is a known flag
    accumulates         the values of a repeated flag and of a file are concatenated
    """

    resume: str
    help: str
    aliases: Sequence[str] = ()
    choices: Collection[str] = ()
    bare_value: str | None = None
    required: bool = False
    minimum: int = 0
    exclusive_min: int | None = None
    exclusive_max: tuple[float, str] | None = None
    maximum: tuple[float, str] | None = None
    placeholder: float | None = None
    effective_property: str | None = None
    acts_through: str | None = None
    may_look_like_flag: bool = False
    accumulates: bool = False

    def range_error(self, value: object) -> str | None:
        """Return the reason why a number is out of range, with a remedy; None if it is in range or not a number."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if isinstance(value, float) and not math.isfinite(value):  # isfinite of a large int overflows
            return "is not finite; give a number"
        allowed = f"{self.minimum} or more"
        if self.exclusive_min is not None:
            allowed = (
                f"{self.exclusive_min + 1} or more" if isinstance(value, int) else f"more than {self.exclusive_min}"
            )
        if value < self.minimum:
            return f"is negative; give {allowed}"
        if self.exclusive_min is not None and value == self.exclusive_min:
            return f"is too small; give {allowed}"
        if self.exclusive_max is not None and value >= self.exclusive_max[0]:
            return self.exclusive_max[1]
        return self.maximum[1] if self.maximum is not None and value > self.maximum[0] else None


def option(resume: str, default: Any, *, help: str, **properties: Any) -> Any:
    """Return a dataclass field with an `OptionSpec`, to which `properties` are passed.

    A number whose default is None must be above 0, unless `minimum` is set.
    """
    if default is None and "minimum" not in properties:
        properties["exclusive_min"] = 0
    return field(default=default, metadata={"spec": OptionSpec(resume, help, **properties)})


operational = partial(option, OPERATIONAL)
execution = partial(option, EXECUTION)
training = partial(option, TRAINING)
model = partial(option, MODEL)


def option_spec(f: Field[Any]) -> OptionSpec:
    return f.metadata["spec"]


def type_name(f: Field[Any]) -> str:
    """Return "int", "float", "bool", "str", "ints", "floats" or "strs"."""
    name = str(f.type).replace(" | None", "")
    return {"tuple[int, ...]": "ints", "tuple[float, ...]": "floats", "tuple[str, ...]": "strs"}.get(name, name)


@cache
def unsupported_values() -> Mapping[str, Mapping[str, str]]:
    """Return option -> value of other programs that megalite does not support -> the reason, with a remedy."""
    table = load_table(__file__, "unsupported_values")
    return {
        name: {value: reason for values, reason in rows.items() for value in values.split()}
        for name, rows in table.items()
    }


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def to_argv(options: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments that set these options; an option with the value None is omitted."""
    args = list[str]()
    for name, value in options.items():
        flag = flag_name(name)
        if isinstance(value, bool):
            opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
            args.append(flag if value else opposite)
        elif value is not None:
            args += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
    return args


def flags_of(f: Field[Any]) -> list[tuple[str, Any]]:
    """Return all flags of an option: (flag, None) if it takes a value, otherwise (flag, the value that it sets)."""
    flag = flag_name(f.name)
    if type_name(f) != "bool":
        result: list[tuple[str, Any]] = [(flag, None)]
    elif flag.startswith("--no-"):
        result = [(flag, True), ("--" + flag.removeprefix("--no-"), False)]
    else:
        result = [(flag, True), (f"--no-{flag[2:]}", False), (f"--disable-{flag[2:]}", False)]
    for alias in option_spec(f).aliases:
        alias_flag, _, value = alias.partition("=")
        result.append((alias_flag, {"": None, "true": True, "false": False}.get(value, value)))
    return result


def find_url_secret(text: str) -> str | None:
    """Return a message about a part of a URL that may be a secret, with a remedy; None if there is none.

    The message does not repeat the secret.
    """
    secret = ""
    query = _QUERY.search(text)
    if query and not _SAFE_QUERY.fullmatch(query[1]):
        secret = "a query or fragment, such as a token,"
    for protocol, user in _URL.findall(text):
        if user and (":" in user or protocol.lower() not in _USER_PROTOCOLS):
            secret = "a password" if ":" in user else "a name before its host"
    if not secret:
        return None
    return f"has {secret} in its URL, which the run's files would show; give it in FSSPEC_<PROTOCOL>_<OPTION> instead"


def mask_url_secrets(text: str) -> str:
    """Return a message with *** in place of the parts of its URLs that may be secrets.

    >>> mask_url_secrets("unexpected argument 's3://KEY:TOP@b/x?token=T'; quote"), mask_url_secrets("ssh://me@host/x")
    ("unexpected argument 's3://***@b/x?*** quote", 'ssh://me@host/x')
    """

    def mask_user(url: re.Match[str]) -> str:
        is_public = not url[2] or (":" not in url[2] and url[1].lower() in _USER_PROTOCOLS)
        return url[0] if is_public else f"{url[1]}://***@"

    return re.sub(r"(://[^?#\s]*[?#])\S+", r"\1***", _URL.sub(mask_user, text))


def invalid_text_reason(text: str, path: bool) -> str | None:
    """Return the reason why a text cannot be a value; None if it can.

    It has a secret, is not UTF-8, so that the run's files could not hold it, or is too long for a path.

    Args:
        path: the text is a path or a URL.
    """
    if (reason := find_url_secret(text)) is not None:
        return reason
    try:
        raw = text.encode(errors="surrogateescape")  # bytes of the command line that are not UTF-8
    except UnicodeEncodeError:  # from Python
        raw = text.encode(errors="surrogatepass")
    if "\0" in text or raw.decode(errors="replace") != text:
        return f"is not UTF-8 text ({raw[:MAX_SHOWN]!r}); rename it"
    if path and (len(raw) > MAX_PATH_BYTES or ("://" not in text and max(map(len, raw.split(b"/"))) > MAX_NAME_BYTES)):
        return f"is longer than a path may be ({MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} between two /); shorten it"
    return None


def _unknown_choice(value: str, choices: Collection[str], plugin_hint: str) -> str:
    """Return the end of a message about a value that is not among the choices, with a remedy."""
    names = [*choices]
    if not names:  # a registry without built-in components
        return f"unknown; {plugin_hint.removeprefix(', or ')}"
    names_by_letters = {re.sub(r"[-_ ]", "", name).lower(): name for name in names}
    near = difflib.get_close_matches(re.sub(r"[-_ ]", "", value).lower(), names_by_letters, 1, cutoff=0.7)
    remedy = f"did you mean {names_by_letters[near[0]]}?" if near else f"use one of them{plugin_hint}"
    return f"not one of {', '.join(names)}; {remedy}"


def convert_value(f: Field[Any], value: Any) -> Any:
    """Return `value` as the field's type; a text is never converted to a number.

    Raises:
        ValueError: if the type is wrong or the value is not a choice, with the reason and a remedy.
    """
    kind = type_name(f)
    spec = option_spec(f)
    items = value if isinstance(value, (list, tuple)) else [value]
    is_path = _PATH_OPTIONS.fullmatch(f.name) is not None
    for item in items:
        reason = invalid_text_reason(item, is_path) if isinstance(item, str) else None
        if reason:
            raise ValueError(f"{f.name} {reason}")
    shown = repr(value) if len(repr(value)) <= MAX_SHOWN else repr(value)[:MAX_SHOWN] + "..."
    bad = ValueError(f"{f.name}={shown} is not {'an' if kind[0] == 'i' else 'a'} {kind}; write it as one")
    if kind in LIST_TYPES:
        item_type = {"ints": int, "floats": (int, float), "strs": str}[kind]
        if any(isinstance(item, bool) or not isinstance(item, item_type) for item in items):
            raise bad
        return tuple(map(float, items) if kind == "floats" else items)
    if (kind == "bool" or kind == "int") and type(value).__name__ == kind:
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{f.name}={shown} is beyond a float's range; give a smaller number") from None
    if kind == "str" and isinstance(value, str):
        unsupported = unsupported_values().get(f.name, {})
        plugin_hint = PLUGIN_HINT if isinstance(spec.choices, Registry) else ""
        reason = unsupported.get(value) or unsupported.get(value.lower())
        if reason and value not in spec.choices:
            raise ValueError(f"{f.name}={value} is not supported: {reason}{plugin_hint}")
        if spec.choices and value not in spec.choices:
            raise ValueError(f"{f.name}={value!r} is {_unknown_choice(value, spec.choices, plugin_hint)}")
        return value
    raise bad
