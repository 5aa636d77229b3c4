"""Which begins a journal holds, and what its own later records say of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, LiteralString, TypeVar, cast
from uuid import UUID

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.journal_records import Acknowledged, Begin, NotBegun, Outcome, Presented, Record
from fencepost.jobs.journal_scan import Frame

__all__ = ["MATCHED_MAX", "MISSING", "PRESENT", "Begins", "missing", "present"]

T = TypeVar("T")

MATCHED_MAX = 10_000
BATCH = 1000

PRESENT: LiteralString = """
SELECT fencepost.present_begin(%(tenant)s, %(operation)s, %(class)s, %(effect_key)s, %(kind)s, %(effect_attempt)s,
                               %(attempt)s, %(request_digest)s)"""
MISSING: LiteralString = """
SELECT m FROM fencepost.missing_begins(%(tenants)s, %(operations)s, %(effect_keys)s, %(effect_attempts)s) AS m"""


class Begins:
    """Follows a journal's records.

    ``unmatched``: nothing says what became of them, so they count as begun. ``matched``: the database had them once, or
    was shown them; the newest 10,000 of these.
    """

    def __init__(self) -> None:
        self.unmatched: dict[UUID, Begin] = {}
        self.matched: dict[UUID, Begin] = {}

    def take(self, frame: Frame) -> None:
        """Follows a record that was read."""
        self.follow(frame.record)

    def follow(self, record: Record) -> None:
        """Follows a record that was read or written."""
        match record:
            case Begin():
                self.unmatched[record.effect_attempt] = record
            case NotBegun():
                self.unmatched.pop(record.effect_attempt, None)
            case Outcome() | Presented():
                begin = self.unmatched.pop(record.effect_attempt, None)
                if begin is not None:
                    self.matched[record.effect_attempt] = begin
                    if len(self.matched) > MATCHED_MAX:
                        del self.matched[next(iter(self.matched))]
            case Acknowledged():
                self.unmatched.pop(record.effect_attempt, None)
                self.matched.pop(record.effect_attempt, None)
            case _:
                pass


def present(conn: Connection[Any], begin: Begin) -> str:
    """What the database makes of a begin whose outcome the journal does not know, in the caller's transaction.

    known, unknown (from here on: its job is blocked), superseded, pending or no_job. Raises NotArmed.
    """
    parameters = {
        "tenant": begin.tenant,
        "operation": begin.operation,
        "class": begin.job_class,
        "effect_key": begin.effect_key,
        "kind": begin.kind,
        "effect_attempt": begin.effect_attempt,
        "attempt": begin.attempt,
        "request_digest": bytes.fromhex(begin.request_digest),
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(PRESENT, parameters).fetchone()
    assert row is not None
    return cast(str, row[0])


def missing(conn: Connection[Any], begins: Iterable[Begin]) -> list[Begin]:
    """Those of which the database has no trace; changes nothing."""
    found: list[Begin] = []
    for batch in _batches(begins):
        parameters = {
            "tenants": [b.tenant for b in batch],
            "operations": [b.operation for b in batch],
            "effect_keys": [b.effect_key for b in batch],
            "effect_attempts": [b.effect_attempt for b in batch],
        }
        with conn.cursor(row_factory=tuple_row) as cursor:
            lost = {row[0] for row in cursor.execute(MISSING, parameters)}
        found += [b for b in batch if b.effect_attempt in lost]
    return found


def _batches(begins: Iterable[Begin]) -> Iterator[Sequence[Begin]]:
    left = iter(begins)
    while batch := list(islice(left, BATCH)):
        yield batch
