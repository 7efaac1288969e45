"""The layers of a model as a text with a letter for each part, as in Megatron-LM's hybrid models.

    *   attention          -   MLP          E   experts          |   border between two pipeline stages

    "*-*E"    two layers: attention and MLP, attention and experts
    "**-"     two layers: attention alone, attention and MLP
    "*|-"     one layer, whose halves are on two stages

An attention and the MLP or experts after it are one layer, as in models without a pattern. Any other part is a layer by
itself. A border does not change the model: the halves of a layer that it separates have the same number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

MIXER_LETTERS = {"*": "attention"}
MLP_LETTERS = {"-": "mlp", "E": "moe"}
BORDER = "|"
MAX_LAYERS = 100_000
_HINT = "use * (attention), - (MLP), E (experts) and | (pipeline border)"
_REFUSED = {
    "/": "multi-token prediction",
    "M": "a Mamba layer",
    "G": "a gated delta net",
    "K": "Kimi delta attention",
    "+": "multi-latent attention",
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
        return _letter(MIXER_LETTERS, self.mixer) + _letter(MLP_LETTERS, self.mlp)


def _letter(letters: dict[str, str], part: str | None) -> str:
    return next((letter for letter, name in letters.items() if name == part), "")


@cache
def parse_hybrid_pattern(text: str) -> tuple[tuple[PatternLayer, ...], ...]:
    """Return the layers of each stage of a pattern; without borders there is one stage.

    Raises:
        ValueError: if the pattern is invalid, with the reason and a remedy.

    >>> [[layer.number for layer in stage] for stage in parse_hybrid_pattern("*-*|-E")]
    [[0, 1], [1, 2]]
    """
    if len(text) > 2 * MAX_LAYERS:
        raise ValueError(f"has {len(text)} letters; use at most {2 * MAX_LAYERS}")
    for position, letter in enumerate(text):
        if letter in _REFUSED:
            raise ValueError(f"has {letter}, {_REFUSED[letter]}, which is not supported; {_HINT}")
        if letter not in MIXER_LETTERS and letter not in MLP_LETTERS and letter != BORDER:
            raise ValueError(f"has {letter!r} at position {position}; {_HINT}")
    stages: list[tuple[PatternLayer, ...]] = []
    number = -1
    last_is_mixer = False
    for segment in text.split(BORDER):
        if not segment:
            raise ValueError("is empty or has a stage without layers; give each stage a letter")
        layers: list[PatternLayer] = []
        for letter in segment:
            if letter in MIXER_LETTERS:
                number += 1
                layers.append(PatternLayer(MIXER_LETTERS[letter], None, number))
            elif last_is_mixer and layers:
                layers[-1] = PatternLayer(layers[-1].mixer, MLP_LETTERS[letter], number)
            else:
                number += not last_is_mixer
                layers.append(PatternLayer(None, MLP_LETTERS[letter], number))
            last_is_mixer = letter in MIXER_LETTERS
        stages.append(tuple(layers))
    return tuple(stages)


def num_parts(text: str) -> int:
    """Return the number of mixers and MLPs of a pattern, which Megatron-LM counts as layers."""
    return len(text.replace(BORDER, ""))


def without_borders(text: str) -> str:
    """Return the pattern of the same model, for any pipeline."""
    return text.replace(BORDER, "")


def format_stages(stages: Sequence[Sequence[PatternLayer]]) -> str:
    """Return the pattern of these stages."""
    return BORDER.join("".join(layer.letters for layer in stage) for stage in stages)
