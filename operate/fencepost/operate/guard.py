"""`fencepost authority guard`: what relays, consumers and workers do beside their work, where none of them is given the logins.

    witness      beats it every two seconds, and arms again after a plain restart; after anything else all stays refused
    recycling    of the outbox and the acks, and purge of ticks and identities
    inboxes      purge of what is older than each consumer's replay window
    jobs         escalation of unknown effects, archive of finished jobs

Each part is the one that runs beside a relay, a consumer or a worker, under the same row lease: any number may run. Expired
leases of jobs are taken back by the workers that claim, and by nobody else.

Killed at any moment: whoever has the lease next goes on, and the witness's intended turn is taken, or found to be.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import LiteralString

import psycopg

from fencepost.consumer.upkeep import Upkeep as Inbox
from fencepost.jobs.upkeep import Upkeep as Effects
from fencepost.operate import settings
from fencepost.operate.signals import draining
from fencepost.relay.recycling import Recycler
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import FencepostError, Unreachable
from fencepost.schemas.keeper import Keeper

__all__ = ["Inboxes", "guard"]

LOOK_SECONDS = 30.0
CONSUMERS_MAX = 100
CONSUMERS: LiteralString = """
SELECT c.consumer FROM fencepost.consumer AS c WHERE c.replay_window IS NOT NULL ORDER BY c.changed_at LIMIT %(limit)s"""

log = logging.getLogger("fencepost.guard")


class Inboxes:
    """Forgets for each consumer that declares a replay window, also one that declares it later; the first hundred of them."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._kept: dict[str, Inbox] = {}
        self._may_look = True

    def look(self) -> None:
        """Begins with consumers that are new; a database that does not answer is asked again the next time."""
        if not self._may_look:
            return
        try:
            with connect(self._dsn, autocommit=True, answer_within=LOOK_SECONDS) as conn:
                found = [str(name) for (name,) in conn.execute(CONSUMERS, {"limit": CONSUMERS_MAX})]
        except psycopg.errors.InsufficientPrivilege:
            self._may_look = False
            log.info("this login may not purge inboxes; grant it the role maintenance, or let their consumers do it")
            return
        except (psycopg.Error, FencepostError) as error:
            log.warning("consumers cannot be looked up now: %s", type(error).__name__)
            return
        for name in found:
            if name not in self._kept and len(self._kept) < CONSUMERS_MAX:
                self._kept[name] = Inbox(name, self._dsn)
                self._kept[name].start()

    def stop(self) -> None:
        """Ends all of them, waiting for a step under way."""
        for kept in self._kept.values():
            kept.stop()


def guard() -> None:
    """Keep the witness and do the maintenance until stopped, where no relay, consumer or worker has the logins for it.

    Beats every two seconds; arms again by equality after a plain restart, and after anything else says so and leaves
    everything refused until an operator decides. Needs the roles armer and maintenance, and does what its login may.
    """
    chosen = settings.load()
    dsn = chosen.dsn()
    stop = threading.Event()
    with contextlib.suppress(Unreachable):
        # Of another contract it ends at once; one that does not answer is waited for.
        connect(dsn).close()
    inboxes = Inboxes(dsn)
    parts = (Keeper(dsn, chosen.outside()), Recycler(dsn), Effects(dsn, "guard", {}))
    with draining(stop.set):
        for part in parts:
            part.start()
        inboxes.look()
        while not stop.wait(LOOK_SECONDS):
            inboxes.look()
        inboxes.stop()
        for part in reversed(parts):
            part.stop()
