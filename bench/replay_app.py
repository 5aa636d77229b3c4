"""What the benchmark replays into: sums by account; and a handler that tries to schedule work, which must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from fencepost.consumer import handoff
from fencepost.consumer.projection import projection
from fencepost.schemas.event import Event

ADD = """
INSERT INTO sums AS s (account, events, amount)
SELECT * FROM unnest(%s::text[], %s::bigint[], %s::bigint[])
ON CONFLICT (account) DO UPDATE SET events = s.events + excluded.events, amount = s.amount + excluded.amount"""


class Counted(Event, type="bench.counted", version=1):
    """About 200 bytes of content."""

    n: int
    amount: int
    note: str


@projection(name="sums", tables=("sums",))
def sums(tx: Connection[Any], events: Sequence[Counted]) -> None:
    """One row for each account, written once for each batch."""
    found: dict[str, list[int]] = {}
    for event in events:
        row = found.setdefault(event.ordering_key, [0, 0])
        row[0] += 1
        row[1] += event.amount
    accounts = sorted(found)
    tx.execute(ADD, (accounts, [found[a][0] for a in accounts], [found[a][1] for a in accounts]))


@projection(name="sums", tables=("sums",))
def attempting(tx: Connection[Any], event: Counted) -> None:
    """Not a projection's work."""
    handoff.submit(tx, "bench.charge", event)
