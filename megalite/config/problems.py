"""Problems of a configuration: a line of text with the options that it is about, and helpers for common ones.

The helpers take options as they should be shown: a name ("bf16"), a name and a value ("zero_stage=3") or a flag
("--save"). The options of the problem follow from these; `also` adds options that the line does not name.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from megalite.config.option import flag_name
from megalite.config.options import SECTION_OF, Config, iter_options


class Problem(str):
    """A line that describes a problem."""

    options: frozenset[str]  # the options that it is about, including those of its remedy

    def __new__(cls, line: str, options: Collection[str] = ()) -> "Problem":
        problem = super().__new__(cls, line)
        problem.options = frozenset(options)
        return problem

    def mentions(self, names: Collection[str]) -> bool:
        """Return True if the problem is about one of these options."""
        return not self.options.isdisjoint(names)


DEFAULTS = {f.name: f.default for _, f in iter_options()}


def value_of(config: Config, name: str) -> Any:
    """Return the value of an option, whatever its section."""
    return getattr(getattr(config, SECTION_OF[name]), name)


def is_set(config: Config, name: str) -> bool:
    """Return True if an option differs from its default and is not an empty text or list."""
    return value_of(config, name) not in (DEFAULTS[name], "", ())


def options_set(config: Config, *names: str) -> Iterator[str]:
    """Yield those of the named options that are set, in the order of `names`."""
    return (name for name in names if is_set(config, name))


def shown(config: Config, name: str) -> str:
    """Return an option with its value; the values of a list are joined by commas.

    >>> shown(Config(), "cp_comm_type"), shown(Config(), "seed")
    ('cp_comm_type=auto', 'seed=1234')
    """
    value = value_of(config, name)
    return f"{name}={comma_separated(value) if isinstance(value, tuple) else value}"


def comma_separated(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def option_of(text: str) -> str:
    """Return the option that a text shows.

    >>> option_of("bf16"), option_of("zero_stage=3"), option_of("--zero-stage")
    ('bf16', 'zero_stage', 'zero_stage')
    """
    return text.removeprefix("--").partition("=")[0].replace("-", "_")


def exclusive(first: str, second: str, remedy: str = "give one", also: Collection[str] = ()) -> Problem:
    """Return the problem that two options exclude each other.

    >>> exclusive("bf16", "fp16")
    'bf16 and fp16 exclude each other; give one'
    """
    return Problem(f"{first} and {second} exclude each other; {remedy}", (option_of(first), option_of(second), *also))


def requires(option: str, needed: str, value: str = "", also: Collection[str] = ()) -> Problem:
    """Return the problem that an option needs another one, where it matters with a certain value.

    >>> requires("fim_split_sample=x", "fim_fragment_rate")
    'fim_split_sample=x needs --fim-fragment-rate'
    """
    flag = f"{flag_name(needed)} {value}".rstrip()
    return Problem(f"{option} needs {flag}", (option_of(option), needed, *also))


def no_effect(option: str, without: str, value: str = "", also: Collection[str] = ()) -> Problem:
    """Return the problem that an option has no effect without another one, where it matters with a certain value.

    >>> no_effect("muon_nesterov=True", without="optimizer", value="muon")
    'muon_nesterov=True has no effect without --optimizer muon'
    """
    flag = f"{flag_name(without)} {value}".rstrip()
    return Problem(f"{option} has no effect without {flag}", (option_of(option), without, *also))


def is_above(name: str, value: float, limit_name: str, limit: float, also: Collection[str] = ()) -> Problem:
    """Return the problem that the value of one option is above that of another.

    >>> is_above("min_lr", 0.2, "lr", 0.1)
    'min_lr=0.2 is above lr=0.1; lower it'
    """
    return Problem(f"{name}={value} is above {limit_name}={limit}; lower it", (name, limit_name, *also))


def does_not_divide(
    name: str, divisor: int, total_name: str, total: int, remedy: str = "", also: Collection[str] = ()
) -> Problem:
    """Return the problem that the value of one option does not divide that of another.

    Args:
        remedy: what to use instead; by default the divisors of `total`.

    >>> does_not_divide("tensor_model_parallel_size", 3, "num_attention_heads", 8)
    'tensor_model_parallel_size=3 does not divide num_attention_heads=8: use 1, 2, 4 or 8'
    """
    remedy = remedy or f"use {join_or(divisors(total))}"
    return Problem(f"{name}={divisor} does not divide {total_name}={total}: {remedy}", (name, total_name, *also))


def nearest_multiples(n: int, unit: int) -> str:
    """Return the nearest multiples of `unit` below and above `n`, as text.

    >>> nearest_multiples(100, unit=12), nearest_multiples(5, unit=12)
    ('96 or 108', '12')
    """
    low = n // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def join_or(values: Iterable[object]) -> str:
    """Return the values as text.

    >>> join_or([1, 2, 4])
    '1, 2 or 4'
    """
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
