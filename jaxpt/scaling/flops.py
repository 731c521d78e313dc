"""Counts of parameters and of training FLOPs per token, as Kaplan, Hoffmann and Porian have them.

The exponents of a scaling law depend on the count (Pearce & Song 2024, arXiv 2406.12907; Porian et al. 2024, arXiv
2406.19146), most of all on small models, where embeddings and the last layer are most of the model. A backward pass
counts twice a forward one.
"""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Of a decoder; entries may be arrays of one shape."""

    layers: np.ndarray
    width: np.ndarray
    ff: np.ndarray  # hidden units of the feed-forward layer
    heads: np.ndarray
    head_width: np.ndarray
    vocab: int
    context: int
    gated: bool = False  # three matrices in the feed-forward layer instead of two

    @property
    def inner(self) -> np.ndarray:
        """Width of all heads together."""
        return self.heads * self.head_width


def layer_params(s: Shape) -> np.ndarray:
    """Kaplan's N (table 1): all matrices of the layers, without embeddings and biases."""
    return s.layers * (4 * s.width * s.inner + (3 if s.gated else 2) * s.width * s.ff)


def head_params(s: Shape) -> np.ndarray:
    """The last layer; as many again in an embedding that is not tied to it."""
    return np.asarray(s.width * s.vocab)


def kaplan(s: Shape) -> np.ndarray:
    """6 N per token, without embeddings, last layer and attention (Kaplan et al. 2020, section 2.1)."""
    return 6.0 * layer_params(s)


def last_layer(s: Shape) -> np.ndarray:
    """6 (N + d V): the products with weights, embeddings being looked up (Porian et al.'s standard count)."""
    return 6.0 * (layer_params(s) + head_params(s))


def attention(s: Shape) -> np.ndarray:
    """Porian et al.'s other count: `last_layer` and the scores and mixtures of attention, 12 l T d per token where
    every token sees the whole context (Kaplan's table 1 has 2 l T d forward, for half of the two products)."""
    return last_layer(s) + 12.0 * s.layers * s.context * s.inner


def chinchilla(s: Shape) -> np.ndarray:
    """All of Hoffmann et al. 2022, appendix F: embeddings counted as products with one-hot vectors, softmax as 3
    FLOPs for each head's score."""
    T = s.context
    embeddings = 2.0 * s.vocab * s.width
    projections = 2.0 * 4 * s.width * s.inner
    scores = 2.0 * 2 * T * s.inner + 3.0 * T * s.heads
    dense = 2.0 * (3 if s.gated else 2) * s.width * s.ff
    logits = 2.0 * s.width * s.vocab
    return 3 * (embeddings + s.layers * (projections + scores + dense) + logits)


def from_runs(N: np.ndarray, D: np.ndarray, C: np.ndarray):
    """A count FLOPs per token as a function of N from a table's own column: log(C / D) as a parabola in log N."""
    logs = np.log(N)
    middle = logs.mean()
    degree = min(2, len(np.unique(logs.round(6))) - 1)
    fitted = np.polynomial.Polynomial.fit(logs - middle, np.log(C / D), degree)
    return lambda n: np.exp(fitted(np.log(n) - middle))
