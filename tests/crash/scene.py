"""What one crash test works with: a database, a destination, a relay that dies, its successor, and the judgement."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, LiteralString

from conformance.harness import Arrived, Broker
from crash.points import Point, points
from crash.victim import AHEAD, BATCH, Act, Orders
from fencepost.relay import outbox
from fencepost.relay.publisher import Route
from fencepost.schemas.event import Event
from support.database import Database
from support.processes import Child, wait_for
from support.relaying import Noted, address_of, kind_of
from support.services import Services

KEYS = 20
# Parts of pages are made of a few rows of each slot, so a batch may hold somewhat more than was asked for.
IN_FLIGHT = AHEAD * 2 * BATCH

# Neither covered by the acked tick of its slot, nor by the position in the page under way.
UNACKED: LiteralString = """
SELECT o.operation FROM fencepost.outbox AS o
WHERE NOT EXISTS (
    SELECT FROM (SELECT k.* FROM fencepost.ack AS k
                 WHERE k.destination = 'events' AND k.slot = o.slot ORDER BY k.n DESC LIMIT 1) AS a
    JOIN fencepost.tick AS t ON t.era = a.era AND t.n = a.acked_tick
    JOIN fencepost.tick AS e ON e.era = a.era AND e.n = a.end_tick
    WHERE pg_visible_in_snapshot(o.xid, t.snap) OR o.seq <= a.position AND pg_visible_in_snapshot(o.xid, e.snap))"""
PARKED: LiteralString = "SELECT k.operation FROM fencepost.parked AS k WHERE k.destination = 'events'"
SESSIONS: LiteralString = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost'"""
LAPSE: LiteralString = "UPDATE fencepost.relay SET lease_until = clock_timestamp() - interval '1 ms'"
LAPSE_DUTY: LiteralString = "UPDATE fencepost.duty SET lease_until = clock_timestamp() - interval '1 ms'"


class Lost(Event, type="test.crashed", version=1):
    """An event of another type."""


class Scene:
    """One database, one destination on a real broker, and processes that serve it."""

    def __init__(self, database: Database, broker: Broker, services: Services, folder: Path) -> None:
        self.database = database
        self._looking = database.connect(autocommit=True)
        self.broker = broker
        self.route: Route = broker.destination()
        self.points = points()
        self.accepted: list[tuple[str, str]] = []
        self._services = services
        self._folder = folder

    def close(self) -> None:
        self._looking.close()

    def point(self, label: str) -> Point:
        return self.points[label]

    def accept(self, count: int, *, lost: frozenset[int] = frozenset()) -> None:
        """Commits so many more events over the keys in turn, each by itself; `lost` are those of the other type."""
        with self.database.connect() as conn:
            for n in range(len(self.accepted), len(self.accepted) + count):
                operation, key = f"op-{n}", f"k{n % KEYS}"
                event: Event = (
                    Lost(tenant="acme", operation=operation, ordering_key=key)
                    if n in lost
                    else Noted(tenant="acme", operation=operation, ordering_key=key, n=n)
                )
                with conn.transaction():
                    outbox.enqueue(conn, event)
                self.accepted.append((key, operation))

    def relay(
        self, acts: dict[str, tuple[int, Act]] | None = None, *, recycling: bool = False, after: int | None = None
    ) -> Child:
        """A process that relays (or, with `after`, sends again), not started."""
        orders = Orders(
            self.database.dsn,
            kind_of(self.broker),
            address_of(self.broker, self._services),
            self.route.to,
            self.route.routing_key,
            acts or {},
            recycling,
            after,
        )
        number = len(list(self._folder.glob("relay-*.out")))
        output = self._folder / f"relay-{number}.out"
        output.touch()
        # The same sources as here, wherever they were found.
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        return Child(["-m", "crash.victim", orders.as_argument()], output=output, env=path)

    def dies(self, victim: Child, label: str) -> set[str]:
        """Waits for its death at this label; returns what is not recorded as published then."""
        victim.says(f"killed at [{label}]", 60)
        assert victim.wait() == -signal.SIGKILL
        self.lapse()
        return self.left()

    def left(self) -> set[str]:
        """What the relay still has to do: neither acked nor free of being parked."""
        return self.operations(UNACKED) | self.operations(PARKED)

    def operations(self, query: LiteralString) -> set[str]:
        return {row[0] for row in self._looking.execute(query)}

    def value(self, query: LiteralString) -> Any:
        row = self._looking.execute(query).fetchone()
        assert row is not None
        return row[0]

    def lapse(self) -> None:
        """The sessions of the dead have ended, and so have the leases, which nobody renews."""
        wait_for(lambda: self.value(SESSIONS) == 0, 20, "the sessions of the dead to end")
        self._looking.execute(LAPSE)
        self._looking.execute(LAPSE_DUTY)

    def recorded(self) -> None:
        """Returns once everything is acked; what is parked may stay."""
        wait_for(lambda: not self.operations(UNACKED), 30, "everything to be recorded")

    def restarts(self, *, recycling: bool = False) -> None:
        """The same process again: it finishes everything, and leaves when it is told to."""
        with self.relay(recycling=recycling) as successor:
            wait_for(lambda: not self.left() or not successor.alive, 40, "the successor to finish")
            assert successor.terminate() == 0, successor.text[-2000:]
        assert not self.left()

    def judge(self, unrecorded: set[str], *, most: int = IN_FLIGHT) -> list[Arrived]:
        """Nothing lost, first arrivals in order, copies alike, and none but of what was not recorded at a crash."""
        arrived = self.broker.read(self.route, len(self.accepted))
        counts = Counter(one.envelope.operation for one in arrived if not one.envelope.replayed)
        firsts: dict[str, list[str]] = {}
        for operation in counts:  # in the order of arrival
            firsts.setdefault(self._key(operation), []).append(operation)
        expected: dict[str, list[str]] = {}
        for key, operation in self.accepted:
            expected.setdefault(key, []).append(operation)
        assert set(counts) == {operation for _, operation in self.accepted}, "lost"
        assert firsts == expected, "first arrivals out of order"
        repeated = {operation for operation, number in counts.items() if number > 1}
        assert repeated <= unrecorded, "what was recorded was sent again"
        assert len(repeated) <= most, "more was sent again than was in flight"
        wires = {(one.envelope.operation, one.envelope.replayed, one.wire) for one in arrived}
        assert len(wires) == len({wire[:2] for wire in wires}), "copies differ"
        return arrived

    def _key(self, operation: str) -> str:
        return f"k{int(operation.removeprefix('op-')) % KEYS}"
