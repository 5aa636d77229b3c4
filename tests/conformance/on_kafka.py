"""Kafka under the suite."""

import time

from confluent_kafka import Consumer, TopicPartition

from conformance.harness import READ_SECONDS, SOURCE, Arrived, Features
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.publisher import ParkReason, Route
from fencepost.schemas import kafka_binding
from support.services import Kafka, unique

DELIVERY_SECONDS = 10.0
IMPATIENT_SECONDS = 3.0
LIMIT = 300_000
PARTITIONS = 3
QUIET_SECONDS = 0.5


class OnKafka:
    """Topics with three partitions; `read` goes through every partition from its beginning."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self.features = Features(
            name="kafka",
            missing=ParkReason.NO_SUCH_TOPIC,
            unroutable=None,
            pausable=kafka.node is not None,
            limit=LIMIT,
            shortest=IMPATIENT_SECONDS + 1.5,
        )

    def publisher(self, *, impatient: bool = False) -> KafkaPublisher:
        return KafkaPublisher(
            self._kafka.bootstrap,
            source=SOURCE,
            delivery_timeout=IMPATIENT_SECONDS if impatient else DELIVERY_SECONDS,
            max_message_bytes=LIMIT,
        )

    def astray(self) -> KafkaPublisher:
        options = {"sasl.username": "u", "sasl.password": "SECRET", "sasl.mechanism": "PLAIN"}
        return KafkaPublisher("127.0.0.1:1", source=SOURCE, options=options | {"security.protocol": "SASL_PLAINTEXT"})

    def destination(self) -> Route:
        return Route("*", self._kafka.topic(PARTITIONS))

    def missing(self) -> Route:
        return Route("*", unique("missing"))

    def nowhere(self) -> Route:
        raise NotImplementedError

    def read(self, route: Route, expected: int, within: float = READ_SECONDS) -> list[Arrived]:
        consumer = Consumer(
            {
                "bootstrap.servers": self._kafka.bootstrap,
                "group.id": unique("reader"),
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        found: list[Arrived] = []
        try:
            topic = consumer.list_topics(route.to, timeout=10).topics[route.to]
            consumer.assign([TopicPartition(route.to, number, 0) for number in topic.partitions])
            until = time.monotonic() + within
            while time.monotonic() < until:
                message = consumer.poll(QUIET_SECONDS if len(found) >= expected else 1.0)
                if message is None:
                    if len(found) >= expected and _at_the_end(consumer):
                        break
                    continue
                assert message.error() is None, message.error()
                headers = [(name, _bytes(value)) for name, value in _pairs(message.headers())]
                envelope = kafka_binding.decode(headers, message.key(), message.value())
                found.append(Arrived((message.key(), tuple(headers), message.value()), envelope))
        finally:
            consumer.close()
        return found

    def pause(self) -> None:
        assert self._kafka.node is not None
        self._kafka.node.pause()

    def resume(self) -> None:
        assert self._kafka.node is not None
        self._kafka.node.resume()


def _at_the_end(consumer: Consumer) -> bool:
    """Whether nothing is left in any partition: copies count as messages, and one partition may be slower than others."""
    return all(
        max(0, place.offset) >= consumer.get_watermark_offsets(place, timeout=10)[1]
        for place in consumer.position(consumer.assignment())
    )


def _pairs(headers: object) -> list[tuple[str, object]]:
    assert isinstance(headers, list)
    return headers  # pyright: ignore[reportUnknownVariableType]


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value
