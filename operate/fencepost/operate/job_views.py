"""What `fencepost jobs` reads: which jobs, how they stand, and what happened to one; never a payload.

No index knows what changes in a job. Jobs that stand still are found by their holds, queued and running ones by the
agenda, and of those that are done only so many are looked at, with a word about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.operate import archived_views, printing

__all__ = ["LOOKED_MAX", "Filter", "StateName", "find", "history", "one", "standing"]

LOOKED_MAX = 100_000
STILL: LiteralString = """
SELECT f.tenant, f.operation, f.class, f.since FROM unnest(%(states)s::text[]) AS s (state) CROSS JOIN LATERAL (
    SELECT h.tenant, h.operation, h.class, h.since FROM fencepost.job_hold AS h
    WHERE h.state = s.state AND (%(tenant)s::text IS NULL OR h.tenant = %(tenant)s::text)
      AND (%(operation)s::text IS NULL OR h.operation = %(operation)s::text)
      AND (%(class)s::text IS NULL OR h.class = %(class)s::text)
      AND (%(older)s::interval IS NULL OR h.since < (SELECT clock_timestamp()) - %(older)s::interval)
      AND (%(reason)s::text IS NULL OR EXISTS (
          SELECT FROM fencepost.job AS j WHERE j.tenant = h.tenant AND j.operation = h.operation AND j.class = h.class
             AND j.reason = %(reason)s::text))
    ORDER BY h.since LIMIT %(limit)s) AS f
ORDER BY f.since LIMIT %(limit)s"""
MOVING: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.changed_at AS since FROM (
    SELECT DISTINCT a.tenant, a.operation, a.class FROM (
        SELECT a.tenant, a.operation, a.class FROM fencepost.agenda AS a
        WHERE (a.priority < 2147483647 AND %(states)s::text[] && '{queued,held}'
               OR a.priority = 2147483647 AND 'running' = ANY (%(states)s::text[]))
          AND (%(tenant)s::text IS NULL OR a.tenant = %(tenant)s::text)
          AND (%(operation)s::text IS NULL OR a.operation = %(operation)s::text)
          AND (%(class)s::text IS NULL OR a.class = %(class)s::text) LIMIT %(most)s) AS a) AS l
JOIN fencepost.job AS j ON j.tenant = l.tenant AND j.operation = l.operation AND j.class = l.class
CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
WHERE CASE WHEN j.exec = 'queued' AND j.epoch < greatest(i.floor, t.epoch) THEN 'held' ELSE j.exec END
      = ANY (%(states)s::text[]) AND j.exec IN ('queued', 'running')
  AND (%(reason)s::text IS NULL OR j.reason = %(reason)s::text)
  AND (%(older)s::interval IS NULL OR j.changed_at < clock_timestamp() - %(older)s::interval)
ORDER BY j.changed_at LIMIT %(limit)s"""
DONE: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.changed_at AS since FROM (
    SELECT j.tenant, j.operation, j.class, j.exec, j.reason, j.changed_at FROM fencepost.job AS j
    WHERE (%(tenant)s::text IS NULL OR j.tenant = %(tenant)s::text)
      AND (%(operation)s::text IS NULL OR j.operation = %(operation)s::text)
      AND (%(class)s::text IS NULL OR j.class = %(class)s::text) LIMIT %(most)s) AS j
WHERE j.exec = 'done' AND (%(reason)s::text IS NULL OR j.reason = %(reason)s::text)
  AND (%(older)s::interval IS NULL OR j.changed_at < clock_timestamp() - %(older)s::interval)
ORDER BY j.changed_at LIMIT %(limit)s"""
LOOKED: LiteralString = """
SELECT greatest(CASE WHEN %(moving)s THEN (SELECT count(*) FROM (
                    SELECT FROM fencepost.agenda AS a
                    WHERE a.priority < 2147483647 AND %(states)s::text[] && '{queued,held}'
                       OR a.priority = 2147483647 AND 'running' = ANY (%(states)s::text[]) LIMIT %(most)s) AS a) END,
                CASE WHEN %(done)s THEN (SELECT count(*) FROM (
                    SELECT FROM fencepost.job AS j
                    WHERE (%(tenant)s::text IS NULL OR j.tenant = %(tenant)s::text)
                      AND (%(operation)s::text IS NULL OR j.operation = %(operation)s::text)
                      AND (%(class)s::text IS NULL OR j.class = %(class)s::text) LIMIT %(most)s) AS j) END) AS looked"""
# Of the effects, the one that is open for longest.
LIST: LiteralString = """
SELECT j.tenant, j.operation, j.class,
       CASE WHEN j.exec = 'queued' AND j.epoch < greatest(i.floor, t.epoch) THEN 'held' ELSE j.exec END AS state,
       j.mode, j.reason, j.detail, j.attempts, c.max_attempts, j.open_effects, j.owner, j.run_at, j.priority,
       clock_timestamp() - coalesce(h.since, j.changed_at) AS age,
       e.unknown, e.pending, clock_timestamp() - e.since AS effect_age, e.assignee
