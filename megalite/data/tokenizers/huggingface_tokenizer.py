"""Models of the library tokenizers: a Hugging Face tokenizer.json, or GPT-2's two files, are read; `as_tokenizer_json`
writes a run's tokenizer, whatever it is, so that plain transformers loads it without more packages.

No code of a model directory is run and nothing is fetched: names on a hub are refused. A SentencePiece model is a
protobuf message, whose few fields that matter are read here without a package for it. What is written is compared with
the tokenizer itself on odd texts and on every piece of the vocabulary: other ids are an error, never a file. Special
tokens that are written out in a text become their ids, as in all that transformers loads.
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
from megalite.data.tokenizers.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, read

GPT2_EOD = "<|endoftext|>"
DEFAULT_EOD_TOKENS = (GPT2_EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_LITERAL = {"<": "<(?=0x[0-9A-F]{2}>)", ">": "(?<=<0x[0-9A-F]{2})>"}  # where a mark is unknown, no piece has it
_SPACE = "\u2581"
_NEVER = -1e6  # the score of a piece that no text is cut into
EDGE_CASE_TEXTS = [*load_table(__file__, "tables")["edge_cases"], "a" * 3000, " " * 3000 + "x"]
EDGE_CASE_TEXTS.append("\n" * 500 + "=" * 500 + "1" * 500 + "é" * 500)


class HuggingFaceTokenizer(Tokenizer):
    """`model` is a tokenizers.Tokenizer; `contents` the files that define it."""

    splits_special = False  # special tokens that are written out in a text are cut into pieces

    def __init__(self, name: str, kind: str, model: Any, eod: int, contents: Sequence[bytes]):
        self._model, self.eod = model, eod
        # ids may have holes above the base vocabulary: the largest id counts, not the number of entries
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        self.set_identity(name, kind, *contents)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with wrap_library_errors(
            f"{self.name} cannot encode {texts[0][:40]!r}" if len(texts) == 1 else f"{self.name} fails"
        ):
            return [encoding.ids for encoding in self._model.encode_batch_fast(list(texts))]

    def token_id(self, token: str) -> int | None:
        return self._model.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def as_tokenizers_model(self, end: str) -> Any:
        """A tokenizers.Tokenizer of its own, in which `end` is a special token."""
        from tokenizers import Tokenizer as Library

        model: Any = Library.from_str(self._model.to_str())
        model.add_special_tokens([end])
        return model

    def load_gigatoken(self) -> Any:
        import gigatoken

        return None if self.splits_special else gigatoken.Tokenizer.from_json(self._model.to_str())


def find_tokenizer_in(folder: Path) -> dict[str, Any]:
    """The data options (--tokenizer-type and its like) of the tokenizer in a model directory; empty without one. Raises
    DataError where transformers would add tokens to it that its own files do not have."""
    folder = folder.resolve()
    model, vocab, merges = (folder / name for name in ("tokenizer.model", "vocab.json", "merges.txt"))
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if model.is_file():
        pieces = SentencePieceTokenizer(model)
        _check_has_tokens(folder, pieces, model)
        _check_space(model, read_settings(folder), bool(SentencePieces(pieces.content).dummy_prefix))
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(model)}
    if vocab.is_file() and merges.is_file():
        _check_has_tokens(folder, open_gpt2(vocab, merges), vocab)
        _check_space(vocab, read_settings(folder), False)
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    return {}


def _check_has_tokens(folder: Path, tokenizer: Tokenizer, file: Path) -> None:
    """Of a format that cannot be added to. Raises DataError."""
    settings = read_settings(folder)
    for one in settings.tokens:
        found = tokenizer.token_id(one.token.content)
        if found is None or one.number not in (None, found):
            has = "lacks" if found is None else f"has as token {found}"
            wrong = f"the token {one.token.content!r}, which {file.name} {has}"
            remedy = "write a tokenizer.json with AutoTokenizer's save_pretrained"
            raise DataError(f"{one.file}: {wrong}; {remedy}")
    if settings.splits:
        raise DataError(f"{folder / added_tokens.CONFIG}: split_special_tokens=true is only known of a tokenizer.json")


def open_tokenizer_json(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of the directory that holds one; eod is its eos_token, or a usual one."""
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise DataError(
            f"tokenizer_model={path} is not a tokenizer.json or a directory with one; names on a hub are not fetched: "
            "download the tokenizer and give its directory"
        )
    content = read(file)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        remedy = "if it is a SentencePiece model, give --tokenizer-type SentencePieceTokenizer"
        raise DataError(f"tokenizer_model={file} is not a tokenizer.json: it is not UTF-8 text; {remedy}") from None
    with wrap_library_errors(f"tokenizer_model={file} is not a tokenizer.json"):
        model = tokenizers.Tokenizer.from_str(text)
    described = json.loads(text)
    settings = read_settings(file.parent, described.get("added_tokens") or ())
    contents = [content]
    candidates = DEFAULT_EOD_TOKENS if settings.eos is None else (settings.eos,)
    known = [token for token in candidates if model.token_to_id(token) is not None or settings.declares(token)]
    if not known:
        lost = f"no end-of-document token among {', '.join(candidates)}"
        raise DataError(f"{file}: {lost}; name one that it has as eos_token in tokenizer_config.json beside it")
    if file.name == added_tokens.MODEL:  # what is beside another name belongs to another tokenizer
        _check_space(file, settings, added_tokens.begins_with_space(described))
        if add_tokens(model, settings):
            contents.append(json.dumps([model.encode_special_tokens, added_tokens.state(model)]).encode())
    eod = model.token_to_id(known[0])
    if eod is None:
        raise DataError(f"{file}: no end-of-document token {known[0]}; rename the file to {added_tokens.MODEL}")
    model.no_padding()
    model.no_truncation()
    tokenizer = HuggingFaceTokenizer(str(file), "huggingface", model, eod, contents)
    tokenizer.splits_special = settings.splits
    return tokenizer


