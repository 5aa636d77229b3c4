"""What Kafka says of a topic: its id, which tells it from an earlier one of its name, and how long it keeps events."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, cast

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from fencepost.consumer.standing import BrokerState

__all__ = ["Asking", "TopicIds", "retentions"]

log = logging.getLogger("fencepost.consumer.kafka")

REQUEST_SECONDS = 3.0
_OF_THE_CONNECTION = ("bootstrap.servers", "security.", "sasl.", "ssl.", "client.id", "log_level")


class _Described(Protocol):
    @property
    def topic_id(self) -> object: ...


class _Describes(Protocol):
    """What we call of the admin client, whose own types leave the futures open."""

    def describe_topics(self, topics: TopicCollection, *, request_timeout: float) -> dict[str, Future[_Described]]: ...


class _Lists(Protocol):
    def list_topics(self, topic: str | None = None, timeout: float = -1) -> object: ...


class _Entry(Protocol):
    @property
    def value(self) -> str | None: ...


class _DescribesConfigs(Protocol):
    def describe_configs(
        self, resources: list[ConfigResource], *, request_timeout: float
    ) -> dict[ConfigResource, Future[Mapping[str, _Entry]]]: ...


class _Cluster(Protocol):
    @property
    def controller_id(self) -> int: ...
    @property
    def brokers(self) -> Mapping[int, object]: ...


class TopicIds:
    """The ids that a cluster gives its topics, each asked for once, within ``REQUEST_SECONDS``."""

    def __init__(self, config: Mapping[str, object], cluster: _Cluster) -> None:
        self._config = {name: value for name, value in config.items() if name.startswith(_OF_THE_CONNECTION)}
        # Without a controller nobody answers, and a request would only run into its deadline.
        self._answers = cluster.controller_id in cluster.brokers
        self._known: dict[str, str] = {}

    def of(self, topic: str) -> str:
        """The id of a topic; empty where the broker does not say."""
        if not self._answers:
            return ""
        if topic not in self._known:
            self._known[topic] = self._ask(topic)
        return self._known[topic]

    def _ask(self, topic: str) -> str:
        admin = cast(_Describes, AdminClient(cast(dict[str, Any], self._config)))
        try:
            described = admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_SECONDS)
            return str(described[topic].result(timeout=REQUEST_SECONDS).topic_id)
        except (KafkaException, TimeoutError) as error:
            log.info("%s: no topic id: %s", topic, type(error).__name__)
            return ""


class Asking:
    """Whether a cluster answers, asked on a client of its own that is made when it is first needed."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = {name: value for name, value in config.items() if name.startswith(_OF_THE_CONNECTION)}
        self._client: _Lists | None = None

    def state(self) -> BrokerState:
        """Connected or unreachable, within ``REQUEST_SECONDS``; for one thread."""
        try:
            if self._client is None:
                self._client = cast(_Lists, AdminClient(cast(dict[str, Any], self._config)))
            self._client.list_topics(timeout=REQUEST_SECONDS)
        except KafkaException:
            return BrokerState.UNREACHABLE
        return BrokerState.CONNECTED


def retentions(config: Mapping[str, object], topics: Iterable[str]) -> dict[str, int]:
    """How long each topic keeps events, in milliseconds, -1 for ever; a topic that does not say is left out.

    A compacted topic keeps the last event of every key for ever.
    """
    ours = {name: value for name, value in config.items() if name.startswith(_OF_THE_CONNECTION)}
    asked = {ConfigResource(ResourceType.TOPIC, topic): topic for topic in topics if not topic.startswith("^")}
    found: dict[str, int] = {}
    try:
        admin = cast(_DescribesConfigs, AdminClient(cast(dict[str, Any], ours)))
        answers = admin.describe_configs(list(asked), request_timeout=REQUEST_SECONDS)
    except (KafkaException, ValueError) as error:
        log.info("no retention of topics: %s", type(error).__name__)
        return found
    for resource, answer in answers.items():
        try:
            entries = answer.result(timeout=REQUEST_SECONDS)
            policy, kept = entries["cleanup.policy"].value or "", entries["retention.ms"].value
            found[asked[resource]] = -1 if "delete" not in policy else max(-1, int(kept or -1))
        except (KafkaException, TimeoutError, KeyError, ValueError) as error:
            log.info("%s: no retention: %s", asked[resource], type(error).__name__)
    return found
