"""Text splitting, windows and n-gram models: invariances, planted duplicates, and slow oracles."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.data import ngram, text

WORDS = "the of list set tuple returns raises value index when object with a byte string and file".split()


def sentences(seed: int, n: int) -> bytes:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(n)).encode()


def corpus(n: int = 40) -> list[bytes]:
    return [b"\n\n".join(sentences(100 * i + j, 30) for j in range(1 + i % 4)) for i in range(n)]


streams = st.lists(st.integers(0, 255), min_size=2, max_size=200).map(lambda x: np.array(x, np.uint8))


# Splitting

@given(st.randoms(use_true_random=False))
def test_split_depends_on_neither_order_nor_names(rng):
    documents = corpus()
    shuffled = rng.sample(documents, len(documents))
    assert text.split(documents) == text.split(shuffled)


def test_split_is_disjoint_complete_and_near_its_share():
    documents = corpus()
    parts = text.split(documents)
    pieces = [piece for document in documents for piece in text.cut(document, 512)]
    assert parts.overlapping == 0
    assert sorted(parts.train + parts.held) == sorted(piece.strip(b"\n") for piece in pieces)
    held = sum(map(len, parts.held)) / sum(map(len, parts.held + parts.train))
    assert 0.1 <= held < 0.15


def test_planted_duplicates_are_removed():
    documents = corpus()
    clean = text.split(documents)
    respelled = [document.replace(b" ", b"\t  ") for document in documents[:5]]  # white space does not count
    parts = text.split([*documents, *documents[:7]])
    assert (parts.train, parts.held) == (clean.train, clean.held)
    removed = parts.duplicates - clean.duplicates
    assert removed == sum(map(len, documents[:7]))
    seen = sorted(map(text.normalise, text.deduplicate([*documents, *respelled])))
    assert seen == sorted(map(text.normalise, text.deduplicate(documents)))


def test_a_repeated_paragraph_stays_once_and_a_heading_stays():
    licence, heading = sentences(1, 30), b"See also"
    documents = [b"\n\n".join([heading, sentences(10 + i, 20), licence]) for i in range(8)]
    kept = text.deduplicate(documents)
    assert sum(licence in document for document in kept) == 1
    assert all(heading in document for document in kept)


def test_overlap_is_the_share_of_known_shingles():
    known, new = sentences(1, 60), sentences(2, 60)
    at = len(known) // 10
    shares = text.overlap([known, new, b"short"], [b"a new beginning " + known[at:]])
    np.testing.assert_allclose(shares, [(len(known) - at - 49) / (len(known) - 49), 0, 0], atol=0.005)


def test_held_out_documents_that_mostly_occur_in_train_are_dropped():
    documents = [sentences(i, 60) for i in range(40)]
    near = [b"a new beginning " + document[40:] for document in documents]
    parts = text.split([*documents, *near])  # of most pairs with a held-out member, the other is in train
    assert parts.duplicates == 0 and parts.overlapping > 0
    assert text.overlap(parts.held, parts.train).max(initial=0) <= text.OVERLAP


@given(st.binary(min_size=0, max_size=200), st.binary(min_size=0, max_size=60))
def test_shingles_agree_exactly_when_substrings_do(left, middle):
    """Oracle: Python's own sets of substrings."""
    a, b = left + middle + left, middle + left
    plain = [text.normalise(x) for x in (a, b)]
    substrings = [[x[i:i + 50] for i in range(max(0, len(x) - 49))] for x in plain]
    codes = dict(zip(substrings[0], text.shingles(a), strict=True))
    for substring, code in zip(substrings[1], text.shingles(b), strict=True):
        assert (codes.get(substring) == code) == (substring in codes)


