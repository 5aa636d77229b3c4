"""Looking at topics or exchanges: what exists, what does not, and a broker that does not answer; nothing is sent."""

import time

import pytest

from conformance.harness import Broker
from fencepost.relay.publisher import Inspectable, Place, Publisher
from fencepost.schemas.errors import Unreachable


def inspected(publisher: Publisher, *names: str, seconds: float = 10.0) -> dict[str, Place]:
    assert isinstance(publisher, Inspectable)
    return publisher.inspect(names, time.monotonic() + seconds)


def test_what_exists_is_told_from_what_does_not_and_nothing_arrives(broker: Broker, publisher: Publisher) -> None:
    route, missing = broker.destination(), broker.missing()

    found = inspected(publisher, route.to, missing.to)

    assert found[route.to].reason is None
    assert (found[route.to].max_bytes or 1) > 0
    assert found[missing.to].reason is broker.features.missing
    assert broker.read(route, 0, within=1.0) == []


def test_what_was_created_meanwhile_is_seen(broker: Broker, publisher: Publisher) -> None:
    assert inspected(publisher, broker.missing().to)
    route = broker.destination()
    assert inspected(publisher, route.to)[route.to].reason is None


def test_a_silent_broker_is_unreachable_within_the_deadline(broker: Broker, publisher: Publisher) -> None:
    if not broker.features.pausable:
        pytest.skip("the broker is not ours to pause")
    route = broker.destination()
    assert inspected(publisher, route.to)
    broker.pause()
    try:
        began = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            inspected(publisher, route.to, seconds=1.5)
        assert time.monotonic() - began < 6
        assert "guest:" not in str(caught.value)
    finally:
        broker.resume()
    # The client may still have to find out that its connection is good again.
    until = time.monotonic() + 30
    while True:
        try:
            assert inspected(publisher, route.to, seconds=5)[route.to].reason is None
            return
        except Unreachable:
            assert time.monotonic() < until
