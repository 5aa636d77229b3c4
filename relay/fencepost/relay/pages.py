"""Pages: what one slot sends between two ticks, in sequence order, read by plain statements with every tick value bound.

Within a page the late rows come first: those with a number below the earlier tick's hint whose transaction was still
open then. All of them lie below every other row of the page, so one position says how far a page has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, LiteralString, cast

from psycopg import Connection

from fencepost.relay.publisher import OutboxRow
from fencepost.schemas.errors import StaleSlot

TICK: LiteralString = "SELECT era, n, fresh FROM fencepost.tick(make_interval(secs => %(min_seconds)s))"
TICKS: LiteralString = """
SELECT t.n, t.hint, t.next::text, t.snap::text, t.snap_xmax::text, t.snap_xip::text
FROM fencepost.tick AS t WHERE t.era = %(era)s AND t.n = ANY (%(numbers)s)"""

# Whatever the statistics say: by the index on (slot, seq), in its order; a sort of the whole page for each part of it is
# what makes a backlog slow.
IN_ORDER: LiteralString = """
SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_seqscan', 'off', true)"""

# Which slots have late rows, and where they begin: most pages have none, and then nothing below the hint is touched.
LATE_FROM: LiteralString = "SELECT slot, first_seq FROM fencepost.late_rows(%(era)s, %(start)s, %(end)s)"

# Payloads of more than a row's part of the memory stay behind: their length is known without reading them. Times are the
# text that is sent, the same as `fencepost.schemas.envelope.instant` makes.
LATE: LiteralString = """
SELECT r.slot, r.seq, r.event_id::text, r.tenant, r.operation, r.type, r.version, r.epoch, r.ordering_key, r.digest,
       to_char(r.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), r.content_type, r.attributes::text,
       CASE WHEN NOT %(payloads)s THEN '' WHEN octet_length(r.payload) <= %(small)s THEN r.payload END, r.reference
FROM unnest(%(slots)s::integer[], %(positions)s::bigint[]) AS p (slot, position)
CROSS JOIN LATERAL (
    SELECT o.* FROM fencepost.outbox AS o
    WHERE o.slot = p.slot AND o.seq > p.position AND o.seq <= %(hint)s::bigint
      AND (o.xid = ANY (%(open)s::xid8[]) OR o.xid >= %(ceiling)s::xid8 AND o.xid < %(next)s::xid8)
      AND pg_visible_in_snapshot(o.xid, %(end_snap)s::pg_snapshot)
    ORDER BY o.seq LIMIT %(rows)s) AS r"""
MAIN: LiteralString = """
SELECT r.slot, r.seq, r.event_id::text, r.tenant, r.operation, r.type, r.version, r.epoch, r.ordering_key, r.digest,
       to_char(r.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), r.content_type, r.attributes::text,
       CASE WHEN NOT %(payloads)s THEN '' WHEN octet_length(r.payload) <= %(small)s THEN r.payload END, r.reference
FROM unnest(%(slots)s::integer[], %(positions)s::bigint[]) AS p (slot, position)
CROSS JOIN LATERAL (
    SELECT o.* FROM fencepost.outbox AS o
    WHERE o.slot = p.slot AND o.seq > greatest(p.position, %(hint)s::bigint) AND o.seq <= %(end_hint)s::bigint
      AND pg_visible_in_snapshot(o.xid, %(end_snap)s::pg_snapshot)
    ORDER BY o.seq LIMIT %(rows)s) AS r"""

# What stayed behind, as much as fits into a slot's share of the memory, and at least one. The limit, which no row needs,
# keeps the planner at one look-up for each: without a sort it would rather go through the whole index for its order.
LARGE: LiteralString = """
SELECT l.slot, l.seq, l.payload
FROM (SELECT o.slot, o.seq, o.payload, sum(octet_length(o.payload)) OVER (PARTITION BY o.slot ORDER BY o.seq) AS total
      FROM unnest(%(slots)s::integer[], %(seqs)s::bigint[]) AS w (slot, seq)
      CROSS JOIN LATERAL (SELECT p.slot, p.seq, p.payload FROM fencepost.outbox AS p
                          WHERE p.slot = w.slot AND p.seq = w.seq LIMIT 1) AS o) AS l
WHERE l.total - octet_length(l.payload) < %(bytes)s"""


