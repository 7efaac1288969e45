"""Tables of Megatron-LM's names of tensors: Megatron core's, and those of other releases for the same tensors."""

import re

from megalite.config.tables import table_beside
from megalite.models.families import Naming, rules

_TABLE = table_beside(__file__, "names")
_CORE_RULES = rules(_TABLE["core"], "decoder.layers.{n}.")
_STACKED_RULES = rules(_TABLE["stacked"], "decoder.layers.{n}.mlp.experts.experts.")
MEGATRON = Naming(name="megatron", rules=_CORE_RULES, others=_STACKED_RULES, ignored=("._extra_state", ".inv_freq"))
GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")  # an expert of Transformer Engine's layers
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")  # numbered
STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")  # [L, ...] under one name
WORD = "embedding.word_embeddings.weight"

FUSED, OLDER = ([(other, core) for other, core in _TABLE[name]] for name in ("fused", "older"))  # in place of core's
SYNONYMS = [*FUSED, *OLDER]


def core_name(name: str) -> str:
    """Megatron core's name of a tensor of any release."""
    for other, core in SYNONYMS:
        name = name.replace(other, core)
    return GROUPED.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
