"""The maximal update parametrization (muP): how initial weights, rates and multipliers follow the width of a model.

Hyperparameters that were found at a base width are then the best ones at every width (Tensor Programs V,
arXiv:2203.03466). m is the hidden size over that of the base model, and all other widths grow in proportion. The role
of a weight says which sides of its product grow:

    role     input side   output side   weights                                        std         AdamW   SGD
    input    fixed        grows         embeddings, biases, norms, filters, the head   1           1       m
    hidden   grows        grows         matrices                                       1/sqrt(m)   1/m     1
    output   grows        fixed         routers, gates of one number                   1/m         1/m     1/m

These are the paper's table 3 for layers, and table 8 for the head, whose logits are divided by m instead: both are the
same training (lemma J.1), and so a head may be the word embedding. Scores of attention are q k / K instead of
q k / sqrt(K). Gradients shrink by m, and so does Adam's epsilon (appendix B.3).

Muon's updates of matrices have a norm that their shapes determine (optim/muon.py). LAMB and LARS have no rule.
"""

from collections.abc import Mapping
from typing import Literal

WidthRole = Literal["input", "hidden", "output"]

# role -> the power of m that multiplies the standard deviation of initial weights
INIT_POWERS: Mapping[WidthRole, float] = {"input": 0.0, "hidden": -0.5, "output": -1.0}
_ADAM_POWERS: Mapping[WidthRole, float] = {"input": 0.0, "hidden": -1.0, "output": -1.0}
# optimizer -> role -> the power of m that multiplies the learning rate; those of Muon are for what AdamW updates
LR_POWERS: Mapping[str, Mapping[WidthRole, float]] = {
    "adam": _ADAM_POWERS,
    "sgd": {"input": 1.0, "hidden": 0.0, "output": -1.0},
    "muon": _ADAM_POWERS,
    "dist_muon": _ADAM_POWERS,
}


def lr_multipliers(optimizer: str, width_mult: float) -> dict[WidthRole, float]:
    """Return role -> the factor of the learning rate; {} if all are 1.

    >>> lr_multipliers("adam", 4.0)
    {'input': 1.0, 'hidden': 0.25, 'output': 0.25}
    """
    if width_mult == 1:
        return {}
    return {role: width_mult**power for role, power in LR_POWERS[optimizer].items()}
