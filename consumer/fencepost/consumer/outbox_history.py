"""The retained outbox as a history: what was committed when the replay began, in the order of its numbers.

Events of a key have numbers in the order in which their transactions were committed, when writers of the key were
serialised. The snapshot of the beginning is kept with the position: a transaction that commits later, with a lower number,
belongs to no part of this replay, wherever it goes on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, LiteralString, cast

from psycopg import Connection

from fencepost.consumer.history import BEGINNING, END, Batch, Bound, Reach, Record
from fencepost.schemas.connect import connect
from fencepost.schemas.digest import Digest
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import FencepostError, InvalidInput, ReplayRefused, Undecodable

__all__ = ["OutboxHistory"]

# Numbers looked at in one statement, and bytes of payloads read at once.
WINDOW = 4000
BYTES = 16 << 20

INSTALLATION: LiteralString = "SELECT i.id, i.slots FROM fencepost.installation AS i"
MARK: LiteralString = "SELECT i.era::text || ' ' || pg_current_snapshot()::text FROM fencepost.installation AS i"
GONE: LiteralString = (
    "SELECT r.seq, CASE WHEN isfinite(r.recorded_at) THEN r.recorded_at END FROM fencepost.recycled AS r"
)
NEWEST: LiteralString = """
SELECT coalesce(max(o.seq), 0) FROM generate_series(0, %(slots)s - 1) AS s
CROSS JOIN LATERAL (SELECT l.seq FROM fencepost.outbox AS l WHERE l.slot = s ORDER BY l.seq DESC LIMIT 1) AS o"""
OLDEST: LiteralString = """
SELECT coalesce(min(o.seq), 1) FROM generate_series(0, %(slots)s - 1) AS s
CROSS JOIN LATERAL (SELECT l.seq FROM fencepost.outbox AS l WHERE l.slot = s ORDER BY l.seq LIMIT 1) AS o"""
BY_INDEX: LiteralString = "SELECT set_config('enable_seqscan', 'off', true), set_config('TimeZone', 'UTC', true)"
# Transaction ids of an earlier era belong to another server: what a restore brought along was committed there.
EVENTS: LiteralString = """
SELECT b.seq, b.event_id, b.tenant, b.operation, b.type, b.version, b.epoch, b.ordering_key, b.digest, b.recorded_at,
       b.attributes::text, b.reference, b.payload
FROM (SELECT x.*, sum(octet_length(x.payload)) OVER (ORDER BY x.seq) AS total
      FROM generate_series(0, %(slots)s - 1) AS s
      CROSS JOIN LATERAL (
          SELECT o.* FROM fencepost.outbox AS o
          WHERE o.slot = s AND o.seq >= %(first)s AND o.seq < %(last)s
            AND (o.era < %(era)s OR pg_visible_in_snapshot(o.xid, %(snap)s::pg_snapshot))
            AND (%(since)s::timestamptz IS NULL OR o.recorded_at >= %(since)s::timestamptz)
            AND (%(until)s::timestamptz IS NULL OR o.recorded_at < %(until)s::timestamptz)) AS x) AS b
