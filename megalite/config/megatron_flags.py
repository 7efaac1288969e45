"""Flags of Megatron-LM and its forks that are not options of megalite, and how each is treated.

megatron_flags.txt has a verdict and a reason for each; docs/document_flags.py shows them as a table. `classify_flags`
returns the notes, warnings and problems for the flags of a command line.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

OPTION, NO_EFFECT, WARNED, REFUSED, DEPENDENT, INSTEAD = "+=?!~>"


@dataclass(frozen=True)
class MegatronFlag:
    """A flag that Megatron-LM or a fork of it accepts."""

    group: str  # of Megatron-LM's parser
    verdict: str  # OPTION, NO_EFFECT, WARNED, REFUSED, DEPENDENT or INSTEAD
    feature: str  # what the flag belongs to; a dependent flag follows the other flags of its feature
    reason: str  # a sentence; "" for a dependent flag
    values: int | None = 0  # the number of values; None: any number
    noop_values: tuple[str, ...] = ()  # values with which the flag requests nothing


@cache
def known_flags() -> Mapping[str, MegatronFlag]:
    """Return flag -> MegatronFlag for all flags of megatron_flags.txt, in the order of the file."""
    flags: dict[str, MegatronFlag] = {}
    group, verdict, feature, reason = "", "", "", ""
    text = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8")
    for line in text.partition("\n# ")[2].splitlines():
        if line.startswith("    "):
            for entry in line.split():
                name, _, num_values = entry.partition("=")
                count, *noop_values = num_values.split(":") if num_values else ["0"]
                values = None if count == "*" else int(count)
                flags["--" + name] = MegatronFlag(group, verdict, feature, reason, values, tuple(noop_values))
        elif line and line[0] in "+=?!~>":
            verdict, rest = line[0], line[2:]
            feature, _, reason = rest.rpartition(" | ") if verdict != DEPENDENT else (rest, "", "")
        elif line:
            group = line.removeprefix("# ")
    return MappingProxyType(flags)


def requests_feature(flag: MegatronFlag, values: Iterable[str]) -> bool:
    """Return True if a flag with these values requests anything."""

    def normalized(value: str) -> float | str:
        try:
            return float(value)
        except ValueError:
            return value.lower()

    # a list may be one value, as in '[a b]'
    requested = [normalized(item) for value in values for item in value.strip("'\"[]").split()]
    noop_values = {normalized(value) for value in flag.noop_values}
    return not requested or not noop_values.issuperset(requested)


class FlagReport(NamedTuple):
    """The lines about the flags of a command line that are not options of megalite."""

    notes: list[str]
    warnings: list[str]
    problems: list[str]


def classify_flags(flags: Iterable[tuple[str, list[str]]]) -> FlagReport:
    """Return a line for each reason, with all flags that it applies to.

    Args:
        flags: (flag, values) for the flags of a command line that are in megatron_flags.txt.
    """
    table = known_flags()
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    entries = [(name, table[name], requests_feature(table[name], values)) for name, values in flags]
    reported_features = {
        flag.feature
        for _, flag, has_request in entries
        if has_request and flag.feature and flag.verdict in (WARNED, REFUSED)
    }
    for name, flag, has_request in entries:
        verdict = flag.verdict
        reason = flag.reason
        if verdict == DEPENDENT:
            if flag.feature in reported_features:
                continue
            verdict = NO_EFFECT
            reason = f"only with {primary_flag(flag.feature)}"
        elif verdict in (WARNED, REFUSED) and not has_request:
            verdict = NO_EFFECT
            reason = "the value requests nothing"
        names = names_by_reason.setdefault((verdict, reason), [])
        if name not in names:
            names.append(name)

    def lines(verdict: str, form: str = "{}: {}") -> list[str]:
        return [form.format(", ".join(names), reason) for (v, reason), names in names_by_reason.items() if v == verdict]

    return FlagReport(lines(NO_EFFECT, "no effect here: {} ({})"), lines(WARNED), lines(REFUSED))


@cache
def primary_flag(feature: str) -> str:
    """Return a flag that enables a feature."""
    return next(name for name, f in known_flags().items() if f.feature == feature and f.verdict != DEPENDENT)


def closest_match(flag: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that differs from `flag` by a few letters in each word; None if there is none."""
    # short flags are too similar to each other
    long_candidates = (candidate for candidate in candidates if len(candidate) > len("--abc"))
    best = max(long_candidates, key=lambda candidate: _similarity(flag[2:], candidate[2:]), default=None)
    return best if best is not None and _similarity(flag[2:], best[2:]) else None


def _similarity(a: str, b: str) -> float:
    """Return the similarity of two flags without --, between 0 and 1.

    It is 0 for a flag and its opposite, and unless all words are similar or the texts as a whole are very similar.
    """
    ratio = _ratio(a, b)
    if ratio < 0.75 or a.startswith(("no-", "disable-")) != b.startswith(("no-", "disable-")):
        return 0.0
    a_words = a.split("-")
    b_words = b.split("-")
    words_match = len(a_words) == len(b_words) and all(
        _ratio(x, y) >= 0.7 for x, y in zip(a_words, b_words, strict=True)
    )
    return ratio if words_match or ratio >= 0.87 else 0.0


def _ratio(a: str, b: str) -> float:
    """Return the ratio of matching letters; 0 if difflib's cheaper upper bounds show that it is below 0.7."""
    matcher = difflib.SequenceMatcher(None, a, b)
    return matcher.ratio() if matcher.real_quick_ratio() >= 0.7 and matcher.quick_ratio() >= 0.7 else 0.0
