"""What is asked of the matrix of laws, catalogue.py: the laws of a family, what may be claimed, the whole as a table."""

from jaxpt.verify.catalogue import LAWS
from jaxpt.verify.families import FAMILIES
from jaxpt.verify.law import CONTRACT, MATH, Law
from jaxpt.verify.waivers import WAIVER, WAIVERS

__all__ = ["CONTRACT", "LAWS", "MATH", "WAIVERS", "claimable", "of_family", "records", "waived", "words"]


def of_family(family: str) -> list[Law]:
    return [law for law in LAWS if family in law.families]


def waived(family: str, claims: tuple[str, ...]) -> dict[str, str]:
    """law -> the claim for which it is not applied."""
    return {law: w.name for w in WAIVERS if w.name in claims and family in w.families for law in w.laws}


def claimable(family: str) -> list[str]:
    contracts = [law.name for law in of_family(family) if law.kind == CONTRACT]
    return contracts + [w.name for w in WAIVERS if family in w.families and w.name not in contracts]


def records() -> list[dict]:
    """The whole matrix, for `jaxpt list invariants`."""
    laws = [
        {"name": law.name, "class": law.kind, "families": list(law.families), "where": law.where,
        "tolerance": law.tolerance,
         "statement": law.statement, "cause": law.cause}
        for law in LAWS
    ]
    return laws + [
        {"name": w.name, "class": WAIVER, "families": list(w.families), "waives": list(w.laws),
        "statement": w.statement}
        for w in WAIVERS if w.name not in {law.name for law in LAWS}
    ]


def words(record: dict) -> str:
    """A record in two lines."""
    families = ", ".join(record["families"]) if len(record["families"]) < len(FAMILIES) else "all families"
    more = f"waives {', '.join(record['waives'])}" if "waives" in record else (
        f"{record['where']}; tolerance: {record['tolerance']}")
    return f"{record['statement']}\n{record['class']} of {families}; {more}"
