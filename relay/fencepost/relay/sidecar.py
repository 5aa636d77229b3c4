"""The relay as a process: one loop for each destination and one for what has no route, under one stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.loop import DestinationLoop, Pace
from fencepost.relay.recycling import Recycler
from fencepost.schemas import arming
from fencepost.schemas.errors import ConfigError, NotArmed, Unreachable, WitnessMismatch
from fencepost.schemas.keeper import Keeper

log = logging.getLogger("fencepost.relay")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a relay did until it ended."""

    published: int
    parked: int
    resent: int
    acks: int


class Relay:
    """Publishes what is committed, in order per key, and records it afterwards; loses nothing at any crash.

    `state` is the folder of the file witness where this process should keep it (heartbeat, re-arming after a plain
    restart); without it some other process must.
    """

    def __init__(
        self, dsn: str, destinations: Sequence[Destination], *, state: Path | None = None, pace: Pace | None = None
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
        served: list[Destination | NoRoute] = [*self._destinations, NoRoute()]
        self.loops = [DestinationLoop(dsn, d, pace=self._pace, stop=self._stop) for d in served]
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Asks every loop to finish what it has sent and to leave; safe from a signal handler."""
        self._stop.set()

    def run(self) -> Summary:
        """Runs until `stop`, then drains within `pace.drain` seconds; raises what ended a loop unexpectedly."""
        keeper = self._keeper()
        recycler = Recycler(self._dsn, seconds=self._pace.recycle)
        recycler.start()
        threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=f"relay-{loop.destination.name}", daemon=True)
            for loop in self.loops
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    if self._stop.is_set():
                        thread.join(self._pace.drain + self._pace.confirm)
                        break
        finally:
            self._stop.set()
            self._close()
            recycler.stop()
            if keeper is not None:
                keeper.stop()
        if self._failure is not None:
            raise self._failure
        return self.summary()

    def run_once(self) -> Summary:
        """Publishes or parks everything committed before the call, then returns; raises when a service is unreachable.

        What could only be sent again later (a parked event whose retry is not due) stays parked.
        """
        if self._state is not None:
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
        except Unreachable as error:
            log.warning("%s", error)
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
