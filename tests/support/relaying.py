"""A relay under test, in this process or as a child that can be killed, and the events it publishes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conformance.harness import Broker
from conformance.on_kafka import OnKafka
from fencepost.relay import outbox
from fencepost.relay.destination import Destination
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.pace import Pace
from fencepost.relay.parking import RetryPolicy
from fencepost.relay.publisher import Publisher, Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.relay.sidecar import Relay
from fencepost.schemas.event import Event
from support.database import Database
from support.processes import Child
from support.services import Services

PACE = Pace(lease=8.0, refresh=0.3, confirm=2.5, poll_max=0.05, drain=3.0, retry=RetryPolicy(base=0.3, cap=1.0))
# Where no broker is away: a slow one is waited for, and makes no copies.
PATIENT = replace(PACE, lease=60.0, confirm=20.0)
# Of the confirm timeout: what Kafka's client gives up is told before it.
DELIVERY = 0.8

CHILD = """
import signal, sys
from fencepost.relay.publisher import Route
from support.relaying import DELIVERY, PACE, made
from fencepost.relay.destination import Destination
from fencepost.relay.sidecar import Relay
kind, address, dsn, to, key, lease, confirm = sys.argv[1:8]
from dataclasses import replace
pace = replace(PACE, lease=float(lease), confirm=float(confirm))
make = lambda source: made(kind, address, source, delivery_timeout=DELIVERY * pace.confirm)
relay = Relay(dsn, [Destination("events", kind, [Route("*", to, key)], make)], pace=pace)
signal.signal(signal.SIGTERM, lambda *_: relay.stop())
print("running", flush=True)
print(relay.run(), flush=True)
"""


class Noted(Event, type="test.noted", version=1):
    """An event of the tests: the n-th of its key."""

    n: int
    pad: str = ""


def made(kind: str, address: str, source: str, *, delivery_timeout: float = DELIVERY * PACE.confirm) -> Publisher:
    """A publisher with short deadlines, unless told otherwise."""
    if kind == "kafka":
        return KafkaPublisher(
            address,
            source=source,
            delivery_timeout=delivery_timeout,
            max_message_bytes=300_000,
            metadata_refresh=0.5,
        )
    return RabbitPublisher(address, source=source, max_message_bytes=300_000)


def kind_of(broker: Broker) -> str:
    """What a destination calls this broker."""
    return "kafka" if isinstance(broker, OnKafka) else "rabbitmq"


def address_of(broker: Broker, services: Services) -> str:
    """Where it is."""
    return services.kafka().bootstrap if isinstance(broker, OnKafka) else services.rabbitmq().url


def relay(
    dsn: str,
    broker: Broker,
    services: Services,
    routes: Sequence[Route],
    *,
    state: Path | None = None,
    pace: Pace = PATIENT,
) -> Relay:
    """A relay in this process, on a broker of the conformance suite."""
    kind, address, timeout = kind_of(broker), address_of(broker, services), DELIVERY * pace.confirm
    destination = Destination(
        "events", kind, routes, lambda source: made(kind, address, source, delivery_timeout=timeout)
    )
    return Relay(dsn, [destination], state=state, pace=pace)


def child(dsn: str, broker: Broker, services: Services, route: Route, folder: Path, *, pace: Pace = PACE) -> Child:
    """A relay in a process of its own, with the lease and the confirm timeout of this pace."""
    times = str(pace.lease), str(pace.confirm)
    arguments = [kind_of(broker), address_of(broker, services), dsn, route.to, route.routing_key, *times]
    paths = Path(__file__).parents[1], Path(__file__).parents[2] / "compose"
    return Child.script(CHILD, folder=folder, arguments=arguments, PYTHONPATH=":".join(map(str, paths)))


def enqueue(database: Database, count: int, *, keys: int = 5, first: int = 0, pad: str = "") -> list[str]:
    """Commits `count` events over `keys` keys, each in a transaction of its own; returns their operations in commit order."""
    operations: list[str] = []
    with database.connect() as conn:
        for n in range(first, first + count):
            operations.append(f"op-{n}")
            with conn.transaction():
                outbox.enqueue(
                    conn, Noted(tenant="acme", operation=f"op-{n}", ordering_key=f"k{n % keys}", n=n, pad=pad)
                )
    return operations