def _check_space(file: Path, settings: added_tokens.Settings, does: bool | None) -> None:
    """Refuse an add_prefix_space that is not what the tokenizer `does`: some classes of transformers take the one, some
    the other. Raises DataError."""
    asked = settings.prefix_space
    if asked is not None and does not in (None, asked):
        both = (
            f"says add_prefix_space={str(asked).lower()}, but {file.name} {'puts' if does else 'does not put'} a space"
        )
        raise DataError(f"{file.with_name(added_tokens.CONFIG)}: {both} before a text; {added_tokens.REMEDY}")


def open_gpt2(vocab: Path, merges: Path) -> Tokenizer:
    """GPT-2's byte-level BPE; eod is <|endoftext|>, also where a text writes it out, as in Megatron-LM."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    contents = [read(vocab), read(merges)]
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
    """What a .model file says, by field numbers and defaults as in sentencepiece_model.proto. `rows`: (piece, score,
    kind), the kind one of _NORMAL .. _BYTE."""

    def __init__(self, content: bytes):
        parts = list(_fields(content))
        pieces, trainers, normalizers = ([value for number, value in parts if number == n] for n in (1, 2, 3))
        rows = map(dict, map(_fields, pieces))
        self.rows = [(r[1].decode(), *struct.unpack("<f", r.get(2, bytes(4))), r.get(3, _NORMAL)) for r in rows]
        trainer, normalizer = dict(_fields(b"".join(trainers))), dict(_fields(b"".join(normalizers)))
        self.is_bpe, self.byte_fallback = trainer.get(3, _UNIGRAM) == _BPE, bool(trainer.get(35))
        spaces_behind, unused = trainer.get(24), any(kind == _UNUSED for *_, kind in self.rows)
        self.expressible = trainer.get(3, _UNIGRAM) in (_UNIGRAM, _BPE) and not spaces_behind and not unused
        self.charsmap = normalizer.get(2, b"")
        # a space before the text; spaces at both ends, and all but one between, removed; spaces shown as _SPACE
        self.dummy_prefix, self.trims, self.escapes = (normalizer.get(n, 1) for n in (3, 4, 5))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message that is known to be one: an int, or the bytes of any other kind."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value, at = _varint(data, at) if kind in (0, 2) else ({1: 8, 5: 4}[kind], at)
        if kind:
            value, at = data[at : at + value], at + value
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    end = next(i for i in range(at, len(data)) if data[i] < 128) + 1
    return sum((data[i] & 127) << 7 * (i - at) for i in range(at, end)), end


def _from_sentencepiece(model: SentencePieces, cut_single: bool) -> Any:
    """A tokenizers.Tokenizer. `cut_single`: user-defined pieces of one character are cut out of the normalised text;
    otherwise they are taken out before normalisation, as longer ones are."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {piece: i for i, (piece, _, _) in enumerate(model.rows)}
    unknown = next((piece for piece, _, kind in model.rows if kind == _UNKNOWN), None)
    if model.is_bpe:  # joins, the likeliest first: every cut of a piece into two others
        normal = {piece: score for piece, score, kind in model.rows if kind == _NORMAL}
        cuts = [(-score, p[:i], p[i:]) for p, score in normal.items() for i in range(1, len(p))]
        merges = [(a, b) for _, a, b in sorted(cuts, key=lambda cut: cut[0]) if a in normal and b in normal]
        options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": model.byte_fallback}
        inner: Any = models.BPE(ids, merges, **options)
    else:
        scored = [(piece, score if kind in (_NORMAL, _USER) else _NEVER) for piece, score, kind in model.rows]
        inner = models.Unigram(scored, None if unknown is None else ids[unknown], model.byte_fallback)
    library: Any = Tokenizer(inner)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.trims:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if model.escapes:
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    chosen = [piece for piece, _, kind in model.rows if kind == _USER]
    single = [piece for piece in chosen if cut_single and len(piece) == 1]
    apart = [re.escape(piece) for piece in single]
    if model.byte_fallback and not model.is_bpe:  # so that "<0x41>" in a text is not the byte's piece
        apart += [cut for mark, cut in _LITERAL.items() if mark not in ids]
    if apart:
        library.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(apart)), "isolated")
    library.add_tokens([AddedToken(p, normalized=False, special=False) for p in chosen if p not in single])
    special = [piece for piece, _, kind in model.rows if kind in (_CONTROL, _UNKNOWN)]
    library.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in special])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.dummy_prefix:
        parts.append(decoders.Strip(" ", 1000 if model.trims else 1, 0))
    library.decoder = decoders.Sequence(parts)
    return library


