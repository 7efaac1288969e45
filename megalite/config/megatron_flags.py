"""Flags of Megatron-LM and its forks that are not options of megalite, and how each is treated. Pure.

megatron_flags.txt has a verdict and a reason for each; docs/document_flags.py shows them as a table. `answer` turns the
flags of a command line into notes, warnings and problems.
"""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

OPTION, NO_EFFECT, WARNED, REFUSED, DEPENDENT, INSTEAD = "+=?!~>"


class MegatronFlag(NamedTuple):
    """`verdict`: one of the above. `values`: how many follow; None: any number. `reason`: a sentence, "" for a
    dependent flag. `feature`: flags of one feature get one answer. `neutral`: values that ask for nothing."""

    group: str
    verdict: str
    feature: str
    reason: str
    values: int | None = 0
    noop_values: tuple[str, ...] = ()


@cache
def known_flags() -> Mapping[str, MegatronFlag]:
    """By flag, in the file's order."""
    flags: dict[str, MegatronFlag] = {}
    group, verdict, feature, reason = "", "", "", ""
    text = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8")
    for line in text.partition("\n# ")[2].splitlines():
        if line.startswith("    "):
            for word in line.split():
                name, _, takes = word.partition("=")
                count, *neutral = takes.split(":") if takes else ["0"]
                values = None if count == "*" else int(count)
                flags["--" + name] = MegatronFlag(group, verdict, feature, reason, values, tuple(neutral))
        elif line and line[0] in "+=?!~>":
            verdict, rest = line[0], line[2:]
            feature, _, reason = rest.rpartition(" | ") if verdict != DEPENDENT else (rest, "", "")
        elif line:
            group = line.removeprefix("# ")
    return MappingProxyType(flags)


def requests_feature(flag: MegatronFlag, values: Iterable[str]) -> bool:
    """Whether these values ask for anything."""

    def plain(word: str) -> float | str:
        try:
            return float(word)
        except ValueError:
            return word.lower()

    words, neutral = [plain(word.strip("'\"")) for word in values], {plain(value) for value in flag.noop_values}
    return not words or not neutral.issuperset(words)


class FlagReport(NamedTuple):
    notes: list[str]
    warnings: list[str]
    problems: list[str]


def classify_flags(given: Iterable[tuple[str, list[str]]]) -> FlagReport:
    """One line for each reason, with its flags. `given`: (flag, values) of each foreign flag of a command line."""
    flags = known_flags()
    said: dict[tuple[str, str], list[str]] = {}
    named = [(name, flags[name], requests_feature(flags[name], values)) for name, values in given]
    features = {f.feature for _, f, asked in named if asked and f.feature and f.verdict in (WARNED, REFUSED)}
    for name, flag, asked in named:
        verdict, reason = flag.verdict, flag.reason
        if verdict == DEPENDENT:
            if flag.feature in features:
                continue  # the feature is answered
            verdict, reason = NO_EFFECT, f"only with {primary_flag(flag.feature)}"
        elif verdict in (WARNED, REFUSED) and not asked:
            verdict, reason = NO_EFFECT, "the value asks for nothing"
        names = said.setdefault((verdict, reason), [])
        if name not in names:
            names.append(name)

    def lines(verdict: str, form: str = "{}: {}") -> list[str]:
        return [form.format(", ".join(names), reason) for (v, reason), names in said.items() if v == verdict]

    return FlagReport(lines(NO_EFFECT, "no effect here: {} ({})"), lines(WARNED), lines(REFUSED))


@cache
def primary_flag(feature: str) -> str:
    """A flag that asks for the feature."""
    return next(name for name, f in known_flags().items() if f.feature == feature and f.verdict != DEPENDENT)


def closest_match(flag: str, candidates: Iterable[str]) -> str | None:
    """The candidate that differs from `flag` by a few letters in each word; None rather than a guess."""
    long = (candidate for candidate in candidates if len(candidate) > len("--abc"))  # short ones are all alike
    best = max(long, key=lambda candidate: _similarity(flag[2:], candidate[2:]), default=None)
    return best if best is not None and _similarity(flag[2:], best[2:]) else None


def _similarity(a: str, b: str) -> float:
    """0: different words; 1: the same. A flag's opposite is different, and so are long words that share letters."""
    whole = _ratio(a, b)
    if whole < 0.75 or a.startswith(("no-", "disable-")) != b.startswith(("no-", "disable-")):
        return 0.0
    ours, theirs = a.split("-"), b.split("-")
    alike = len(ours) == len(theirs) and all(_ratio(x, y) >= 0.7 for x, y in zip(ours, theirs, strict=True))
    return whole if alike or whole >= 0.87 else 0.0


def _ratio(a: str, b: str) -> float:
    """The ratio of letters that match; 0 where a bound that costs less shows that it is below 0.7."""
    matcher = difflib.SequenceMatcher(None, a, b)
    return matcher.ratio() if matcher.real_quick_ratio() >= 0.7 and matcher.quick_ratio() >= 0.7 else 0.0