@dataclass(frozen=True, slots=True)
class Tick:
    """A stored snapshot: the sequence's hint was read after it, and `next` drawn after the hint."""

    n: int
    hint: int
    next: str
    snap: str
    ceiling: str
    open: str

    @property
    def sees_all_below_its_hint(self) -> bool:
        """True when no transaction was open then and none began before `next`: nothing can come late."""
        return self.open == "{}" and self.ceiling == self.next


@dataclass(slots=True)
class Progress:
    """Where a slot stands: everything up to the acked tick is settled, and the page to the end tick up to `position`.

    Invariant: a page once begun keeps its end tick until it is settled; position 0 means that none is begun.
    """

    acked: int
    end: int
    position: int

    @property
    def between_pages(self) -> bool:
        """True when the next page may choose a newer end tick."""
        return self.position == 0

    def copy(self) -> Progress:
        """The same place, to move on from."""
        return Progress(self.acked, self.end, self.position)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one slot in sequence order, read under a slot generation, and the progress before and after them."""

    slot: int
    generation: int
    rows: tuple[OutboxRow, ...]
    before: Progress
    after: Progress

    @classmethod
    def of(cls, slot: int, generation: int, at: Progress, rows: tuple[OutboxRow, ...], *, last: bool) -> Part:
        """`last` when the rows complete the slot's page."""
        after = Progress(at.end, at.end, 0) if last else Progress(at.acked, at.end, rows[-1].seq)
        return cls(slot, generation, rows, at, after)

    @property
    def last(self) -> bool:
        """True when these rows complete the page."""
        return self.after.between_pages


