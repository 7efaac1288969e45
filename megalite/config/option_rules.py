"""The rules of option_rules.txt: contradictions and options without effect that the options' values alone tell."""

import operator
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from megalite.config.options import options
from megalite.config.problem import Problem, Say

TERM = re.compile(r"([!?]?)(\w+)(?:(!=|<=|>=|[=<>%~])(.+))?")
ORDER = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "%": operator.mod}
Term = tuple[str, str, str | None, str]  # ! or ? or "", name, relation, other side


@cache
def rules_of(part: str) -> tuple[tuple[list[list[Term]], str], ...]:
    """(conditions, each of which is some terms, and the text) of each rule of a part of the file."""
    file = Path(__file__).with_name("option_rules.txt").read_text(encoding="utf-8")
    lines = (
        file.partition(f"\n# {part}\n")[2].partition("\n# ")[0].replace("\\\n", "").replace("\n    ", "\t").split("\n")
    )
    rules = []
    for line in filter(None, lines):
        conditions, *text = line.split("\t")
        sign, names, more = re.fullmatch(r"(\W?)([\w,]+)(.*)", conditions).groups()  # pyright: ignore
        for name in names.split(","):
            words = (sign + name + more).split(" ")
            terms = [[TERM.fullmatch(term).groups() for term in word.split("|")] for word in words]  # pyright: ignore
            rules.append((terms, " ".join(text)))
    return tuple(rules)


@cache
def _defaults() -> Mapping[str, object]:
    return MappingProxyType({f.name: f.default for _, f in options()})


def broken(part: str, say: Say, **facts: object) -> Iterator[Problem]:
    """What the rules of this part have to say; `facts`: more that their conditions name."""
    for conditions, text in rules_of(part):
        if all(any(holds(term, say, facts) for term in terms) for terms in conditions):
            named = [name for terms in conditions for _, name, *_ in terms]
            yield say(text, *(name for name in named if name in say.values), option=named[0])


def holds(term: Term, say: Say, facts: Mapping[str, object]) -> bool:
    """Whether a term of a condition holds."""
    sign, name, relation, other = term
    value = facts[name] if name in facts else say.value(name)
    if relation is None:
        return sign == "?" or (value not in (_defaults().get(name, False), "", ())) != (sign == "!")
    if relation == "~":
        return other in str(value)
    if relation in ("=", "!="):
        alike = any(str(value) == one or (one in say.values and value == say.values[one]) for one in other.split(","))
        return alike == (relation == "=")
    bound = say.value(other) if other in say.values else float(other)
    return value is not None and bound is not None and bool(ORDER[relation](value, bound))
