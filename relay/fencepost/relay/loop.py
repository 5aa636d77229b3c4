"""The loop of one destination: lease slots, read pages, publish, record the acks; in that order, and no other.

Parts of pages are read ahead on a connection of their own while earlier ones wait for their confirms; they are settled
and recorded in the order in which they were read.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import Connection

from fencepost.relay import acks
from fencepost.relay.delivery import Delivery, Settled
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.doorbell import DOZE_AFTER_SECONDS, Doorbell, Sleeper
from fencepost.relay.flights import Flight, sort_out
from fencepost.relay.pace import Counters, Pace
from fencepost.relay.pages import PageReader, Part, newest_tick
from fencepost.relay.publisher import Outcome
from fencepost.relay.retries import RETRY_LOOK_SECONDS, Retries
from fencepost.relay.slots import SlotLease, slot_count
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError, NotArmed, StaleSlot, Unreachable, WitnessMismatch

log = logging.getLogger("fencepost.relay")

SLOT_PAUSE_SECONDS = 0.1
SLOT_PAUSE_CAP_SECONDS = 2.0
AGAIN_SECONDS_MAX = 2.0


class DestinationLoop:
    """Publishes the slots it leases; a crash at any point loses nothing and repeats at most what was not acked."""

    def __init__(
        self,
        dsn: str,
        destination: Destination | NoRoute,
        *,
        pace: Pace,
        stop: threading.Event,
        bell: Doorbell | None = None,
    ) -> None:
        self.destination = destination
        self._sleeper = None if bell is None else Sleeper(bell)
        self.counters = Counters()
        # Monotonic time of the last step, whatever came of it: all that liveness looks at.
        self.progressed_at = time.monotonic()
        self.owner: UUID = uuid4()
        self._dsn = dsn
        self._pace = pace
        self._stop = stop
        self._lease = SlotLease(destination.name, self.owner, seconds=pace.lease, holds_keys=destination.holds_keys)
        self._refresh_at = self._refreshed_at = 0.0
        self._leaving: set[int] = set()
        self._reader: PageReader | None = None
        self._flights: deque[Flight] = deque()
        self._reading: Future[list[Part]] | None = None
        self._said = ""
        self._patience: float | None = None
        self._until: tuple[int, int] | None = None
        self._routed: tuple[int, int] | None = None
        self._look_at = 0.0
        self._conn: Connection[Any] | None = None
        self._delivery = Delivery(
            destination.publisher,
            confirm_seconds=pace.confirm,
            seconds_left=self._lease.seconds_left,
            keep=self._keep,
            stop=stop,
            drain_seconds=pace.drain,
            on_trouble=self._trouble,
            block=destination.blocks,
        )
        self._retries = Retries(
            destination,
            self._lease,
            self._delivery,
            pace.retry,
            confirm_seconds=pace.confirm,
            unrecorded=lambda: (p for flight in self._flights for p in flight.aside),
        )

    def run(self, *, once: bool = False) -> None:
        """Runs until stopped, or with `once` until everything committed before the call is published or parked.

        Reconnects to the database by itself with a capped backoff. With `once` an unreachable database or broker, and a
        broker that confirms nothing for three confirm timeouts, raises; what another live relay has leased is left to
        that one, and one lease is waited to tell it from a dead one.
        """
        self._patience = 3 * self._pace.confirm if once else None
        attempt = 0
        while not self._stop.is_set():
            self.progressed_at = time.monotonic()
            try:
                with self._connected() as (conn, worker, reading):
                    self.destination.open(conn, time.monotonic() + self._pace.confirm)
                    attempt = 0
                    self._serve(conn, worker, reading, once)
                    return
            except (psycopg.OperationalError, psycopg.InterfaceError, Unreachable, NotArmed, WitnessMismatch) as error:
                if once:
                    raise
                self._trouble(str(error) if isinstance(error, FencepostError) else type(error).__name__)
                pause = min(self._pace.poll_max * 4, AGAIN_SECONDS_MAX, 0.05 * 2 ** min(attempt, 10))
                attempt += 1
                self._stop.wait(pause * (0.5 + random.random() / 2))

    @property
    def leased(self) -> bool:
        """Whether we take part in sharing the slots now; how many are ours depends on who else does."""
        return self._lease.seconds_left() > 0

    @property
    def slots_held(self) -> int:
        """How many slots are ours now."""
        return len(self._lease.held)

    @property
    def in_flight(self) -> int:
        """How many events were handed to the broker and have no recorded answer yet."""
        return sum(len(flight.batch) for flight in list(self._flights)) + self._retries.in_flight

    @contextlib.contextmanager
    def _connected(self) -> Generator[tuple[Connection[Any], ThreadPoolExecutor, Connection[Any]]]:
        """A connection for leases and acks, one for reading ahead, and the thread that reads."""
        with (
            connect(self._dsn, autocommit=True, answer_within=self._pace.answer) as conn,
            connect(self._dsn, autocommit=True, answer_within=self._pace.answer) as reading,
            ThreadPoolExecutor(1, thread_name_prefix=f"relay-{self.destination.name}-read") as worker,
        ):
            self._conn = conn
            self._reader = None
            try:
                yield conn, worker, reading
            finally:
                self._abandon()
                self._reading = None
                self._leaving = set()
                # Also after an error of the broker: nobody should wait for a lease that is not used.
                # Crash here: [D2] drained, and the slots are still ours: others take them once the lease has run out.
                with contextlib.suppress(psycopg.Error, FencepostError):
                    self._lease.release(conn, list(self._lease.held))
                self._lease.forget()

    def _serve(self, conn: Connection[Any], worker: ThreadPoolExecutor, reading: Connection[Any], once: bool) -> None:
        pause = self._pace.poll_min
        self._refresh_at = 0.0
        # A single run has an end even while others go on committing.
        self._until = newest_tick(conn, 0) if once else None
        slots = slot_count(conn) if once else 0
        others_until = time.monotonic() + self._pace.lease + self._pace.refresh
        while not self._stop.is_set():
            self.progressed_at = time.monotonic()
            try:
                self._renew(conn, reading)
                self._hand_over(conn)
                acks.record_noted(conn, self._lease, seconds=self._pace.record)
                busy = self._settle_retries(conn)
                busy = self._retries.send(conn) or busy
                busy = self._send() or busy
                busy = self._read_ahead(conn, worker) or busy
                busy = self._settle(conn) or busy
            except StaleSlot as stale:
                # Crash here: [S] published, but another relay owns the slot: it sends the page again, same bytes.
                self.counters.lost_slots += 1
                self._trouble(str(stale))
                self._start_over()
                continue
            if busy:
                if self._said and not any(held.doubts for held in self._lease.held.values()):
                    self._said = ""
                pause = self._pace.poll_min
                if self._sleeper is not None:
                    self._sleeper.awake()
            elif self._flights or self._reading is not None or self._retries.answers is not None:
                # Events that commit meanwhile do not wait for these confirms.
                self._await(min(pause, self._due()))
                pause = min(self._pace.poll_max, pause * 1.5)
            else:
                # Slots that are still not ours after a whole lease belong to a relay that lives and publishes them.
                if once and (len(self._lease.held) == slots or self._refreshed_at > others_until):
                    return
                rung = self._rest(conn, pause)
                if once:
                    self._refresh_at = 0.0
                pause = self._pace.poll_min if rung else min(self._pace.poll_max, pause * 1.5)
        self._drain(conn)

    def _rest(self, conn: Connection[Any], pause: float) -> bool:
        """Nothing is to be done: waits, or with a doorbell sleeps until it rings (True), never past what is due."""
        held = self._lease.held
        due = self._due()
        if self._sleeper is None or not held or pause < min(DOZE_AFTER_SECONDS, self._pace.poll_max):
            self._stop.wait(min(pause, due))
            return False
        if any(slot.keys or slot.doubts for slot in held.values()):
            due = min(due, RETRY_LOOK_SECONDS)
        return self._sleeper.rest(conn, min(self._pace.poll_max, due))

    def _due(self) -> float:
        """Seconds until our slots are to be renewed, and what others have left is to be taken."""
        return max(0.0, self._refresh_at - time.monotonic())

    # -- slots -------------------------------------------------------------------------------------------------------

    def _renew(self, conn: Connection[Any], reading: Connection[Any] | None = None) -> None:
        """Renews the lease when it is time, takes what is free, and notes which slots others should have."""
        now = time.monotonic()
        if now >= self._refresh_at:
            self._refreshed_at, self._refresh_at = now, now + self._pace.refresh
            _, surplus = self._lease.refresh(conn)
            self._leaving = set(surplus)
            self._retries.load_keys(conn)
            self.destination.reload(conn)
        if reading is not None and (self._reader is None or self._reader.era != self._lease.era):
            if self._reader is not None:
                # What was read and sent under the old era belongs to no progress of ours.
                self._start_over()
            self._reader = PageReader(
                reading,
                self._lease.era,
                rows_per_slot=self._rows_per_slot(),
                rows_in_all=self._pace.batch,
                payloads=self.destination.publishes,
            )

    def _hand_over(self, conn: Connection[Any]) -> None:
        """Gives surplus slots to others once nothing of them is under way."""
        if self._leaving and self._reading is None:
            under_way = {part.slot for flight in self._flights for part in flight.parts} | self._retries.slots
            if free := self._leaving - under_way:
                # Crash here: [S1] nothing of these slots is under way; others take them once our lease has run out.
                self._lease.release(conn, sorted(free))
                self._leaving -= free

    def _rows_per_slot(self) -> int:
        return max(1, min(500, self._pace.batch // max(1, len(self._lease.held))))

    def _keep(self) -> set[int]:
        """The slots still ours while a batch is under way; a slot that was lost and leased anew is not."""
        assert self._conn is not None
        self.progressed_at = time.monotonic()
        under_way = {slot: held.generation for slot, held in self._lease.held.items()}
        era = self._lease.era
        self._renew(self._conn)
        if self._lease.era != era:
            return set()
        return {s for s, held in self._lease.held.items() if under_way.get(s) == held.generation}

    def _start_over(self) -> None:
        """Forgets what was read and sent but not recorded; the recorded progress tells where to go on."""
        self._abandon()
        if self._reading is not None:
            wait([self._reading])
            self._reading = None
        for held in self._lease.held.values():
            held.read = held.progress.copy()
        self._refresh_at = 0.0

    def _abandon(self) -> None:
        """Nobody will look at these answers: their keys must not wait for that."""
        for flight in self._flights:
            flight.answers.add_done_callback(_looked_at)
        self._flights.clear()
        self._retries.abandon()

    # -- pages -------------------------------------------------------------------------------------------------------

    def _read_ahead(self, conn: Connection[Any], worker: ThreadPoolExecutor) -> bool:
        """Starts to read the next parts; pages without rows to publish are settled at once."""
        ahead = max(2, self._pace.ahead) if self._flights and self._flights[0].doubtful else self._pace.ahead
        if self._reading is not None or len(self._flights) >= ahead or not self._lease.held:
            return False
        now = time.monotonic()
        held = {s: h for s, h in self._lease.held.items() if s not in self._leaving and h.not_before <= now}
        if self.destination.routes_everything and self._until is None:
            # There is nothing to find here, only old ticks to let go.
            if time.monotonic() < self._look_at:
                return False
            self._look_at = time.monotonic() + self._pace.refresh
        if self._until is not None:
            era, newest = self._until
        elif any(h.read.between_pages for h in held.values()):
            era, newest = newest_tick(conn, self._pace.poll_min)
        else:
            era, newest = self._lease.era, 0
        if era != self._lease.era:
            self._refresh_at = 0.0
            return False
        if newest and (era, newest) != self._routed:
            # Invariant: routes are read after the end tick of the page that they are applied to.
            self.destination.reload(conn)
            self._routed = era, newest
        for h in held.values():
            if h.read.between_pages:
                h.read.end = max(h.read.acked, newest)
        wanted = {s: (h.generation, h.read.copy()) for s, h in held.items() if h.read.acked != h.read.end}
        if not wanted:
            return False
        if self.destination.routes_everything:
            parts = [Part.of(slot, generation, at, (), last=True) for slot, (generation, at) in wanted.items()]
            for part in parts:
                self._lease.held[part.slot].read = part.after.copy()
            self._record(conn, parts, Settled())
            return True
        assert self._reader is not None
        # Crash here: [T2] a tick is taken, and nothing that ends at it was read: whoever owns the slots next reads it.
        self._reading = worker.submit(self._reader.read, wanted)
        return False

    def _send(self) -> bool:
        """Hands what was read to the broker."""
        if self._reading is None or not self._reading.done():
            return False
        if self._lease.seconds_left() < self._pace.confirm:
            return False
        # A slot that was stopped meanwhile goes on from somewhere else.
        parts = [
            p
            for p in self._reading.result()
            if self._lease.generation(p.slot) == p.generation and self._lease.held[p.slot].read == p.before
        ]
        self._reading = None
        # Events that stopped their slots come first: what overtakes them in this send is told from what was merely sooner.
        parts.sort(key=lambda part: -self._lease.held[part.slot].doubts)
        doubtful = any(self._lease.held[part.slot].doubts for part in parts)
        batch, aside = sort_out(parts, self._lease, self.destination)
        # Crash here: [B1] read and not sent: whoever owns the slots next reads it again.
        self._flights.append(Flight(parts, batch, aside, time.monotonic(), self._delivery.send(batch), doubtful))
        # Crash here: [B2] handed over, stored or not: the slots' next owner sends all of it again, same bytes.
        return True

    def _settle(self, conn: Connection[Any]) -> bool:
        """Records the oldest flights whose events all have an answer; anything but a confirm is settled in order first."""
        flights = self._flights
        if len(flights) == 1 and flights[0].doubtful and self._reading is not None and not self._stop.is_set():
            # A stopped slot's page may end with the very event that stopped it: what comes after it goes along.
            return False
        done: list[Flight] = []
        while self._flights and self._flights[0].answers.done():
            done.append(self._flights.popleft())
        if not done:
            return False
        outcomes = [flight.answers.result() for flight in done]
        if not all(Delivery.all_confirmed(found) for found in outcomes):
            # Invariant: nothing new is sent before every event that was sent has its answer and its place in the order.
            done += self._flights
            outcomes += [self._delivery.answered(flight.answers, len(flight.batch)) for flight in self._flights]
            self._flights.clear()
        batch = [item for flight in done for item in flight.batch]
        parts = [part for flight in done for part in flight.parts]
        aside = [p for flight in done for p in flight.aside]
        era = self._lease.era
        settled = self._delivery.deliver(
            batch, [o for found in outcomes for o in found], began=done[0].sent_at, patience=self._patience
        )
        if self._lease.era != era:
            # These ticks are not of the era that the slots go on in.
            return True
        settled.parked += aside
        # Crash here: [A1] confirmed and not recorded: the slots' next owner sends it again, same bytes.
        self._record(conn, parts, settled)
        stopped = {item.row.slot for item in settled.unresolved}
        if stopped and self._patience is not None:
            self._start_over()
            raise Unreachable(
                f"the broker of destination {self.destination.name} confirmed only a part: {self.counters.trouble}",
                field=f"destinations.{self.destination.name}",
                hint="what was not confirmed stays in the outbox; run again when the broker is back",
            )
        self._pause_slots({part.slot for part in parts}, stopped)
        if not stopped.isdisjoint(p.row.slot for p in aside):
            # What of it was not recorded comes again, and holds its key only from there.
            self._retries.load_keys(conn, stopped)
        return True

    def _pause_slots(self, slots: set[int], stopped: set[int]) -> None:
        """Slots with an event that has no answer are read again from their recorded progress, after a growing pause."""
        # Slots that were stopped together are read together.
        jitter, now = 0.5 + random.random() / 2, time.monotonic()
        for slot in slots:
            held = self._lease.held.get(slot)
            if held is None:
                continue
            if slot in stopped:
                held.read = held.progress.copy()
                pause = min(SLOT_PAUSE_CAP_SECONDS, SLOT_PAUSE_SECONDS * 2 ** min(held.doubts, 10))
                held.not_before = now + pause * jitter
                held.doubts += 1
            elif held.doubts:
                held.doubts = 0

    def _settle_retries(self, conn: Connection[Any]) -> bool:
        """Records what became of parked events that were sent again."""
        published = self._retries.settle(conn)
        self.counters.published += published or 0
        return published is not None

    def _await(self, seconds: float) -> None:
        found: list[Future[Any] | None] = [flight.answers for flight in list(self._flights)[:1]]
        found += [self._reading, self._retries.answers]
        pending = [future for future in found if future is not None and not future.done()]
        if pending:
            wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
        else:
            self._stop.wait(seconds)

    def _drain(self, conn: Connection[Any]) -> None:
        """Told to stop: what was sent is waited for and recorded, what was only read is left."""
        # Crash here: [D1] told to stop: what was sent and not recorded is sent again, as after any other kill.
        until = time.monotonic() + self._pace.drain
        with contextlib.suppress(StaleSlot):
            while self._flights or self._retries.answers is not None:
                self._await(max(0.05, min(1.0, until - time.monotonic())))
                self._renew(conn)
                self._settle_retries(conn)
                self._settle(conn)
                if time.monotonic() >= until + self._pace.confirm:
                    return

    def _record(self, conn: Connection[Any], parts: list[Part], settled: Settled) -> None:
        recorded = acks.record(conn, self._lease, parts, settled, self._pace.retry)
        self.counters.acks += recorded.rows > 0
        self.counters.pages += recorded.pages
        self.counters.published += settled.published
        self.counters.resent += settled.resent
        self.counters.parked += recorded.parked
        if recorded.overtaken:
            self.counters.overtaken += recorded.overtaken
            name = self.destination.name
            log.warning(
                "destination %s: %s events were overtaken by later ones of their keys",
                name,
                recorded.overtaken,
                extra={"destination": name},
            )
        self.counters.reasons.update(recorded.reasons)

    def _trouble(self, what: str) -> None:
        self.counters.trouble = what
        if what != self._said:
            self._said = what
            name = self.destination.name
            log.warning("destination %s waits: %s", name, what, extra={"destination": name})


def _looked_at(answers: Future[list[Outcome]]) -> None:
    answers.result()
