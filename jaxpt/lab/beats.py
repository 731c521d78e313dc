"""Processes that hear of each other by files in a folder which all of them reach: who is silent is lost.

`python -m jaxpt.lab.beats FOLDER INDEX PROCESSES PATIENCE` stands beside process INDEX, whose end closes its standard input:
jax ends a process without a word to Python when process 0 is gone, and then it is this one that says why.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

DONE = "done"  # the last that a process writes
BEAT = 0.5  # seconds between two words of a process


def write(path: Path, word: str | None = None) -> None:
    """Something new, or the word."""
    with contextlib.suppress(OSError):  # the others will say so
        path.write_text(word or f"{os.getpid()} {time.monotonic_ns()}")


def lost(folder: Path, others: Iterable[int], patience: float, beat: Callable[[], bool]) -> list[int]:
    """Those of the others that have written nothing for `patience` seconds, and not that they are done; of these the first
    moment. beat() is called now and then; when it says True, this ends, with none."""
    heard: dict[int, str] = {}
    when = dict.fromkeys(others, time.monotonic())
    while not beat():
        for i in when:
            word = ""
            with contextlib.suppress(OSError):
                word = (folder / str(i)).read_text()
            if word == DONE or word != heard.get(i):
                heard[i], when[i] = word, time.monotonic()
        if silent := [i for i, then in when.items() if time.monotonic() - then > patience]:
            return silent
    return []


def sentence(silent: list[int], processes: int) -> str:
    who = "process" if len(silent) == 1 else "processes"
    return (f"jaxpt: {who} {', '.join(map(str, silent))} of {processes} lost: nothing more has come from there; what was saved "
            "is kept, start all processes again to go on from it")


def main(folder: str, index: str, processes: str, patience: str) -> None:
    sys.stdin.buffer.read()
    own = Path(folder) / index
    if own.read_text() != DONE:
        over, others = threading.Event(), [i for i in range(int(processes)) if i != int(index)]
        threading.Timer(float(patience) + 10 * BEAT, over.set).start()
        silent = lost(Path(folder), others, float(patience), lambda: over.wait(BEAT))
        over.set()
        if silent:
            print(sentence(silent, int(processes)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
