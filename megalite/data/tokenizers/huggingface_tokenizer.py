"""Tokenizers of the library tokenizers: a Hugging Face tokenizer.json, or GPT-2's two files.

`export_tokenizer_json` writes a run's tokenizer, of any type, so that plain transformers loads it without more
packages.

No code of a model directory is run and nothing is fetched: names on a hub are refused. A SentencePiece model is a
protobuf message; the few fields that matter are read here without a package for it. The exported tokenizer is compared
with the original on unusual texts and on every piece of the vocabulary: different ids are an error, and no file is
written. Special tokens that are written out in a text become their ids, as in everything that transformers loads.

Rejected: the conversion of transformers. Of 34 unusual texts (EDGE_CASE_TEXTS and those of the tests), it gives other
ids for 1 with models of tools/train_tokenizer.py, and for 13 to 32 with other BPE and unigram models (transformers
5.23); this one gives the same ids for all. It also needs protobuf, and 2.3 s to import.
"""

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.common.tables import load_table
from megalite.data.errors import DataError, wrap_library_errors
from megalite.data.tokenizers import added_tokens
from megalite.data.tokenizers.added_tokens import add_tokens, read_settings
from megalite.data.tokenizers.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, read_tokenizer_file

GPT2_EOD = "<|endoftext|>"
DEFAULT_EOD_TOKENS = (GPT2_EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
# patterns that isolate a mark of a literal "<0x41>"; a mark that is not in the vocabulary is in no other piece either
_LITERAL = {"<": "<(?=0x[0-9A-F]{2}>)", ">": "(?<=<0x[0-9A-F]{2})>"}
_SPACE = "\u2581"
_NEVER = -1e6  # the score of pieces that must never occur in a segmentation
EDGE_CASE_TEXTS = [*load_table(__file__, "tables")["edge_cases"], "a" * 3000, " " * 3000 + "x"]
EDGE_CASE_TEXTS.append("\n" * 500 + "=" * 500 + "1" * 500 + "é" * 500)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library tokenizers.

    Args:
        name: for messages and logs
        kind: the type, as a part of the fingerprint
        model: a tokenizers.Tokenizer
        eod: the id that ends a document
        contents: the files that define the tokenizer, for the fingerprint
    """

    splits_special = False  # True: special tokens that are written out in a text are cut into pieces

    def __init__(self, name: str, kind: str, model: Any, eod: int, contents: Sequence[bytes]):
        self._model, self.eod = model, eod
        # ids may have holes above the base vocabulary: the largest id counts, not the number of entries
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        self.set_identity(name, kind, *contents)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        problem = f"{self.name} cannot encode {texts[0][:40]!r}" if len(texts) == 1 else f"{self.name} fails"
        with wrap_library_errors(problem):
            return [encoding.ids for encoding in self._model.encode_batch_fast(list(texts))]

    def token_id(self, token: str) -> int | None:
        return self._model.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def as_tokenizers_model(self, end: str) -> Any:
        """Return a copy of the tokenizers.Tokenizer in which `end` is a special token."""
        from tokenizers import Tokenizer as Library

        model: Any = Library.from_str(self._model.to_str())
        model.add_special_tokens([end])
        return model

    def load_gigatoken(self) -> Any:
        import gigatoken

        return None if self.splits_special else gigatoken.Tokenizer.from_json(self._model.to_str())


def find_tokenizer_in(directory: Path) -> dict[str, Any]:
    """Return the data options (--tokenizer-type etc.) of the tokenizer in a model directory; empty if it has none.

    Raises DataError if transformers would add tokens that the tokenizer's own files do not have.
    """
    directory = directory.resolve()
    model, vocab, merges = (directory / name for name in ("tokenizer.model", "vocab.json", "merges.txt"))
    if (directory / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(directory)}
    if model.is_file():
        pieces = SentencePieceTokenizer(model)
        _check_has_tokens(directory, pieces, model)
        _check_prefix_space(model, read_settings(directory), bool(SentencePieces(pieces.content).dummy_prefix))
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(model)}
    if vocab.is_file() and merges.is_file():
        _check_has_tokens(directory, open_gpt2(vocab, merges), vocab)
        _check_prefix_space(vocab, read_settings(directory), False)
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    return {}


def _check_has_tokens(directory: Path, tokenizer: Tokenizer, file: Path) -> None:
    """Raise DataError if a tokenizer lacks tokens that the settings in its directory declare.

    It is for formats that tokens cannot be added to.
    """
    settings = read_settings(directory)
    for declared in settings.tokens:
        number = tokenizer.token_id(declared.added_token.content)
        if number is None or declared.token_id not in (None, number):
            state = "lacks" if number is None else f"has as id {number}"
            problem = f"the token {declared.added_token.content!r}, which {file.name} {state}"
            remedy = "write a tokenizer.json with AutoTokenizer's save_pretrained"
            raise DataError(f"{declared.file}: {problem}; {remedy}")
    if settings.splits_special:
        config = directory / added_tokens.CONFIG
        raise DataError(f"{config}: split_special_tokens=true is only supported with a tokenizer.json")


def open_tokenizer_json(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or of the directory that contains one.

    eod is its eos_token, or else the first of DEFAULT_EOD_TOKENS that it has. Raises DataError.
    """
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(
            f"tokenizer_model={path} is not a tokenizer.json or a directory with one; names on a hub are not fetched: "
            "download the tokenizer and give its directory"
        )
    content = read_tokenizer_file(file)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        remedy = "if it is a SentencePiece model, give --tokenizer-type SentencePieceTokenizer"
        raise DataError(f"tokenizer_model={file} is not a tokenizer.json: it is not UTF-8 text; {remedy}") from None
    with wrap_library_errors(f"tokenizer_model={file} is not a tokenizer.json"):
        model = tokenizers.Tokenizer.from_str(text)
    spec = json.loads(text)
    settings = read_settings(file.parent, spec.get("added_tokens") or ())
    contents = [content]
    candidates = DEFAULT_EOD_TOKENS if settings.eos is None else (settings.eos,)
    available = [token for token in candidates if model.token_to_id(token) is not None or settings.declares(token)]
    if not available:
        problem = f"no end-of-document token among {', '.join(candidates)}"
        raise DataError(
            f"{file}: {problem}; name one of its tokens as eos_token in the tokenizer_config.json next to it"
        )
    if file.name == added_tokens.MODEL:  # files next to a file of another name belong to another tokenizer
        _check_prefix_space(file, settings, added_tokens.begins_with_space(spec))
        if add_tokens(model, settings):
            contents.append(json.dumps([model.encode_special_tokens, added_tokens.added_tokens_by_id(model)]).encode())
    eod = model.token_to_id(available[0])
    if eod is None:
        raise DataError(f"{file}: no end-of-document token {available[0]}; rename the file to {added_tokens.MODEL}")
    model.no_padding()
    model.no_truncation()
    tokenizer = HuggingFaceTokenizer(str(file), "huggingface", model, eod, contents)
    tokenizer.splits_special = settings.splits_special
    return tokenizer


def _check_prefix_space(file: Path, settings: added_tokens.TokenizerSettings, adds_space: bool | None) -> None:
    """Raise DataError if add_prefix_space contradicts the tokenizer.

    Some classes of transformers follow the setting, others the tokenizer.

    Args:
        adds_space: the tokenizer puts a space before a text; None: it has no step that could.
    """
    requested = settings.prefix_space
    if requested is not None and adds_space not in (None, requested):
        action = "adds" if adds_space else "does not add"
        problem = f"has add_prefix_space={str(requested).lower()}, but {file.name} {action} a space"
        raise DataError(f"{file.with_name(added_tokens.CONFIG)}: {problem} before a text; {added_tokens.REMEDY}")


def open_gpt2(vocab: Path, merges: Path) -> Tokenizer:
    """Return GPT-2's byte-level BPE tokenizer. Raises DataError.

    eod is <|endoftext|>, also where it is written out in a text, as in Megatron-LM.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    contents = [read_tokenizer_file(vocab), read_tokenizer_file(merges)]
    with wrap_library_errors(f"{vocab}, {merges}: not a GPT-2 vocabulary and merges"):
        model = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    eod = model.token_to_id(GPT2_EOD)
    if eod is None:
        raise DataError(f"{vocab}: has no {GPT2_EOD}; add it, or give a tokenizer.json as HuggingFaceTokenizer")
    model.add_special_tokens([GPT2_EOD])
    tokenizer = HuggingFaceTokenizer(str(vocab), "gpt2-bpe special", model, eod, contents)
    tokenizer.unk_id = eod  # as in Megatron-LM
    return tokenizer


class SentencePieces:
    """The contents of a SentencePiece .model file.

    Field numbers and defaults come from sentencepiece_model.proto.

    rows           (piece, score, kind) of each id, with kind from _NORMAL .. _BYTE
    is_bpe         True for BPE, False for Unigram
    byte_fallback  True if unknown characters become their bytes
    expressible    True if a tokenizer.json can express the model
    charsmap       the precompiled normalization, empty if there is none
    dummy_prefix   a space is put before the text
    trims          spaces at both ends, and all but one between words, are removed
    escapes        spaces are shown as _SPACE
    """

    def __init__(self, content: bytes):
        fields = list(_fields(content))
        pieces, trainers, normalizers = ([value for number, value in fields if number == n] for n in (1, 2, 3))
        rows = map(dict, map(_fields, pieces))
        self.rows = [(r[1].decode(), *struct.unpack("<f", r.get(2, bytes(4))), r.get(3, _NORMAL)) for r in rows]
        trainer = dict(_fields(b"".join(trainers)))
        normalizer = dict(_fields(b"".join(normalizers)))
        model_type = trainer.get(3, _UNIGRAM)
        self.is_bpe = model_type == _BPE
        self.byte_fallback = bool(trainer.get(35))
        spaces_as_suffix = trainer.get(24)
        has_unused = any(kind == _UNUSED for *_, kind in self.rows)
        self.expressible = model_type in (_UNIGRAM, _BPE) and not spaces_as_suffix and not has_unused
        self.charsmap = normalizer.get(2, b"")
        self.dummy_prefix, self.trims, self.escapes = (normalizer.get(n, 1) for n in (3, 4, 5))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a valid protobuf message; value is an int, or bytes for other types."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        wire_type = key & 7
        if wire_type in (0, 2):  # the value, or its length
            value, offset = _varint(data, offset)
        else:
            value = {1: 8, 5: 4}[wire_type]  # bytes
        if wire_type:
            value, offset = data[offset : offset + value], offset + value
        yield key >> 3, value


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the variable-length integer at `offset`, and the offset after it."""
    end = next(i for i in range(offset, len(data)) if data[i] < 128) + 1
    return sum((data[i] & 127) << 7 * (i - offset) for i in range(offset, end)), end


def _from_sentencepiece(model: SentencePieces, cut_single: bool) -> Any:
    """Return a tokenizers.Tokenizer for a SentencePiece model.

    `cut_single` cuts user-defined pieces of one character out of the normalized text; otherwise they are cut out before
    normalization, in the same way as longer ones.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {piece: i for i, (piece, _, _) in enumerate(model.rows)}
    unknown = next((piece for piece, _, kind in model.rows if kind == _UNKNOWN), None)
    if model.is_bpe:  # merges, best score first: every cut of a piece into two others
        normal = {piece: score for piece, score, kind in model.rows if kind == _NORMAL}
        cuts = [(-score, p[:i], p[i:]) for p, score in normal.items() for i in range(1, len(p))]
        merges = [(a, b) for _, a, b in sorted(cuts, key=lambda cut: cut[0]) if a in normal and b in normal]
        options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": model.byte_fallback}
        algorithm: Any = models.BPE(ids, merges, **options)
    else:
        scored = [(piece, score if kind in (_NORMAL, _USER) else _NEVER) for piece, score, kind in model.rows]
        algorithm = models.Unigram(scored, None if unknown is None else ids[unknown], model.byte_fallback)
    library: Any = Tokenizer(algorithm)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.trims:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if model.escapes:
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    user_defined = [piece for piece, _, kind in model.rows if kind == _USER]
    single = [piece for piece in user_defined if cut_single and len(piece) == 1]
    isolated = [re.escape(piece) for piece in single]
    if model.byte_fallback and not model.is_bpe:  # so that "<0x41>" in a text is not the byte's piece
        isolated += [cut for mark, cut in _LITERAL.items() if mark not in ids]
    if isolated:
        library.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(isolated)), "isolated")
    library.add_tokens([AddedToken(p, normalized=False, special=False) for p in user_defined if p not in single])
    special = [piece for piece, _, kind in model.rows if kind in (_CONTROL, _UNKNOWN)]
    library.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in special])
    decoder_steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.dummy_prefix:
        decoder_steps.append(decoders.Strip(" ", 1000 if model.trims else 1, 0))
    library.decoder = decoders.Sequence(decoder_steps)
    return library


def _byte_level_model() -> Any:
    """Return ByteTokenizer as a tokenizers.Tokenizer: no character is a piece, so each becomes its bytes, the ids."""
    from tokenizers import Tokenizer, decoders, models

    library: Any = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([GPT2_EOD])
    return library


def _first_difference(library: Any, tokenizer: Tokenizer, texts: list[str]) -> str | None:
    """Return the first text for which `library` gives different ids, or None.

    Texts that contain a special token are skipped.
    """
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    texts = [text for text in texts if not any(token in text for token in special)]
    encodings = library.encode_batch(texts, add_special_tokens=False)
    triples = zip(texts, tokenizer.encode_batch(texts), encodings, strict=True)
    return next((text for text, ids, encoding in triples if ids != encoding.ids), None)


def export_tokenizer_json(tokenizer: Tokenizer) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json of a tokenizer, as name -> text.

    Raises DataError if there is no tokenizer.json that gives the same ids.
    """
    texts = list(EDGE_CASE_TEXTS)
    special_tokens: dict[str, str | None] = {"bos_token": None, "eos_token": GPT2_EOD, "unk_token": None}
    if isinstance(tokenizer, SentencePieceTokenizer):
        model = SentencePieces(tokenizer.content)
        if not model.expressible:
            raise DataError(f"{tokenizer.name}: a kind of SentencePiece model that tokenizer.json cannot express")
        candidates = [_from_sentencepiece(model, cut_single) for cut_single in (True, False)]
        texts += [piece.replace(_SPACE, " ") for piece, _, kind in model.rows if kind in (_NORMAL, _BYTE)]
        special_tokens = dict(zip(special_tokens, tokenizer.bos_eos_unk_pieces(), strict=True))
    elif isinstance(tokenizer, ByteTokenizer):
        candidates = [_byte_level_model()]
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        candidates = [tokenizer.as_tokenizers_model(GPT2_EOD)]
    else:
        raise DataError(f"{tokenizer.name}: there is no tokenizer.json for a {type(tokenizer).__name__}")
    differences = [_first_difference(form, tokenizer, texts) for form in candidates]
    if None not in differences:
        raise DataError(
            f"{tokenizer.name}: tokenizer.json would give other ids, for example for {differences[0]!r:.60}"
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special_tokens}
    text = candidates[differences.index(None)].to_str(pretty=True)
    return {"tokenizer.json": text + "\n", "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
