"""Outages and poison as brokers really have them, over a whole relay: nothing counts as published that was not confirmed."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
from aio_pika.abc import AbstractChannel

from conformance.conftest import BROKERS
from conformance.harness import Arrived, Broker
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay import outbox
from fencepost.relay.destination import Destination
from fencepost.relay.publisher import Route
from fencepost.relay.sidecar import Relay
from fencepost.schemas.event import Event
from fencepost.schemas.health import HealthAddress
from support.brokers import held_back
from support.database import Database
from support.health import LOOPBACK, ask, becomes, metric, running
from support.processes import wait_for
from support.relaying import PACE, Noted, address_of, enqueue, kind_of, made
from support.relays import unacked
from support.services import Services

PARKED = "SELECT count(*) FROM fencepost.parked"
PUBLISHED = 'fencepost_relay_published_total{destination="events"}'
OLDEST = 'fencepost_relay_oldest_unsent_seconds{destination="events"}'
# More than a batch of them, and older than every good one.
POISON = (
    ("unknown_version", "digest = '\\x02'::bytea || substr(digest, 2)"),
    ("unknown_version", "content_type = 'application/cbor'"),
    ("undecodable", """attributes = '["no object"]'"""),
    ("undecodable", """attributes = '{"name": 1}'"""),
    ("undecodable", "payload = ''"),
    ("no_route", "type = 'gone.thing'"),
)


class Mended(Event, type="other.mended", version=1):
    """An event whose way appears later."""


Outage = Callable[[Broker, Services], AbstractContextManager[None]]


@pytest.fixture(params=sorted(BROKERS))
def broker(request: pytest.FixtureRequest, services: Services) -> Broker:
    name: str = request.param
    return BROKERS[name](services)


def relay(database: Database, on: Broker, services: Services, route: Route, batch: int = 2000) -> Relay:
    """A relay for events of the tests, that serves health."""
    kind, address = kind_of(on), address_of(on, services)
    routes = [replace(route, match="test.*"), replace(route, match="other.*")]
    to = Destination("events", kind, routes, lambda source: made(kind, address, source))
    pace = replace(PACE, batch=batch)
    return Relay(database.dsn, [to], pace=pace, health=HealthAddress(LOOPBACK, 0), look=0.2, stalled=30)


def count(database: Database, query: str) -> int:
    with database.connect(autocommit=True) as conn:
        row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def firsts(arrived: list[Arrived]) -> dict[str, list[str]]:
    """First arrivals of every key, in order."""
    found: dict[str, list[str]] = {}
    for one in arrived:
        operations = found.setdefault(one.envelope.ordering_key, [])
        if one.envelope.operation not in operations:
            operations.append(one.envelope.operation)
    return found


def expected(operations: list[str], keys: int = 5) -> dict[str, list[str]]:
    return {f"k{k}": operations[k::keys] for k in range(keys)}


@contextmanager
def killed(on: Broker, services: Services) -> Generator[None]:
    """The broker stops with every thread, is killed so, and comes back with what it had confirmed."""
    node = services.kafka().node if kind_of(on) == "kafka" else services.rabbitmq().node
    assert node is not None
    node.pause()
    try:
        yield
    finally:
        node.kill()
        node.start()


@contextmanager
def alarmed(on: Broker, services: Services) -> Generator[None]:
    """RabbitMQ has no memory left, and reads nothing from those who publish."""
    node = services.rabbitmq().node
    assert node is not None
    node.rabbitmqctl("set_vm_memory_high_watermark", "0")
    try:
        # The command is done before the connections have heard of it.
        wait_for(lambda: held_back(node), 60, "the alarm to reach every connection")
        yield
    finally:
        node.rabbitmqctl("set_vm_memory_high_watermark", "absolute", "1GB")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "outage"), [("kafka", killed), ("rabbitmq", killed), ("rabbitmq", alarmed)])
def test_nothing_that_was_on_its_way_in_an_outage_counts_as_published_and_all_of_it_arrives_afterwards(
    database18: Database, services: Services, name: str, outage: Outage
) -> None:
    on = BROKERS[name](services)
    if not on.features.pausable:
        pytest.skip("the broker is not ours to stop")
    route = on.destination()
    with running(relay(database18, on, services, route, batch=20)) as under_test:
        becomes(under_test, "ready")
        before = enqueue(database18, 10)
        wait_for(lambda: unacked(database18, "events") == 0, 30, "the control")
        loop = under_test.loops[0]
        with outage(on, services):
            after = enqueue(database18, 60, first=10)
            wait_for(lambda: loop.in_flight > 0 or loop.counters.trouble != "", 30, "events to be on their way")
            wait_for(lambda: loop.counters.trouble != "", 30, "the relay to say why it waits")
            wait_for(lambda: (metric(under_test, OLDEST) or 0) > 2, 30, "the age of the oldest unsent event to rise")
            assert metric(under_test, PUBLISHED) == 10
            assert unacked(database18, "events") == 60
            assert ask(under_test.health_port, "/livez").status == 200
        wait_for(lambda: unacked(database18, "events") == 0, 60, "everything to be published or parked")
        # A broker on its way up may still answer that something leads nowhere, which is parked and then sent again.
        wait_for(lambda: count(database18, PARKED) == 0, 60, "everything to be published")
        becomes(under_test, "ready")
    arrived = on.read(route, 70)
    assert firsts(arrived) == expected([*before, *after])
    wires: dict[str, set[tuple[object, ...]]] = {}
    for one in arrived:
        wires.setdefault(one.envelope.operation, set()).add(one.wire)
    assert all(len(copies) == 1 for copies in wires.values()), "copies differ"


def test_rows_that_cannot_be_read_are_parked_with_their_reason_and_stop_neither_the_others_nor_the_loop(
    database18: Database, broker: Broker, services: Services
) -> None:
    route = broker.destination()
    with database18.connect() as conn:
        for n in range(30):
            outbox.enqueue(conn, Noted(tenant="acme", operation=f"bad-{n}", ordering_key=f"bad-{n}", n=n))
            change = POISON[n % len(POISON)][1]
            conn.execute(f"UPDATE fencepost.outbox SET {change} WHERE operation = 'bad-{n}'".encode())
    good = enqueue(database18, 35)
    with running(relay(database18, broker, services, route, batch=16)) as under_test:
        wait_for(lambda: unacked(database18, "events") == 0, 30, "every row to be settled")
        # The reserved destination has its own loop.
        wait_for(lambda: count(database18, "SELECT count(*) FROM fencepost.parked") == 30, 30, "the bad ones")

        def counted(reason: str) -> float | None:
            return metric(under_test, f'fencepost_relay_parked_total{{destination="events",reason="{reason}"}}')

        wait_for(lambda: counted("unknown_version") == 10 and counted("undecodable") == 15, 30, "them to be counted")
        good += enqueue(database18, 5, first=35)
        wait_for(lambda: unacked(database18, "events") == 0, 30, "the loop to go on")
    assert firsts(broker.read(route, 40)) == expected(good)
    with database18.connect() as conn:
        parked = conn.execute("SELECT operation, reason, attempts, next_try_at FROM fencepost.parked").fetchall()
    assert {row[0]: row[1:] for row in parked} == {f"bad-{n}": (POISON[n % 6][0], 1, None) for n in range(30)}


def test_a_key_whose_second_event_is_returned_waits_in_order_and_its_neighbour_does_not(
    database18: Database, services: Services
) -> None:
    on = OnRabbit(services.rabbitmq())
    route = on.route("test.#")
    with database18.connect() as conn:
        for n in range(1, 6):
            for key in ("k1", "k2"):
                known = {"tenant": "acme", "operation": f"{key}-{n}", "ordering_key": key}
                outbox.enqueue(conn, Mended(**known) if (key, n) == ("k1", 2) else Noted(n=n, **known))
                conn.commit()

    async def bind(channel: AbstractChannel) -> None:
        await (await channel.get_queue(route.to)).bind(route.to, "other.#")

    with running(relay(database18, on, services, route)):
        wait_for(lambda: unacked(database18, "events") == 0, 30, "every row to be settled")
        assert firsts(on.read(route, 6)) == {"k1": ["k1-1"], "k2": [f"k2-{n}" for n in range(1, 6)]}
        wait_for(lambda: count(database18, "SELECT max(attempts) FROM fencepost.parked") > 1, 30, "a second failure")
        assert count(database18, "SELECT count(*) FROM fencepost.parked WHERE reason = 'behind'") == 3
        on.on_channel(bind)
        wait_for(lambda: count(database18, "SELECT count(*) FROM fencepost.parked") == 0, 30, "the key to flow")
    assert firsts(on.read(route, 4)) == {"k1": [f"k1-{n}" for n in range(2, 6)]}
