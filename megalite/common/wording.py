"""Words for messages."""


def plural(noun: str, count: int) -> str:
    """Return `noun` for `count` things: "step" for 1, otherwise "steps", and "es" after a hissing sound."""
    if count == 1:
        return noun
    return noun + ("es" if noun.endswith(("s", "ch", "x")) else "s")
