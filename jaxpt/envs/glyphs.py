"""Ranks of cards as little pictures in two inks, and the pictures as tokens: patches of 2 x 2 pixels.

A pixel is white or has the ink of the picture, so that a patch is blank or one of few shapes in one of two inks. A table
of embeddings over them says whatever an embedding of patches can say (a linear map of a patch's pixels is one such table),
so nothing is lost where a prompt shows a picture as tokens, and models, rollouts and objectives take it as they take any
prompt. What has to be learnt is the same: which patches at which places are which rank, and that two inks show the same
ranks.
"""

import numpy as np

INKS = ("black", "red")  # spades and clubs, hearts and diamonds
SIDE = 2  # pixels of a patch, each way
PICTURES = """
.##. ###. #### #..# #### .##. #### .##. .##. #### ..## .##. #..#
#..# ...# ...# #..# #... #... ...# #..# #..# .##. ...# #..# #.#.
#..# ..#. .##. #### ###. ###. ..#. .##. .### .##. ...# #..# ##..
#### .#.. ...# ...# ...# #..# ..#. #..# ...# .##. ...# #..# ##..
#..# #... ...# ...# ...# #..# .#.. #..# #..# .##. #..# #.#. #.#.
#..# #### ###. ...# ###. .##. .#.. .##. .##. .##. .##. .#.# #..#
"""  # A 2 3 4 5 6 7 8 9 T J Q K


def bitmaps() -> np.ndarray:
    """[13,6,4] bool: the pixels of each rank that have ink."""
    lines = [line.split() for line in PICTURES.splitlines() if line]
    return np.array([[[pixel == "#" for pixel in line[rank]] for line in lines] for rank in range(len(lines[0]))])


def _shapes() -> np.ndarray:
    """[13,6] int: a patch's pixels, row by row, as the digits of a binary number."""
    pixels = bitmaps()
    ranks, height, width = pixels.shape
    cut = pixels.reshape(ranks, height // SIDE, SIDE, width // SIDE, SIDE).swapaxes(2, 3)
    return cut.reshape(ranks, -1, SIDE * SIDE) @ (1 << np.arange(SIDE * SIDE)[::-1])


USED = np.unique(_shapes()[_shapes() > 0])  # shapes that occur, the blank one aside
NAMES = ("blank", *(f"{ink}{shape:04b}" for ink in INKS for shape in USED))


def patches() -> np.ndarray:
    """[2,13,6] int32: the patches of each rank in each ink, as indices of NAMES, row by row."""
    shapes = _shapes()
    at = 1 + np.searchsorted(USED, shapes)
    return np.stack([np.where(shapes > 0, at + ink * len(USED), 0) for ink in range(len(INKS))]).astype(np.int32)
