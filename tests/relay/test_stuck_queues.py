"""On RabbitMQ: what a full queue does not take keeps nobody waiting but its own keys, and flows in order once there is room."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import LiteralString

from aio_pika.abc import AbstractChannel

from conformance.harness import Arrived
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay import outbox
from fencepost.relay.publisher import Route
from fencepost.relay.sidecar import Relay
from fencepost.schemas.event import Event
from support.database import Database
from support.relaying import Noted, relay
from support.relays import until
from support.services import Services

ROOM = 2
SET_ASIDE: LiteralString = """
SELECT array_agg(reason ORDER BY seq) = '{nacked,behind,behind}' AND max(attempts) > 2 FROM fencepost.parked"""
ALL_PUBLISHED: LiteralString = """
SELECT NOT EXISTS (SELECT FROM fencepost.parked) AND NOT EXISTS (
    SELECT FROM fencepost.outbox o WHERE NOT EXISTS (
        SELECT FROM fencepost.ack a JOIN fencepost.tick t ON t.era = a.era AND t.n = a.acked_tick
        WHERE a.destination = 'events' AND a.slot = o.slot AND pg_visible_in_snapshot(o.xid, t.snap) AND o.seq <= t.hint))"""


class Shelved(Event, type="test.shelved", version=1):
    """What is for the place that takes nothing more."""


def file(database: Database, *operations: str) -> None:
    with database.connect() as conn:
        for operation in operations:
            outbox.enqueue(conn, Shelved(tenant="acme", operation=operation, ordering_key="files"))
            conn.commit()


def note(database: Database, *operations: str) -> None:
    with database.connect() as conn:
        for n, operation in enumerate(operations):
            outbox.enqueue(conn, Noted(tenant="acme", operation=operation, ordering_key=operation, n=n))
            conn.commit()


@contextmanager
def running(under_test: Relay) -> Generator[Relay]:
    thread = threading.Thread(target=under_test.run, daemon=True)
    thread.start()
    try:
        yield under_test
    finally:
        under_test.stop()
        thread.join(30)
        assert not thread.is_alive()


def operations(arrived: list[Arrived]) -> list[str]:
    return [a.envelope.operation for a in arrived]


def test_a_full_queue_keeps_no_other_queue_of_its_exchange_waiting(database18: Database, services: Services) -> None:
    on = OnRabbit(services.rabbitmq())
    free = on.route("free")
    full = on.route("full", {"x-max-length": ROOM, "x-overflow": "reject-publish"})

    async def bind(channel: AbstractChannel) -> None:
        queue = await channel.get_queue(full.to)
        await queue.bind(free.to, "full")

    on.on_channel(bind)
    routes = [Route("test.shelved", free.to, "full"), Route("*", free.to, "free")]
    filed = [f"f{n}" for n in range(1, 7)]
    with running(relay(database18.dsn, on, services, routes)), database18.connect(autocommit=True) as conn:
        note(database18, "n0")
        file(database18, *filed[:ROOM])
        assert operations(on.read(free, 1)) == ["n0"]  # the control
        until(conn, ALL_PUBLISHED)
        file(database18, *filed[ROOM : ROOM + 3])
        found: list[str] = []
        for n in range(1, 30):
            note(database18, *[f"n{n}-{m}" for m in range(5)])
            found += operations(on.read(free, 5))
            assert len(found) == 5 * n
        assert len(found) == len(set(found))
        until(conn, SET_ASIDE)
        file(database18, filed[-1])
        until(conn, "SELECT count(*) = 4 FROM fencepost.parked")
        drained: list[str] = []
        while len(drained) < len(filed):
            drained += operations(on.read(full, min(ROOM, len(filed) - len(drained))))
        until(conn, ALL_PUBLISHED)
    assert drained == filed
    assert on.read(full, 0, within=1) == []
