"""The function that is verified: found by name, its parameters against the family's, whose arrays it computes with."""

import dis
import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

from jaxpt.verify.families import Family


class TargetError(Exception):
    """The function cannot be verified at all: one sentence that says why."""


class Target(NamedTuple):
    fn: Callable
    name: str
    framework: str  # jax, numpy, torch
    takes: tuple[str, ...]  # which of the family's optional arguments


FRAMEWORKS = ("jax", "numpy", "torch")


def load(spec: str) -> Callable:
    """The function that `module:function` or `path/file.py:function` names. TargetError where there is none."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise TargetError(f"target {spec!r}: module:function or path/file.py:function is expected")
    try:
        module = _from_file(where) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError:
        raise TargetError(f"target {spec!r}: there is no file {where!r}") from None
    except ModuleNotFoundError as error:
        raise TargetError(f"target {spec!r}: no module named {error.name!r} can be imported") from None
    except Exception as error:  # whatever the file does when it is imported
        raise TargetError(f"target {spec!r}: importing {where!r} raised {told(error)}") from None
    try:
        fn = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        import difflib

        near = difflib.get_close_matches(name, [k for k in vars(module) if not k.startswith("_")], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TargetError(f"target {spec!r}: {where!r} has no {name!r}{hint}") from None
    if not callable(fn):
        raise TargetError(f"target {spec!r}: {name!r} is of type {type(fn).__name__}, not a function")
    return fn


def _from_file(path: str) -> types.ModuleType:
    name = "jaxpt_target_" + "".join(c if c.isalnum() else "_" for c in path.removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up
    spec.loader.exec_module(module)
    return module


def told(error: BaseException) -> str:
    """An exception in one line."""
    words = " ".join(str(error).split())
    short = words if len(words) <= 200 else words[:200] + "..."
    return f"{type(error).__name__}: {short}" if words else type(error).__name__


def parameters(fn: Callable, family: Family, family_name: str) -> tuple[str, ...]:
    """Which optional arguments the function takes. TargetError if the family's do not fit."""
    if not callable(fn):
        raise TargetError(f"a function is expected, got one of type {type(fn).__name__}")
    try:
        given = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = tuple(family.args)
    gives = f"family {family_name} gives {len(names)}: {', '.join(names)}"
    if len(positional) < len(names) and not any(p.kind == p.VAR_POSITIONAL for p in given):
        raise TargetError(f"the function takes {len(positional)} positional arguments, {gives}")
    further = [*positional[len(names):], *(p for p in given if p.kind == p.KEYWORD_ONLY)]
    for p in further:
        if p.default is p.empty and p.name not in family.optional:
            raise TargetError(f"the function's parameter {p.name!r} has no default, {gives}")
    return tuple(p.name for p in further if p.name in family.optional)


def frameworks_of(fn: Callable) -> tuple[str, ...]:
    """What the function may compute with, the likeliest first: the one that its annotations name; else those that its
    code names or imports; else those that its file does. Numpy if there is no sign."""
    fn = _plain(fn)
    seen = _annotated(fn)
    if len(seen) != 1:
        seen = set(_named(fn, depth=3))
    if not seen and hasattr(fn, "__globals__"):
        seen = {root_of(value) for value in fn.__globals__.values()}
    return tuple(name for name in ("torch", "jax", "numpy") if name in seen) or ("numpy",)


def _plain(fn: Callable) -> Callable:
    """The function under partials, decorators and methods."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType):
        fn = getattr(type(fn), "forward", None) or type(fn).__call__
    return fn


def _annotated(fn: Callable) -> set[str]:
    """Annotations may be strings, of which the first name is looked up."""
    found = set()
    for said in getattr(fn, "__annotations__", {}).values():
        if isinstance(said, str):
            said = fn.__globals__.get(said.split(".")[0].split("[")[0].strip())
        found.add(root_of(said))
    return found & set(FRAMEWORKS)


def _named(fn: Callable, depth: int) -> list[str]:
    if not isinstance(fn, types.FunctionType):
        return []
    codes, names, imported = [fn.__code__], [], []
    while codes:
        code = codes.pop()
        names += code.co_names
        imported += [step.argval.split(".")[0] for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    values = [fn.__globals__[name] for name in names if name in fn.__globals__]
    values += [cell.cell_contents for cell in fn.__closure__ or () if not _empty(cell)]
    deeper = [root for value in values if depth for root in _named(getattr(value, "__wrapped__", value), depth - 1)]
    return [root for root in (*imported, *map(root_of, values)) if root in FRAMEWORKS] + deeper


def _empty(cell) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def root_of(value: object) -> str:
    """The framework that a module, a function or a class belongs to, or where else it comes from."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    root = module.split(".")[0] if isinstance(module, str) else ""
    return {"jaxlib": "jax", "flax": "jax", "optax": "jax", "rlax": "jax", "chex": "jax"}.get(root, root)
