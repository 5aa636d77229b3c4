"""A destination in structured mode gets the same events: confirmed, refused and sent again by the same rules."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from conformance.harness import SOURCE, Broker, answers, event, fingerprint, send
from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import LIMIT, OnRabbit
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.publisher import CONFIRMED, Answer, ParkReason, Publisher
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.schemas import json_format
from support.services import Services


@pytest.fixture(params=["kafka", "rabbitmq"])
def broker(request: pytest.FixtureRequest, services: Services) -> Broker:
    return OnKafka(services.kafka()) if request.param == "kafka" else OnRabbit(services.rabbitmq())


@pytest.fixture
def publisher(broker: Broker, services: Services) -> Iterator[Publisher]:
    made: Publisher
    if isinstance(broker, OnKafka):
        made = KafkaPublisher(
            services.kafka().bootstrap, source=SOURCE, max_message_bytes=LIMIT, mode="structured", delivery_timeout=8.0
        )
    else:
        made = RabbitPublisher(services.rabbitmq().url, source=SOURCE, max_message_bytes=LIMIT, mode="structured")
    made.open(time.monotonic() + 20)
    yield made
    made.close(time.monotonic() + 5)


def test_all_copies_are_one_document_with_the_payload_in_it(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    batch = [event(route, seq, f"k{seq}") for seq in (1, 2, 3)]
    spaced = batch[2].row._replace(payload=batch[2].row.payload + b"\n")
    batch[2] = batch[2]._replace(row=spaced)
    for _ in range(2):
        assert send(publisher, batch) == [CONFIRMED] * 3

    arrived = broker.read(route, 6)
    by_id = {sent.row.event_id: sent.row for sent in batch}
    copies: dict[object, set[str]] = {}
    for one in arrived:
        row = by_id[one.envelope.id]
        one.envelope.verify()
        assert (one.envelope.payload, one.envelope.sequence, one.envelope.epoch) == (row.payload, row.seq, row.epoch)
        assert one.envelope.attributes["traceparent"].startswith("00-0af7")
        copies.setdefault(row.event_id, set()).add(fingerprint(one))
        body = one.envelope.body
        assert body is not None and body == json_format.encode(one.envelope)
        assert ("data_base64" if row is spaced else "data") in json.loads(body)
    assert [len(found) for found in copies.values()] == [1, 1, 1]


def test_what_cannot_become_a_document_or_is_too_large_is_refused_alone(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    # In binary mode this payload fits: as base64 it is a third larger.
    big = event(route, 2, "b")
    big = big._replace(row=big.row._replace(payload=b" " * (LIMIT - 30_000)))
    bad = event(route, 3, "c")
    bad = bad._replace(row=bad.row._replace(attributes='["not an object"]'))

    outcomes = send(publisher, [event(route, 1, "a"), big, bad, event(route, 4, "d")])

    assert answers(outcomes) == [Answer.CONFIRMED, Answer.REFUSED, Answer.REFUSED, Answer.CONFIRMED]
    assert [outcome.reason for outcome in outcomes[1:3]] == [ParkReason.TOO_LARGE, ParkReason.UNDECODABLE]
    assert sorted(one.envelope.sequence for one in broker.read(route, 2)) == [1, 4]
