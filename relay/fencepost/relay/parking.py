"""Parking: a definite refusal sets the event aside with a typed reason; its key waits behind it, other keys flow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection

from fencepost.relay.publisher import OutboxRow, ParkReason

KEYS: LiteralString = """
SELECT DISTINCT k.slot, k.tenant, k.ordering_key FROM fencepost.parked AS k
WHERE k.destination = %(destination)s AND k.slot = ANY (%(slots)s)"""
DUE: LiteralString = """
SELECT h.slot, h.seq, h.event_id::text, h.tenant, h.operation, h.type, h.version, h.epoch, h.ordering_key, h.digest, h.recorded_at,
       h.content_type, h.attributes::text, h.payload, h.reference, h.attempts
FROM (SELECT DISTINCT ON (k.slot, k.tenant, k.ordering_key) k.* FROM fencepost.parked AS k
      WHERE k.destination = %(destination)s AND k.slot = ANY (%(slots)s)
      ORDER BY k.slot, k.tenant, k.ordering_key, k.seq) AS h
WHERE h.next_try_at <= clock_timestamp() ORDER BY h.next_try_at LIMIT 100"""
RETRIED: LiteralString = """
SELECT fencepost.retried(%(destination)s, %(owner)s, %(slot)s, %(generation)s, %(tenant)s, %(ordering_key)s, %(seq)s,
    %(published)s, %(reason)s, %(detail)s, %(retry)s)"""

# What may mend itself (a binding, a topic, a permission appears) is tried again; the rest waits for an operator.
MENDABLE = frozenset(
    {ParkReason.UNROUTABLE, ParkReason.NO_SUCH_EXCHANGE, ParkReason.NO_SUCH_TOPIC, ParkReason.NOT_AUTHORISED}
)


@dataclass(frozen=True, slots=True)
class Parking:
    """One event to set aside in the next ack; `overtaken_by` is the last later event of its key that got through."""

    row: OutboxRow
    reason: ParkReason
    detail: str = ""
    overtaken_by: int | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """The first parked event of a key, whose time has come."""

    row: OutboxRow
    attempts: int


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds until a mendable refusal is tried again: doubling from `base` to `cap`."""

    base: float = 5.0
    cap: float = 300.0

    def after(self, reason: ParkReason, attempts: int) -> timedelta | None:
        """None where only an operator can help."""
        if reason not in MENDABLE:
            return None
        return timedelta(seconds=min(self.cap, self.base * 2 ** min(attempts - 1, 16)))


def held_keys(conn: Connection[Any], destination: str, slots: list[int]) -> dict[int, set[tuple[str, str]]]:
    """The keys that parked events hold back, by slot."""
    found: dict[int, set[tuple[str, str]]] = {s: set() for s in slots}
    for slot, tenant, key in conn.execute(KEYS, {"destination": destination, "slots": slots}):
        found[slot].add((tenant, key))
    return found


def due(conn: Connection[Any], destination: str, slots: list[int]) -> list[Due]:
    """Heads of held keys that may be tried again now; at most one per key."""
    with conn.cursor(binary=True) as cursor:
        cursor.execute(DUE, {"destination": destination, "slots": slots})
        return [Due(OutboxRow._make(r[:-1]), r[-1]) for r in cursor.fetchall()]


def record_retry(
    conn: Connection[Any],
    destination: str,
    owner: UUID,
    generation: int,
    item: Due,
    *,
    refused: tuple[ParkReason, str] | None,
    policy: RetryPolicy,
) -> None:
    """Published ones leave the parked table, and the key flows again with its last one; raises `StaleSlot`."""
    row = item.row
    conn.execute(
        RETRIED,
        {
            "destination": destination,
            "owner": owner,
            "slot": row.slot,
            "generation": generation,
            "tenant": row.tenant,
            "ordering_key": row.ordering_key,
            "seq": row.seq,
            "published": refused is None,
            "reason": None if refused is None else refused[0].value,
            "detail": "" if refused is None else refused[1][:500],
            "retry": None if refused is None else policy.after(refused[0], item.attempts + 1),
        },
    )
