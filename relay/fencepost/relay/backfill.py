"""Backfill: retained events of a range are sent to a destination again, marked as replayed, in order per key.

Only what the destination has acked (or what is older than it) is sent again: everything else is still on its way, and
a replayed copy must not arrive first. Parked events are left out for the same reason. Nothing is recorded; a consumer's
inbox sees duplicates.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Generator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, LiteralString, cast

from psycopg import Connection

from fencepost.relay.delivery import Delivery
from fencepost.relay.destination import Destination
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import OutboxRow, Outgoing
from fencepost.schemas.envelope import REPLAYED
from fencepost.schemas.errors import InvalidInput, StaleSlot, Unreachable

# Of the acked snapshot of every slot; a slot that never acked has passed what its destination's start saw.
ACKED: LiteralString = """
SELECT s.slot, t.snap::text, t.hint
FROM fencepost.slot AS s
JOIN fencepost.destination AS d ON d.destination = s.destination
LEFT JOIN LATERAL (SELECT k.era, k.acked_tick FROM fencepost.ack AS k
                   WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
LEFT JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
WHERE s.destination = %(destination)s ORDER BY s.slot"""
GONE: LiteralString = """
SELECT r.seq, CASE WHEN isfinite(r.recorded_at) THEN r.recorded_at END FROM fencepost.recycled AS r"""
OLDEST: LiteralString = """
SELECT min(o.seq) FROM unnest(%(slots)s::integer[]) AS s
CROSS JOIN LATERAL (SELECT l.seq FROM fencepost.outbox AS l WHERE l.slot = s ORDER BY l.seq LIMIT 1) AS o"""
# Every number up to a tick's hint was drawn before the tick was taken.
BEFORE: LiteralString = """
SELECT t.hint FROM fencepost.tick AS t WHERE t.taken_at <= %(at)s ORDER BY t.era DESC, t.n DESC LIMIT 1"""
BY_INDEX: LiteralString = "SELECT set_config('enable_seqscan', 'off', true)"
COUNT: LiteralString = """
SELECT count(*) FROM unnest(%(slots)s::integer[], %(snaps)s::text[]) AS p (slot, snap)
CROSS JOIN LATERAL (
    SELECT FROM fencepost.outbox AS o
    WHERE o.slot = p.slot AND o.seq > %(after)s AND o.seq <= %(last)s AND pg_visible_in_snapshot(o.xid, p.snap::pg_snapshot)
      AND (%(since)s::timestamptz IS NULL OR o.recorded_at >= %(since)s::timestamptz)
      AND (%(until)s::timestamptz IS NULL OR o.recorded_at < %(until)s::timestamptz)
      AND (%(type)s::text IS NULL OR o.type = %(type)s::text) AND (%(tenant)s::text IS NULL OR o.tenant = %(tenant)s::text)
      AND NOT EXISTS (SELECT FROM fencepost.parked AS k
                      WHERE k.destination = %(destination)s AND k.slot = o.slot AND k.tenant = o.tenant
                        AND k.ordering_key = o.ordering_key AND k.seq = o.seq)) AS x"""
EVENTS: LiteralString = """
SELECT b.slot, b.seq, b.event_id, b.tenant, b.operation, b.type, b.version, b.epoch, b.ordering_key, b.digest,
       to_char(b.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), b.content_type, b.attributes::text, b.payload, b.reference
FROM (SELECT x.*, sum(octet_length(x.payload)) OVER (ORDER BY x.seq) AS total
      FROM unnest(%(slots)s::integer[], %(snaps)s::text[]) AS p (slot, snap)
      CROSS JOIN LATERAL (
          SELECT o.* FROM fencepost.outbox AS o
          WHERE o.slot = p.slot AND o.seq > %(after)s AND o.seq <= %(last)s
            AND pg_visible_in_snapshot(o.xid, p.snap::pg_snapshot)
            AND (%(since)s::timestamptz IS NULL OR o.recorded_at >= %(since)s::timestamptz)
            AND (%(until)s::timestamptz IS NULL OR o.recorded_at < %(until)s::timestamptz)
            AND (%(type)s::text IS NULL OR o.type = %(type)s::text)
            AND (%(tenant)s::text IS NULL OR o.tenant = %(tenant)s::text)
            AND NOT EXISTS (SELECT FROM fencepost.parked AS k
                            WHERE k.destination = %(destination)s AND k.slot = o.slot AND k.tenant = o.tenant
                              AND k.ordering_key = o.ordering_key AND k.seq = o.seq)) AS x) AS b
WHERE b.total - octet_length(b.payload) < %(bytes)s ORDER BY b.seq"""

# Numbers looked at in one statement, and bytes of payloads read at once.
WINDOW = 2000
BYTES = 16 << 20
SLOTS = range(1 << 16)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which events: from a number on (inclusive) or from a time on, up to a number (inclusive) or before a time."""

    since: int | datetime
    until: int | datetime | None = None
    type: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The chosen range as numbers above `after` up to `last`, with what each slot has acked when it was resolved."""

    destination: str
    chosen: Chosen
    after: int
    last: int
    slots: tuple[int, ...]
    snaps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """How far a backfill has come: everything up to `position` is sent; `unrouted` events have no route here.

    `refused` says why it ended early: the number and the broker's reason of the event that it could not send.
    """

    position: int
    sent: int
    unrouted: int = 0
    refused: str = ""


def resolve(conn: Connection[Any], destination: str, chosen: Chosen) -> Span:
    """The range that was chosen, refused (`InvalidInput`) when a part of it was recycled or the destination is unknown."""
    acked = conn.execute(ACKED, {"destination": destination}).fetchall()
    if not acked:
        raise InvalidInput(
            f"no destination {destination} is registered", field="destination", hint="start a relay with it first"
        )
    if any(snap is None for _, snap, _ in acked):
        raise StaleSlot("the acked ticks are gone", field="slot", hint="try again")
    slots = tuple(slot for slot, _, _ in acked)
    for name, end in (("from", chosen.since), ("to", chosen.until)):
        if isinstance(end, datetime) and end.tzinfo is None:
            raise InvalidInput("the time has no zone", field=name, hint="example: 2026-01-31T12:00:00Z")
    _require_retained(conn, chosen.since, 0)
    oldest = _one(conn, OLDEST, {"slots": list(slots)})
    match chosen.since:
        case int():
            after = chosen.since - 1
        case datetime():
            after = _one(conn, BEFORE, {"at": chosen.since}) or 0
    last = max(hint for _, _, hint in acked)
    if isinstance(chosen.until, int):
        last = min(last, chosen.until)
    after = last if oldest is None else max(after, oldest - 1)
    return Span(destination, chosen, min(after, last), last, slots, tuple(snap for _, snap, _ in acked))


def count(conn: Connection[Any], span: Span) -> int:
    """How many events a backfill of this range would look at, without reading any."""
    found = 0
    for after in range(span.after, span.last, WINDOW):
        found += _one(conn, COUNT, _parameters(span, after, min(after + WINDOW, span.last))) or 0
    return found


def send(
    conn: Connection[Any], span: Span, destination: Destination, *, pace: Pace, stop: threading.Event
) -> Generator[Sent]:
    """Sends the range again, batch by batch, and tells after each how far it came; the caller opened the destination.

    Ends early with `refused` set, or when `stop` is set; going on from `position` + 1 repeats at most one batch. Raises
    `Unreachable` when the broker confirms nothing for three confirm timeouts, `InvalidInput` when recycling took what
    was not sent yet; both name where to go on. The connection is autocommit and idle while the broker is waited for.
    """
    delivery = Delivery(
        destination.publisher,
        confirm_seconds=pace.confirm,
        seconds_left=lambda: math.inf,
        keep=lambda: SLOTS,
        stop=stop,
        drain_seconds=pace.drain,
        on_trouble=lambda _: None,
    )
    at = Sent(span.after, 0)
    while at.position < span.last and not stop.is_set():
        rows, upto = _read(conn, span, at.position)
        batch = [Outgoing(_replayed(row), route) for row in rows if (route := destination.route(row.type)) is not None]
        settled = delivery.deliver(batch, patience=3 * pace.confirm)
        # Crash here: [F] sent, and nobody was told: going on from the last number told repeats this one batch.
        at = replace(at, sent=at.sent + len(settled.confirmed), unrouted=at.unrouted + len(rows) - len(batch))
        refused = min(settled.parked, key=lambda p: p.row.seq, default=None)
        open_seqs = [item.row.seq for item in settled.unresolved] + ([] if refused is None else [refused.row.seq])
        at = replace(at, position=min(open_seqs) - 1 if open_seqs else upto)
        if refused is not None:
            yield replace(at, refused=f"{refused.row.seq}: {refused.reason} {refused.detail}".strip())
            return
        if open_seqs and not stop.is_set():
            raise Unreachable(
                f"the broker of destination {span.destination} confirmed only a part",
                field=f"destinations.{span.destination}",
                hint=f"when it is back, go on with --from {at.position + 1}",
            )
        yield at


def _read(conn: Connection[Any], span: Span, after: int) -> tuple[list[OutboxRow], int]:
    """The next events, and the number up to which they are all."""
    upto = min(after + WINDOW, span.last)
    with conn.transaction(), conn.cursor(binary=True) as cursor:
        conn.execute(BY_INDEX)
        cursor.execute(EVENTS, _parameters(span, after, upto) | {"bytes": BYTES})
        rows = [OutboxRow._make(row) for row in cursor.fetchall()]
        # Invariant: read after the events, so that what it does not count as gone was there to be read.
        _require_retained(conn, span.chosen.since, after)
    cut = sum(len(row.payload) for row in rows) >= BYTES
    return rows, rows[-1].seq if cut else upto


def _require_retained(conn: Connection[Any], since: int | datetime, after: int) -> None:
    row = conn.execute(GONE).fetchone()
    assert row is not None
    seq, recorded_at = cast(tuple[int, datetime | None], row)
    match since:
        case int():
            if max(since - 1, after) < seq:
                raise InvalidInput(
                    f"events up to number {seq} were recycled",
                    field="from",
                    hint=f"the oldest retained is --from {seq + 1}",
                )
        case datetime():
            if recorded_at is not None and since <= recorded_at:
                raise InvalidInput(
                    f"events recorded up to {recorded_at.isoformat()} were recycled",
                    field="from",
                    hint="choose a later time"
                    + (f"; what is left of this range begins at --from {max(after, seq) + 1}" if after else ""),
                )


def _parameters(span: Span, after: int, last: int) -> dict[str, Any]:
    chosen = span.chosen
    return {
        "destination": span.destination,
        "slots": list(span.slots),
        "snaps": list(span.snaps),
        "after": after,
        "last": last,
        "since": chosen.since if isinstance(chosen.since, datetime) else None,
        "until": chosen.until if isinstance(chosen.until, datetime) else None,
        "type": chosen.type,
        "tenant": chosen.tenant,
    }


def _replayed(row: OutboxRow) -> OutboxRow:
    """The same event with its one declared difference; a row that cannot be read is the publisher's to refuse."""
    attributes: object = json.loads(row.attributes) if row.attributes else {}
    if not isinstance(attributes, dict):
        return row
    return row._replace(
        attributes=json.dumps({**cast(dict[str, str], attributes), REPLAYED: "true"}, ensure_ascii=False)
    )


def _one(conn: Connection[Any], statement: LiteralString, parameters: dict[str, Any]) -> int | None:
    row = conn.execute(statement, parameters).fetchone()
    return None if row is None else cast(int | None, row[0])
