"""Build the tokenizer that --tokenizer-type names; the names are Megatron's.

SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer   a SentencePiece .model; eod is its eos
HuggingFaceTokenizer   a tokenizer.json, or a directory with one; its own rules for special tokens apply
GPT2BPETokenizer       vocab.json + merges.txt; eod is <|endoftext|>
TikTokenizer           ranks for tiktoken, in its own format or as Megatron-LM's JSON list (tiktoken_tokenizer.py)
ByteTokenizer          the bytes of the UTF-8 text, 0..255, and 256 as eod; needs no file and no training
NullTokenizer          --vocab-size ids, the last one is eod; its text is ids separated by spaces, as in Megatron-LM
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.registry import PLUGIN_HINT, REGISTRIES
from megalite.data.errors import DataError
from megalite.data.tokenizers.huggingface_tokenizer import open_gpt2, open_tokenizer_json
from megalite.data.tokenizers.tiktoken_tokenizer import open_tiktoken
from megalite.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, SentencePieceTokenizer, Tokenizer


@dataclass(frozen=True)
class TokenizerOptions:
    """The options that select and configure a tokenizer, with the names of the flags."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None

    def require(self, name: str) -> Any:
        """Return the option's value. Raises DataError if it is not set."""
        value = getattr(self, name)
        if value is None:
            raise DataError(f"tokenizer_type={self.tokenizer_type} needs --{name.replace('_', '-')}")
        return value


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None = None, **options: Any) -> Tokenizer:
    """Build the tokenizer that the flags of the same names describe.

    Raises DataError for an unknown type, or a flag that is missing or wrong.
    """
    if tokenizer_type not in REGISTRIES["tokenizer_type"]:
        known = ", ".join(REGISTRIES["tokenizer_type"])
        raise DataError(f"tokenizer_type={tokenizer_type} is not supported; use one of {known}{PLUGIN_HINT}")
    build = REGISTRIES["tokenizer_type"].get(tokenizer_type)
    tokenizer = build(TokenizerOptions(tokenizer_type, tokenizer_model, **options))
    if not isinstance(tokenizer, Tokenizer):
        raise DataError(f"tokenizer_type={tokenizer_type} gives a {type(tokenizer).__name__}; give a Tokenizer")
    return tokenizer


def build_builtin(options: TokenizerOptions) -> Tokenizer:
    """Build a tokenizer of one of megalite's own types. Raises DataError."""
    match options.tokenizer_type:
        case "NullTokenizer":
            size = int(options.require("vocab_size"))
            if size < 2:
                raise DataError(f"vocab_size={size} has no id besides the end of document; give 2 or more")
            return NullTokenizer(size)
        case "ByteTokenizer":
            return ByteTokenizer()
        case "GPT2BPETokenizer":
            return open_gpt2(Path(options.require("vocab_file")), Path(options.require("merge_file")))
        case "TikTokenizer":
            return open_tiktoken(Path(options.require("tokenizer_model")), options.tiktoken_pattern, options.vocab_size)
        case "HuggingFaceTokenizer":
            return open_tokenizer_json(Path(options.require("tokenizer_model")))
    return SentencePieceTokenizer(Path(options.require("tokenizer_model")))
