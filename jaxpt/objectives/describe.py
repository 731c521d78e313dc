"""Rows in words: the formula with every constant, and how two rows differ, in words and on a probe batch."""

import numpy as np

from jaxpt.objectives import get
from jaxpt.objectives.papers import papers_of
from jaxpt.objectives.probe import probe
from jaxpt.objectives.row import Row

WHERE = {  # what the formulas of a family leave unsaid
    "policy_loss": "m_it = 1 where the policy chose the token; tokens, rows: totals of the whole batch",
}
PROBE = {"policy_loss": "2 groups of 4, lengths 3 to 8, off-policy by 0.5 nats a token"}


def formula(row: Row) -> str:
    """The row's formula with its constants filled in."""
    return row.formula.format(**{k: f"{v:g}" for k, v in row.hyper.items()})


def record(row: Row) -> dict:
    """What `jaxpt list objectives --json` says of a row."""
    papers = [{"title": paper.title, "link": paper.link} for paper in papers_of(row.paper)]
    return {
        "name": row.name, "family": row.family, "paper": row.paper, "papers": papers, "formula": formula(row),
        "hyper": dict(row.hyper), "needs": list(row.needs), "claims": list(row.claims), "additive": row.additive,
        "alias_of": row.alias_of or None,
    }


def describe(name: str) -> str:
    """Formula with all constants, parts in words, paper."""
    row = get(name)
    lines = [f"{row.name} ({row.family})", f"  {row.paper}"]
    lines += [f"  {paper.title}, {paper.link}" for paper in papers_of(row.paper)] + [""]
    lines += [f"  {line}" for line in formula(row).split("\n")]
    lines += [f"  {WHERE[row.family]}", ""] if row.family in WHERE else [""]
    lines += [f"  {kind:<14} {words}" for kind, words in row.parts.items()]
    constants = ", ".join(f"{k} = {v:g}" for k, v in row.hyper.items()) or "none"
    lines += ["", f"  constants      {constants}", f"  needs          {', '.join(row.needs) or 'no more'}"]
    lines += [f"  additive       {'yes' if row.additive else 'no'}", f"  claims         {', '.join(row.claims) or 'none'}"]
    return "\n".join(lines)


def difference(name_a: str, name_b: str) -> str:
    """Where two rows differ, part by part, and what that does on one fixed batch."""
    a, b = get(name_a), get(name_b)
    if a.family != b.family:
        raise ValueError(f"{a.name} is of family {a.family}, {b.name} of {b.family}: expected rows of one family")
    lines = [f"{a.name} against {b.name}", ""]
    for kind in {**a.parts, **b.parts}:
        words_a, words_b = (row.parts.get(kind, "absent") for row in (a, b))
        if words_a != words_b:
            lines += [f"  {kind}", f"    {a.name}: {words_a}", f"    {b.name}: {words_b}"]
    for constant in sorted(set(a.hyper) | set(b.hyper)):
        values = [f"{row.hyper[constant]:g}" if constant in row.hyper else "absent" for row in (a, b)]
        if values[0] != values[1]:
            lines.append(f"  {constant}: {values[0]} against {values[1]}")
    if len(lines) == 2:
        lines.append("  the same parts and constants")
    (value_a, grads_a), (value_b, grads_b) = probe(a), probe(b)
    grad_a, grad_b = (np.concatenate([np.ravel(g[k]) for k in sorted(g)]) for g in (grads_a, grads_b))
    norm_a, norm_b = np.linalg.norm(grad_a), np.linalg.norm(grad_b)
    cosine = float(np.sum(grad_a * grad_b) / max(norm_a * norm_b, 1e-30))
    lines += [
        "", f"  on the probe batch ({PROBE.get(a.family, 'fixed, with holes in the masks')}):",
        f"    value            {np.sum(value_a):+.5f}   {np.sum(value_b):+.5f}",
        f"    |gradient|        {norm_a:.5f}    {norm_b:.5f}",
        f"    cosine of the two gradients {cosine:+.4f}",
    ]
    return "\n".join(lines)
