"""Bits per byte, a loss that can be compared between tokenizers."""

import math
from collections.abc import Sequence

from megalite.data.errors import DataError
from megalite.data.files.sidecar import read_sidecar


def bytes_per_token(prefixes: Sequence[str], weights: Sequence[float] | None = None) -> float | None:
    """Return the UTF-8 bytes of text per token of a set, or None if a prefix.json does not have them.

    They come from "bytes" and "tokens" in each prefix.json. `weights` are the files' shares of the set's samples;
    without them each file counts by its tokens. The average is over full files; a fraction of one (--split) may differ
    a little. Raises DataError for counts that are not integers > 0.
    """
    sizes = []
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is None or "bytes" not in sidecar:
            return None
        counts = sidecar["bytes"], sidecar.get("tokens")
        if not all(type(count) is int and count > 0 for count in counts):
            raise DataError(f"{prefix}.json: bytes={counts[0]!r} and tokens={counts[1]!r} must both be integers > 0")
        sizes.append(counts)
    shares = weights if weights is not None else [tokens for _, tokens in sizes]
    total = sum(share * size / tokens for share, (size, tokens) in zip(shares, sizes, strict=True))
    return total / sum(shares)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return the bits that the model needs for a byte of text when a token costs `loss` nats on average.

    Use it to compare models with different tokenizers: the loss per token depends on how much text a token covers.

    >>> round(bits_per_byte(2.772588722239781, 4.0), 6)  # 4 bits for 4 bytes
    1.0
    """
    return loss / (bytes_per_token * math.log(2))
