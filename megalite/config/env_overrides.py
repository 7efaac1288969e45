"""Environment variables that take precedence over an option, for tests and for programs without options."""

from dataclasses import fields
from functools import partial
from typing import TypeVar

from megalite.common.environment import getenv
from megalite.common.fault_injection import FaultInjector
from megalite.config.option import option_spec
from megalite.config.run_options import ParallelConfig

T = TypeVar("T", str, bool)
OVERRIDES = {
    "kernels": "MEGALITE_KERNELS",
    "attention_kernel": "MEGALITE_ATTENTION",
    "shared_memory": "MEGALITE_SHARED_MEMORY",
}


def env_override(option: str, value: T) -> T:
    """Return the value of the option's variable if it is set, otherwise `value`.

    The values of a variable are the option's choices, or on and off if the option is a bool.

    Raises:
        ValueError: if the variable has another value.
    """
    text = getenv(OVERRIDES[option])
    spec = next(option_spec(f) for f in fields(ParallelConfig) if f.name == option)
    values = {"on": True, "off": False} if isinstance(value, bool) else {choice: choice for choice in spec.choices}
    if text and text not in values:
        *others, last = values
        raise ValueError(f"{OVERRIDES[option]}={text} is unknown; use {', '.join(others)} or {last}")
    return values[text] if text else value  # pyright: ignore[reportReturnType]


def setting_name(option: str) -> str:
    """Return the name of the option's variable if that is set, otherwise the option's own name."""
    return OVERRIDES[option] if getenv(OVERRIDES[option]) else option


def env_problems() -> list[str]:
    """Return all problems of the variables in OVERRIDES and of MEGALITE_FAULT."""
    overrides = [partial(env_override, option, getattr(ParallelConfig(), option)) for option in OVERRIDES]
    errors = []
    for read in (FaultInjector, *overrides):
        try:
            read()
        except ValueError as error:
            errors.append(str(error))
    return errors
