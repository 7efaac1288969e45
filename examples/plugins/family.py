"""A model family: a Llama with other tensor names and other keys in config.json.

megalite train --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/llama
megalite convert --plugin examples/plugins/family.py --load runs/llama --to-hf models/acme --family acme
megalite train --plugin examples/plugins/family.py --pretrained-checkpoint models/acme --use-checkpoint-args \
  --vocab-size 300 --mock-data --lr 1e-4 \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/acme

A family is used in both directions. Its name is the model_type. All fields that are not set here are those of Llama.
"""

from dataclasses import replace

import megalite
from megalite.interop.name_mapping import FAMILIES, ModelFamily, parse_rules

NAMES = """
tokens.weight = embedding.word
layer.norm1.weight = our.attention.norm.weight
layer.wq.* = our.attention.q*
layer.wkv.* = our.attention.kv*[0] + our.attention.kv*[1]
layer.wo.* = our.attention.out*
layer.norm2.weight = our.mlp.norm.weight
layer.w1.* = our.mlp.gate_up*[0]
layer.w3.* = our.mlp.gate_up*[1]
layer.w2.* = our.mlp.down*
norm.weight = final_norm.weight
output.weight = head | embedding.word
"""
LLAMA: ModelFamily = FAMILIES.get("llama")

acme = replace(
    LLAMA,
    name="acme",
    architecture="AcmeForCausalLM",
    rules=parse_rules(NAMES, "blocks.{n}."),
    prefix="",
    keys={**LLAMA.keys, "hidden_size": "width", "num_layers": "depth"},
)
megalite.register("family", "acme", acme)
