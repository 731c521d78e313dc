"""Text as bytes: cutting, de-duplication, the train/held-out split, and windows over byte streams.

Everything here depends on the bytes of the documents only, never on their names or their order, so a
renamed or reshuffled corpus gives the same split, byte for byte.

The rules, in the order in which `split` applies them:

1. A document longer than 1/128 of the corpus (and 512 bytes) is cut between paragraphs, so one long
   file still becomes many documents.
2. Documents that are equal up to white space are kept once; a paragraph of 64 bytes or more that has
   been seen before (up to white space) is cut from the later documents. "Before" is the order of the
   documents' hashes.
3. In that same order documents are held out until the held-out share is reached; the rest is train.
4. A held-out document is dropped when more than half of its 50-byte shingles (white space normalised)
   occur in train: near-duplicates and boilerplate would measure memory, not modelling. Lee et al. 2021
   (arXiv 2107.06499) remove repeats of 50 tokens for the same reason.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.types import Array, Key

SEPARATOR = 0  # ends every document in a stream; no text document contains it
PARAGRAPH = 64  # bytes; shorter paragraphs (headings, "See also") may repeat
SHINGLE = 50  # bytes
SPLIT = b"final"  # settings were compared under another word, so no choice saw what is held out now
OVERLAP = 0.5  # a held-out document with a larger share of its shingles in train is dropped


class Split(NamedTuple):
    train: list[bytes]  # documents in hash order
    held: list[bytes]
    duplicates: int  # bytes removed by rule 2, with the blank lines around them
    overlapping: int  # bytes of held-out documents dropped because of rule 4


class Windows(NamedTuple):
    """Scoring windows over a stream of N bytes. `position` is the index in the stream of each token
    that counts (-1 where it only gives context); every position 0 .. N-1 occurs exactly once."""

    tokens: np.ndarray  # [W,T] int32
    position: np.ndarray  # [W,T] int32


def normalise(text: bytes) -> bytes:
    """Every run of white space becomes one space; none at the ends."""
    return b" ".join(text.split())


def digest(text: bytes) -> int:
    """64 bits of BLAKE2b of the normalised text, personalised: another word gives another split."""
    return int.from_bytes(hashlib.blake2b(normalise(text), digest_size=8, person=SPLIT).digest(), "big")


def cut(document: bytes, size: int) -> list[bytes]:
    """Pieces of at most `size` bytes that join to the document: cut behind the last blank line that
    fits, else behind the last line end, else at `size`."""
    pieces = []
    while len(document) > size:
        at = document.rfind(b"\n\n", 0, size) + 2
        if at < size // 2:
            at = max(at, document.rfind(b"\n", 0, size) + 1)
        at = at if at >= 2 else size
        pieces.append(document[:at])
        document = document[at:]
    return [*pieces, document]


def deduplicate(documents: Iterable[bytes]) -> list[bytes]:
    """Rule 2. Distinct documents in hash order, without paragraphs that an earlier one contains."""
    distinct: dict[int, bytes] = {}
    for document in documents:
        key = digest(document)
        distinct[key] = min(document, distinct.get(key, document))  # one spelling, whatever the order
    seen: set[int] = set()
    kept = []
    for _, document in sorted(distinct.items()):
        paragraphs = []
        for paragraph in re.split(rb"\n\s*\n", document):
            key = digest(paragraph)
            if key in seen:
                continue
            if len(normalise(paragraph)) >= PARAGRAPH:
                seen.add(key)
            paragraphs.append(paragraph)
        rest = b"\n\n".join(paragraphs).strip(b"\r\n")
        if rest:
            kept.append(rest)
    return kept


def shingles(text: bytes) -> np.ndarray:
    """[max(0, len - 49)] uint64 hashes of all 50-byte substrings of the normalised text: Rabin's
    rolling polynomial modulo 2^64 over random byte codes, by differences of one prefix sum."""
    codes = np.random.default_rng(0).integers(1, 2**63, 256, np.uint64)
    data = codes[np.frombuffer(normalise(text), np.uint8)]
    if len(data) < SHINGLE:
        return np.zeros(0, np.uint64)
    base = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
    powers = _powers(base, len(data))
    prefix = np.concatenate([np.zeros(1, np.uint64), np.cumsum(data * powers, dtype=np.uint64)])
    inverse = _powers(pow(base, -1, 2**64), len(data) - SHINGLE + 1)
    return (prefix[SHINGLE:] - prefix[:-SHINGLE]) * inverse


def _powers(base: int, n: int) -> np.ndarray:
    factors = np.full(n, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def overlap(documents: Sequence[bytes], train: Sequence[bytes]) -> np.ndarray:
    """[len(documents)] share of each document's shingles that occur in train (0 without shingles)."""
    known = np.unique(np.concatenate([np.zeros(1, np.uint64), *map(shingles, train)]))

    def share(document: bytes) -> float:
        mine = shingles(document)
        found = known[np.minimum(np.searchsorted(known, mine), len(known) - 1)] == mine
        return float(found.mean()) if len(mine) else 0.0

    return np.array([share(document) for document in documents])


