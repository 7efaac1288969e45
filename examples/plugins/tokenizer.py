"""A tokenizer with one id for each character of an alphabet; other characters become "?".

megalite data corpus --out data
megalite preprocess --plugin examples/plugins/tokenizer.py --tokenizer-type Characters --append-eod \
  --input data/valid.jsonl --output-prefix data/characters
megalite train --plugin examples/plugins/tokenizer.py --tokenizer-type Characters --preset tiny \
  --data-path data/characters_text_document \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/characters

`options` has the tokenizer options of the command line; this tokenizer uses none. `set_identity` gets everything that
the ids depend on, so that data and checkpoints of another alphabet are refused.
"""

import string
from collections.abc import Sequence

import megalite
from megalite.data.tokenizers.build_tokenizer import TokenizerOptions
from megalite.data.tokenizers.tokenizer import Tokenizer

ALPHABET = string.printable


class Characters(Tokenizer):
    def __init__(self) -> None:
        self.ids = {character: i for i, character in enumerate(ALPHABET)}
        self.eod, self.vocab_size = len(ALPHABET), len(ALPHABET) + 1
        self.set_identity("Characters", "characters", ALPHABET.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.ids.get(character, self.ids["?"]) for character in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(ALPHABET[i] for i in ids if i != self.eod)


@megalite.register("tokenizer_type", "Characters")
def characters(options: TokenizerOptions) -> Characters:
    return Characters()
