"""The loop of one destination: lease slots, read pages, publish, record the acks; in that order, and no other."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import Connection

from fencepost.relay import acks, parking
from fencepost.relay.delivery import Delivery, Settled
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.pages import PageReader, Part, Progress, newest_tick
from fencepost.relay.publisher import Outgoing, ParkReason
from fencepost.relay.slots import SlotLease, slot_count
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import ConfigError, FencepostError, NotArmed, StaleSlot, Unreachable, WitnessMismatch

log = logging.getLogger("fencepost.relay")


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a relay, in seconds.

    `lease` bounds how long a dead relay holds its slots; `confirm` how long one send may wait for the broker; `poll_min`
    and `poll_max` the adaptive pause when nothing is new; `drain` the time to finish after a stop.
    """

    lease: float = 30.0
    refresh: float = 2.0
    confirm: float = 10.0
    poll_min: float = 0.01
    poll_max: float = 0.5
    drain: float = 10.0
    batch: int = 2000
    retry: parking.RetryPolicy = field(default_factory=parking.RetryPolicy)

    def __post_init__(self) -> None:
        if self.lease <= self.confirm + self.refresh:
            raise ConfigError(
                "the lease is not longer than one confirm and one refresh together",
                field="lease",
                hint="raise the lease, or lower the confirm timeout: what is sent must be answered while the lease lasts",
            )


@dataclass(slots=True)
class Counters:
    """What this loop did since it started."""

    published: int = 0
    parked: int = 0
    resent: int = 0
    pages: int = 0
    acks: int = 0
    lost_slots: int = 0
    trouble: str = ""


