"""Worker: value and gradient of one loss at a time, jaxpt's row or the peer's own function, on the cases of tests/peers.

Command: with_losses.py jaxpt|torch. A line "CASE HOW" of the standard input is answered by the seconds of one call (the
mean over a block of them) and the loss. HOW: jit, eager or compile. The last two that were asked for stay warm, so that
blocks of one case may alternate.
"""

import importlib
import json
import sys
import time
import warnings
from functools import cache, lru_cache, partial, wraps
from pathlib import Path

import numpy as np
import pytest
from jobs import cores

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "peers"))
import parity  # noqa: E402

ROWS = COLUMNS = 512
parity.N, parity.B, parity.T, parity.P = 1, ROWS, COLUMNS, ROWS // parity.G
parity.GROUP = np.arange(ROWS) // parity.G
import cases_pairs  # noqa: E402  (they take the sizes from parity at import)
import cases_policy  # noqa: E402
import wheels  # noqa: E402

CASES = {x.id: x for x in (*cases_policy.CASES, *cases_pairs.CASES) if x.framework == "torch" and x.wrt}
BLOCK = 0.15  # seconds


def batch_of(case: parity.Case) -> dict[str, np.ndarray]:
    """The arrays of one batch behind a leading axis of 1, in float32."""
    return parity.data(case._replace(dtype="float32"), 1)


@lru_cache(2)
def ours(name: str, how: str):
    """A call of value and gradient, as training makes it: with the row's metrics."""
    import jax
    import jax.numpy as jnp

    case = CASES[name]
    batch = {k: jnp.asarray(x[0]) for k, x in batch_of(case).items()}
    moving = {k: batch.pop(k) for k in case.wrt}

    def loss(moving, batch):
        return case.ours({**batch, **moving}, **case.constants, **case.given)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return lambda: jax.block_until_ready(run(moving, batch))[0][0]


@lru_cache(2)
def theirs(name: str, how: str):
    import torch

    torch.set_num_threads(cores())
    torch._dynamo.reset()  # or the limit of recompilations ends in eager calls
    torch._dynamo.config.capture_scalar_outputs = True  # a metric's item() does not cut the program in two
    case = CASES[name]
    module, _, path = case.peer.partition(":")
    function = peer(module)
    for part in path.split("."):
        function = getattr(function, part)
    batch = parity.Tensors(batch_of(case), 0)
    moving = [batch[k].requires_grad_() for k in case.wrt]
    function = compiled(function) if how == "compile" else function

    def run():
        for x in moving:
            x.grad = None
        value = case.call(function, batch)
        value.backward()
        return value.detach()

    return run


def compiled(function):
    """The function, or the module that a class makes, compiled; with the stand-ins of its first call in every call,
    because new ones would be compiled anew. Tensors are those of each call."""
    import torch

    compile = partial(torch.compile, dynamic=False)
    if isinstance(function, type):
        return cache(lambda *args, **kwargs: compile(function(*args, **kwargs)))
    run, first = compile(function), []

    @wraps(function)
    def again(*args, **kwargs):
        if not first:
            first.append((args, kwargs))
        for kept in first[0][0]:
            getattr(kept, "_metrics", {}).clear()  # a list that grows is another program to the compiler
        same = lambda new, old: new if isinstance(new, torch.Tensor) else old  # noqa: E731
        return run(*map(same, args, first[0][0]), **{k: same(x, first[0][1][k]) for k, x in kwargs.items()})

    return again


@cache
def peer(name: str):
    if name.split(".")[0] in wheels.STUBS:
        return wheels.load(name, pytest.MonkeyPatch())
    return importlib.import_module(name)


def main():
    sys.stdout, out = sys.stderr, sys.stdout  # what a library prints must not mix with the answers
    tell = lambda **answer: print(json.dumps(answer), file=out, flush=True)  # noqa: E731
    warnings.simplefilter("ignore")
    make = {"jaxpt": ours, "torch": theirs}[sys.argv[1]]
    tell(cases=list(CASES))
    for line in sys.stdin:
        name, how = line.split()
        made = make.cache_info().misses
        try:
            run = make(name, how)
            if make.cache_info().misses > made:
                run(), run()
        except Exception as error:  # a function that cannot be compiled is a result, not a failure
            make.cache_clear()
            tell(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:120])
            continue
        value, calls, start = run(), 1, time.perf_counter()
        while time.perf_counter() - start < BLOCK or calls < 3:
            value, calls = run(), calls + 1
        tell(seconds=(time.perf_counter() - start) / (calls - 1), value=float(value))


if __name__ == "__main__":
    main()