@given(st.binary(max_size=600), st.integers(2, 100))
def test_pieces_join_to_the_document(document, size):
    pieces = text.cut(document, size)
    assert b"".join(pieces) == document
    assert all(0 < len(piece) <= size for piece in pieces[:-1]) and len(pieces[-1]) <= size


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=30), st.integers(1, 40))
def test_blocks_are_runs_of_whole_documents(documents, n):
    block = text.blocks(documents, n)
    assert len(block) == len(text.stream(documents))
    assert block[0] == 0 and set(np.diff(block)) <= {0, 1} and block[-1] < n
    ends = np.cumsum([len(d) + 1 for d in documents])
    assert all(len(set(block[end - len(d) - 1:end])) == 1 for d, end in zip(documents, ends))


# Windows

@given(streams, st.integers(2, 40), st.integers(1, 39))
def test_every_byte_is_scored_once_behind_its_own_context(data, window, stride):
    stride = min(stride, window - 1)
    tokens, position = text.scoring_windows(data, window, stride)
    scored = position[position >= 0]
    assert sorted(scored) == list(range(len(data)))
    padded = np.concatenate([[text.SEPARATOR], data])
    for row, places in zip(tokens, position):
        for t in np.nonzero(places >= 0)[0]:
            assert t >= 1 and row[t] == data[places[t]]
            assert t >= min(window - stride, places[t] + 1)  # enough context, or all there is
            np.testing.assert_array_equal(row[:t], padded[places[t] + 1 - t:places[t] + 1])


def test_training_windows_stay_inside_and_reach_both_ends():
    data = jnp.arange(20, dtype=jnp.uint8)
    windows = text.random_windows(jax.random.key(0), data, jnp.arange(500), 6)
    assert windows.shape == (500, 6)
    assert bool(jnp.all(windows[:, 1:] == windows[:, :-1] + 1))
    assert sorted(set(windows[:, 0].tolist())) == list(range(15))
    some = text.random_windows(jax.random.key(0), data, jnp.array([7, 3]), 6)
    np.testing.assert_array_equal(some, windows[jnp.array([7, 3])])  # a row's draw is its own


# Baselines

@given(streams, st.sampled_from([0.5, 8.0, 512.0]))
def test_ngrams_are_distributions_and_agree_with_counting(data, k):
    unigram, bigram = ngram.unigram_logp(data), ngram.bigram_logp(data, k)
    np.testing.assert_allclose(np.sum(2.0**unigram), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.sum(2.0**bigram, axis=1), 1.0, rtol=1e-12)
    listed = data.tolist()
    p = [(listed.count(b) + 1) / (len(listed) + 256) for b in range(256)]
    pairs = list(zip(listed, listed[1:]))
    previous = [0, *listed[:-1]]
    by_hand = [-math.log2((pairs.count((a, b)) + k * p[b]) / (listed[:-1].count(a) + k))
               for a, b in zip(previous, listed)]
    np.testing.assert_allclose(ngram.bigram_bits(bigram, data), by_hand, rtol=1e-10)
    by_hand = [-math.log2(p[b]) for b in listed]
    np.testing.assert_allclose(ngram.unigram_bits(unigram, data), by_hand, rtol=1e-10)


def test_bigram_smoothing_is_fitted_on_train():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 4000).astype(np.uint8)  # pairs say nothing: the strongest smoothing wins
    np.testing.assert_array_equal(ngram.fit_bigram(noise), ngram.bigram_logp(noise, 512))
    cycle = np.tile(np.arange(200, dtype=np.uint8), 20)  # pairs say everything: the weakest wins
    np.testing.assert_array_equal(ngram.fit_bigram(cycle), ngram.bigram_logp(cycle, 0.5))


def test_conditional_xz_knows_what_it_has_read():
    rng = np.random.default_rng(0)
    train, fresh = (rng.integers(0, 256, 20_000).astype(np.uint8).tobytes() for _ in range(2))
    assert 0 <= ngram.xz_bits(train, [train])[0] < 0.02 * 8 * len(train)
    assert ngram.xz_bits(train, [fresh])[0] == pytest.approx(8 * len(fresh), rel=0.02)
    assert ngram.xz_bits(b"", [train])[0] == pytest.approx(8 * len(train), rel=0.02)
