"""Each broker in turn, with a publisher that is open and is closed at the end."""

import time
from collections.abc import Callable, Iterator

import pytest

from conformance.harness import Broker
from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay.publisher import Publisher
from support.services import Services

BROKERS: dict[str, Callable[[Services], Broker]] = {
    "rabbitmq": lambda services: OnRabbit(services.rabbitmq()),
    "kafka": lambda services: OnKafka(services.kafka()),
}


@pytest.fixture(params=sorted(BROKERS))
def broker(request: pytest.FixtureRequest, services: Services) -> Broker:
    name: str = request.param
    return BROKERS[name](services)


@pytest.fixture
def publisher(broker: Broker) -> Iterator[Publisher]:
    yield from opened(broker.publisher())


@pytest.fixture
def impatient(broker: Broker) -> Iterator[Publisher]:
    """One for a broker that is stopped."""
    yield from opened(broker.publisher(impatient=True))


def opened(made: Publisher) -> Iterator[Publisher]:
    made.open(time.monotonic() + 20)
    yield made
    made.close(time.monotonic() + 5)
