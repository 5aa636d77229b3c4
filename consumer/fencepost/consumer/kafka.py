"""Kafka: an offset is committed only when everything below it is committed in the database.

One partition is worked on in its own order, one message at a time; partitions side by side, up to ``concurrency``.
The poll loop never waits for a handler, so a slow or failing one does not cost the membership: its partition is
paused when its buffer is full. What was revoked or lost is never committed afterwards.

Crash here (K1): after the database commit, before the offset commit. The next owner sees a duplicate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.executors import attempts
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, RunnerOptions, Tries, require_fit
from fencepost.consumer.signals import stop_on_signals
from fencepost.consumer.topics import TopicIds, retentions
from fencepost.consumer.transactions import AsyncDatabase, Database
from fencepost.consumer.upkeep import Upkeep
from fencepost.schemas.errors import ConfigError, Unreachable

__all__ = ["KafkaRunner"]

log = logging.getLogger("fencepost.consumer.kafka")

POLL_SECONDS = 0.05
COMMIT_SECONDS = 0.25
BUFFER_MESSAGES = 64
BUFFER_BYTES = 1024 * 1024

# Invariant: the user cannot loosen these; each of them would acknowledge work that is not done.
_FIXED: dict[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "cooperative-sticky",
    "enable.partition.eof": False,
}
_OURS = frozenset({"bootstrap.servers", "group.id", "on_commit", "error_cb", "logger", "auto.commit.enable"})
_DEFAULT: dict[str, object] = {
    "auto.offset.reset": "earliest",
    "queued.max.messages.kbytes": 16_384,
    "log_level": 2,
}


@dataclass(slots=True, eq=False)
class _Lane:
    """One assigned partition: what waits, what runs, and up to where everything is done."""

    topic: str
    partition: int
    topic_id: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: deque[tuple[int, Delivery]] = field(default_factory=deque[tuple[int, Delivery]])
    bytes_waiting: int = 0
    running: bool = False
    closed: bool = False
    paused: bool = False
    tries: Tries | None = None
    not_before: float = 0.0
    # Invariant: every message below `done` is committed in the database; None until the first is.
    done: int | None = None
    committed: int | None = None

    @property
    def full(self) -> bool:
        return len(self.waiting) >= BUFFER_MESSAGES or self.bytes_waiting >= BUFFER_BYTES


class KafkaRunner:
    """Feeds an inbox from Kafka topics until it is stopped; every event is handled or a dead letter, none is skipped.

    ``database`` as of `Inbox.handle`. ``group`` is the consumer's name unless given. ``config`` adds librdkafka
    settings (security, timeouts); those that would acknowledge unfinished work are refused with ConfigError.
    """

    def __init__(
        self,
        inbox: Inbox[Any] | AsyncInbox[Any],
        database: Database | AsyncDatabase,
        *,
        bootstrap: str,
        topics: Sequence[str],
        group: str | None = None,
        config: Mapping[str, object] | None = None,
        options: RunnerOptions | None = None,
    ) -> None:
        if not topics or isinstance(topics, str):
            raise ConfigError("topics is not a list of at least one topic", field="topics")
        for name, value in (config or {}).items():
            if name in _OURS or value != _FIXED.get(name, value):
                raise ConfigError(f"{name} is set by the runner", field=name, hint="remove it")
        self._options = options or RunnerOptions()
        self._bootstrap = bootstrap
        self._topics = list(topics)
        self._database = database
        require_fit(inbox, database)
        self._inbox = inbox
        self._config: dict[str, object] = {
            **_DEFAULT,
            **(config or {}),
            **_FIXED,
            "bootstrap.servers": bootstrap,
            "group.id": group or inbox.consumer,
            "on_commit": self._on_commit,
            "error_cb": self._on_error,
            "logger": log,
        }
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._cluster_id = ""
        self._draining = False
        self._fatal: str | None = None
        self._commit_at = 0.0
        self._retrying: Future[bool] | None = None
        self._retry_at = 0.0

    def run(self, stop: threading.Event | None = None) -> None:
        """Runs until ``stop`` is set, then drains: running handlers finish, their offsets are committed.

        Without ``stop``, SIGTERM and SIGINT stop it (main thread only). Raises Unreachable when Kafka does not answer
        within ``start_seconds``, or refuses this consumer for good.
        """
        if stop is None:
            with stop_on_signals() as signalled:
                return self.run(signalled)
        self._draining, self._fatal = False, None
        consumer = self._consumer()
        running = attempts(self._inbox, self._database, self._options)
        self._start, self._retry, self._retrying = running.start, running.retry, None
        upkeep = Upkeep(self._inbox.consumer, self._database, topics=lambda: retentions(self._config, self._topics))
        try:
            self._connect(consumer, stop)
            upkeep.start()
            consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
            self._loop(consumer, stop)
            self._drain(consumer)
        finally:
            self._draining = True
            upkeep.stop()
            consumer.close()
            for lane in self._lanes.values():
                lane.closed = True
            self._lanes.clear()
            running.close()

    # The poll loop: one thread, never blocked by a handler.

    def _loop(self, consumer: Consumer, stop: threading.Event) -> None:
        due = 0.0
        while not stop.is_set():
            try:
                message = consumer.poll(POLL_SECONDS)
            except KafkaException as error:
                self._on_error(cast(KafkaError, error.args[0]))
                message = None
            if message is not None:
                self._arrived(consumer, message)
            if self._fatal is not None:
                raise self._unreachable(f"Kafka refuses this consumer: {self._fatal}")
            if message is None or time.monotonic() >= due:
                self._tend(consumer)
                due = time.monotonic() + POLL_SECONDS

    def _drain(self, consumer: Consumer) -> None:
        self._draining = True
        with suppress(KafkaException):
            consumer.pause(consumer.assignment())
        deadline = time.monotonic() + self._options.drain_seconds
        while self._busy() and time.monotonic() < deadline:
            with suppress(KafkaException):
                consumer.poll(POLL_SECONDS)
        if left := sum(lane.running for lane in self._lanes.values()):
            log.warning("%d handlers were still running after %.0f s", left, self._options.drain_seconds)
        self._commit(consumer, list(self._lanes.values()), asynchronous=False)

    def _busy(self) -> bool:
        retrying = self._retrying is not None and not self._retrying.done()
        return retrying or any(lane.running for lane in self._lanes.values())

    def _arrived(self, consumer: Consumer, message: Message) -> None:
        if (error := message.error()) is not None:
            self._on_error(error)
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            return
        lane = self._lanes.get((topic, partition))
        if lane is None or self._draining:
            return  # No longer ours; never committed, so whoever owns it reads it again.
        delivery = Delivery.from_kafka(
            cluster_id=self._cluster_id,
            topic=topic,
            topic_id=lane.topic_id,
            partition=partition,
            offset=offset,
            headers=_headers(message),
            key=message.key(),
            value=message.value(),
        )
        with lane.lock:
            lane.waiting.append((offset, delivery))
            lane.bytes_waiting += len(delivery.body)
        if lane.full and not lane.paused:
            consumer.pause([TopicPartition(topic, partition)])
            lane.paused = True
        self._advance(lane)

    def _tend(self, consumer: Consumer) -> None:
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            if lane.paused and len(lane.waiting) <= BUFFER_MESSAGES // 4 and lane.bytes_waiting <= BUFFER_BYTES // 4:
                consumer.resume([TopicPartition(lane.topic, lane.partition)])
                lane.paused = False
            if lane.not_before <= now:
                self._advance(lane)
        if now >= self._commit_at:
            self._commit(consumer, list(self._lanes.values()), asynchronous=True)
            self._commit_at = now + COMMIT_SECONDS
        if now >= self._retry_at and not any(lane.running for lane in self._lanes.values()):
            self._give_back(now)

    def _give_back(self, now: float) -> None:
        """One dead letter that an operator gave back, where nothing else runs; the next at once if there was one."""
        if self._retrying is not None:
            if not self._retrying.done():
                return
            found, self._retrying = self._retrying.exception() is None and self._retrying.result(), None
            if not found:
                self._retry_at = now + self._options.idle_seconds
                return
        self._retrying = self._retry()

    # Lanes: called by the poll loop and by whoever finishes a handler.

    def _advance(self, lane: _Lane) -> None:
        """Starts the first waiting message, unless one runs, it is not yet time, or the partition is not ours."""
        with lane.lock:
            if lane.running or lane.closed or self._draining or not lane.waiting:
                return
            if lane.not_before > time.monotonic():
                return
            lane.running = True
            lane.tries = lane.tries or Tries(self._options)
            tries, delivery = lane.tries, lane.waiting[0][1]
        try:
            self._start(delivery, tries).add_done_callback(lambda future: self._finished(lane, future))
        except RuntimeError:
            lane.running = False  # The executor is shut down: the process is ending.

    def _finished(self, lane: _Lane, future: Future[Handled | Again]) -> None:
        result: Handled | Again
        try:
            result = future.result()
        except BaseException as error:  # noqa: BLE001  # whatever it was, the message is not done
            if lane.closed:
                return
            log.error("%s/%d: the runner failed: %s", lane.topic, lane.partition, type(error).__name__)
            result = Again(self._options.backoff_max)
        with lane.lock:
            lane.running = False
            if lane.closed:
                return
            if isinstance(result, Again):
                lane.not_before = time.monotonic() + result.seconds
                return
            offset, delivery = lane.waiting.popleft()
            lane.bytes_waiting -= len(delivery.body)
            lane.tries = None
            lane.done = offset + 1
        self._advance(lane)

    # Offsets and membership.

    def _commit(self, consumer: Consumer, lanes: list[_Lane], *, asynchronous: bool) -> None:
        offsets: list[TopicPartition] = []
        for lane in lanes:
            if not lane.closed and lane.done is not None and lane.done != lane.committed:
                offsets.append(TopicPartition(lane.topic, lane.partition, lane.done))
                lane.committed = lane.done
        if not offsets:
            return
        try:
            if asynchronous:
                consumer.commit(offsets=offsets, asynchronous=True)
            else:
                consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._on_commit(cast(KafkaError, error.args[0]), offsets)

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        for each in offsets:
            failed = error or each.error
            if failed is None:
                continue
            log.warning("%s/%d: offset %d not committed: %s", each.topic, each.partition, each.offset, failed.name())
            if (lane := self._lanes.get((each.topic, each.partition))) is not None:
                lane.committed = None

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            log.info("%s/%d: assigned", each.topic, each.partition)
            self._lanes[each.topic, each.partition] = _Lane(each.topic, each.partition, self._topic_ids.of(each.topic))

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Still ours while this runs: what is done is committed now, and nothing of these partitions later."""
        lanes = [lane for each in partitions if (lane := self._lanes.get((each.topic, each.partition))) is not None]
        self._commit(consumer, lanes, asynchronous=False)
        self._forget(partitions, "revoked")

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Somebody else may own them already: nothing may be committed."""
        self._forget(partitions, "lost")

    def _forget(self, partitions: list[TopicPartition], why: str) -> None:
        for each in partitions:
            log.info("%s/%d: %s", each.topic, each.partition, why)
            if (lane := self._lanes.pop((each.topic, each.partition), None)) is not None:
                with lane.lock:
                    lane.closed = True

    # The broker.

    def _consumer(self) -> Consumer:
        try:
            return Consumer(cast(dict[str, Any], self._config))
        except KafkaException as error:
            said = cast(KafkaError, error.args[0]).str()
            known = said if said.startswith("No such configuration property") else "a setting is not acceptable"
            raise ConfigError(f"Kafka client: {known}", field="config") from None

    def _connect(self, consumer: Consumer, stop: threading.Event) -> None:
        deadline = time.monotonic() + self._options.start_seconds
        tries = 0
        while True:
            try:
                found = consumer.list_topics(timeout=min(5.0, max(0.5, deadline - time.monotonic())))
                self._cluster_id = str(getattr(found, "cluster_id", None) or "")
                self._topic_ids = TopicIds(self._config, found)
                return
            except KafkaException as error:
                tries += 1
                pause = self._options.backoff(tries)
                if stop.is_set() or time.monotonic() + pause > deadline:
                    name = cast(KafkaError, error.args[0]).name()
                    raise self._unreachable(f"Kafka did not answer: {name}") from None
                log.warning("Kafka does not answer at %s, again in %.1f s", self._bootstrap, pause)
                stop.wait(pause)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = error.name()
        log.warning("Kafka at %s: %s", self._bootstrap, error.name())

    def _unreachable(self, message: str) -> Unreachable:
        return Unreachable(message, address=self._bootstrap, field="bootstrap", hint="check that Kafka runs there")


def _headers(message: Message) -> list[tuple[str, str | bytes | None]]:
    try:
        headers = message.headers() or []
    except UnicodeDecodeError:
        return [(":unreadable", None)]  # Becomes undecodable, and is kept as such.
    return list(headers.items()) if isinstance(headers, dict) else headers
