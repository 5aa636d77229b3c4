"""What `fencepost jobs show` reads of an archived job, as long as the archive has it; never a payload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.rows import dict_row

__all__ = ["history", "signals"]

Row = dict[str, Any]

ATTEMPTS: LiteralString = """
WITH of AS MATERIALIZED (
    SELECT a.kind, a.content FROM fencepost.archived AS a
    WHERE a.tenant = %(tenant)s AND a.operation = %(operation)s AND a.class = %(class)s
      AND a.kind IN ('job', 'attempt', 'job_event'))
SELECT a.claimed_at, k.ended_at, k.became, k.reason, k.detail, a.mode, a.owner, a.generation, a.epoch, a.attempt FROM (
    SELECT v.attempt, v.at AS ended_at, v.became, v.reason, v.detail
    FROM of CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.job_event, of.content) AS v
    WHERE of.kind = 'job_event' AND v.attempt IS NOT NULL
    UNION ALL
    SELECT j.done_attempt, j.changed_at, j.exec, NULL, NULL
    FROM of CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.job, of.content) AS j
    WHERE of.kind = 'job' AND j.exec = 'done') AS k
JOIN (SELECT p.* FROM of CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.attempt, of.content) AS p
      WHERE of.kind = 'attempt') AS a ON a.attempt = k.attempt
ORDER BY a.generation"""
HISTORY: LiteralString = """
WITH of AS MATERIALIZED (
    SELECT a.kind, a.content FROM fencepost.archived AS a
    WHERE a.tenant = %(tenant)s AND a.operation = %(operation)s AND a.class = %(class)s
      AND a.kind IN ('publication', 'job_event'))
SELECT h.at, h.what, h.reason, h.detail, h.by FROM (
    SELECT v.at, v.was || ' -> ' || v.became AS what, v.reason, v.detail, v.login AS by
    FROM of CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.job_event, of.content) AS v WHERE of.kind = 'job_event'
    UNION ALL
    SELECT d.at, 'decision: ' || d.kind, d.verdict, d.reason, d.actor FROM fencepost.decision AS d
    WHERE d.kind IN ('cancel', 'requeue')
      AND d.tenant = %(tenant)s AND d.operation = %(operation)s AND d.subject = %(class)s
    UNION ALL
    SELECT p.at, 'publication', NULL, '', p.owner
    FROM of CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.publication, of.content) AS p
    WHERE of.kind = 'publication') AS h
ORDER BY h.at, h.what"""
SIGNALS: LiteralString = """
SELECT s.name AS signal, s.key, s.actor, s.login, s.at
FROM fencepost.archived AS a CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.signal, a.content) AS s
WHERE a.tenant = %(tenant)s AND a.operation = %(operation)s AND a.class = %(class)s AND a.kind = 'signal' ORDER BY s.n"""


def history(conn: Connection[Any], which: Mapping[str, str]) -> tuple[list[Row], list[Row]]:
    """The attempts of an archived job, and what else happened to it."""
    return _rows(conn, ATTEMPTS, which), _rows(conn, HISTORY, which)


def signals(conn: Connection[Any], which: Mapping[str, str]) -> list[Row]:
    """What was signalled to an archived job, without payloads."""
    return _rows(conn, SIGNALS, which)


def _rows(conn: Connection[Any], statement: LiteralString, which: Mapping[str, str]) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, which).fetchall()
