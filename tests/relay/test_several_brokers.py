"""Kafka and RabbitMQ in one relay: every destination gets what its routes say, and none waits for another."""

import contextlib
import threading
from collections.abc import Generator
from dataclasses import replace

import pytest

from conformance.harness import Arrived, Broker
from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay import outbox
from fencepost.relay.destination import Destination
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Publisher, Route
from fencepost.relay.sidecar import Relay
from fencepost.schemas.event import Event
from support.database import Database
from support.processes import wait_for
from support.relaying import DELIVERY, PACE, PATIENT, address_of, enqueue, kind_of, made
from support.relays import value
from support.services import Services


class Filed(Event, type="test.several", version=1):
    """For RabbitMQ only."""


@contextlib.contextmanager
def running(under_test: Relay) -> Generator[None]:
    """The relay at work in a thread of its own; it ends without an error."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            under_test.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        under_test.stop()
        thread.join(30)
    assert not thread.is_alive(), "the relay did not end"
    if failed:
        raise failed[0]


@pytest.fixture
def brokers(services: Services) -> dict[str, Broker]:
    return {"kafka": OnKafka(services.kafka()), "rabbitmq": OnRabbit(services.rabbitmq())}


def relay_to(
    database: Database,
    services: Services,
    brokers: dict[str, Broker],
    routes: dict[str, list[Route]],
    *,
    pace: Pace = PATIENT,
) -> Relay:
    """One relay with a destination on each broker."""

    def destination(name: str) -> Destination:
        kind, address = kind_of(brokers[name]), address_of(brokers[name], services)

        def make(source: str) -> Publisher:
            return made(kind, address, source, delivery_timeout=DELIVERY * pace.confirm)

        return Destination(name, kind, routes[name], make)

    found = [destination(name) for name in routes]
    with database.connect() as conn:
        for each in found:
            each.register(conn)
    return Relay(database.dsn, found, pace=replace(pace, drain=1.0))


def in_order(arrived: list[Arrived]) -> dict[str, list[str]]:
    """First arrivals by ordering key."""
    found: dict[str, list[str]] = {}
    for a in arrived:
        operations = found.setdefault(a.envelope.ordering_key, [])
        if a.envelope.operation not in operations:
            operations.append(a.envelope.operation)
    return found


def expected(operations: list[str], keys: int = 5) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for n, operation in enumerate(operations):
        found.setdefault(f"k{n % keys}", []).append(operation)
    return found


def test_one_event_goes_to_every_destination_with_a_route_and_to_no_other(
    database18: Database, services: Services, brokers: dict[str, Broker]
) -> None:
    on = {name: broker.destination() for name, broker in brokers.items()}
    routes = {
        "kafka": [Route("test.noted", on["kafka"].to)],
        "rabbitmq": [Route("test.*", on["rabbitmq"].to, on["rabbitmq"].routing_key)],
    }
    operations = enqueue(database18, 20)
    with database18.connect() as conn:
        outbox.enqueue(conn, Filed(tenant="acme", operation="filed"))
    summary = relay_to(database18, services, brokers, routes).run_once()
    assert (summary.published, summary.parked) == (41, 0)
    assert in_order(brokers["kafka"].read(on["kafka"], 20)) == expected(operations)
    assert in_order(brokers["rabbitmq"].read(on["rabbitmq"], 21)) == {**expected(operations), "filed": ["filed"]}


@pytest.mark.parametrize("silent", ["kafka", "rabbitmq"])
def test_a_silent_broker_stops_its_own_destination_and_no_other(
    database18: Database, services: Services, brokers: dict[str, Broker], silent: str
) -> None:
    if not brokers[silent].features.pausable:
        pytest.skip("the broker is not ours to pause")
    (other,) = set(brokers) - {silent}
    on = {name: broker.destination() for name, broker in brokers.items()}
    operations = enqueue(database18, 10)
    routes = {name: [route] for name, route in on.items()}
    with running(relay_to(database18, services, brokers, routes, pace=PACE)):
        wait_for(lambda: unsent(database18, silent) + unsent(database18, other) == 0, 30, "both to work")  # the control
        brokers[silent].pause()
        try:
            operations += enqueue(database18, 20, first=10)
            wait_for(lambda: unsent(database18, other) == 0, 20, "the other destination to go on")
            assert unsent(database18, silent) == 20
        finally:
            brokers[silent].resume()
        wait_for(lambda: unsent(database18, silent) == 0, 40, "the silent one to catch up")
    for name, broker in brokers.items():
        assert in_order(broker.read(on[name], 30)) == expected(operations), name


@pytest.mark.parametrize("relays", [1, 2])
def test_relays_share_two_brokers_and_keep_the_order_of_keys_on_both(
    database18: Database, services: Services, brokers: dict[str, Broker], relays: int
) -> None:
    on = {name: broker.destination() for name, broker in brokers.items()}
    routes = {name: [route] for name, route in on.items()}
    with contextlib.ExitStack() as stack:
        for _ in range(relays):
            stack.enter_context(running(relay_to(database18, services, brokers, routes)))
        owners = "SELECT count(DISTINCT (destination, owner)) FROM fencepost.slot WHERE owner IS NOT NULL AND destination <> '-'"
        with database18.connect(autocommit=True) as conn:
            wait_for(lambda: value(conn, owners) == 2 * relays, 30, "every relay to own slots of both")
        operations = enqueue(database18, 60)
        wait_for(lambda: unsent(database18, "kafka") + unsent(database18, "rabbitmq") == 0, 30, "everything to be sent")
    for name, broker in brokers.items():
        assert in_order(broker.read(on[name], 60)) == expected(operations), name


def unsent(database: Database, name: str) -> int:
    with database.connect(autocommit=True) as conn:
        row = conn.execute("SELECT fencepost._unsent(%(name)s, 1000)", {"name": name}).fetchone()
    assert row is not None
    return int(row[0])
