"""Slots: ordered shares of the outbox, leased to one relay at a time and told apart by a slot generation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection

from fencepost.relay.pages import Progress

LEASE: LiteralString = """
SELECT slot, generation, era, acked_tick, end_tick, position, surplus
FROM fencepost.lease_slots(%(destination)s, %(owner)s, make_interval(secs => %(seconds)s))"""
RELEASE: LiteralString = "SELECT fencepost.release_slots(%(destination)s, %(owner)s, %(slots)s)"

COUNT: LiteralString = "SELECT slots FROM fencepost.installation"


@dataclass(slots=True)
class Held:
    """A slot of ours under one generation, with its progress and the keys that parked events hold back.

    `progress` is what is settled, `read` what was read (and perhaps sent) already; `recorded` is the acked tick that the
    database knows, for pages without rows advance `progress` only; `recorded_at` is the monotonic time of that ack. `acts`
    tells up to which operator's act `keys` is right. `ahead` are events beyond `progress` that were confirmed before one in
    front of them: they are not sent again. After `doubts` such stops in a row the slot is not read before `not_before`.
    """

    generation: int
    progress: Progress
    read: Progress
    recorded: int
    keys: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    acts: int = -1
    recorded_at: float = field(default_factory=time.monotonic)
    ahead: set[int] = field(default_factory=set[int])
    doubts: int = 0
    not_before: float = 0.0


class SlotLease:
    """The slots this relay may send from; trusted only until a monotonic deadline counted from before each round trip."""

    def __init__(self, destination: str, owner: UUID, *, seconds: float, holds_keys: bool = True) -> None:
        self.destination = destination
        self.holds_keys = holds_keys
        self.owner = owner
        self.seconds = seconds
        self.held: dict[int, Held] = {}
        self.era = 0
        self._until = 0.0

    def seconds_left(self) -> float:
        """How long these slots may still be sent from; not positive when no longer."""
        return self._until - time.monotonic()

    def generation(self, slot: int) -> int | None:
        """Under which generation we hold a slot; None when we do not."""
        held = self.held.get(slot)
        return None if held is None else held.generation

    def refresh(self, conn: Connection[Any]) -> tuple[set[int], list[int]]:
        """Renews, takes free slots up to the fair share, forgets lost ones.

        Returns the slots that are new to us (their keys must be loaded), and the surplus ones to release.
        """
        before = time.monotonic()
        rows = conn.execute(
            LEASE, {"destination": self.destination, "owner": self.owner, "seconds": self.seconds}
        ).fetchall()
        self._until = before + self.seconds
        fresh: set[int] = set()
        surplus: list[int] = []
        kept: dict[int, Held] = {}
        known_era = self.era
        for slot, generation, era, acked, end, position, too_many in rows:
            known = self.held.get(slot)
            if known is not None and known.generation == generation and era == known_era:
                kept[slot] = known
            else:
                kept[slot] = Held(generation, Progress(acked, end, position), Progress(acked, end, position), acked)
                fresh.add(slot)
            if too_many:
                surplus.append(slot)
            self.era = era
        self.held = kept
        return fresh, surplus

    def release(self, conn: Connection[Any], slots: list[int]) -> None:
        """Hands slots back; whatever of them was acked stays acked."""
        if slots:
            conn.execute(RELEASE, {"destination": self.destination, "owner": self.owner, "slots": slots})
            for slot in slots:
                self.held.pop(slot, None)

    def forget(self) -> None:
        """Trusts nothing any more, as after a lost connection."""
        self.held = {}
        self._until = 0.0


def slot_count(conn: Connection[Any]) -> int:
    """How many slots each destination has; it never changes within an installation."""
    row = conn.execute(COUNT).fetchone()
    assert row is not None
    count: int = row[0]
    return count
