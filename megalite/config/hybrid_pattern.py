"""The layers of a model as a text with a letter for each part, as in Megatron-LM's hybrid models.

    *   attention          +   multi-latent attention
    G   gated delta net    K   Kimi delta attention       M   Mamba-2
    -   MLP                E   experts
    |   border between two pipeline stages
    /   start of a depth of multi-token prediction

    "*-*E"       two layers: attention and MLP, attention and experts
    "**-"        two layers: attention alone, attention and MLP
    "*|-"        one layer, whose halves are on two stages
    "*-*E/*E/*E" two layers, and two depths of multi-token prediction with a layer each

A mixer and the MLP or experts after it are one layer, as in models without a pattern. Any other part is a layer by
itself. A border does not change the model: the halves of a layer that it separates have the same number. All depths
have the same letters.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megalite.config.layer_spec import ROUTER_LOSSES
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN
from megalite.config.registry import REGISTRIES

ATTENTION_LETTERS = {"*": "attention", "+": "latent_attention"}
RECURRENT_LETTERS = {"G": "gated_delta_net", "K": "kda", "M": "mamba2"}
MLP_LETTERS = {"-": "mlp", "E": "moe"}
BORDER = "|"
DEPTH = "/"  # starts a depth of multi-token prediction
MAX_SHOWN = 80  # characters of a pattern that a message shows
_HINT = (
    "use * (attention), + (multi-latent attention), G (gated delta net), K (Kimi delta attention), M (Mamba-2), "
    "- (MLP), E (experts), | (pipeline border), / (multi-token prediction) or a letter of a --plugin"
)
_REFUSED = {
    "D": "sparse attention",
    "C": "compressed sparse attention",
    "H": "compressed attention",
    "W": "window attention",
    "[": "a group of layers",
    "]": "a group of layers",
}


@dataclass(frozen=True)
class PatternLayer:
    """A layer of a pattern, or the half of one on its side of a border.

    Attributes:
        mixer: The name of its mixer; None: it has none.
        mlp: The name of its MLP; None: it has none.
        number: The number of the layer in the model without borders.
    """

    mixer: str | None
    mlp: str | None
    number: int

    @property
    def letters(self) -> str:
        """The letters of its parts."""
        return _letter(mixer_letters(), self.mixer) + _letter(MLP_LETTERS, self.mlp)


def _letter(letters: Mapping[str, str], part: str | None) -> str:
    return next((letter for letter, name in letters.items() if name == part), "")


def mixer_letters() -> dict[str, str]:
    """Return the name of the mixer for each letter: the built-in ones, and the mixers of plugins."""
    plugin_mixers = REGISTRIES["mixer"].plugin_components
    letters = {**ATTENTION_LETTERS, **RECURRENT_LETTERS}
    for name, mixer in plugin_mixers.items():
        if mixer.letter in letters:
            both = f"{letters[mixer.letter]} and {name}"
            raise ValueError(f"is ambiguous: mixers {both} have letter {mixer.letter}; give one of their plugins")
        letters[mixer.letter] = name
    return letters


def find_mixer_error(mixer: Any) -> str:
    """Return what is wrong with the letter or the name of a plugin's mixer, which is registered, or ""."""
    letter = mixer.letter
    plugin_mixers = REGISTRIES["mixer"].plugin_components.items()
    same_letter = [name for name, other in plugin_mixers if other.letter == letter and other is not mixer]
    if not isinstance(letter, str) or not re.fullmatch("[A-Za-z]", letter) or letter in MLP_LETTERS:
        return f"has letter={letter!r}; give a letter of A-Z or a-z other than {', '.join(MLP_LETTERS)}"
    if same_letter:
        return f"has letter={letter!r}, as {same_letter[0]} has; give another letter"
    names = [name for name, other in plugin_mixers if other is mixer]
    if not all(re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in MLP_LETTERS.values() for name in names):
        return "is a part of parameters' names; use lower-case letters, digits and _, and not mlp or moe"
    losses = getattr(mixer, "losses", ())
    is_named = isinstance(losses, tuple) and all(isinstance(name, str) for name in losses)
    if not is_named or not all(re.fullmatch(r"[a-z][a-z0-9_]*_loss", name) for name in losses):
        return f"has losses={losses!r}; give a tuple of names of lower-case letters, digits and _ that end in _loss"
    reserved_names = (*ROUTER_LOSSES.values(), "z_loss")
    if reserved := [
        name
        for name in losses
        if name in reserved_names or re.fullmatch(r"mtp_\d+_loss", name) or losses.count(name) > 1
    ]:
        return f"has losses={losses!r}, and {reserved[0]} is the name of another loss; rename it"
    return ""