class DestinationLoop:
    """Publishes the slots it leases; a crash at any point loses nothing and repeats at most what was not acked."""

    def __init__(self, dsn: str, destination: Destination | NoRoute, *, pace: Pace, stop: threading.Event) -> None:
        self.destination = destination
        self.counters = Counters()
        self.owner: UUID = uuid4()
        self._dsn = dsn
        self._pace = pace
        self._stop = stop
        self._lease = SlotLease(destination.name, self.owner, seconds=pace.lease)
        self._refresh_at = 0.0
        self._reader: PageReader | None = None
        self._said = ""
        self._patience: float | None = None
        self._conn: Connection[Any] | None = None
        self._until: tuple[int, int] | None = None
        self._delivery = Delivery(
            destination.publisher,
            confirm_seconds=pace.confirm,
            seconds_left=self._lease.seconds_left,
            keep=self._keep,
            stop=stop,
            drain_seconds=pace.drain,
            on_trouble=self._trouble,
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
            try:
                with connect(self._dsn, autocommit=True) as conn:
                    self._conn = conn
                    self._reader = None
                    self.destination.open(conn, time.monotonic() + self._pace.confirm)
                    attempt = 0
                    try:
                        self._serve(conn, once)
                    finally:
                        # Also after an error of the broker: nobody should wait for a lease that is not used.
                        with contextlib.suppress(psycopg.Error, FencepostError):
                            self._lease.release(conn, list(self._lease.held))
                    return
            except (psycopg.OperationalError, psycopg.InterfaceError, Unreachable, NotArmed, WitnessMismatch) as error:
                if once:
                    raise
                self._trouble(str(error) if isinstance(error, FencepostError) else type(error).__name__)
                self._lease.forget()
                pause = min(self._pace.poll_max * 4, 0.05 * 2 ** min(attempt, 10))
                attempt += 1
                self._stop.wait(pause * (0.5 + random.random() / 2))

    def _serve(self, conn: Connection[Any], once: bool) -> None:
        pause = self._pace.poll_min
        self._refresh_at = 0.0
        # A single run has an end even while others go on committing.
        self._until = newest_tick(conn, 0) if once else None
        slots = slot_count(conn) if once else 0
        others_until = time.monotonic() + self._pace.lease + self._pace.refresh
        while not self._stop.is_set():
            try:
                self._lease.release(conn, self._refresh(conn))
                busy = self._retry_parked(conn)
                busy = self._step(conn) or busy
            except StaleSlot as stale:
                # Crash here: [S] published, but another relay owns the slot: it sends the page again, same bytes.
                self.counters.lost_slots += 1
                self._trouble(str(stale))
                self._refresh_at = 0.0
                continue
            if busy:
                self._said = ""
                pause = self._pace.poll_min
                continue
            if once:
                # Slots that are still not ours after a whole lease belong to a relay that lives and publishes them.
                if len(self._lease.held) == slots or time.monotonic() > others_until:
                    return
                self._refresh_at = 0.0
            self._stop.wait(pause)
            pause = min(self._pace.poll_max, pause * 1.5)

    def _refresh(self, conn: Connection[Any]) -> list[int]:
        """Renews the lease when it is time; returns the slots that others should have, for when nothing is under way."""
        now = time.monotonic()
        if now < self._refresh_at:
            return []
        self._refresh_at = now + self._pace.refresh
        era = self._lease.era
        fresh, surplus = self._lease.refresh(conn)
        if self._reader is None or era != self._lease.era:
            per_slot = max(1, min(500, self._pace.batch // max(1, len(self._lease.held)) * 4))
            self._reader = PageReader(conn, self._lease.era, rows_per_slot=per_slot)
        self._load_keys(conn, fresh)
        self.destination.reload(conn)
        return surplus

    def _keep(self) -> set[int]:
        """The slots still ours while a batch is under way; a slot that was lost and leased anew is not."""
        assert self._conn is not None
        under_way = {slot: held.generation for slot, held in self._lease.held.items()}
        self._refresh(self._conn)
        return {s for s, held in self._lease.held.items() if under_way.get(s) == held.generation}

    def _load_keys(self, conn: Connection[Any], slots: set[int]) -> None:
        if slots:
            for slot, keys in parking.held_keys(conn, self.destination.name, sorted(slots)).items():
                self._lease.held[slot].keys = keys

    def _step(self, conn: Connection[Any]) -> bool:
        """One part of a page for every slot of ours; True when there was something to do."""
        if not self._lease.held:
            return False
        era, newest = self._until or newest_tick(conn, self._pace.poll_min)
        if era != self._lease.era:
            self._refresh_at = 0.0
            return True
        open_pages: dict[int, Progress] = {}
        for slot, held in self._lease.held.items():
            if held.progress.between_pages:
                held.progress.end = max(held.progress.acked, newest)
            if held.progress.acked != held.progress.end:
                open_pages[slot] = held.progress
        if not open_pages:
            return False
        if self.destination.routes_everything:
            self._ack(conn, [Part(slot, (), last=True) for slot in open_pages], Settled())
            return True
        assert self._reader is not None
        parts = self._reader.read(open_pages)
        generations = {part.slot: self._lease.held[part.slot].generation for part in parts}
        settled = self._publish(parts)
        ours = [p for p in parts if self._lease.generation(p.slot) == generations[p.slot]]
        self._ack(conn, ours, settled)
        if settled.unresolved and self._patience is not None:
            raise Unreachable(
                f"the broker of destination {self.destination.name} confirmed only a part: {self.counters.trouble}",
                field=f"destinations.{self.destination.name}",
                hint="what was not confirmed stays in the outbox; run again when the broker is back",
            )
        return True

    def _publish(self, parts: list[Part]) -> Settled:
        batch: list[Outgoing] = []
        behind: list[parking.Parking] = []
        unrouted: list[parking.Parking] = []
        for part in parts:
            keys = self._lease.held[part.slot].keys
            for row in part.rows:
                route = self.destination.route(row.type)
                if route is None:
                    if self.destination.parks(row.type):
                        unrouted.append(parking.Parking(row, ParkReason.NO_ROUTE))
                elif (row.tenant, row.ordering_key) in keys:
                    behind.append(parking.Parking(row, ParkReason.BEHIND))
                else:
                    batch.append(Outgoing(row, route))
        settled = self._deliver(batch) if batch else Settled()
        settled.parked += behind + unrouted
        return settled

    def _deliver(self, batch: list[Outgoing]) -> Settled:
        return self._delivery.deliver(batch, patience=self._patience)

    def _ack(self, conn: Connection[Any], parts: list[Part], settled: Settled) -> None:
        recorded = acks.record(conn, self._lease, parts, settled, self._pace.retry)
        self.counters.acks += recorded.rows > 0
        self.counters.pages += recorded.pages
        self.counters.published += len(settled.confirmed)
        self.counters.resent += settled.resent
        self.counters.parked += recorded.parked

    def _retry_parked(self, conn: Connection[Any]) -> bool:
        """Publishes parked events whose time has come, one of each key, in the key's order."""
        slots = [s for s, held in self._lease.held.items() if held.keys]
        if not slots:
            return False
        items = parking.due(conn, self.destination.name, slots)
        batch: list[Outgoing] = []
        sent: list[parking.Due] = []
        for item in items:
            route = self.destination.route(item.row.type)
            if route is not None:
                batch.append(Outgoing(item.row, route))
                sent.append(item)
        if not batch:
            return False
        settled = self._deliver(batch)
        refused = {p.row.seq: (p.reason, p.detail) for p in settled.parked}
        settled_items = [i for i in sent if i.row.seq in settled.confirmed or i.row.seq in refused]
        for item in settled_items:
            generation = self._lease.generation(item.row.slot)
            if generation is None:
                continue
            parking.record_retry(
                conn,
                self.destination.name,
                self.owner,
                generation,
                item,
                refused=refused.get(item.row.seq),
                policy=self._pace.retry,
            )
        self.counters.published += len(settled.confirmed)
        self._load_keys(conn, {i.row.slot for i in settled_items} & self._lease.held.keys())
        return bool(settled_items)

    def _trouble(self, what: str) -> None:
        self.counters.trouble = what
        if what != self._said:
            self._said = what
            log.warning("destination %s waits: %s", self.destination.name, what)
