"""What a model of text has to beat: unigram, bigram, and a dictionary coder that has read the train text.

All results are bits per symbol in float64; `stream` is a [N] uint8 array.
"""

import lzma
from collections.abc import Callable, Sequence

import numpy as np

MIB = 2**20


def unigram_logp(train: np.ndarray) -> np.ndarray:
    """[256] log2 p(byte), add-one smoothed (Laplace), so no byte is impossible."""
    counts = np.bincount(train, minlength=256) + 1.0
    return np.log2(counts / counts.sum())


def bigram_logp(train: np.ndarray, k: float) -> np.ndarray:
    """[256,256] log2 p(next | previous) = log2 (count + k p(next)) / (count(previous) + k): k bytes'
    worth of the unigram model are mixed in (MacKay & Peto 1995, a Dirichlet prior). k > 0."""
    pair = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=256 * 256)
    counts = pair.reshape(256, 256).astype(np.float64)
    prior = 2.0 ** unigram_logp(train)
    return np.log2((counts + k * prior[None, :]) / (counts.sum(1, keepdims=True) + k))


def fit_bigram(train: np.ndarray, ks: tuple[float, ...] = (0.5, 2, 8, 32, 128, 512)) -> np.ndarray:
    """[256,256] bigram_logp of all of train, with the k that codes the last tenth of train best when the
    counts come from the first nine tenths. The held-out text plays no part."""
    at = len(train) * 9 // 10
    best = min(ks, key=lambda k: bigram_bits(bigram_logp(train[:at], k), train[at:]).sum())
    return bigram_logp(train, best)


def unigram_bits(logp: np.ndarray, data: np.ndarray) -> np.ndarray:
    """[N] bits of each byte."""
    return -logp[data]


def bigram_bits(logp: np.ndarray, data: np.ndarray, before: int = 0) -> np.ndarray:
    """[N] bits of each byte given the one before it; `before` (the separator) precedes the first."""
    return -logp[np.concatenate([[before], data[:-1]]).astype(np.int64), data]


def xz_size(text: bytes, span: int) -> int:
    """Bytes of LZMA2 at preset 9 | EXTREME, as a raw stream: the container's rounding to 4 bytes would be noise.

    span: the dictionary, the distance over which the coder finds matches. Where it spans the whole text, more
    changes nothing but the memory (about 10 times the dictionary).
    """
    dictionary = max(MIB, 1 << span.bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary}]
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=filters))


def xz_bits(train: bytes, held: Sequence[bytes], each: Callable = map) -> list[float]:
    """Bits that each held-out text adds to the compressed train text: 8 (|xz(train + held)| - |xz(train)|).

    each: the map that runs the compressions (a thread pool's, say: lzma lets go of the interpreter's lock).
    """
    span = len(train) + max(map(len, held), default=0)
    alone, *together = each(lambda text: xz_size(train + text, span), [b"", *held])
    return [8.0 * (size - alone) for size in together]
