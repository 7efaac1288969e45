"""The tokenizer that --tokenizer-type names, under Megatron's names.

SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer   a SentencePiece .model; eod is its eos
HuggingFaceTokenizer   a tokenizer.json, or a directory with one; its own rules for special tokens are kept
GPT2BPETokenizer       vocab.json + merges.txt; eod is <|endoftext|>
TikTokenizer           ranks for tiktoken, in its own format or as Megatron-LM's JSON list (tiktoken_files.py)
ByteTokenizer          the bytes of the UTF-8 text, 0..255, and 256 as eod; needs no file and no training
NullTokenizer          --vocab-size ids, the last one eod; its text is ids with spaces between, as in Megatron-LM
"""

from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.registry import PLUGIN_HINT, REGISTRIES
from megalite.data.errors import DataError
from megalite.data.tokenizers.huggingface_tokenizer import open_gpt2, open_tokenizer_json
from megalite.data.tokenizers.tiktoken_tokenizer import open_tiktoken
from megalite.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, SentencePieceTokenizer, Tokenizer


class TokenizerOptions(NamedTuple):
    """The options of a tokenizer, by their names."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None

    def require(self, name: str) -> Any:
        """The option's value. Raises DataError where it is not given."""
        if (value := getattr(self, name)) is None:
            raise DataError(f"tokenizer_type={self.tokenizer_type} needs --{name.replace('_', '-')}")
        return value


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None = None, **options: Any) -> Tokenizer:
    """The tokenizer that the flags of the same names describe; DataError says which one is missing or wrong."""
    if tokenizer_type not in REGISTRIES["tokenizer_type"]:
        known = ", ".join(REGISTRIES["tokenizer_type"])
        raise DataError(f"tokenizer_type={tokenizer_type} is not supported; use one of {known}{PLUGIN_HINT}")
    made = REGISTRIES["tokenizer_type"].get(tokenizer_type)(
        TokenizerOptions(tokenizer_type, tokenizer_model, **options)
    )
    if not isinstance(made, Tokenizer):
        raise DataError(f"tokenizer_type={tokenizer_type} gives a {type(made).__name__}; give a Tokenizer")
    return made


def build_builtin(o: TokenizerOptions) -> Tokenizer:
    match o.tokenizer_type:
        case "NullTokenizer":
            if (size := int(o.require("vocab_size"))) < 2:
                raise DataError(f"vocab_size={size} has no id beside the end of document; give 2 or more")
            return NullTokenizer(size)
        case "ByteTokenizer":
            return ByteTokenizer()
        case "GPT2BPETokenizer":
            return open_gpt2(Path(o.require("vocab_file")), Path(o.require("merge_file")))
        case "TikTokenizer":
            return open_tiktoken(Path(o.require("tokenizer_model")), o.tiktoken_pattern, o.vocab_size)
        case "HuggingFaceTokenizer":
            return open_tokenizer_json(Path(o.require("tokenizer_model")))
    return SentencePieceTokenizer(Path(o.require("tokenizer_model")))
