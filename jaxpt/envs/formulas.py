"""Formulas in reverse Polish notation, exactly: values are fractions of integers, and a hand's formulas are listed."""

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

OPERATIONS = "+-*/"
HIGHEST = 13  # numbers are 1..13, as cards count


class Table(NamedTuple):
    """Every hand of k numbers (M of them), every target (T) and every formula that uses each number once (F)."""

    hands: np.ndarray  # [M,k] numbers, ascending
    codes: np.ndarray  # [F,2k-1] the i-th number of the hand as i, the j-th operation as k + j
    solves: np.ndarray  # [M,T,ceil(F/8)] uint8, np.packbits over formulas
    solvable: np.ndarray  # [M,T] bool


def combine(a: tuple[Any, Any], b: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """a + b, a - b, a * b and a / b of fractions (numerator, denominator) of integers, of whatever array type.

    A denominator of 0 says that there is no value, and stays: the square of b's is there for that.
    """
    (p, q), (r, s) = a, b
    return [(p * s + r * q, q * s), (p * s - r * q, q * s), (p * r, q * s), (p * s * s, q * r * s)]


def formulas(k: int) -> np.ndarray:
    """[F,2k-1] codes, in lexicographic order: 8 for two numbers, 192 for three, 7680 for four."""

    def rest(depth: int, unused: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if depth == 1 and not unused:
            yield ()
        for i in unused:
            yield from ((i, *more) for more in rest(depth + 1, tuple(j for j in unused if j != i)))
        if depth >= 2:
            more = list(rest(depth - 1, unused))
            yield from ((k + j, *tail) for j in range(len(OPERATIONS)) for tail in more)

    return np.array(list(rest(0, tuple(range(k)))), np.int32)


def values(codes: np.ndarray, hands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators [M,F] of the formulas of every hand."""
    k = hands.shape[1]
    numbers = [(hands[:, i].astype(np.int64), np.ones(len(hands), np.int64)) for i in range(k)]

    def value(formula: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        stack: list[tuple[np.ndarray, np.ndarray]] = []
        for code in formula:
            if code < k:
                stack.append(numbers[code])
            else:
                b, a = stack.pop(), stack.pop()
                stack.append(combine(a, b)[code - k])
        return stack.pop()

    pairs = [value(formula) for formula in codes]
    return np.stack([p for p, _ in pairs], 1), np.stack([q for _, q in pairs], 1)


def table_size(k: int) -> int:
    """Bytes of `solves` for each target."""
    return math.comb(HIGHEST + k - 1, k) * -(-len(formulas(k)) // 8)


@cache
def table(k: int, low: int, high: int) -> Table:
    """The table of k numbers and the targets low..high."""
    hands = np.array(list(itertools.combinations_with_replacement(range(1, HIGHEST + 1), k)), np.int32)
    codes = formulas(k)
    numerator, denominator = values(codes, hands)
    solves = [(numerator == target * denominator) & (denominator != 0) for target in range(low, high + 1)]
    solvable = np.stack([each.any(1) for each in solves], 1)
    return Table(hands, codes, np.stack([np.packbits(each, axis=1) for each in solves], 1), solvable)
