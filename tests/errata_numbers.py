"""How the numbers of jaxpt.errata are held against what tests compute."""

import math


def noted_in(computed):
    """A decorator's maker: `@noted_in(computed)("name")` keeps () -> [(said, right)] as computed["name"]."""
    def computes(name):
        def note(function):
            assert name not in computed
            computed[name] = function
            return function
        return note
    return computes


def agrees(stated, computed):
    """Equal to four significant digits."""
    if stated is None or computed is None:
        return stated is computed
    unit = 10.0 ** (math.floor(math.log10(abs(stated))) - 3) if stated else 1e-9
    return abs(float(computed) - stated) <= 0.5001 * unit


def check(row, pairs):
    """pairs: (said, right) for each of the row's numbers, in their order."""
    assert len(pairs) == len(row.numbers)
    for number, (said, right) in zip(row.numbers, pairs):
        assert agrees(number.said, said), (number, said)
        assert agrees(number.right, right), (number, right)
