"""The table of objectives: ROWS[name] -> Row. Names are unique over all tables."""

import difflib

from jaxpt.objectives import (
    distillation, lengths, peer_pairs, peers, policy, policy_advantages, policy_losses, preference, reward, supervised, unpaired,
)
from jaxpt.objectives.row import Row

TABLES = (
    supervised.ROWS, policy.ROWS, policy_losses.ROWS, policy_advantages.ROWS, preference.ROWS, unpaired.ROWS, reward.ROWS,
    distillation.ROWS, lengths.ROWS, peers.ROWS, peer_pairs.ROWS,
)
ROWS: dict[str, Row] = {row.name: row for table in TABLES for row in table}
if len(ROWS) < sum(map(len, TABLES)):
    raise ValueError("two objectives have one name")


def get(name: str) -> Row:
    """The row of that name; ValueError names the nearest one."""
    if name not in ROWS:
        near = difflib.get_close_matches(name, ROWS, n=1, cutoff=0.0)
        raise ValueError(f"unknown objective {name!r}; nearest: {near[0]!r} (known: {', '.join(ROWS)})")
    return ROWS[name]