WHERE b.total - octet_length(b.payload) < %(bytes)s ORDER BY b.seq"""


class OutboxHistory:
    """The retained events of this installation between two bounds; numbers are places."""

    def __init__(self, dsn: str, since: Bound = BEGINNING, until: Bound = END) -> None:
        self._dsn, self._since, self._until = dsn, since, until
        self._mark = ""

    @property
    def range(self) -> str:
        """The range as it was asked for."""
        return f"{self._since} to {self._until}"

    @property
    def mark(self) -> str:
        """Era and snapshot of the beginning."""
        return self._mark

    def open(self) -> str:
        """Reaches the database, Unreachable when it does not answer."""
        self._conn = connect(self._dsn, autocommit=True)
        installation, self._slots = cast(tuple[object, int], self._row(INSTALLATION))
        self._source = f"urn:fencepost:{installation}"
        return f"outbox {installation}"

    def resolve(self) -> dict[int, Reach]:
        """The range as numbers; InvalidInput when a part of it was recycled already."""
        (self._mark,) = cast(tuple[str], self._row(MARK))
        slots = {"slots": self._slots}
        # Invariant: read after the mark, so every event that the mark sees has a number up to it.
        (last,) = cast(tuple[int], self._row(NEWEST, slots))
        (first,) = cast(tuple[int], self._row(OLDEST, slots))
        if isinstance(self._since, str):
            # Below, only a part is left: late rows of a partition that was reused.
            first = max(first, cast(int, self._row(GONE)[0]) + 1)
        else:
            self._require_retained(0)
        if isinstance(self._since, int):
            first = max(first, self._since)
        if isinstance(self._until, int):
            last = min(last, self._until)
        return {0: Reach(first, first, max(first, last + 1))}

    def read(self, reaches: Mapping[int, Reach], mark: str, stop: threading.Event) -> Iterator[Batch]:
        """Batches of 4000 numbers at most; ReplayRefused when recycling took what was not read yet."""
        era, _, snap = mark.partition(" ")
        at, last = reaches[0].position, reaches[0].last
        while at < last and not stop.is_set():
            upto = min(at + WINDOW, last)
            with self._conn.transaction(), self._conn.cursor(binary=True) as cursor:
                self._conn.execute(BY_INDEX)
                cursor.execute(EVENTS, self._parameters(at, upto, int(era), snap))
                rows = cursor.fetchall()
                # Invariant: read after the events, so that what it does not count as gone was there to be read.
                self._require_retained(at)
            if sum(len(row[12]) for row in rows) >= BYTES:
                upto = rows[-1][0] + 1
            yield Batch([Record(0, row[0], self._found(row)) for row in rows], {0: upto})
            at = upto

    def close(self) -> None:
        """Leaves the database."""
        if hasattr(self, "_conn"):
            self._conn.close()

    def _found(self, row: tuple[Any, ...]) -> Envelope | Undecodable:
        seq, event_id, tenant, operation, type_, version, epoch, key, digest, at, attributes, reference, payload = row
        try:
            return Envelope(
                event_id,
                self._source,
                type_,
                version,
                tenant,
                operation,
                key,
                epoch,
                Digest(digest),
                seq,
                cast(datetime, at).astimezone(UTC),
                payload,
                {} if attributes is None else dict(json.loads(attributes)),
                reference,
            )
        except (FencepostError, ValueError, TypeError):
            return Undecodable("the row cannot be read", reason="invalid_attribute", field="attributes")

    def _parameters(self, first: int, last: int, era: int, snap: str) -> dict[str, object]:
        return {
            "slots": self._slots,
            "first": first,
            "last": last,
            "era": era,
            "snap": snap,
            "since": self._since if isinstance(self._since, datetime) else None,
            "until": self._until if isinstance(self._until, datetime) else None,
            "bytes": BYTES,
        }

    def _require_retained(self, at: int) -> None:
        gone, recorded_at = cast(tuple[int, datetime | None], self._row(GONE))
        match self._since:
            case int() if self._since <= gone and at <= gone:
                raise InvalidInput(
                    f"events up to number {gone} were recycled", field="from", hint=f"the oldest retained is {gone + 1}"
                )
            case datetime() if recorded_at is not None and self._since <= recorded_at and at <= gone:
                raise InvalidInput(
                    f"events recorded up to {recorded_at.isoformat()} were recycled",
                    field="from",
                    hint="choose a later time, or beginning",
                )
            case str() if at <= gone:
                raise ReplayRefused(
                    f"events up to number {gone} were recycled before they were read",
                    field="outbox",
                    hint="lengthen the retention, then begin again with --restart",
                )
            case _:
                return

    def _row(self, statement: LiteralString, parameters: Mapping[str, object] | None = None) -> tuple[Any, ...]:
        row = cast(Connection[Any], self._conn).execute(statement, parameters).fetchone()
        assert row is not None
        return cast(tuple[Any, ...], row)
