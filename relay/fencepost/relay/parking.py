"""Parking: a definite refusal sets the event aside with a typed reason; its key waits behind it, other keys flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection

from fencepost.relay.publisher import OutboxRow, ParkReason

# Only of slots where an operator has acted since: whatever else changes a slot's parked events is its owner's own doing.
KEYS: LiteralString = """
SELECT s.slot, s.acts, k.tenant, k.ordering_key
FROM unnest(%(slots)s::integer[], %(acts)s::bigint[]) AS u (slot, acts)
JOIN fencepost.slot AS s ON s.destination = %(destination)s AND s.slot = u.slot AND s.acts <> u.acts
LEFT JOIN LATERAL (SELECT DISTINCT p.tenant, p.ordering_key FROM fencepost.parked AS p
                   WHERE p.destination = s.destination AND p.slot = s.slot) AS k ON true"""
# now() and not clock_timestamp(), which no index could be asked for.
DUE: LiteralString = """
SELECT k.slot, k.seq, k.event_id::text, k.tenant, k.operation, k.type, k.version, k.epoch, k.ordering_key, k.digest,
       to_char(k.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), k.content_type, k.attributes::text, k.payload, k.reference, k.attempts, k.reason
FROM fencepost.parked AS k
WHERE k.destination = %(destination)s AND k.slot = ANY (%(slots)s) AND k.next_try_at <= now()
  AND (%(each)s OR NOT EXISTS (SELECT FROM fencepost.parked AS e
                               WHERE e.destination = k.destination AND e.slot = k.slot AND e.tenant = k.tenant
                                 AND e.ordering_key = k.ordering_key AND e.seq < k.seq))
ORDER BY k.next_try_at, k.seq LIMIT %(most)s"""
RETRIED: LiteralString = """
SELECT fencepost.retried(%(destination)s, %(owner)s, %(slot)s, %(generation)s, %(tenant)s, %(ordering_key)s, %(seq)s,
    %(published)s, %(reason)s, %(detail)s, %(retry)s)"""

FREE: LiteralString = """
SELECT u.slot, u.tenant, u.ordering_key
FROM unnest(%(slots)s::integer[], %(tenants)s::text[], %(keys)s::text[]) AS u (slot, tenant, ordering_key)
WHERE NOT EXISTS (SELECT FROM fencepost.parked AS p
                  WHERE p.destination = %(destination)s AND p.slot = u.slot AND p.tenant = u.tenant
                    AND p.ordering_key = u.ordering_key)"""

DUE_AT_ONCE = 100

# What may mend itself (a binding, a topic, a permission appears, a queue is drained) is tried again; the rest waits for an
# operator.
MENDABLE = frozenset(
    {
        ParkReason.UNROUTABLE,
        ParkReason.NO_SUCH_EXCHANGE,
        ParkReason.NO_SUCH_TOPIC,
        ParkReason.NOT_AUTHORISED,
        ParkReason.NACKED,
        ParkReason.UNANSWERED,
    }
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
    """A parked event whose time has come; where keys wait, the first of its key."""

    row: OutboxRow
    attempts: int
    reason: ParkReason


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds until a mendable refusal is tried again: doubling from `base` to `cap`."""

    base: float = 5.0
    cap: float = 300.0

    def after(self, reason: ParkReason, attempts: int) -> timedelta | None:
        """None where only an operator can help."""
        return self.pause(attempts) if reason in MENDABLE else None

    def pause(self, attempts: int) -> timedelta:
        """After so many attempts without success."""
        return timedelta(seconds=min(self.cap, self.base * 2 ** max(0, min(attempts - 1, 16))))


def held_keys(
    conn: Connection[Any], destination: str, known: Mapping[int, int]
) -> dict[int, tuple[int, set[tuple[str, str]]]]:
    """The keys that parked events hold back, of every slot where operators acted since `known` (slot to acts)."""
    found: dict[int, tuple[int, set[tuple[str, str]]]] = {}
    values = {"destination": destination, "slots": list(known), "acts": list(known.values())}
    for slot, acts, tenant, key in conn.execute(KEYS, values):
        keys = found.setdefault(slot, (acts, set()))[1]
        if tenant is not None:
            keys.add((tenant, key))
    return found


def free_keys(
    conn: Connection[Any], destination: str, keys: Iterable[tuple[int, str, str]]
) -> list[tuple[int, str, str]]:
    """Those of these keys (slot, tenant, ordering key) that no parked event holds back any more."""
    slots, tenants, names = zip(*keys, strict=True)
    values = {"destination": destination, "slots": list(slots), "tenants": list(tenants), "keys": list(names)}
    return conn.execute(FREE, values).fetchall()


def due(conn: Connection[Any], destination: str, slots: list[int], *, each: bool = False) -> list[Due]:
    """What may be tried again now, in the order of the sequence: heads of keys, or with `each` every event on its own."""
    with conn.cursor(binary=True) as cursor:
        cursor.execute(DUE, {"destination": destination, "slots": slots, "each": each, "most": DUE_AT_ONCE})
        found = [Due(OutboxRow._make(r[:-2]), r[-2], ParkReason(r[-1])) for r in cursor.fetchall()]
    return sorted(found, key=lambda item: item.row.seq)


def record_retry(
    conn: Connection[Any],
    destination: str,
    owner: UUID,
    generation: int,
    item: Due,
    *,
    refused: tuple[ParkReason, str] | None,
    retry: timedelta | None,
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
            "retry": retry,
        },
    )
