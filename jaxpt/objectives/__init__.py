"""The table of objectives: ROWS[name] -> Row. Names are unique over all tables."""

from jaxpt.objectives import policy, supervised
from jaxpt.objectives.row import Row

ROWS: dict[str, Row] = {row.name: row for table in (supervised, policy) for row in table.ROWS}
