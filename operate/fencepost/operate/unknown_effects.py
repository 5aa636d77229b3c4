"""What `fencepost doctor` says about effects that nobody knows the outcome of; counts and ages, never what they were."""

from __future__ import annotations

from typing import Any, LiteralString

from psycopg import Connection

from fencepost.operate import printing
from fencepost.operate.findings import Finding, ok, warn

__all__ = ["unsettled"]

UNKNOWN: LiteralString = """
SELECT u.severity, sum(u.count)::bigint, extract(epoch FROM clock_timestamp() - min(u.oldest))::float, sum(u.overdue)::bigint
FROM fencepost.unknown_effects AS u GROUP BY u.severity
ORDER BY array_position(ARRAY['critical', 'high', 'normal'], u.severity)"""


def unsettled(conn: Connection[Any]) -> Finding:
    """Unknown effects wait for somebody, the most severe first; and somebody escalates them."""
    found = conn.execute(UNKNOWN).fetchall()
    if not found:
        return ok("effects", "no unknown effects")
    if overdue := sum(int(row[3]) for row in found):
        return warn(
            "effects",
            f"nobody escalates: {overdue} unknown effects are overdue; run a worker with a login that has the role maintenance,"
            " or `fencepost authority guard`",
        )
    groups = ", ".join(f"{number} {severity} (oldest {printing.age(age)})" for severity, number, age, _ in found)
    return warn("effects", f"unknown effects: {groups}; see `fencepost effects list`")
