"""Retries: parked events whose time has come are sent beside the rest, and never keep it waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_never

from psycopg import Connection

from fencepost.relay import parking
from fencepost.relay.delivery import Delivery
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.parking import Due, Parking, RetryPolicy
from fencepost.relay.publisher import Answer, Outcome, Outgoing, ParkReason
from fencepost.relay.slots import SlotLease

RETRY_LOOK_SECONDS = 0.1

_NO_ROUTE = Outcome(Answer.REFUSED, ParkReason.NO_ROUTE)


@dataclass(slots=True)
class _Sent:
    """Parked events on their way, each with the generation of its slot; `batch` leaves out what has no route now."""

    items: list[tuple[Due, int]]
    batch: list[Outgoing]
    answers: Future[list[Outcome]]


class Retries:
    """Sends the first parked event of each key again when it is due, and knows which keys parked events hold back.

    One send at a time; whatever its answer, it counts as an attempt, and the next one comes later. `unrecorded` are
    events that are set aside and not recorded yet. Memory: every held key of our slots (names, no events).
    """

    def __init__(
        self,
        destination: Destination | NoRoute,
        lease: SlotLease,
        delivery: Delivery,
        policy: RetryPolicy,
        *,
        confirm_seconds: float,
        unrecorded: Callable[[], Iterable[Parking]],
    ) -> None:
        self._destination = destination
        self._lease = lease
        self._delivery = delivery
        self._policy = policy
        self._confirm_seconds = confirm_seconds
        self._unrecorded = unrecorded
        self._sent: _Sent | None = None
        self._look_at = 0.0

    @property
    def answers(self) -> Future[list[Outcome]] | None:
        """What is waited for; None when nothing is on its way."""
        return None if self._sent is None else self._sent.answers

    @property
    def slots(self) -> set[int]:
        """The slots with an event on its way."""
        return set() if self._sent is None else {item.row.slot for item, _ in self._sent.items}

    @property
    def in_flight(self) -> int:
        """How many events are on their way."""
        return 0 if self._sent is None else len(self._sent.batch)

    def abandon(self) -> None:
        """Nobody will record these answers: their keys must not wait for that."""
        if self._sent is not None:
            self._sent.answers.add_done_callback(lambda late: late.result())
            self._sent = None

    def send(self, conn: Connection[Any]) -> bool:
        """Hands over what is due, unless something is on its way or the lease is about to end."""
        now = time.monotonic()
        if self._sent is not None or now < self._look_at or self._lease.seconds_left() < self._confirm_seconds:
            return False
        slots = [s for s, held in self._lease.held.items() if held.keys]
        if not slots:
            return False
        self._look_at = now + RETRY_LOOK_SECONDS
        each = not self._destination.blocks
        due = parking.due(conn, self._destination.name, slots, each=each)
        items = [(item, self._lease.held[item.row.slot].generation) for item in due]
        if not items:
            return False
        routed = [(item.row, self._destination.route(item.row.type)) for item, _ in items]
        batch = [Outgoing(row, route) for row, route in routed if route is not None]
        self._sent = _Sent(items, batch, self._delivery.send(batch))
        return True

    def settle(self, conn: Connection[Any]) -> int | None:
        """Records what was sent once its answers are there, and returns how many got through; raises `StaleSlot`."""
        if self._sent is None or not self._sent.answers.done():
            return None
        sent, self._sent = self._sent, None
        outcomes = dict(zip([item.row.seq for item in sent.batch], sent.answers.result(), strict=True))
        waiting: set[tuple[str, str]] = set()
        freed: set[tuple[int, str, str]] = set()
        published = 0
        for item, generation in sent.items:
            # Crash here: [Q1] published and still parked: the slot's next owner sends it again, same bytes.
            if self._lease.generation(item.row.slot) != generation:
                continue
            row = item.row
            key = (row.tenant, row.ordering_key)
            # Their route went since they were parked: an operator decides, nothing else is kept waiting by them.
            outcome = outcomes.get(row.seq, _NO_ROUTE)
            if outcome.answer is Answer.WITHHELD and key in waiting:
                # Where keys do not wait: not tried at all, and still due.
                continue
            refused = _refused(item, outcome)
            retry = None if refused is None else self._after(outcome, item)
            name, owner = self._lease.destination, self._lease.owner
            parking.record_retry(conn, name, owner, generation, item, refused=refused, retry=retry)
            if refused is None:
                published += 1
                freed.add((row.slot, *key))
            else:
                waiting.add(key)
        if freed:
            self._free(conn, freed)
        self._look_at = 0.0
        return published

    def load_keys(self, conn: Connection[Any], changed: Container[int] = ()) -> None:
        """Looks again which keys wait, in slots that are new to us, that we `changed`, and where an operator acted."""
        if not self._lease.holds_keys or not self._lease.held:
            return
        known = {slot: -1 if slot in changed else held.acts for slot, held in self._lease.held.items()}
        for slot, (acts, keys) in parking.held_keys(conn, self._lease.destination, known).items():
            held = self._lease.held[slot]
            held.acts = acts
            # Invariant: what was set aside and is not recorded yet still holds its key; nothing of it is sent meanwhile.
            held.keys = keys | {(p.row.tenant, p.row.ordering_key) for p in self._unrecorded() if p.row.slot == slot}

    def _free(self, conn: Connection[Any], keys: set[tuple[int, str, str]]) -> None:
        """Lets the keys flow whose last parked event has got through."""
        rest = keys - {(p.row.slot, p.row.tenant, p.row.ordering_key) for p in self._unrecorded()}
        for slot, tenant, key in parking.free_keys(conn, self._lease.destination, rest) if rest else ():
            self._lease.held[slot].keys.discard((tenant, key))

    def _after(self, outcome: Outcome, item: Due) -> timedelta | None:
        """When it is tried again; None where only an operator can help."""
        if outcome.reason is not None:
            return self._policy.after(outcome.reason, item.attempts + 1)
        return self._policy.pause(item.attempts + 1)


def _refused(item: Due, outcome: Outcome) -> tuple[ParkReason, str] | None:
    """As what the event stays parked; None when it got through."""
    match outcome.answer:
        case Answer.CONFIRMED:
            return None
        case Answer.REFUSED:
            assert outcome.reason is not None
            return outcome.reason, outcome.detail
        case Answer.NACKED:
            return ParkReason.NACKED, outcome.detail
        case Answer.UNKNOWN | Answer.WITHHELD:
            # Says nothing about the event itself: the reason stays.
            return item.reason, f"{outcome.answer.value}: {outcome.detail}"
        case _ as never:
            assert_never(never)
