"""Where a source file can be changed, and the file with one change: a fixed set of operators, enumerated by `ast`."""

import ast
import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# What is copied from others, what only prints, and the batch that rows are told apart on.
LEFT_OUT = ("peers.py", "peer_parts.py", "peer_pairs.py", "describe.py", "papers.py", "probe.py")

ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd}
COMPARISON = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,),
}
EXTREMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "any": "all", "all": "any"}
MASKED = {  # function -> place of its mask
    "masked_sum": 1, "masked_mean": 1, "count": 0, "group_sum": 2, "group_extreme": 2, "largest": 1, "weighed": 1,
}
AXES = {0: 1, 1: 0, -1: 0}


class Site(NamedTuple):
    """One change of one expression."""

    file: str  # relative to the root
    line: int
    column: int
    operator: str  # arithmetic, comparison, sign, constant, mask, stop, axis
    before: str
    after: str
    start: int  # the bytes of the file that `after` takes the place of
    end: int
    function: int  # first line of the innermost function that it is in, 0 where importing executes it

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.operator}: {self.before} -> {self.after}"


def files() -> list[str]:
    """The files that are changed."""
    chosen = [p for p in sorted((ROOT / "jaxpt/objectives").glob("*.py")) if p.name not in LEFT_OUT]
    return [str(p.relative_to(ROOT)) for p in [*chosen, ROOT / "jaxpt/ops/masked.py"]]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def joins(node: ast.BinOp) -> bool:
    """Texts or dictionaries: no arithmetic."""
    return any(
        isinstance(x, ast.Dict | ast.JoinedStr) or isinstance(x, ast.Constant) and isinstance(x.value, str)
        for x in (node.left, node.right)
    )


def of_operation(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(operator, what stands in place of `node`)"""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not joins(node):
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield from (("mask", side) for side in (node.left, node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for op in COMPARISON.get(type(node.ops[0]), ()):
            yield "comparison", ast.Compare(node.left, [op()], node.comparators)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield "sign", node.operand


def of_constant(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        x = node.value
        changed = not x if isinstance(x, bool) else x + 1 if isinstance(x, int) or x == 0 else round(x * 1.1, 12)
        yield "constant", ast.Constant(changed)


def of_call(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if not isinstance(node, ast.Call):
        return
    name, args = name_of(node), node.args
    if name in EXTREMES and isinstance(node.func, ast.Attribute):
        swapped = ast.Attribute(node.func.value, EXTREMES[name], ast.Load())
        yield "comparison", ast.Call(swapped, args, node.keywords)
    if name == "keep" and len(args) > 1:
        yield "mask", args[0]
    if name == "where" and len(args) == 3:
        yield "mask", args[1]
    if name in MASKED and len(args) > MASKED[name]:
        k = MASKED[name]
        everything = ast.Compare(args[k], [ast.Eq()], [args[k]])
        yield "mask", ast.Call(node.func, [*args[:k], everything, *args[k + 1 :]], node.keywords)
    if name in ("stop", "stop_gradient") and args:
        yield "stop", args[0]
    for k, keyword in enumerate(node.keywords):
        axis = keyword.value
        value = -axis.operand.value if isinstance(axis, ast.UnaryOp) else getattr(axis, "value", None)
        if keyword.arg == "axis" and type(value) is int and value in AXES:
            other = ast.keyword("axis", ast.Constant(AXES[value]))
            yield "axis", ast.Call(node.func, args, [*node.keywords[:k], other, *node.keywords[k + 1 :]])


def is_axis(node: ast.AST, parents: list[ast.AST]) -> bool:
    return any(isinstance(p, ast.keyword) and p.arg == "axis" for p in [*parents, node])


def walk(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Expressions that are computed, with what they stand in; annotations and strings are none."""
    yield node, parents
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from walk(child, [*parents, node])


def sites(file: str, source: str | None = None) -> list[Site]:
    """All changes of a file, in order."""
    source = (ROOT / file).read_text() if source is None else source
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    found = []
    for node, parents in walk(ast.parse(source), []):
        changes = [*of_operation(node), *of_constant(node), *of_call(node)]
        for operator, new in changes:
            if operator in ("constant", "sign") and is_axis(node, parents):
                continue
            start, end = offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(new)
            after = text if isinstance(new, ast.Name | ast.Constant | ast.Call | ast.Attribute) else f"({text})"
            found.append(Site(
                file, node.lineno, node.col_offset, operator, ast.unparse(node), after, start, end, function_of(node, parents),
            ))
    return sorted(set(found), key=lambda s: (s.start, s.end, s.operator, s.after))


def function_of(node: ast.AST, parents: list[ast.AST]) -> int:
    """Default values are executed where the function is defined."""
    chain = [*parents, node]
    inside = [p for p, below in itertools.pairwise(chain)
              if isinstance(p, ast.FunctionDef | ast.Lambda) and not isinstance(below, ast.arguments)]
    return min(x.lineno for x in [inside[-1], *getattr(inside[-1], "decorator_list", [])]) if inside else 0


def mutated(site: Site) -> str:
    """The source of the file with the change made."""
    source = (ROOT / site.file).read_bytes()
    return (source[: site.start] + site.after.encode() + source[site.end :]).decode()


def draw(number: int, seed: int, only: str = "") -> list[tuple[Site, bool]]:
    """(site, set aside) of a fixed sample, half of it set aside, in the order of the files."""
    everything = [site for file in files() if only in file for site in sites(file)]
    rng = random.Random(seed)
    chosen = rng.sample(everything, min(number, len(everything)))
    aside = set(rng.sample(range(len(chosen)), len(chosen) // 2))
    return sorted((site, k in aside) for k, site in enumerate(chosen))


def digest(*paths: Path) -> str:
    """Of the contents of files."""
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(paths))).hexdigest()[:16]
