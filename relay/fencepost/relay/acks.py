"""Acks: progress is recorded after the broker's confirms, appended under the slot generation, with what was set aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection

from fencepost.relay.delivery import Settled
from fencepost.relay.pages import Part, Progress
from fencepost.relay.parking import RetryPolicy
from fencepost.relay.slots import SlotLease

ACK: LiteralString = """
SELECT fencepost.ack(%(destination)s, %(owner)s, %(slots)s::integer[], %(generations)s::bigint[], %(era)s,
    %(acked)s::bigint[], %(ending)s::bigint[], %(positions)s::bigint[], %(park_slots)s::integer[], %(park_seqs)s::bigint[],
    %(park_reasons)s::text[], %(park_details)s::text[], %(park_overtaken)s::bigint[], %(park_retry)s::interval[])"""

# A slot without rows is recorded at least this often, so that old ticks can be recycled.
TICKS_UNRECORDED = 1000


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one ack wrote."""

    rows: int
    pages: int
    parked: int


def record(
    conn: Connection[Any], lease: SlotLease, parts: list[Part], settled: Settled, policy: RetryPolicy
) -> Recorded:
    """Appends the progress of every slot that moved and parks what was refused, in one commit, or raises `StaleSlot`.

    A slot's progress ends before its first event without an answer. A page without rows of a slot is noted in memory
    only: whoever owns the slot next finds the same nothing in it.
    """
    first_open: dict[int, int] = {}
    for item in settled.unresolved:
        first_open.setdefault(item.row.slot, item.row.seq)
    moved: dict[int, Progress] = {}
    noted: dict[int, Progress] = {}
    for part in parts:
        held = lease.held[part.slot]
        after = _after(part, held.progress, first_open.get(part.slot))
        if after is None:
            continue
        if (
            not part.rows
            and part.last
            and held.progress.between_pages
            and after.acked - held.recorded < TICKS_UNRECORDED
        ):
            noted[part.slot] = after
        else:
            moved[part.slot] = after
    parked = [
        p for p in settled.parked if p.row.slot in moved and p.row.seq < first_open.get(p.row.slot, p.row.seq + 1)
    ]
    if moved:
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
            },
        )
    for slot, after in noted.items():
        lease.held[slot].progress = after
    for slot, after in moved.items():
        lease.held[slot].progress = after
        lease.held[slot].recorded = after.acked
    for p in parked:
        lease.held[p.row.slot].keys.add((p.row.tenant, p.row.ordering_key))
    return Recorded(len(moved), sum(1 for p in moved.values() if p.between_pages), len(parked))


def _after(part: Part, progress: Progress, first_open: int | None) -> Progress | None:
    """Progress of a slot after this part, up to its first event without an answer; None where nothing moved."""
    if first_open is not None:
        done = [r.seq for r in part.rows if r.seq < first_open]
        return Progress(progress.acked, progress.end, done[-1]) if done else None
    if part.last:
        return Progress(progress.end, progress.end, 0)
    return Progress(progress.acked, progress.end, part.rows[-1].seq)
