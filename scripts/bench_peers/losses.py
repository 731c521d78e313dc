"""Value and gradient of jaxpt's peer rows beside the functions that they stand for, at 512 rows of 512 tokens.

Both sides get the same float32 arrays and the same cores. A peer's function is called as tests/peers calls it, with what
it does besides (its own metrics); jaxpt's gives the row's metrics too. Workers stay loaded and are asked in turn.
"""

import contextlib
import statistics
from typing import NamedTuple

from bench_peers.compare import OURS, Missing, progress, versions, worker
from bench_peers.jobs import cores

SCRIPT, TORCH = "with_losses.py", "torch"
SIDES = {"jaxpt": (OURS, "jit"), "eager": (TORCH, "eager"), "compiled": (TORCH, "compile")}
ALIKE = 1e-3  # of two float32 losses that are sums over 262,144 tokens


class Times(NamedTuple):
    """Medians over rounds, seconds of one value and gradient; `compiled` is missing where torch.compile gives up."""

    name: str
    jaxpt: float
    eager: float
    compiled: float | None
    note: str


def losses(rounds: int, only: str | None = None):
    """Times of every case whose name starts with `only`."""
    print(f"{versions()}; {cores()} threads on either side")
    with contextlib.ExitStack() as stack:
        ask, names = {}, []
        for who in (OURS, TORCH):
            ready, ask[who] = stack.enter_context(worker(who, SCRIPT, who))
            names = ready()["cases"]
        chosen = [name for name in names if only is None or name.startswith(only)]
        if not chosen:
            raise Missing(f"no case is named {only!r}; there are {', '.join(names)}")
        for name in chosen:
            progress(name)
            yield _times(name, ask, rounds)
    progress("")


def _times(name: str, ask: dict, rounds: int) -> Times:
    answers = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, (who, how) in SIDES.items():
            answers[side].append(ask[who](f"{name} {how}"))
            if "error" in answers[side][-1] and side != "compiled":
                raise Missing(f"{name}, {side}: {answers[side][-1]['error']}")
    failed = next((answer["error"] for answer in answers["compiled"] if "error" in answer), "")
    spent = {
        side: None if failed and side == "compiled" else statistics.median(answer["seconds"] for answer in blocks)
        for side, blocks in answers.items()
    }
    mine, other = (answers[side][-1]["value"] for side in ("jaxpt", "eager"))
    unlike = abs(mine - other) > ALIKE * max(abs(other), 1e-3)
    note = f"values differ: {mine:.6g} and {other:.6g}" if unlike else failed
    return Times(name, spent["jaxpt"], spent["eager"], spent["compiled"], note)


def summary(rows: list[Times]) -> str:
    """Of how many rows the two aims hold."""
    fast = [row.eager / row.jaxpt >= 2.0 for row in rows]
    level = [row.compiled / row.jaxpt >= 1.0 for row in rows if row.compiled is not None]
    both = [row.eager / row.jaxpt >= 2.0 and (row.compiled is None or row.compiled >= row.jaxpt) for row in rows]
    share = lambda hits: f"{sum(hits)} of {len(hits)} ({sum(hits) / max(len(hits), 1):.0%})"  # noqa: E731
    return f"at least 2x eager: {share(fast)}; not slower than compiled: {share(level)}; both: {share(both)}"