FROM unnest(%(tenants)s::text[], %(operations)s::text[], %(classes)s::text[]) WITH ORDINALITY AS k (tenant, operation, class, n)
JOIN fencepost.job AS j ON j.tenant = k.tenant AND j.operation = k.operation AND j.class = k.class
CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
LEFT JOIN fencepost.job_class AS c ON c.class = j.class
LEFT JOIN fencepost.job_hold AS h ON h.tenant = j.tenant AND h.operation = j.operation AND h.class = j.class
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE e.state = 'unknown') AS unknown, count(*) FILTER (WHERE e.state = 'pending') AS pending,
           min(coalesce(e.unknown_since, e.changed_at)) AS since,
           (array_agg(e.assignee ORDER BY e.unknown_since) FILTER (WHERE e.state = 'unknown'))[1] AS assignee
    FROM fencepost.effect AS e
    WHERE e.tenant = j.tenant AND e.operation = j.operation AND e.class = j.class AND e.state IN ('pending', 'unknown')) AS e
ORDER BY k.n"""
SHOW: LiteralString = """
SELECT j.generation, j.finishes, j.epoch, j.accepted_epoch, j.attempt, j.done_attempt, j.lease_until, j.applied_effects,
       j.source_event, j.submitted_at, j.changed_at, j.archived_at,
       (SELECT count(*) FROM fencepost.candidate AS s
        WHERE s.tenant = j.tenant AND s.operation = j.operation AND s.class = j.class) AS staged
FROM fencepost.job AS j
WHERE j.tenant = %(tenant)s AND j.operation = %(operation)s AND j.class = %(class)s"""
EFFECTS: LiteralString = """
SELECT e.effect_key AS effect, e.kind, e.state, e.reason, e.assignee, e.version, clock_timestamp() - e.changed_at AS age
FROM fencepost.effect AS e
WHERE e.tenant = %(tenant)s AND e.operation = %(operation)s AND e.class = %(class)s ORDER BY e.begun_at"""
ATTEMPTS: LiteralString = """
SELECT a.claimed_at, k.ended_at, k.became, k.reason, k.detail, a.mode, a.owner, a.generation, a.epoch, a.attempt FROM (
    SELECT v.attempt, v.at AS ended_at, v.became, v.reason, v.detail FROM fencepost.job_event AS v
    WHERE v.tenant = %(tenant)s AND v.operation = %(operation)s AND v.class = %(class)s AND v.attempt IS NOT NULL
    UNION ALL
    SELECT coalesce(j.attempt, j.done_attempt), CASE j.exec WHEN 'done' THEN j.changed_at END, j.exec, NULL, NULL
    FROM fencepost.job AS j
    WHERE j.tenant = %(tenant)s AND j.operation = %(operation)s AND j.class = %(class)s
      AND j.exec IN ('running', 'done')) AS k
JOIN fencepost.attempt AS a ON a.tenant = %(tenant)s AND a.attempt = k.attempt
ORDER BY a.generation"""
HISTORY: LiteralString = """
SELECT h.at, h.what, h.reason, h.detail, h.by FROM (
    SELECT v.at, v.was || ' -> ' || v.became AS what, v.reason, v.detail, v.login AS by FROM fencepost.job_event AS v
    WHERE v.tenant = %(tenant)s AND v.operation = %(operation)s AND v.class = %(class)s
    UNION ALL
    SELECT d.at, 'decision: ' || d.kind, d.verdict, d.reason, d.actor FROM fencepost.decision AS d
    WHERE d.kind IN ('cancel', 'requeue')
      AND d.tenant = %(tenant)s AND d.operation = %(operation)s AND d.subject = %(class)s
    UNION ALL
    SELECT p.at, 'publication', NULL, '', p.owner FROM fencepost.publication AS p
    WHERE p.tenant = %(tenant)s AND p.operation = %(operation)s AND p.class = %(class)s) AS h
