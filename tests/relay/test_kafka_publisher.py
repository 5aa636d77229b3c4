"""What only Kafka does: a local queue, batches that are refused whole, callbacks, options that could end a guarantee."""

import contextlib
import json
import random
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from conformance.harness import SOURCE, answers, event, send, send_until_confirmed
from conformance.on_kafka import DELIVERY_SECONDS, OnKafka
from fencepost.relay import kafka_topics
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.kafka_client import Client
from fencepost.relay.kafka_topics import Topics
from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, Outgoing, ParkReason, Route
from fencepost.schemas.errors import ConfigError
from support.processes import wait_for
from support.services import Kafka, Services, TopicAdmin, unique

AGAIN = {Answer.NACKED, Answer.UNKNOWN, Answer.WITHHELD}


@pytest.fixture
def kafka(services: Services) -> Kafka:
    return services.kafka()


@pytest.fixture
def on(kafka: Kafka) -> OnKafka:
    return OnKafka(kafka)


@contextlib.contextmanager
def opened(publisher: KafkaPublisher) -> Generator[KafkaPublisher]:
    publisher.open(time.monotonic() + 20)
    try:
        yield publisher
    finally:
        publisher.close(time.monotonic() + 5)


def small_topic(kafka: Kafka, limit: int) -> Route:
    """A topic that takes batches of at most `limit` bytes."""
    if not kafka.real:
        pytest.skip("the stand-in has no limits of its own")
    name = unique("small")
    admin = cast(TopicAdmin, AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}))
    topic = NewTopic(name, 1, 1, config={"max.message.bytes": str(limit)})
    admin.create_topics([topic], operation_timeout=15)[name].result(timeout=15)
    return Route("*", name)


def test_a_full_local_queue_is_back_pressure_and_not_loss(kafka: Kafka, on: OnKafka) -> None:
    route = on.destination()
    with opened(KafkaPublisher(kafka.bootstrap, source=SOURCE, max_queued=10, delivery_timeout=10)) as publisher:
        batch = [event(route, seq, f"k{seq % 7}") for seq in range(1, 501)]
        assert send(publisher, batch, 40) == [CONFIRMED] * 500
    assert len(on.read(route, 500)) == 500


def test_a_send_whose_deadline_is_nearer_than_the_delivery_timeout_sends_nothing(on: OnKafka) -> None:
    route = on.destination()
    with opened(on.publisher()) as publisher:
        assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
        assert answers(send(publisher, [event(route, 2)], DELIVERY_SECONDS - 0.1)) == [Answer.WITHHELD]
        assert send(publisher, [event(route, 3)]) == [CONFIRMED]
    assert [one.envelope.sequence for one in on.read(route, 2)] == [1, 3]


def test_events_that_fit_one_by_one_are_confirmed_though_a_batch_of_them_would_not_fit(
    kafka: Kafka, on: OnKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A limit that is told too late is not known, and a batch is then refused as a whole.
    monkeypatch.setattr(kafka_topics, "LIMIT_SECONDS", 10)
    route = small_topic(kafka, 5_000)
    with opened(on.publisher()) as publisher:
        batch = [event(route, seq, f"k{seq}", size=9_000 if seq == 10 else 1_000) for seq in range(1, 41)]
        outcomes = send(publisher, batch)
        assert outcomes[9].answer is Answer.REFUSED
        assert outcomes[9].reason is ParkReason.TOO_LARGE
        assert answers(outcomes[:9] + outcomes[10:]) == [Answer.CONFIRMED] * 39
    assert len(on.read(route, 39)) == 39


def test_a_batch_refused_by_a_limit_nobody_told_blames_only_the_guilty(kafka: Kafka, on: OnKafka) -> None:
    """Compression hides the size: the broker's answer for whole batches is all there is."""
    route = small_topic(kafka, 3_000)
    noisy = KafkaPublisher(
        kafka.bootstrap, source=SOURCE, delivery_timeout=DELIVERY_SECONDS, options={"compression.type": "gzip"}
    )
    with opened(noisy) as publisher:
        batch = [event(route, seq, f"k{seq}") for seq in range(1, 41)]
        guilty = event(route, 41, "guilty")
        payload = json.dumps({"pad": random.Random(7).randbytes(10_000).hex()}).encode()
        guilty = guilty._replace(row=guilty.row._replace(payload=payload))
        left = [*batch, guilty]
        refused: list[int] = []
        until = time.monotonic() + 40
        while left:
            assert time.monotonic() < until
            outcomes = send(publisher, left, 15)
            refused += [s.row.seq for s, o in zip(left, outcomes, strict=True) if o.reason is ParkReason.TOO_LARGE]
            left = [s for s, o in zip(left, outcomes, strict=True) if o.answer in AGAIN]
        assert refused == [41]
    assert {one.envelope.sequence for one in on.read(route, 40)} == set(range(1, 41))


def test_a_topic_is_not_created_by_asking_and_is_used_once_it_exists(kafka: Kafka, on: OnKafka) -> None:
    if not kafka.real:
        pytest.skip("the stand-in makes topics")
    name = unique("later")
    route = Route("*", name)
    with opened(on.publisher()) as publisher:
        assert send(publisher, [event(route, 1)])[0].reason is ParkReason.NO_SUCH_TOPIC
        admin = cast(TopicAdmin, AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}))
        assert name not in cast(Any, admin.list_topics(timeout=10)).topics
        admin.create_topics([NewTopic(name, 1, 1)], operation_timeout=15)[name].result(timeout=15)
        until = time.monotonic() + 15
        outcomes: list[Outcome] = []
        while outcomes != [CONFIRMED]:
            assert time.monotonic() < until
            outcomes = send(publisher, [event(route, 2)])
    assert [one.envelope.sequence for one in on.read(route, 1)] == [2]


