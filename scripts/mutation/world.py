"""jaxpt and its tests as fresh modules, with one source changed; and the tests run in process, on chosen rows alone."""

import ast
import contextlib
import importlib.abc
import importlib.util
import inspect
import itertools
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mutation.sites import ROOT

TESTS = (  # the modules whose tests look at objectives without training anything
    "test_masked", "test_digits", "test_constants", "test_value", "test_bonuses", "test_advantages", "test_lengths", "test_reward",
    "test_supervised", "test_distillation", "test_preference", "test_pairs", "test_prepare", "test_objectives", "test_rows",
    "test_public_faults", "test_public_faults_losses", "test_public_faults_preference", "test_public_faults_distillation",
)
HELPERS = ("policy_loops", "prepare_loops", "advantage_loops", "preference_loops", "distillation_loops")
TOO_LONG = 60  # CPU-seconds that one test may take before it counts as failed


def start() -> None:
    """Strict modes as for every test; no compilation; few examples. Before anything imports jaxpt."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import conftest  # noqa: F401  (flags, strict modes, the cache of compiled programs)
    import jax
    from hypothesis import Phase, settings

    core = settings.get_profile("core")
    for name, examples in (("few", 3), ("many", 25)):
        settings.register_profile(name, core, max_examples=examples, phases=[Phase.generate], report_multiple_bugs=False)
    warnings.simplefilter("error")
    jax.jit = partial(interpreted, jax.jit)
    sys.meta_path.insert(0, Source)


def interpreted(compiled: Callable, fun: Callable | None = None, *, static_argnums=(), static_argnames=(), **options):
    """In place of jax.jit: traced once for every shape, then evaluated with numpy."""
    if fun is None:
        return partial(interpreted, compiled, static_argnums=static_argnums, static_argnames=static_argnames, **options)
    import jax
    import numpy as np

    from mutation.numeric import evaluate

    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    parameters = list(inspect.signature(fun).parameters)
    numbers += tuple(parameters.index(name) for name in names if name in parameters)
    traces = {}

    @wraps(fun)
    def run(*args, **kwargs):
        held = {k: args[k] for k in numbers if k < len(args)}, {k: v for k, v in kwargs.items() if k in names}
        moving = {k: x for k, x in enumerate(args) if k not in held[0]}, {k: v for k, v in kwargs.items() if k not in names}
        leaves, tree = jax.tree.flatten(moving)

        def flat(*leaves):
            places, words = jax.tree.unflatten(tree, leaves)
            both = {**held[0], **places}
            return fun(*(both[k] for k in range(len(args))), **held[1], **words)

        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return flat(*leaves)
        kinds = tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)
        key = tree, kinds, str(held), jax.config.jax_enable_x64
        if key not in traces:
            with jax.disable_jit():
                closed, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
            traces[key] = closed, jax.tree.structure(out)
        closed, out = traces[key]
        given = [np.asarray(x, v.aval.dtype) for x, v in zip(leaves, closed.jaxpr.invars, strict=True)]
        return jax.tree.unflatten(out, map(jax.numpy.asarray, evaluate(closed.jaxpr, closed.consts, given)))

    run.lower = compiled(fun, static_argnums=static_argnums, static_argnames=static_argnames, **options).lower
    return run


class Source(importlib.abc.MetaPathFinder):
    """Finds the modules whose source is changed: {name: source}."""

    changed: dict[str, str] = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.changed:
            return None
        file = ROOT / (name.replace(".", "/") + ".py")
        file = file if file.exists() else ROOT / name.replace(".", "/") / "__init__.py"
        places = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, loader=Loader(cls.changed[name], file), submodule_search_locations=places
        )


class Loader(importlib.abc.Loader):
    def __init__(self, source: str, file: Path):
        self.source, self.file = source, file

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(ast.parse(self.source), str(self.file), "exec"), module.__dict__)


def ours(name: str) -> bool:
    return name.split(".")[0] in ("jaxpt", *TESTS, *HELPERS)


def take_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}


class World:
    """The modules of one version of the sources; imported when they are first asked for."""

    def __init__(self, file: str = "", source: str = ""):
        self.changed = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source} if file else {}
        self.modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Imports in here see these modules alone; outside all is as before."""
        before, changed = take_out(), Source.changed
        sys.modules.update(self.modules)
        Source.changed = self.changed
        try:
            yield
        finally:
            self.modules, Source.changed = take_out(), changed
            sys.modules.update(before)

    def get(self, name: str) -> ModuleType:
        with self.inside():
            return importlib.import_module(name)

    def rows(self) -> dict[str, Any]:
        """{name: row} of the table, and of the tables that the imported test modules make for themselves."""
        found = dict(self.get("jaxpt.objectives").ROWS)
        row = self.get("jaxpt.objectives.row").Row
        for module in self.modules.values():
            for table in vars(module).values():
                if isinstance(table, dict) and table and all(isinstance(x, row) for x in table.values()):
                    found |= table
        return found


class Case(NamedTuple):
    """One test with its parameters."""

    module: str
    test: str
    arguments: tuple[tuple[str, Any], ...]

    def __str__(self):
        given = ",".join(str(x) for _, x in self.arguments)
        return f"{self.module}::{self.test}" + (f"[{given}]" if given else "")


def cases(world: World, module: str) -> list[Case]:
    """The tests of a module that need no fixture, in its order."""
    found = []
    for name, test in vars(world.get(module)).items():
        if not name.startswith("test_") or not callable(test):
            continue
        choices = []
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "parametrize":
                names = [n.strip() for n in mark.args[0].split(",")]
                values = [getattr(x, "values", x) if len(names) > 1 or hasattr(x, "values") else (x,) for x in mark.args[1]]
                values = [x if isinstance(x, tuple | list) else (x,) for x in values]
                choices.append([tuple(zip(names, x, strict=True)) for x in values])
        given = [sum(parts, ()) for parts in itertools.product(*choices)]
        needed = set(inspect.signature(test).parameters)
        found += [Case(module, name, arguments) for arguments in given if {k for k, _ in arguments} == needed]
    return found


class TooLong(BaseException):
    pass


def failure(world: World, case: Case, rows: frozenset[str] | None = None, known: Collection[str] = ()) -> str:
    """What the test says against the world, "" where it passes. With `rows`, tables hold those of the `known` rows alone."""
    def ring(*_):
        raise TooLong(f"more than {TOO_LONG} s")

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, TOO_LONG)
    try:
        with world.inside():
            module = importlib.import_module(case.module)
            with shown(rows, known):
                getattr(module, case.test)(**dict(case.arguments))
    except KeyboardInterrupt:
        raise
    except (Exception, TooLong) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return (f"{type(error).__name__}: {error}".strip().splitlines() or [""])[0][:120]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


@contextlib.contextmanager
def shown(rows: frozenset[str] | None, known: Collection[str]) -> Iterator[None]:
    """Dictionaries and lists of the test modules that go by row names, cut down to `rows`."""
    if rows is None:
        yield
        return
    cut = []
    for module in [sys.modules[name] for name in (*TESTS, *HELPERS) if name in sys.modules]:
        for table in vars(module).values():
            if type(table) in (dict, list) and table and all(isinstance(k, str) and k in known for k in table):
                if not any(table is seen for seen, _ in cut):
                    cut.append((table, table.copy()))
    try:
        for table, whole in cut:
            table.clear()
            if isinstance(table, dict):
                table.update({k: x for k, x in whole.items() if k in rows})
            else:
                table.extend(k for k in whole if k in rows)
        yield
    finally:
        for table, whole in cut:
            table.clear()
            table.update(whole) if isinstance(table, dict) else table.extend(whole)

