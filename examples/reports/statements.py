"""What the director asks the database: read-only, but for the lock that holds an ack back."""

from __future__ import annotations

from typing import LiteralString

SUBMISSIONS: LiteralString = "SELECT count(*) FROM reports.submission"
EVENTS: LiteralString = "SELECT count(*) FROM fencepost.event_key WHERE type = 'report.accepted'"
ROLLED_BACK: LiteralString = """
SELECT (SELECT count(*) FROM reports.submission WHERE submission_id = %(operation)s)
     + (SELECT count(*) FROM fencepost.event_key WHERE operation = %(operation)s)
     + (SELECT count(*) FROM fencepost.outbox WHERE operation = %(operation)s)"""
SLOTS_OWNED: LiteralString = (
    "SELECT count(*) FROM fencepost.slot WHERE destination = %(destination)s AND owner IS NOT NULL"
)
SLOTS: LiteralString = "SELECT count(*) FROM fencepost.slot WHERE destination = %(destination)s"
ACKS: LiteralString = "SELECT count(*) FROM fencepost.ack WHERE destination = %(destination)s"
# An ack locks its slots first: while these are locked, a relay that has its confirms waits here and nowhere else.
HOLD_ACKS: LiteralString = "SELECT FROM fencepost.slot WHERE destination = %(destination)s FOR UPDATE"
ACK_WAITS: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%fencepost.ack(%%'
  AND pid <> pg_backend_pid()"""
DELIVERIES: LiteralString = """
SELECT coalesce(sum(arrivals), 0) FROM fencepost.delivery WHERE consumer = %(consumer)s AND type = 'report.accepted'"""
RESERVATIONS: LiteralString = """
SELECT count(*) FROM fencepost.reservation WHERE consumer = %(consumer)s AND type = 'report.accepted'"""
UNSENT: LiteralString = """
SELECT count(*) FROM fencepost.event_key AS k
WHERE NOT EXISTS (SELECT FROM fencepost.reservation AS r
                  WHERE r.tenant = k.tenant AND r.operation = k.operation AND r.type = k.type)"""
DONE: LiteralString = "SELECT count(*) FROM fencepost.job WHERE exec = 'done' AND operation = ANY (%(operations)s)"
STUCK: LiteralString = """
SELECT j.operation, j.exec, coalesce(j.reason, ''), j.detail, j.attempts FROM fencepost.job AS j
WHERE j.exec IN ('poison', 'blocked') AND j.operation = ANY (%(operations)s) ORDER BY j.operation"""
JOB: LiteralString = """
SELECT j.exec, coalesce(j.owner, ''), j.generation, coalesce(j.lease_until <= clock_timestamp(), false)
FROM fencepost.job AS j WHERE j.operation = %(operation)s"""
STAGED: LiteralString = "SELECT count(*) FROM fencepost.staged WHERE operation = %(operation)s"
STAGED_BY: LiteralString = """
SELECT a.owner, a.generation FROM fencepost.staged AS s
JOIN fencepost.attempt AS a ON a.tenant = s.tenant AND a.attempt = s.attempt WHERE s.operation = %(operation)s"""
REPORT: LiteralString = """
SELECT r.worker, r.generation, a.owner FROM reports.report AS r
JOIN reports.analysis AS n USING (submission_id)
JOIN fencepost.attempt AS a ON a.attempt = n.computed_by
WHERE r.submission_id = %(operation)s"""
EFFECTS: LiteralString = """
SELECT e.operation, e.state, e.version, coalesce(e.reason, '') FROM fencepost.effect AS e
WHERE e.operation = ANY (%(operations)s) ORDER BY e.operation"""
PUBLISHED_SEEN: LiteralString = "SELECT count(*) FROM reports.submission WHERE state = 'published'"
RESULTS: LiteralString = """
SELECT s.package || ' ' || s.file, n.family, n.words, n.reading_ease, array_to_string(n.frequent, ', ')
FROM reports.submission AS s JOIN reports.analysis AS n USING (submission_id)
ORDER BY s.accepted_at LIMIT %(limit)s"""

# The final check. Domain tables and the provider's ledger are the oracle; fencepost's own tables are not.
PUBLICATIONS: LiteralString = """
SELECT s.submission_id, (SELECT count(*) FROM reports.report AS r WHERE r.submission_id = s.submission_id),
       (SELECT count(*) FROM reports.analysis AS n WHERE n.submission_id = s.submission_id),
       (SELECT min(r.receipt) FROM reports.report AS r WHERE r.submission_id = s.submission_id)
FROM reports.submission AS s ORDER BY s.submission_id"""
DEAD_LETTERS: LiteralString = "SELECT count(*) FROM fencepost.dead_letter"
PARKED: LiteralString = "SELECT count(*) FROM fencepost.parked"