def test_a_callback_of_the_caller_that_raises_cannot_stop_the_deliveries(on: OnKafka) -> None:
    route = on.destination()

    def explode(_: Future[list[Outcome]]) -> None:
        raise RuntimeError("the caller's own")

    with opened(on.publisher()) as publisher:
        first = publisher.send([event(route, 1)], time.monotonic() + 20)
        first.add_done_callback(explode)
        assert first.result(timeout=21) == [CONFIRMED]
        assert send(publisher, [event(route, 2)]) == [CONFIRMED]
    assert len(on.read(route, 2)) == 2


@pytest.mark.timeout(120)
def test_a_restarted_broker_gets_what_it_missed(kafka: Kafka, on: OnKafka) -> None:
    if kafka.node is None:
        pytest.skip("the broker is not ours to control")
    route = on.destination()
    with opened(on.publisher(impatient=True)) as publisher:
        assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
        kafka.node.stop()
        try:
            assert set(answers(send(publisher, [event(route, 9)], 5))) <= {Answer.UNKNOWN, Answer.WITHHELD}
        finally:
            kafka.node.start()
        send_until_confirmed(publisher, [event(route, seq) for seq in (2, 3)])
    assert {1, 2, 3} <= {one.envelope.sequence for one in on.read(route, 3)}


SASL = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "SECRET"}


@pytest.mark.parametrize(
    ("bootstrap", "options"),
    [
        ("broker.example:9092", SASL | {"security.protocol": "SASL_PLAINTEXT"}),
        ("127.0.0.1:9092,broker.example:9092", SASL | {"security.protocol": "sasl_plaintext"}),
        (
            "broker.example:9092",
            SASL | {"security.protocol": "SASL_SSL", "enable.ssl.certificate.verification": "false"},
        ),
        ("broker.example:9092", {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}),
    ],
)
def test_credentials_in_the_clear_and_unverified_servers_are_refused(bootstrap: str, options: dict[str, str]) -> None:
    KafkaPublisher("127.0.0.1:9092", source=SOURCE, options=SASL | {"security.protocol": "SASL_PLAINTEXT"})
    KafkaPublisher(bootstrap, source=SOURCE, options=SASL | {"security.protocol": "SASL_SSL"})
    with pytest.raises(ConfigError) as caught:
        KafkaPublisher(bootstrap, source=SOURCE, options=options)
    assert "SECRET" not in str(caught.value)
    KafkaPublisher(bootstrap, source=SOURCE, options=options, insecure=True)