def _bytes() -> Any:
    """ByteTokenizer: no character is a piece, so each falls back on its bytes, and these are their own ids."""
    from tokenizers import Tokenizer, decoders, models

    library: Any = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([GPT2_EOD])
    return library


def _first_difference(library: Any, tokenizer: Tokenizer, texts: list[str]) -> str | None:
    """The first text for which `library` gives other ids; those that write out a special token are left out."""
    words = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    texts = [text for text in texts if not any(word in text for word in words)]
    encodings = library.encode_batch(texts, add_special_tokens=False)
    triples = zip(texts, tokenizer.encode_batch(texts), encodings, strict=True)
    return next((text for text, ids, encoding in triples if ids != encoding.ids), None)


def export_tokenizer_json(tokenizer: Tokenizer) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json: name -> text. Raises DataError that says why there are none."""
    texts = list(EDGE_CASE_TEXTS)
    ends: dict[str, str | None] = {"bos_token": None, "eos_token": GPT2_EOD, "unk_token": None}
    if isinstance(tokenizer, SentencePieceTokenizer):
        model = SentencePieces(tokenizer.content)
        if not model.expressible:
            raise DataError(f"{tokenizer.name}: a kind of SentencePiece model that tokenizer.json cannot express")
        forms = [_from_sentencepiece(model, cut) for cut in (True, False)]
        texts += [piece.replace(_SPACE, " ") for piece, _, kind in model.rows if kind in (_NORMAL, _BYTE)]
        ends = dict(zip(ends, tokenizer.bos_eos_unk_pieces(), strict=True))
    elif isinstance(tokenizer, ByteTokenizer):
        forms = [_bytes()]
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        forms = [tokenizer.as_tokenizers_model(GPT2_EOD)]
    else:
        raise DataError(f"{tokenizer.name}: there is no tokenizer.json for a {type(tokenizer).__name__}")
    wrong = [_first_difference(form, tokenizer, texts) for form in forms]
    if None not in wrong:
        raise DataError(f"{tokenizer.name}: tokenizer.json would give other ids, as of {wrong[0]!r:.60}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **ends}
    text = forms[wrong.index(None)].to_str(pretty=True)
    return {"tokenizer.json": text + "\n", "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
