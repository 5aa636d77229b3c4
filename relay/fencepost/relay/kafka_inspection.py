"""Looking at topics on a client of its own: never in the way of what the publisher sends, and nothing it knew is repeated."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import cast

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from fencepost.relay.kafka_topics import Topics
from fencepost.relay.publisher import Place
from fencepost.schemas.errors import Unreachable


class Inspector:
    """Asks the broker each time; its client exists from the first question on."""

    def __init__(self, bootstrap: str, options: Mapping[str, str]) -> None:
        self._bootstrap = bootstrap
        self._configuration = {"bootstrap.servers": bootstrap, **options}
        self._topics = Topics(self._configuration, 0.0)
        self._client: AdminClient | None = None
        self._asking = threading.Lock()

    def inspect(self, names: Sequence[str], deadline: float) -> dict[str, Place]:
        """What the broker says of these topics now, or `Unreachable` when it does not before `deadline` (monotonic)."""
        found: dict[str, Place] = {}
        with self._asking:
            if self._client is None:
                self._client = AdminClient({"log_level": 0, **self._configuration})
            for name in names:
                self._topics.forget(name)
                # Of a producer only the question about topics is used, and that one they share.
                topic = self._topics.find(cast(Producer, self._client), name, deadline)
                if topic is None:
                    raise Unreachable(f"Kafka does not answer about {name}", address=self._bootstrap, field="bootstrap")
                found[name] = Place(topic.reason, topic.max_bytes)
        return found
