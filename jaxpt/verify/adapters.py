"""One door to functions of three frameworks: a batch of examples in, values and gradients as float64 numpy out.

JAX: one compiled, vmapped program a shape, a fixed number of examples at a time; where tracing is not possible, one
example after the other. PyTorch: autograd, one example after the other. NumPy: central differences in float64.
Each framework is imported when a target needs it.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpt.verify.target import told

CHUNK = 64  # examples in one call of a compiled program
STEP = 1e-5  # of central differences, relative to the size of the number


class Out(NamedTuple):
    value: np.ndarray  # [n, ...]
    grads: Mapping[str, np.ndarray]  # of the sum of the value, by argument
    raised: str = ""  # what the function raised, if it did, on the first of those examples
    nothing: bool = False  # it raised on all of them: the value has no shape of its own


class Evaluation(NamedTuple):
    args: Mapping[str, np.ndarray]  # by position, in this order, [n, ...]
    given: Mapping[str, Any]  # by keyword; arrays [n, ...], dicts of them; "key" is made by the adapter
    moving: tuple[str, ...] = ()


def first(out: Any) -> Any:
    """The loss of a function that returns (loss, extras)."""
    return out[0] if isinstance(out, tuple | list) else out


def _count(e: Evaluation) -> int:
    return len(next(iter(e.args.values())))


def _rows(tree: Any, i: Any) -> Any:
    return {k: _rows(v, i) for k, v in tree.items()} if isinstance(tree, Mapping) else tree[i]


class Adapter:
    """evaluate(Evaluation) -> Out; again(Evaluation) -> values of the first examples twice, with others in between;
    untouched(Evaluation) -> of the first examples, which arguments the function wrote into."""

    def __init__(self, fn: Callable, takes_key: bool, dtype: str, mask: str, mask_names: tuple[str, ...]):
        self.fn, self.takes_key, self.dtype = fn, takes_key, dtype
        self.mask, self.mask_names = mask, mask_names

    def cast(self, name: str, x: np.ndarray) -> np.ndarray:
        if name in self.mask_names and self.mask == "bool":
            return x > 0
        return x.astype(self.dtype if x.dtype.kind == "f" else np.int32 if self.dtype == "float32" else np.int64)

    def evaluate(self, e: Evaluation) -> Out:
        return self.one_by_one(e)

    def one_by_one(self, e: Evaluation) -> Out:
        n = _count(e)
        outs, raised = [], ""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            for i in range(n):
                try:
                    outs.append(self.one(e, i))
                except Exception as error:  # whatever a stranger's function raises is a finding
                    raised = raised or told(error)
                    outs.append(None)
        return _stacked(outs, e, raised)

    def again(self, e: Evaluation) -> tuple[np.ndarray, np.ndarray]:
        n = min(CHUNK, _count(e))
        bare = e._replace(moving=())
        passes = [self.evaluate(bare._replace(args=_rows(e.args, order), given=_rows(e.given, order)))
                  for order in (np.arange(n), np.arange(n)[::-1])]
        return passes[0].value, passes[1].value[::-1]

    def untouched(self, e: Evaluation) -> list[list[str]]:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [self.written_if_fine(e, i) for i in range(min(CHUNK, _count(e)))]

    def written_if_fine(self, e: Evaluation, i: int) -> list[str]:
        try:
            return self.written(e, i)
        except Exception:  # told by the laws of values
            return []

    def written(self, e: Evaluation, i: int) -> list[str]:
        return []

    def one(self, e: Evaluation, i: int) -> tuple[np.ndarray, dict]:
        raise NotImplementedError


def _stacked(outs: list, e: Evaluation, raised: str) -> Out:
    """[n, ...] arrays; NaN where the function raised. Results of different shapes cannot be stacked: NaN as well."""
    there = next((out for out in outs if out is not None), None)
    if there is None:
        n = len(outs)
        return Out(np.full(n, np.nan), {k: np.full(e.args[k].shape, np.nan) for k in e.moving}, raised, True)
    shape = there[0].shape
    values = [out[0] if out is not None and out[0].shape == shape else np.full(shape, np.nan) for out in outs]
    grads = {k: np.stack([np.full(e.args[k].shape[1:], np.nan) if out is None else out[1][k] for out in outs])
             for k in e.moving}
    return Out(np.stack(values), grads, raised)


class NumpyAdapter(Adapter):
    """float64 always: differences of float32 would say nothing."""

    def cast(self, name: str, x: np.ndarray) -> np.ndarray:
        if name in self.mask_names and self.mask == "bool":
            return x > 0
        return x.astype(np.float64 if x.dtype.kind == "f" else np.int64)

    def call(self, e: Evaluation, i: int) -> Callable:
        args = {k: self.cast(k, v[i]) for k, v in e.args.items()}
        given = {k: _cast_tree(self, k, _rows(v, i)) for k, v in e.given.items()}
        if self.takes_key:
            given["key"] = np.random.default_rng(0)
        args = {k: float(v) if np.ndim(v) == 0 else v for k, v in args.items()}

        def f(**changed):
            now = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in {**args, **changed}.items()}
            return np.asarray(first(self.fn(*now.values(), **given)), np.float64)

        return f

    def one(self, e: Evaluation, i: int) -> tuple[np.ndarray, dict]:
        f = self.call(e, i)
        value = f()
        grads = {k: np.zeros(e.args[k].shape[1:]) for k in e.moving}
        for k, g in grads.items():
            x = e.args[k][i].astype(np.float64)
            for slot in np.ndindex(x.shape):
                h = STEP * max(1.0, abs(x[slot])) if np.isfinite(x[slot]) else STEP
                up, down = x.copy(), x.copy()
                up[slot], down[slot] = x[slot] + h, x[slot] - h
                high, low = f(**{k: up}), f(**{k: down})
                same = (high == low) | (np.isnan(high) & np.isnan(low))
                difference = np.where(same, 0.0, (high - low) / (2 * h))
                g[slot] = difference.sum() if np.isfinite(value).all() else np.nan
        return value, grads

    def written(self, e: Evaluation, i: int) -> list[str]:
        args = {k: float(v[i]) if v[i].ndim == 0 else self.cast(k, v[i]) for k, v in e.args.items()}
        kept = {k: np.copy(v) for k, v in args.items()}
        given = {k: _cast_tree(self, k, _rows(v, i)) for k, v in e.given.items()}
        if self.takes_key:
            given["key"] = np.random.default_rng(0)
        self.fn(*args.values(), **given)
        return [k for k in args if not np.array_equal(args[k], kept[k], equal_nan=True)]


def _cast_tree(adapter: Adapter, name: str, tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {k: _cast_tree(adapter, k, v) for k, v in tree.items()}
    return adapter.cast(name, np.asarray(tree))


class TorchAdapter(Adapter):
    def tensors(self, e: Evaluation, i: int) -> tuple[dict, dict]:
        import torch

        def tensor(name, x):
            x = self.cast(name, np.asarray(x))
            return torch.tensor(x.astype(np.int64) if x.dtype.kind == "i" else x)

        def tree(name, x):
            return {k: tree(k, v) for k, v in x.items()} if isinstance(x, Mapping) else tensor(name, x)

        args = {k: float(v[i]) if v[i].ndim == 0 else tensor(k, v[i]) for k, v in e.args.items()}
        given = {k: tree(k, _rows(v, i)) for k, v in e.given.items()}
        if self.takes_key:
            given["key"] = torch.Generator().manual_seed(0)
        return args, given

    def one(self, e: Evaluation, i: int) -> tuple[np.ndarray, dict]:
        import torch

        args, given = self.tensors(e, i)
        moving = [args[k].requires_grad_() for k in e.moving]
        out = first(self.fn(*args.values(), **given))
        out = out if isinstance(out, torch.Tensor) else torch.as_tensor(out)
        grads = [None] * len(moving)
        if moving and out.requires_grad:
            grads = torch.autograd.grad(out.sum(), moving, allow_unused=True)
        arrays = [np.zeros(x.shape) if g is None else g.detach().numpy().astype(np.float64)
                  for x, g in zip(moving, grads, strict=True)]
        return out.detach().to(torch.float64).numpy(), dict(zip(e.moving, arrays, strict=True))

    def written(self, e: Evaluation, i: int) -> list[str]:
        import torch

        args, given = self.tensors(e, i)
        kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        self.fn(*args.values(), **given)
        same = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # noqa: E731
        return [k for k in args if not same(args[k], kept[k])]


class JaxAdapter(Adapter):
    def __init__(self, *args):
        super().__init__(*args)
        import jax

        self.jax, self.programs, self.eager = jax, {}, False
        self.untraceable = (
            jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError,
        )

    def settings(self):
        """Strict modes of the caller's, that would find the poison before the laws do, are off."""
        from contextlib import ExitStack

        stack = ExitStack()
        for manager in (self.jax.debug_nans(False), self.jax.debug_infs(False),
                        self.jax.enable_x64(self.dtype == "float64")):
            stack.enter_context(manager)
        return stack

    def single(self, moving: tuple[str, ...]) -> Callable:
        """One example's arrays -> (value, gradients)."""
        jax = self.jax

        def value_of(args, given):
            key = {"key": jax.random.key(0)} if self.takes_key else {}
            out = jax.numpy.asarray(first(self.fn(*args.values(), **given, **key)))
            return jax.numpy.sum(out), out

        def run(args, given):
            still = {k: v for k, v in args.items() if k not in moving}
            merge = lambda m: {k: m[k] if k in m else still[k] for k in args}  # noqa: E731
            if not moving:
                return value_of(args, given)[1], {}
            moved = {k: args[k] for k in moving}
            loss = lambda m: value_of(merge(m), given)  # noqa: E731
            (_, value), grads = jax.value_and_grad(loss, has_aux=True)(moved)
            return value, grads

        return run

    def evaluate(self, e: Evaluation) -> Out:
        with warnings.catch_warnings(), self.settings():
            warnings.simplefilter("ignore")
            if not self.eager:
                try:
                    return self.batched(e)
                except self.untraceable:
                    self.eager = True
                except Exception as error:  # raised while tracing: for this shape, whatever the numbers
                    return _stacked([None] * _count(e), e, told(error))
        return self.one_by_one(e)

    def batched(self, e: Evaluation) -> Out:
        if e.moving not in self.programs:
            run = self.single(e.moving)
            # one argument, sorted by its keys, would lose the order of the positions
            self.programs[e.moving] = self.jax.jit(
                lambda names,
                *arrays: self.jax.vmap(lambda *a: run(dict(zip(names, a[:-1], strict=True)), a[-1]))(*arrays),
                static_argnums=0,
            )
        names, n = tuple(e.args), _count(e)
        arrays = [self.cast(k, v) for k, v in e.args.items()]
        given = {k: _cast_tree(self, k, v) for k, v in e.given.items()}
        outs = []
        for start in range(0, n, CHUNK):
            index = np.minimum(np.arange(start, start + CHUNK), n - 1)
            out = self.programs[e.moving](names, *(a[index] for a in arrays), _rows(given, index))
            outs.append(self.jax.device_get(out))
        value, grads = self.jax.tree.map(lambda *parts: np.concatenate(parts)[:n].astype(np.float64), *outs)
        return Out(value, grads)

    def one(self, e: Evaluation, i: int) -> tuple[np.ndarray, dict]:
        """Untraced; numbers such as gamma as Python's, of which code may ask whether they are 1."""
        with self.settings():
            array = lambda k, v: float(v[i]) if v[i].ndim == 0 else self.jax.numpy.asarray(self.cast(k,
                v[i]))  # noqa: E731
            args = {k: array(k, v) for k, v in e.args.items()}
            given = self.jax.tree.map(self.jax.numpy.asarray,
                {k: _cast_tree(self, k, _rows(v, i)) for k, v in e.given.items()})
            value, grads = self.single(e.moving)(args, given)
            return np.asarray(value, np.float64), {k: np.asarray(g, np.float64) for k, g in grads.items()}

    def again(self, e: Evaluation) -> tuple[np.ndarray, np.ndarray]:
        """A compiled program cannot tell: two traces are compared, and evaluated where they differ."""
        with warnings.catch_warnings(), self.settings():
            warnings.simplefilter("ignore")
            if not self.eager:
                args = [self.jax.numpy.asarray(self.cast(k, v[0])) for k, v in e.args.items()]
                given = self.jax.tree.map(self.jax.numpy.asarray,
                    {k: _cast_tree(self, k, _rows(v, 0)) for k, v in e.given.items()})
                run = self.single(())

                def trace():
                    made = self.jax.make_jaxpr(lambda *a: run(dict(zip(e.args, a[:-1], strict=True)), a[-1])[0])(*args,
                        given)
                    return re.sub(r"0x[0-9a-f]+", "", str(made)), [np.asarray(c) for c in made.consts if not _is_key(c)]

                one, two = trace(), trace()
                same = one[0] == two[0] and all(map(np.array_equal, one[1], two[1]))
                if same:
                    return np.zeros(1), np.zeros(1)
        n = min(8, _count(e))
        bare = e._replace(moving=())
        passes = [[self.one(bare, i)[0] for i in order] for order in (range(n), range(n)[::-1])]
        return np.stack(passes[0]), np.stack(passes[1][::-1])


def _is_key(x: Any) -> bool:
    return "key" in str(getattr(x, "dtype", ""))


ADAPTERS = {"jax": JaxAdapter, "numpy": NumpyAdapter, "torch": TorchAdapter}