@pytest.mark.parametrize(
    "name",
    ["acks", "enable.idempotence", "message.timeout.ms", "bootstrap.servers", "sasl.kerberos.kinit.cmd", "debug"],
)
def test_an_option_that_could_end_a_guarantee_is_refused_by_name(name: str) -> None:
    KafkaPublisher("127.0.0.1:9092", source=SOURCE, options={"linger.ms": "1"})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        KafkaPublisher("127.0.0.1:9092", source=SOURCE, options={name: "SECRET"}, insecure=True)


def test_a_producer_that_failed_for_good_is_replaced_and_its_events_are_unknown(on: OnKafka) -> None:
    route = on.destination()
    with opened(on.publisher()) as publisher:
        assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
        future = publisher.send([event(route, seq) for seq in range(2, 102)], time.monotonic() + 20)
        client = publisher._clients.current  # pyright: ignore[reportPrivateUsage]
        assert client is not None
        publisher._clients.failed(client, KafkaError(KafkaError._FATAL))  # pyright: ignore[reportPrivateUsage]
        assert send(publisher, [event(route, 102, "other")]) == [CONFIRMED]
        assert set(answers(future.result(timeout=21))) <= {Answer.CONFIRMED, Answer.UNKNOWN}
        assert publisher._clients.current is not client  # pyright: ignore[reportPrivateUsage]
        confirmed = answers(future.result()).count(Answer.CONFIRMED)
    assert len(on.read(route, confirmed + 2)) >= confirmed + 2


def test_what_follows_an_event_that_died_with_its_producer_does_not_overtake_it_on_the_next(
    kafka: Kafka, on: OnKafka
) -> None:
    route = on.destination()
    # A linger longer than the test: only what is flushed leaves this producer, so the broker never sees the copy in it.
    slow = KafkaPublisher(kafka.bootstrap, source=SOURCE, delivery_timeout=60, options={"linger.ms": "50000"})
    with opened(slow) as publisher:
        clients = publisher._clients  # pyright: ignore[reportPrivateUsage]

        def held(outgoing: Outgoing) -> tuple[Client, Future[list[Outcome]]]:
            future = publisher.send([outgoing], time.monotonic() + 80)
            client = clients.current
            assert client is not None
            wait_for(lambda: len(client.producer) == 1, 20, "the event is in the producer")
            return client, future

        client, control = held(event(route, 1))
        client.producer.flush(20)
        assert control.result(timeout=21) == [CONFIRMED]  # the allowed control
        client, first = held(event(route, 2))
        clients._configuration["linger.ms"] = "5"  # pyright: ignore[reportPrivateUsage] - of the next producer
        clients.failed(client, KafkaError(KafkaError._FATAL))  # pyright: ignore[reportPrivateUsage]
        second = publisher.send([event(route, 3)], time.monotonic() + 80)
        other = publisher.send([event(route, 4, "other")], time.monotonic() + 80)

        assert answers(first.result(timeout=21)) == [Answer.UNKNOWN]
        assert answers(second.result(timeout=21)) == [Answer.WITHHELD]
        assert answers(other.result(timeout=21)) == [Answer.CONFIRMED]
        assert send(publisher, [event(route, 2), event(route, 3)], 80) == [CONFIRMED] * 2
    assert [one.envelope.sequence for one in on.read(route, 4) if one.envelope.ordering_key == "k"] == [1, 2, 3]


@pytest.mark.parametrize("pause", [60.0, 0.0])
def test_a_topics_limit_that_was_not_told_in_time_is_asked_for_again_later(
    kafka: Kafka, on: OnKafka, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    if not kafka.real:
        pytest.skip("the stand-in has no limits of its own")
    route, settings = on.destination(), {"bootstrap.servers": kafka.bootstrap}
    producer = Producer({**settings, "log_level": 0})

    def told() -> bool:
        found = topics.find(producer, route.to, time.monotonic() + 10)
        assert found is not None and found.reason is None
        return found.max_bytes is not None

    monkeypatch.setattr(kafka_topics, "LIMIT_SECONDS", 10)
    topics = Topics(settings, refresh=0)
    assert told()  # the control
    topics = Topics(settings, refresh=0)
    monkeypatch.setattr(kafka_topics, "LIMIT_AGAIN_SECONDS", pause)
    monkeypatch.setattr(kafka_topics, "LIMIT_SECONDS", 1e-6)
    assert not told()
    monkeypatch.setattr(kafka_topics, "LIMIT_SECONDS", 10)
    assert told() is (pause == 0)