class PageReader:
    """Reads the parts of pages; holds no transaction while the caller publishes.

    `rows_per_slot` is read of every slot; where few slots had so many, those get more, up to about `rows_in_all`. Without
    `payloads` they stay in the database, empty in the rows and not counted.
    """

    def __init__(
        self,
        conn: Connection[Any],
        era: int,
        *,
        rows_per_slot: int = 500,
        rows_in_all: int = 0,
        bytes_in_all: int = 16 << 20,
        payloads: bool = True,
    ) -> None:
        self._conn = conn
        self.era = era
        self._least = rows_per_slot
        self._most = rows_in_all
        self._rows = rows_per_slot
        self._payloads = payloads
        self._bytes = bytes_in_all
        self._ticks: dict[int, Tick] = {}
        self._late: dict[tuple[int, int], dict[int, int]] = {}

    def read(self, wanted: Mapping[int, tuple[int, Progress]]) -> list[Part]:
        """The next part of every given slot's page (slot to generation and progress); one statement for slots alike."""
        groups: dict[tuple[int, int], list[int]] = {}
        for slot, (_, at) in wanted.items():
            groups.setdefault((at.acked, at.end), []).append(slot)
        self._load({n for pair in groups for n in pair})
        parts: list[Part] = []
        share = max(1, self._bytes // max(1, len(wanted)))
        for (acked, end), slots in groups.items():
            parts += self._group(self._ticks[acked], self._ticks[end], slots, wanted, share)
        busy = sum(1 for part in parts if not part.last)
        self._rows = max(self._least, self._most // max(1, busy)) if busy else self._least
        return parts

    def _group(
        self, start: Tick, end: Tick, slots: list[int], wanted: Mapping[int, tuple[int, Progress]], share: int
    ) -> list[Part]:
        parts: list[Part] = []
        late = self._late_from(start, end)
        main = {s: wanted[s][1].position for s in slots}
        # A slot whose position has passed the hint has no late rows left.
        early = {s: max(main[s], late[s] - 1) for s in slots if s in late and main[s] < start.hint}
        for slot, rows, _ in self._fetch(LATE, start, end, early, share) if early else ():
            if rows:
                del main[slot]
                parts.append(Part.of(slot, *wanted[slot], rows, last=False))
        for slot, rows, cut in self._fetch(MAIN, start, end, main, share) if main else ():
            parts.append(Part.of(slot, *wanted[slot], rows, last=not cut))
        return parts

    def _late_from(self, start: Tick, end: Tick) -> dict[int, int]:
        if start.n == end.n or start.sees_all_below_its_hint:
            return {}
        if (start.n, end.n) not in self._late:
            found = self._conn.execute(LATE_FROM, {"era": self.era, "start": start.n, "end": end.n}).fetchall()
            self._late[start.n, end.n] = dict(found)
        return self._late[start.n, end.n]

    def _fetch(
        self, statement: LiteralString, start: Tick, end: Tick, positions: Mapping[int, int], share: int
    ) -> Iterable[tuple[int, tuple[OutboxRow, ...], bool]]:
        """Each slot's next rows, and whether there may be more."""
        read = self._query(
            statement,
            {
                "slots": list(positions),
                "positions": list(positions.values()),
                "hint": start.hint,
                "open": start.open,
                "ceiling": start.ceiling,
                "next": start.next,
                "end_hint": end.hint,
                "end_snap": end.snap,
                "rows": self._rows,
                "small": share // self._rows,
                "payloads": self._payloads,
            },
        )
        found: dict[int, list[OutboxRow]] = {s: [] for s in positions}
        for slot, rows in groupby(map(_ROW, read), _SLOT):
            found[slot].extend(rows)
        full: set[int] = set()
        for slot, of_slot in found.items():
            of_slot.sort(key=_SEQ)
            if len(of_slot) >= self._rows:
                full.add(slot)
        if any(None in map(_PAYLOAD, of_slot) for of_slot in found.values()):
            full |= self._fill(found, share)
        return [(slot, tuple(of_slot), slot in full) for slot, of_slot in found.items()]

    def _fill(self, found: Mapping[int, list[OutboxRow]], share: int) -> set[int]:
        """Adds the large payloads, and ends a slot's rows where its share of the memory does; returns the slots cut."""
        behind = [row for rows in found.values() for row in rows if row.payload is None]  # pyright: ignore[reportUnnecessaryComparison]
        wanted = {"slots": [row.slot for row in behind], "seqs": [row.seq for row in behind], "bytes": share}
        large = {(slot, seq): payload for slot, seq, payload in self._query(LARGE, wanted)}
        cut: set[int] = set()
        for slot, rows in found.items():
            total = 0
            for index, row in enumerate(rows):
                payload: bytes | None = large.get((slot, row.seq), row.payload)
                if payload is None or total >= share:
                    del rows[index:]
                    cut.add(slot)
                    break
                rows[index] = row._replace(payload=payload)
                total += len(payload)
        return cut

    def _query(self, statement: LiteralString, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        # The plan settings end with the transaction, so a pooler never passes them on.
        # Invariant: a pipeline ends inside its transaction. psycopg may send a Flush behind its last Sync; outside, that
        # lone Flush, which nothing answers, takes a server connection of PgBouncer and keeps it until our next statement.
        with self._conn.transaction(), self._conn.cursor() as settings, self._conn.cursor(binary=True) as cursor:
            with self._conn.pipeline():
                settings.execute(IN_ORDER)
                cursor.execute(statement, parameters)
            return cursor.fetchall()

    def _load(self, numbers: set[int]) -> None:
        for n in [n for n in self._ticks if n not in numbers]:
            del self._ticks[n]
        for pair in [p for p in self._late if not numbers.issuperset(p)]:
            del self._late[pair]
        missing = [n for n in numbers if n not in self._ticks]
        if missing:
            for row in self._conn.execute(TICKS, {"era": self.era, "numbers": missing}):
                self._ticks[row[0]] = Tick(*row)
            if not numbers <= self._ticks.keys():
                # Only ticks that no recorded progress needs are purged, so these slots went on without us.
                raise StaleSlot("the ticks of this page are gone", field="slot", hint="lease the slots again")


def newest_tick(conn: Connection[Any], min_seconds: float) -> tuple[int, int]:
    """Era and number of the newest tick, after taking one when something became visible since."""
    row = conn.execute(TICK, {"min_seconds": min_seconds}).fetchone()
    assert row is not None
    return row[0], row[1]


# Rows by the hundred thousand: these run without a Python frame for each. The columns are those of OutboxRow, in order.
_ROW = cast(Callable[[tuple[Any, ...]], OutboxRow], partial(tuple.__new__, OutboxRow))  # pyright: ignore[reportUnknownMemberType]
_SLOT: Callable[[OutboxRow], int] = itemgetter(0)
_SEQ: Callable[[OutboxRow], int] = itemgetter(1)
_PAYLOAD: Callable[[OutboxRow], bytes | None] = itemgetter(OutboxRow._fields.index("payload"))
