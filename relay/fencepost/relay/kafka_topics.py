"""What is known about topics before anything is sent to them: existence, the largest message, the right to see them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, cast

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # the package re-exports them without saying so
    AdminClient,
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from fencepost.relay.publisher import ParkReason
from fencepost.schemas.errors import ConfigError, Unreachable

ASK_SECONDS = 2.0
LIMIT_SECONDS = 0.5
LIMIT_AGAIN_SECONDS = 60.0
RECHECK_MISSING_SECONDS = 1.0
SECOND_LOOK_SECONDS = 0.2
TOPICS_MAX = 10_000
BROKERS_OWN = -1

_NOT_NOW = frozenset(
    {
        KafkaError._TIMED_OUT,  # pyright: ignore[reportPrivateUsage]
        KafkaError._TRANSPORT,  # pyright: ignore[reportPrivateUsage]
        KafkaError._ALL_BROKERS_DOWN,  # pyright: ignore[reportPrivateUsage]
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_CONTROLLER,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
    }
)
"""Answers that another attempt may change."""


class _TopicMetadata(Protocol):
    error: KafkaError | None


class _ClusterMetadata(Protocol):
    topics: dict[str, _TopicMetadata]


class _Admin(Protocol):
    """What we call of the admin client, whose own types leave the futures open."""

    def describe_configs(
        self, resources: list[ConfigResource], *, request_timeout: float
    ) -> dict[ConfigResource, Future[dict[str, ConfigEntry]]]: ...

    def create_topics(
        self, new_topics: list[NewTopic], *, operation_timeout: float, request_timeout: float
    ) -> dict[str, Future[None]]: ...


@dataclass(frozen=True, slots=True)
class Topic:
    """What the broker last said. `reason` is set when nothing may be sent there; `max_bytes` is None when not told."""

    reason: ParkReason | None
    max_bytes: int | None
    checked: float


class Topics:
    """Looks topics up, without creating one by that, and remembers the answer for `refresh` seconds.

    A topic that is missing or forbidden is asked for twice before it is refused, and again at the latest a second later.
    """

    def __init__(self, configuration: Mapping[str, str], refresh: float) -> None:
        self._configuration = configuration
        self._refresh = refresh
        self._known: dict[str, Topic] = {}
        self._largest: dict[str, int | None] = {}
        self._admin: _Admin | None = None
        self._limits_from = 0.0

    def find(self, producer: Producer, name: str, until: float) -> Topic | None:
        """The topic, or None when the broker did not answer by `until` and nothing was known before."""
        known = self._known.get(name)
        now = time.monotonic()
        if known is not None:
            age = self._refresh if known.reason is None else min(self._refresh, RECHECK_MISSING_SECONDS)
            if now - known.checked < age:
                return known
        try:
            reason = self._ask(producer, name, until)
            if reason is not None:
                time.sleep(max(0.0, min(SECOND_LOOK_SECONDS, until - time.monotonic())))
                reason = self._ask(producer, name, until)
        except KafkaException:
            return known
        previous = known.max_bytes if known is not None else None
        limit = previous if reason is not None else self._limit(name, until) or previous
        found = Topic(reason, limit, time.monotonic())
        if len(self._known) >= TOPICS_MAX:
            self._known.clear()
            self._largest.clear()
        self._known[name] = found
        self._largest[name] = found.max_bytes
        return found

    def limit(self, name: str) -> int | None:
        """The largest batch that the broker last told, also after `forget`."""
        return self._largest.get(name)

    def forget(self, name: str) -> None:
        """The next use asks the broker again."""
        self._known.pop(name, None)

    def create(self, names: Sequence[str], partitions: int | None, replication: int | None, deadline: float) -> None:
        """Creates the topics that are missing, with the broker's own numbers where none are given; see `Declarer`."""
        new = [NewTopic(n, partitions or BROKERS_OWN, replication or BROKERS_OWN) for n in names]
        wait = max(0.1, deadline - time.monotonic())
        created = self._administrator().create_topics(new, operation_timeout=wait, request_timeout=wait)
        for name, done in created.items():
            try:
                done.result(max(0.1, deadline - time.monotonic()))
            except (KafkaException, TimeoutError) as error:
                code = cast(KafkaError, error.args[0]) if isinstance(error, KafkaException) else None
                if code is not None and code.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    continue
                if code is None or code.code() in _NOT_NOW:
                    raise Unreachable(
                        f"Kafka did not create topic {name} in time",
                        address=self._configuration["bootstrap.servers"],
                        field="declare",
                    ) from None
                raise ConfigError(
                    f"Kafka refuses to create topic {name}: {code.name()}",
                    field="declare",
                    hint="create it yourself and set declare to false, or correct name, partitions and replication",
                ) from None

    def _administrator(self) -> _Admin:
        if self._admin is None:
            self._admin = cast(_Admin, AdminClient({"log_level": 0, **self._configuration}))
        return self._admin

    def _ask(self, producer: Producer, name: str, until: float) -> ParkReason | None:
        wait = max(0.05, min(ASK_SECONDS, until - time.monotonic()))
        found = cast(_ClusterMetadata, producer.list_topics(name, timeout=wait)).topics.get(name)
        if found is None:
            return ParkReason.NO_SUCH_TOPIC
        error = found.error
        if error is None:
            return None
        code = error.code()
        if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return ParkReason.NOT_AUTHORISED
        if code in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION}:
            return ParkReason.NO_SUCH_TOPIC
        return None

    def _limit(self, name: str, until: float) -> int | None:
        """`max.message.bytes`, if this login may read it; a broker that did not answer is not waited for again for a minute."""
        if time.monotonic() < self._limits_from:
            return None
        wait = min(LIMIT_SECONDS, until - time.monotonic())
        if wait <= 0:
            return None
        resource = ConfigResource(ResourceType.TOPIC, name)
        try:
            answers = self._administrator().describe_configs([resource], request_timeout=ASK_SECONDS)
            entry = next(iter(answers.values())).result(wait).get("max.message.bytes")
        except TimeoutError:
            self._limits_from = time.monotonic() + LIMIT_AGAIN_SECONDS
            return None
        except KafkaException:
            return None
        return int(entry.value) if entry is not None and entry.value is not None else None
