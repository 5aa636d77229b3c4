"""Acks: progress is recorded after the broker's confirms, appended under the slot generation, with what was set aside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, LiteralString

from psycopg import Connection

from fencepost.relay.delivery import Overtaken, Settled
from fencepost.relay.pages import Part, Progress
from fencepost.relay.parking import Parking, RetryPolicy
from fencepost.relay.publisher import ParkReason
from fencepost.relay.slots import SlotLease

ACK: LiteralString = """
SELECT fencepost.ack(%(destination)s, %(owner)s, %(slots)s::integer[], %(generations)s::bigint[], %(era)s,
    %(acked)s::bigint[], %(ending)s::bigint[], %(positions)s::bigint[], %(park_slots)s::integer[], %(park_seqs)s::bigint[],
    %(park_reasons)s::text[], %(park_details)s::text[], %(park_overtaken)s::bigint[], %(park_retry)s::interval[],
    %(overtaken_slots)s::integer[], %(overtaken_seqs)s::bigint[], %(overtaken_by)s::bigint[])"""

# A slot without rows is recorded at least this often, so that old ticks can be recycled.
TICKS_UNRECORDED = 1000


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one ack wrote."""

    rows: int
    pages: int
    parked: int
    overtaken: int
    reasons: tuple[ParkReason, ...] = ()


def record(
    conn: Connection[Any], lease: SlotLease, parts: list[Part], settled: Settled, policy: RetryPolicy
) -> Recorded:
    """Appends the progress of every slot that moved and parks what was refused, in one commit, or raises `StaleSlot`.

    `parts` come in the order in which they were read; those of a slot that was lost meanwhile are left out. A slot's
    progress ends before its first event without an answer; what was confirmed beyond is noted in memory. A page without rows of a slot is noted in memory only:
    whoever owns the slot next finds the same nothing in it.
    """
    open_seqs = {item.row.seq for item in settled.unresolved}
    moved: dict[int, Progress] = {}
    noted: dict[int, Progress] = {}
    cut: set[int] = set()
    covered: set[int] = set()
    for part in parts:
        held = lease.held.get(part.slot)
        if held is None or held.generation != part.generation:
            continue
        if part.slot in cut:
            held.ahead.update(row.seq for row in part.rows if row.seq in settled.confirmed)
            continue
        done = part.rows if not open_seqs else tuple(takewhile(lambda row: row.seq not in open_seqs, part.rows))
        if held.ahead:
            held.ahead.difference_update(row.seq for row in done)
        if len(done) < len(part.rows):
            cut.add(part.slot)
            held.ahead.update(row.seq for row in part.rows[len(done) :] if row.seq in settled.confirmed)
            after = Progress(part.before.acked, part.before.end, done[-1].seq) if done else None
        else:
            after = part.after
        if after is None:
            continue
        if settled.parked:
            covered.update(row.seq for row in done)
        nothing = not part.rows and part.last and part.before.between_pages and part.slot not in moved
        if nothing and after.acked - held.recorded < TICKS_UNRECORDED:
            noted[part.slot] = after
        else:
            moved[part.slot] = after
            noted.pop(part.slot, None)
    parked = [p for p in settled.parked if p.row.seq in covered]
    # What is parked later, or has no answer yet, was overtaken now: said also where its slot stays where it is.
    overtaken = settled.overtaken + [
        Overtaken(p.row, p.overtaken_by)
        for p in settled.parked
        if p.overtaken_by is not None and p.row.seq not in covered
    ]
    if overtaken:
        ours = {part.slot for part in parts if part.generation == lease.generation(part.slot)}
        overtaken = [o for o in overtaken if o.row.slot in ours]
        for o in overtaken:
            moved.setdefault(o.row.slot, lease.held[o.row.slot].progress.copy())
    if moved:
        _append(conn, lease, moved, parked, overtaken, policy)
    for slot, after in noted.items():
        lease.held[slot].progress = after
    for p in parked if lease.holds_keys else ():
        lease.held[p.row.slot].keys.add((p.row.tenant, p.row.ordering_key))
    return Recorded(
        len(moved),
        sum(1 for p in moved.values() if p.between_pages),
        len(parked),
        len(overtaken),
        tuple(p.reason for p in parked),
    )


def record_noted(conn: Connection[Any], lease: SlotLease, *, seconds: float) -> int:
    """Appends the progress of slots that was noted in memory only for this long, or raises `StaleSlot`; returns how many.

    Recycling needs it: what a slot without rows was not recorded to have passed could never be recycled.
    """
    before = time.monotonic() - seconds
    noted = {
        slot: held.progress.copy()
        for slot, held in lease.held.items()
        if held.progress.acked > held.recorded and held.progress.between_pages and held.recorded_at <= before
    }
    if noted:
        _append(conn, lease, {s: Progress(p.acked, p.acked, 0) for s, p in noted.items()}, [], [], RetryPolicy())
    return len(noted)


def _append(
    conn: Connection[Any],
    lease: SlotLease,
    moved: dict[int, Progress],
    parked: list[Parking],
    overtaken: list[Overtaken],
    policy: RetryPolicy,
) -> None:
    conn.execute(
        ACK,
        {
            "destination": lease.destination,
            "owner": lease.owner,
            "slots": list(moved),
            "generations": [lease.held[s].generation for s in moved],
            "era": lease.era,
            "acked": [p.acked for p in moved.values()],
            "ending": [p.end for p in moved.values()],
            "positions": [p.position for p in moved.values()],
            "park_slots": [p.row.slot for p in parked],
            "park_seqs": [p.row.seq for p in parked],
            "park_reasons": [p.reason.value for p in parked],
            "park_details": [p.detail[:500] for p in parked],
            "park_overtaken": [p.overtaken_by for p in parked],
            "park_retry": [policy.after(p.reason, 1) for p in parked],
            "overtaken_slots": [o.row.slot for o in overtaken],
            "overtaken_seqs": [o.row.seq for o in overtaken],
            "overtaken_by": [o.overtaken_by for o in overtaken],
        },
    )
    # Crash here: [A2] recorded, and only the database knows: the slots' next owner goes on from there.
    now = time.monotonic()
    for slot, after in moved.items():
        held = lease.held[slot]
        held.progress = after
        held.recorded = after.acked
        held.recorded_at = now