def parse_hybrid_pattern(text: str) -> tuple[tuple[PatternLayer, ...], ...]:
    """Return the layers of each stage of a pattern; without borders there is one stage. Depths are not part of it.

    Raises:
        ValueError: if the pattern is invalid, with the reason and a remedy.

    >>> [[layer.number for layer in stage] for stage in parse_hybrid_pattern("*-*|-E")]
    [[0, 1], [1, 2]]
    """
    return _parse(text, tuple(mixer_letters().items()))[0]


def parse_depth_pattern(text: str) -> tuple[PatternLayer, ...]:
    """Return the layers of each depth of multi-token prediction, numbered from 0; () without one.

    Raises ValueError if the pattern is invalid.

    >>> [layer.letters for layer in parse_depth_pattern("*-*-/*E*/*E*")]
    ['*E', '*']
    """
    return _parse(text, tuple(mixer_letters().items()))[1]


def num_pattern_depths(text: str) -> int:
    """Return the number of depths of multi-token prediction.

    >>> num_pattern_depths("*-/*E/*E")
    2
    """
    return text.count(DEPTH)


@cache
def _parse(
    text: str, mixers: tuple[tuple[str, str], ...]
) -> tuple[tuple[tuple[PatternLayer, ...], ...], tuple[PatternLayer, ...]]:
    """Return the layers of each stage, and those of each depth of multi-token prediction."""
    mixer_of = dict(mixers)
    if len(text) > 2 * MAX_LAYERS_IN_PATTERN:
        raise ValueError(f"has {len(text):,} letters; use at most {2 * MAX_LAYERS_IN_PATTERN:,}")
    for position, letter in enumerate(text):
        if letter in _REFUSED and letter not in mixer_of:
            raise ValueError(f"has {letter}, {_REFUSED[letter]}, which is not supported; {_HINT}")
        if letter not in mixer_of and letter not in MLP_LETTERS and letter not in (BORDER, DEPTH):
            raise ValueError(f"has {letter!r} at position {position}; {_HINT}")
    layers_text, *depths = text.split(DEPTH)
    if any(BORDER in depth for depth in depths):
        raise ValueError(
            f"has a pipeline border after {DEPTH}, but depths run beside the head, on the last stage; move it before"
        )
    if len(set(depths)) > 1 or "" in depths:
        raise ValueError(f"has depths that are empty or differ; write the same letters after each {DEPTH}")
    (depth_layers,) = _parse_stages(depths[0], mixer_of) if depths else ((),)
    return _parse_stages(layers_text, mixer_of), depth_layers


def _parse_stages(text: str, mixer_of: Mapping[str, str]) -> tuple[tuple[PatternLayer, ...], ...]:
    stages: list[tuple[PatternLayer, ...]] = []
    number = -1
    last_is_mixer = False
    for segment in text.split(BORDER):
        if not segment:
            raise ValueError("is empty or has a stage without layers; give each stage a letter")
        layers: list[PatternLayer] = []
        for letter in segment:
            if letter in mixer_of:
                number += 1
                layers.append(PatternLayer(mixer_of[letter], None, number))
            elif last_is_mixer and layers:
                layers[-1] = PatternLayer(layers[-1].mixer, MLP_LETTERS[letter], number)
            else:
                number += not last_is_mixer
                layers.append(PatternLayer(None, MLP_LETTERS[letter], number))
            last_is_mixer = letter in mixer_of
        stages.append(tuple(layers))
    return tuple(stages)


def num_pattern_layers(text: str) -> int:
    """Return the number of layers of a pattern; borders do not change it. Raises ValueError if it is invalid.

    >>> num_pattern_layers("*-*|-E")
    3
    """
    return parse_hybrid_pattern(text)[-1][-1].number + 1


def first_letters(text: str) -> tuple[int, ...]:
    """Return the position of the first letter of each layer, not counting borders.

    Raises ValueError if the pattern is invalid.

    >>> first_letters("*-*|-E")
    (0, 2, 4)
    """
    positions: list[int] = []
    position = 0
    for stage in parse_hybrid_pattern(text):
        for layer in stage:
            if layer.number == len(positions):
                positions.append(position)
            position += (layer.mixer is not None) + (layer.mlp is not None)
    return tuple(positions)


def shown_pattern(text: str) -> str:
    """Return the option and its pattern for a message, a long one shortened."""
    shortened = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}...{text[-MAX_SHOWN // 2 :]}"
    return f"hybrid_layer_pattern={shortened!r}"


def num_parts(text: str) -> int:
    """Return the number of mixers and MLPs of a pattern without its depths, which Megatron-LM counts as layers."""
    return len(without_borders(text).partition(DEPTH)[0])


def pattern_of_parts(parts: Iterable[str]) -> str:
    """Return the pattern of mixers and MLPs in order, by name, without borders.

    >>> pattern_of_parts(["attention", "mlp", "moe"])
    '*-E'
    """
    letters = {**mixer_letters(), **MLP_LETTERS}
    return "".join(_letter(letters, part) for part in parts)


def without_borders(text: str) -> str:
    """Return the pattern of the same model, for any pipeline."""
    return text.replace(BORDER, "")
