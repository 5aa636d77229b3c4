"""A Kafka topic as a history: read by a consumer of its own that joins no group and commits no offset.

What retention deletes while a replay reads is an error, never a gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fencepost.consumer.history import BEGINNING, END, Batch, Bound, Reach, Record
from fencepost.consumer.topics import TopicIds
from fencepost.schemas import kafka_binding
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError, InvalidInput, ReplayRefused, Undecodable, Unreachable

__all__ = ["KafkaHistory"]

log = logging.getLogger("fencepost.consumer.kafka")

BATCH = 8000
BATCH_BYTES = 8 << 20
# Taken from the client at once; with the bound above, what a batch of the largest messages may exceed it by.
AT_ONCE = 100
FILL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
SILENT_SECONDS = 60.0
_FIXED: dict[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
}
_DEFAULT: dict[str, object] = {"queued.max.messages.kbytes": 32_768, "queued.min.messages": 20_000, "log_level": 2}
_OURS = frozenset({"bootstrap.servers", "group.id", "error_cb", "logger"})


class KafkaHistory:
    """The events of a topic between two bounds, in the order of each partition."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        since: Bound = BEGINNING,
        until: Bound = END,
        *,
        config: Mapping[str, object] | None = None,
    ) -> None:
        for name, value in (config or {}).items():
            if name in _OURS or value != _FIXED.get(name, value):
                raise ConfigError(f"{name} is set by the replay", field=name, hint="remove it")
        self._bootstrap, self._topic, self._since, self._until = bootstrap, topic, since, until
        self._config: dict[str, object] = {
            **_DEFAULT,
            **(config or {}),
            **_FIXED,
            "bootstrap.servers": bootstrap,
            "group.id": "fencepost-replay",  # The client wants one; nothing joins or commits to it.
            "error_cb": self._on_error,
            "logger": log,
        }
        self._partitions: list[int] = []

    @property
    def range(self) -> str:
        """The range as it was asked for."""
        return f"{self._since} to {self._until}"

    @property
    def mark(self) -> str:
        """Offsets need none."""
        return ""

    def open(self) -> str:
        """Reaches the cluster: Unreachable within 10 s when it does not answer, InvalidInput for an unknown topic."""
        try:
            self._consumer = Consumer(cast(dict[str, Any], self._config))
        except KafkaException:
            raise ConfigError("Kafka client: a setting is not acceptable", field="config") from None
        try:
            found = self._consumer.list_topics(self._topic, timeout=ANSWER_SECONDS)
        except KafkaException as error:
            raise self._unreachable(f"Kafka did not answer: {cast(KafkaError, error.args[0]).name()}") from None
        topic = found.topics[self._topic]
        if topic.error is not None or not topic.partitions:
            raise InvalidInput(f"there is no topic {self._topic}", field="topic", hint="see the destination's routes")
        self._partitions = sorted(topic.partitions)
        cluster = str(getattr(found, "cluster_id", None) or "")
        return f"kafka {cluster} {self._topic} {TopicIds(self._config, found).of(self._topic)}".strip()

    def resolve(self) -> dict[int, Reach]:
        """Offsets of every partition; InvalidInput when the first one asked for was deleted already."""
        try:
            return {p: self._reach(p) for p in self._partitions}
        except KafkaException as error:
            raise self._unreachable(f"Kafka did not answer: {cast(KafkaError, error.args[0]).name()}") from None

    def read(self, reaches: Mapping[int, Reach], mark: str, stop: threading.Event) -> Iterator[Batch]:
        """Batches of at most 8000; Unreachable when nothing arrives for a minute, ReplayRefused when events are gone."""
        left = {p: r.last for p, r in reaches.items() if r.position < r.last}
        starts = [TopicPartition(self._topic, p, reaches[p].position) for p in left]
        if starts:
            self._consumer.assign(starts)
        heard = time.monotonic()
        while left and not stop.is_set():
            messages = self._messages()
            if not messages:
                if time.monotonic() - heard > SILENT_SECONDS:
                    raise self._unreachable(f"Kafka sent nothing for {SILENT_SECONDS:.0f} s")
                continue
            heard = time.monotonic()
            batch = self._batch(messages, left)
            done = [p for p in left if batch.positions.get(p, -1) >= left[p] or p in batch.ends]
            for p in done:
                del left[p]
            if done and left:
                self._consumer.pause([TopicPartition(self._topic, p) for p in done])
            yield batch

    def _messages(self) -> list[Message]:
        """What is there, up to the bounds of a batch."""
        found: list[Message] = []
        size = 0
        while len(found) < BATCH and size < BATCH_BYTES:
            asked = min(AT_ONCE, BATCH - len(found))
            more = self._consumer.consume(asked, FILL_SECONDS if not found else 0.05)
            found += more
            if len(more) < asked:
                break
            size += sum(len(message) for message in more)
        return found

    def close(self) -> None:
        """Leaves the cluster."""
        if hasattr(self, "_consumer"):
            self._consumer.close()

    def _batch(self, messages: list[Message], left: Mapping[int, int]) -> Batch:
        records: list[Record] = []
        batch = Batch(records, {})
        for message in messages:
            partition, offset = cast(int, message.partition()), cast(int, message.offset())
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF and partition in left:  # pyright: ignore[reportPrivateUsage]
                    # What lies between here and the end is not, or never will be, committed to the topic.
                    batch.ends[partition] = min(offset, left[partition])
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # pyright: ignore[reportPrivateUsage]
                    raise self._gone(partition)
                elif error.fatal():
                    raise self._unreachable(f"Kafka refuses this consumer: {error.name()}")
                continue
            if (last := left.get(partition)) is None or offset >= last:
                if last is not None:
                    batch.positions[partition] = last
                continue
            records.append(Record(partition, offset, _found(message)))
            batch.positions[partition] = offset + 1
        return batch

    def _reach(self, partition: int) -> Reach:
        found = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=ANSWER_SECONDS)
        if found is None:  # pyright: ignore[reportUnnecessaryComparison]  # in time nobody answered
            raise self._unreachable(f"Kafka did not tell the offsets of partition {partition}")
        low, high = found
        match self._since:
            case int():
                first = self._since
                if first < low:
                    raise InvalidInput(
                        f"offsets below {low} of partition {partition} were deleted by the topic's retention",
                        field="from",
                        hint="choose a later one, or beginning",
                    )
            case datetime():
                first = self._at(partition, self._since, high)
            case _:
                first = low
        match self._until:
            case int():
                last = self._until + 1
            case datetime():
                last = self._at(partition, self._until, high)
            case _:
                last = high
        first, last = min(first, high), min(last, high)
        return Reach(first, first, max(first, last))

    def _at(self, partition: int, time: datetime, high: int) -> int:
        asked = TopicPartition(self._topic, partition, int(time.timestamp() * 1000))
        (found,) = self._consumer.offsets_for_times([asked], timeout=ANSWER_SECONDS)
        return found.offset if found.offset >= 0 else high

    def _gone(self, partition: int) -> ReplayRefused:
        return ReplayRefused(
            f"events of partition {partition} that were not read yet were deleted by the topic's retention",
            field="topic",
            hint="lengthen it, then begin again with --restart",
        )

    def _on_error(self, error: KafkaError) -> None:
        log.warning("Kafka at %s: %s", self._bootstrap, error.name())

    def _unreachable(self, message: str) -> Unreachable:
        return Unreachable(
            message, address=self._bootstrap, field="bootstrap", hint="the same command goes on where this one ended"
        )


def _found(message: Message) -> Envelope | Undecodable:
    try:
        headers = message.headers() or []
    except UnicodeDecodeError:
        return Undecodable("a header's name is not UTF-8", reason="invalid_attribute", field="headers")
    try:
        pairs = list(headers.items()) if isinstance(headers, dict) else headers
        return kafka_binding.decode(pairs, message.key(), message.value())
    except Undecodable as error:
        return error
