"""One option: a field of a section's dataclass. Its metadata holds all that is known about the option, as `Facts`.

Each option is declared by one of four functions, which say what a resume changes if the option changes:

    free      neither model nor training: logging, and when the run saves, evaluates and stops
    how       the same steps, computed differently: layout, kernels, recomputation
    training  a different training; the saved weights still fit
    model     the saved weights no longer fit
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

OPERATIONAL, EXECUTION, TRAINING, MODEL = "free", "how", "training", "model"
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
)  # allow NAME@host
_SAFE_QUERY = re.compile(r"\?(versionId|generation|download)=\w+|#\d+")  # after ? and #: which version of a file
MAX_SHOWN = 200  # characters of a value in an error
_PATH_OPTIONS = re.compile(
    r"\w+_(path|dir|file|folder)|tokenizer_model|save|save_local|load|pretrained_checkpoint|export_hf"
)
LIST_TYPES = ("ints", "floats", "strs")  # types of several values
MAX_PATH_BYTES, MAX_NAME_BYTES = 4000, 240  # bytes; Linux takes 4095 and 255, with the suffixes that are appended


@dataclass(frozen=True)
class OptionSpec:
    """The facts of an option.

    help       a line of --help and of the site's page of flags, with the unit of the value
    aliases    other flags: short ones, and those of older releases of Megatron-LM and its forks; a flag with =VALUE
               takes no value and sets the option to VALUE
    bare_value the value of the flag without one, and of --FLAG=true; --FLAG=false is then "off"
    required   0 means "not set"
    least      the smallest value; `above`: an exclusive lower bound
    below      (an exclusive upper bound, the message for a larger value); `most`: (the largest value, the same)
    stand_in   a value that contradicts nothing, for checking the others where this one is unclear
    same_as    the section's property with the effective value: options whose effective values agree are equal
    through    the option through which alone this one acts: where that is equal, this one may differ
    adds_up    values of a flag that is given again, and of a file, are added to the others
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
    accumulates: bool = False

    def range_error(self, value: object) -> str | None:
        """Why a number is out of range; None where it is not."""
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


def option(resume: str, default: Any, *, help: str, **facts: Any) -> Any:
    """Return a field of the configuration with `Facts`.

    A number whose default is None must be above 0, unless `least` is set.
    """
    if default is None and "minimum" not in facts:
        facts["exclusive_min"] = 0
    return field(default=default, metadata={"facts": OptionSpec(resume, help, **facts)})


operational, execution, training, model = (
    partial(option, resume) for resume in (OPERATIONAL, EXECUTION, TRAINING, MODEL)
)


def option_spec(f: Field[Any]) -> OptionSpec:
    return f.metadata["facts"]


def type_name(f: Field[Any]) -> str:
    """int, float, bool, str, ints, floats or strs."""
    name = str(f.type).replace(" | None", "")
    return {"tuple[int, ...]": "ints", "tuple[float, ...]": "floats", "tuple[str, ...]": "strs"}.get(name, name)


@cache
def unsupported_values() -> Mapping[str, Mapping[str, str]]:
    """Option -> value of other programs that is not among its choices -> why."""
    table = load_table(__file__, "unsupported_values")
    return {name: {value: why for some, why in rows.items() for value in some.split()} for name, rows in table.items()}


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def to_argv(options: Mapping[str, Any]) -> list[str]:
    """Option -> value, as words of a command line; None is an option that is not given."""
    words = list[str]()
    for name, value in options.items():
        flag = flag_name(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}")
        elif value is not None:
            words += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def flags_of(f: Field[Any]) -> list[tuple[str, Any]]:
    """Every flag that sets this option: (flag, None) when a value follows, else (flag, the value it stands for)."""
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
    """Which part of a URL may be a secret, and the remedy; the part itself is not repeated."""
    what, query = "", _QUERY.search(text)
    if query and not _SAFE_QUERY.fullmatch(query[1]):
        what = "a query or fragment, such as a token,"
    for protocol, user in _URL.findall(text):
        if user and (":" in user or protocol.lower() not in _USER_PROTOCOLS):
            what = "a password" if ":" in user else "a name before its host"
    if what:
        return f"has {what} in its URL, which the run's files would show; give it in FSSPEC_<PROTOCOL>_<OPTION> instead"
    return None


def mask_url_secrets(text: str) -> str:
    """A message without the parts of its URLs that may be secrets.

    >>> masked("unexpected word 's3://KEY:TOP@b/x?token=T'; quote it"), masked("ssh://me@host/x")
    ("unexpected word 's3://***@b/x?*** quote it", 'ssh://me@host/x')
    """

    def of_user(url: re.Match[str]) -> str:
        usual = not url[2] or (":" not in url[2] and url[1].lower() in _USER_PROTOCOLS)
        return url[0] if usual else f"{url[1]}://***@"

    return re.sub(r"(://[^?#\s]*[?#])\S+", r"\1***", _URL.sub(of_user, text))


def invalid_text_reason(text: str, path: bool) -> str | None:
    """Why a text cannot be a value: the run's files could not hold it, or no file system takes such a path."""
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


def convert_value(f: Field[Any], value: Any) -> Any:
    """`value` as the field's type; a text never becomes a number. Raises ValueError."""
    kind, facts = type_name(f), option_spec(f)
    words = value if isinstance(value, (list, tuple)) else [value]
    is_path = _PATH_OPTIONS.fullmatch(f.name) is not None
    for reason in filter(None, (invalid_text_reason(word, is_path) for word in words if isinstance(word, str))):
        raise ValueError(f"{f.name} {reason}")
    shown = repr(value) if len(repr(value)) <= MAX_SHOWN else repr(value)[:MAX_SHOWN] + "..."
    bad = ValueError(f"{f.name}={shown} is not {'an' if kind[0] == 'i' else 'a'} {kind}; write it as one")
    if kind in LIST_TYPES:
        item = {"ints": int, "floats": (int, float), "strs": str}[kind]
        if any(isinstance(v, bool) or not isinstance(v, item) for v in words):
            raise bad
        return tuple(map(float, words) if kind == "floats" else words)
    if (kind == "bool" or kind == "int") and type(value).__name__ == kind:
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{f.name}={shown} is beyond a float's range; give a smaller number") from None
    if kind == "str" and isinstance(value, str):
        other, more = unsupported_values().get(f.name, {}), PLUGIN_HINT if isinstance(facts.choices, Registry) else ""
        if (reason := other.get(value) or other.get(value.lower())) and value not in facts.choices:
            raise ValueError(f"{f.name}={value} is not supported: {reason}{more}")
        if facts.choices and value not in facts.choices:
            plain = {re.sub(r"[-_ ]", "", choice).lower(): choice for choice in facts.choices}
            near = difflib.get_close_matches(re.sub(r"[-_ ]", "", value).lower(), plain, 1, cutoff=0.7)
            remedy = f"did you mean {plain[near[0]]}?" if near else "use one of them"
            remedy += more * (not near)
            known = f"not one of {', '.join(facts.choices)}; {remedy}" if [*facts.choices] else f"unknown; {more[5:]}"
            raise ValueError(f"{f.name}={value!r} is {known}")
        return value
    raise bad