def split(documents: Sequence[bytes], held_share: float = 0.1) -> Split:
    """Rules 1 to 4. The held-out share is measured in bytes, before rule 4 drops any."""
    total = sum(map(len, documents))
    size = max(512, total // 128)
    kept = deduplicate(piece for document in documents for piece in cut(document, size))
    before = np.cumsum([0, *map(len, kept)])
    n_held = int(np.searchsorted(before, held_share * before[-1]))
    candidates, train = kept[:n_held], kept[n_held:]
    clean = overlap(candidates, train) <= OVERLAP
    held = [document for document, ok in zip(candidates, clean) if ok]
    overlapping = sum(map(len, candidates)) - sum(map(len, held))
    return Split(train, held, total - int(before[-1]), overlapping)


def stream(documents: Sequence[bytes]) -> np.ndarray:
    """[N] uint8: the documents, each followed by SEPARATOR."""
    return np.frombuffer(b"".join(document + bytes([SEPARATOR]) for document in documents), np.uint8)


def blocks(documents: Sequence[bytes], n: int) -> np.ndarray:
    """[N] int32, N = len(stream(documents)): the block of each byte, counted from 0. A block is a run of
    whole documents and ends when it holds its share of the bytes; long documents make fewer than n."""
    lengths = np.array([len(document) + 1 for document in documents])
    share = lengths.sum() / n
    block = np.zeros(len(documents), np.int32)
    for i, done in enumerate(np.cumsum(lengths)[:-1], start=1):
        block[i] = block[i - 1] + (done >= share * (block[i - 1] + 1))
    return np.repeat(block, lengths)


def random_windows(key: Key, data: Array, rows: Array, window: int) -> Array:
    """[len(rows), window] int32: windows of `data` [N] at uniform starts; row r's start is drawn with
    fold_in(key, r), so the draw of a row does not depend on the others. N >= window."""

    def one(row: Array) -> Array:
        start = jax.random.randint(jax.random.fold_in(key, row), (), 0, data.shape[0] - window + 1)
        return jax.lax.dynamic_slice(data, (start,), (window,))

    return jax.vmap(one)(rows).astype(jnp.int32)


def scoring_windows(data: np.ndarray, window: int, stride: int) -> Windows:
    """Windows of T = `window` tokens, each `stride` further, that score every byte of `data` [N] once.

    The stream is read as if a SEPARATOR stood before it. Token 0 of a window is context only; the
    first window scores its other T - 1 tokens, later ones their last `stride`: from then on a byte sees
    at least T - stride and at most T - 1 bytes before it.  1 <= stride < window.
    """
    if not 1 <= stride < window:
        raise ValueError(f"stride {stride}: expected 1 <= stride < window = {window}")
    n = len(data)
    count = 1 + max(0, -(-(n - (window - 1)) // stride))
    index = stride * np.arange(count)[:, None] + np.arange(window)[None, :]  # in the padded stream
    padded = np.full(index[-1, -1] + 1, SEPARATOR, np.int32)
    padded[1 : n + 1] = data
    position = index - 1
    counts = (np.arange(window) >= window - stride)[None, :] | (np.arange(count) == 0)[:, None]
    counts &= (position >= 0) & (position < n)
    return Windows(padded[index], np.where(counts, position, -1).astype(np.int32))
