"""The relay as a process: one loop for each destination and one for what has no route, under one stop."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.doorbell import Doorbell
from fencepost.relay.health import answering
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.relay.readiness import LOOK_SECONDS, Watch
from fencepost.relay.recycling import Recycler
from fencepost.schemas import arming
from fencepost.schemas.errors import ConfigError, NotArmed, Unreachable, WitnessMismatch
from fencepost.schemas.health import STALLED_SECONDS, HealthAddress, HealthServer
from fencepost.schemas.keeper import Keeper
from fencepost.schemas.witness import Witness

log = logging.getLogger("fencepost.relay")

# What helpers of the loops get after the drain: their threads are daemons and leave nothing half done.
END_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a relay did until it ended."""

    published: int
    parked: int
    resent: int
    acks: int


def settle_memory() -> None:
    """Makes the garbage collector's pauses rare in a process that is a relay and nothing else; called once, after imports.

    Events are thousands of containers a second and none of them is in a cycle, so reference counts free them; what was
    imported is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class Relay:
    """Publishes what is committed, in order per key, and records it afterwards; loses nothing at any crash.

    `state` is the folder of the file witness where this process should keep it (heartbeat, re-arming after a plain
    restart); without it, or for a login without the role armer, some other process must. `health` serves `/livez`, `/readyz` and `/metrics` while it runs;
    `look` (seconds) is how often readiness is looked at, `stalled` after which time without a step a loop is not alive;
    without `health_required` an address that is taken is told and lived with. `doorbell`: sleep until rung, see `doorbell`.
    """

    def __init__(
        self,
        dsn: str,
        destinations: Sequence[Destination],
        *,
        state: Path | Witness | None = None,
        pace: Pace | None = None,
        health: HealthAddress | None = None,
        look: float = LOOK_SECONDS,
        stalled: float = STALLED_SECONDS,
        health_required: bool = True,
        doorbell: bool = False,
    ) -> None:
        if not destinations:
            raise ConfigError(
                "the relay has no destination", field="destinations", hint="configure a Kafka or a RabbitMQ destination"
            )
        self._dsn = dsn
        self._state = state
        self._pace = pace or Pace()
        self._stop = threading.Event()
        self._destinations = list(destinations)
        for destination in self._destinations:
            destination.served_with = tuple(d for d in self._destinations if d is not destination)
        served: list[Destination | NoRoute] = [*self._destinations, NoRoute()]
        self._bell = Doorbell(dsn, answer=self._pace.answer) if doorbell else None
        self.loops = [
            DestinationLoop(
                dsn, d, pace=self._pace, stop=self._stop, bell=None if isinstance(d, NoRoute) else self._bell
            )
            for d in served
        ]
        self._failure: BaseException | None = None
        self._watch = Watch(dsn, self.loops, self._stop, look=look)
        answer = answering(self._watch, _metrics(self.loops, self._watch), stalled=stalled)
        self._health_required = health_required
        self._server = None if health is None else HealthServer(health, answer)

    @property
    def health_port(self) -> int:
        """Where health is served while the relay runs; 0 when it is not."""
        return 0 if self._server is None else self._server.port

    def stop(self) -> None:
        """Asks every loop to finish what it has sent and to leave; safe from a signal handler."""
        self._stop.set()

    def run(self) -> Summary:
        """Runs until `stop`, then drains within `pace.drain` seconds; raises what ended a loop unexpectedly."""
        with self._healthy():
            return self._run()

    def _run(self) -> Summary:
        keeper = self._keeper()
        recycler = Recycler(self._dsn, seconds=self._pace.recycle)
        recycler.start()
        if self._bell is not None:
            self._bell.start()
        threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=f"relay-{loop.destination.name}", daemon=True)
            for loop in self.loops
        ]
        for thread in threads:
            thread.start()
        try:
            # Invariant: this thread never waits for the event, whose lock it would hold when a signal's handler sets it.
            while not self._stop.is_set() and any(thread.is_alive() for thread in threads):
                time.sleep(0.2)
            if self._bell is not None:
                self._bell.wake()
            until = time.monotonic() + self._pace.drain + self._pace.confirm
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
        finally:
            self._stop.set()
            self._close()
            _end([part.stop for part in (recycler, self._bell, keeper) if part is not None])
        if self._failure is not None:
            raise self._failure
        return self.summary()

    @contextmanager
    def _healthy(self) -> Generator[None]:
        """Health is told from before the first connection until after the last ack."""
        if self._server is None or not self._listening(self._server):
            yield
            return
        self._watch.start()
        try:
            yield
        finally:
            self._watch.stop()
            self._server.stop()

    def _listening(self, server: HealthServer) -> bool:
        try:
            server.start()
        except ConfigError as error:
            if self._health_required:
                raise
            log.warning("no health is served: %s", error)
            return False
        log.info("health is served on port %d", server.port)
        return True

    def run_once(self) -> Summary:
        """Publishes or parks everything committed before the call, then returns; raises when a service is unreachable.

        What could only be sent again later (a parked event whose retry is not due) stays parked.
        """
        if self._state is not None:
            with suppress(psycopg.errors.InsufficientPrivilege):
                arming.ensure_armed(self._dsn, self._state)
        try:
            for loop in self.loops:
                loop.run(once=True)
        finally:
            self._close()
        return self.summary()

    def summary(self) -> Summary:
        """Totals over all destinations so far."""
        found = [loop.counters for loop in self.loops]
        return Summary(
            sum(c.published for c in found),
            sum(c.parked for c in found),
            sum(c.resent for c in found),
            sum(c.acks for c in found),
        )

    def _keeper(self) -> Keeper | None:
        if self._state is None:
            return None
        try:
            arming.ensure_armed(self._dsn, self._state)
        except (WitnessMismatch, NotArmed, ConfigError) as error:
            log.error("%s", arming.explain(error))
        except psycopg.errors.InsufficientPrivilege:
            log.info("this login keeps no witness; grant it the role armer, or let another process do it")
            return None
        except (Unreachable, psycopg.OperationalError) as error:
            # The keeper tries again, and so do the loops.
            log.warning("%s", error if isinstance(error, Unreachable) else type(error).__name__)
        keeper = Keeper(self._dsn, self._state)
        keeper.start()
        return keeper

    def _guarded(self, loop: DestinationLoop) -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001 - kept and raised by `run`
            self._failure = error
            log.error("the loop of destination %s ended: %s", loop.destination.name, type(error).__name__)
            self._stop.set()

    def _close(self) -> None:
        deadline = time.monotonic() + 2
        for destination in self._destinations:
            destination.close(deadline)


def _end(stops: Sequence[Callable[[], None]]) -> None:
    """Stops all at once: a database that is silent lets each of them wait, and nobody is waited for longer than this."""
    threads = [threading.Thread(target=stop, name="relay-end", daemon=True) for stop in stops]
    for thread in threads:
        thread.start()
    until = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _metrics(loops: Sequence[DestinationLoop], watch: Watch) -> Callable[[], tuple[str, bytes]] | None:
    """None without the extra `metrics`."""
    try:
        from fencepost.relay.metrics import RelayMetrics, exposition
    except ModuleNotFoundError:
        return None
    return exposition(RelayMetrics(loops, watch))