ORDER BY h.at, h.what"""
SIGNALS: LiteralString = """
SELECT s.name AS signal, s.key, s.actor, s.login, s.at
FROM fencepost.signal AS s
WHERE s.tenant = %(tenant)s AND s.operation = %(operation)s AND s.class = %(class)s ORDER BY s.n"""

Row = dict[str, Any]


class StateName(StrEnum):
    """Where a job's execution stands; held: queued under an old epoch of its tenant."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    CANCELLED = "cancelled"
    POISON = "poison"
    BLOCKED = "blocked"
    HELD = "held"


MOVES = {StateName.QUEUED, StateName.RUNNING, StateName.HELD}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs a command is about."""

    states: tuple[StateName, ...]
    tenant: str | None = None
    operation: str | None = None
    job_class: str | None = None
    reason: str | None = None
    older: timedelta | None = None

    @property
    def narrow(self) -> bool:
        """Whether anything but states was said."""
        return any(v is not None for v in (self.tenant, self.operation, self.job_class, self.reason, self.older))


def find(conn: Connection[Any], which: Filter, limit: int) -> tuple[list[Row], bool]:
    """The first jobs that the filter lets pass, longest in their state first; and whether some were not even looked at."""
    wanted = set(which.states)
    moving, done = bool(wanted & MOVES), StateName.DONE in wanted
    values: dict[str, object] = {
        "states": [state.value for state in which.states],
        "tenant": which.tenant,
        "operation": which.operation,
        "class": which.job_class,
        "reason": which.reason,
        "older": which.older,
        "limit": limit,
        "most": LOOKED_MAX,
    }
    keys: list[Row] = []
    if wanted - {StateName.QUEUED, StateName.RUNNING, StateName.DONE}:
        keys += _rows(conn, STILL, values)
    if moving:
        keys += _rows(conn, MOVING, values)
    if done:
        keys += _rows(conn, DONE, values)
    keys.sort(key=lambda row: row["since"])
    (looked,) = _rows(conn, LOOKED, values | {"moving": moving, "done": done})
    found = {(row["tenant"], row["operation"], row["class"]): None for row in keys}
    tenants, operations, classes = zip(*list(found)[:limit], strict=True) if found else ((), (), ())
    rows = _rows(conn, LIST, {"tenants": list(tenants), "operations": list(operations), "classes": list(classes)})
    return rows, (looked["looked"] or 0) >= LOOKED_MAX


def one(conn: Connection[Any], tenant: str, operation: str, job_class: str) -> Row | None:
    """One job with everything about it that may be shown; None when it is not there."""
    rows = _rows(conn, LIST, {"tenants": [tenant], "operations": [operation], "classes": [job_class]})
    if not rows:
        return None
    (more,) = _rows(conn, SHOW, {"tenant": tenant, "operation": operation, "class": job_class})
    return rows[0] | more


def history(
    conn: Connection[Any], tenant: str, operation: str, job_class: str, *, archived: bool = False
) -> tuple[list[Row], list[Row], list[Row]]:
    """The effects of one job, its attempts, and what else happened to it; of an archived one as long as the archive has it."""
    which = {"tenant": tenant, "operation": operation, "class": job_class}
    if archived:
        return _rows(conn, EFFECTS, which), *archived_views.history(conn, which)
    return _rows(conn, EFFECTS, which), _rows(conn, ATTEMPTS, which), _rows(conn, HISTORY, which)


def signals(conn: Connection[Any], tenant: str, operation: str, job_class: str, *, archived: bool = False) -> list[Row]:
    """What was signalled to one job, without payloads."""
    which = {"tenant": tenant, "operation": operation, "class": job_class}
    return archived_views.signals(conn, which) if archived else _rows(conn, SIGNALS, which)


def standing(row: Row) -> str:
    """Execution and effects side by side: cancelled + 1 effect unknown (3 h, owner payments-ops)."""
    said = [str(row["state"])]
    if row["unknown"]:
        old = printing.age(row["effect_age"].total_seconds())
        said.append(f"{_effects(row['unknown'])} unknown ({old}, owner {row['assignee']})")
    if row["pending"]:
        said.append(f"{_effects(row['pending'])} pending")
    return " + ".join(said)


def _effects(count: int) -> str:
    return f"{count} effect{'' if count == 1 else 's'}"


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
