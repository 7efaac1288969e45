"""The tokenizer that --tokenizer-type names, under Megatron's names.

SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer   a SentencePiece .model; eod is its eos
HuggingFaceTokenizer   a tokenizer.json, or a directory with one; its own rules for special tokens are kept
GPT2BPETokenizer       vocab.json + merges.txt; eod is <|endoftext|>
TikTokenizer           ranks for tiktoken, in its own format or as Megatron-LM's JSON list (tiktoken_files.py)
ByteTokenizer          the bytes of the UTF-8 text, 0..255, and 256 as eod; needs no file and no training
NullTokenizer          --vocab-size ids, the last one eod; its text is ids with spaces between, as in Megatron-LM
"""

from pathlib import Path
from typing import Any

from megalite.config.run_options import TOKENIZERS
from megalite.data.errors import DataError
from megalite.data.tokenizers.tiktoken_files import open_tiktoken
from megalite.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, SentencePieceTokenizer, Tokenizer
from megalite.data.tokenizers.tokenizer_json import open_gpt2, open_tokenizer_json


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
) -> Tokenizer:
    """The tokenizer that the flags of the same names describe; DataError says which one is missing or wrong."""

    def need(name: str, value: Any) -> Any:
        if value is None:
            raise DataError(f"tokenizer_type={tokenizer_type} needs --{name.replace('_', '-')}")
        return value

    if tokenizer_type == "NullTokenizer":
        if need("vocab_size", vocab_size) < 2:
            raise DataError(f"vocab_size={vocab_size} has no id beside the end of document; give 2 or more")
        return NullTokenizer(int(vocab_size or 0))
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "GPT2BPETokenizer":
        return open_gpt2(Path(need("vocab_file", vocab_file)), Path(need("merge_file", merge_file)))
    if tokenizer_type not in TOKENIZERS:
        raise DataError(f"tokenizer_type={tokenizer_type} is not supported; use one of {', '.join(TOKENIZERS)}")
    model = Path(need("tokenizer_model", tokenizer_model))
    if tokenizer_type == "TikTokenizer":
        return open_tiktoken(model, tiktoken_pattern, vocab_size)
    return open_tokenizer_json(model) if tokenizer_type == "HuggingFaceTokenizer" else SentencePieceTokenizer(model)
