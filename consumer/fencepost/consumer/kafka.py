"""Kafka: an offset is committed only when everything below it is committed in the database.

Events of one key are handled one after the other in their order, keys side by side, up to ``concurrency``. The poll loop
never waits for a handler, so a slow or failing one does not cost the membership: a partition is paused when its buffer is
full. What was revoked or lost is never committed afterwards.

How far a partition is done is stored in the database first, then committed at the broker: a database that was restored is
given again what it lost (`positions`). While the database is not armed nothing is handled.

Crash here (K1): after the database commit, before the offset commit. The next owner sees a duplicate.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fencepost.consumer.armed import when_armed
from fencepost.consumer.connections import require_contract
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.executors import attempts
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.kafka_offsets import Offsets
from fencepost.consumer.kafka_settings import DEFAULTS, FIXED, Refusal, checked, refusal, unusable
from fencepost.consumer.lanes import Lanes, Work
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.positions import Place, Positions
from fencepost.consumer.runner import Again, RunnerOptions, require_fit
from fencepost.consumer.signals import stop_on_signals
from fencepost.consumer.standing import BrokerState, Standing
from fencepost.consumer.topics import Asking, TopicIds, retentions
from fencepost.consumer.transactions import AsyncDatabase, Database
from fencepost.consumer.upkeep import Upkeep
from fencepost.schemas.errors import ConfigError, Unreachable

__all__ = ["KafkaRunner"]

log = logging.getLogger("fencepost.consumer.kafka")

POLL_SECONDS = 0.05
LAG_SECONDS = 1.0


class KafkaRunner:
    """Feeds an inbox from Kafka topics until it is stopped; every event is handled or a dead letter, none is skipped.

    ``database`` as of `Inbox.handle`. ``group`` is the consumer's name unless given. ``config`` adds librdkafka
    settings (security, timeouts); those that would acknowledge unfinished work are refused with ConfigError, and without
    ``insecure`` those that send credentials off loopback in the clear or do not verify the server.
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
        insecure: bool = False,
    ) -> None:
        if not topics or isinstance(topics, str):
            raise ConfigError("topics is not a list of at least one topic", field="topics")
        self._options = options or RunnerOptions()
        self._bootstrap = bootstrap
        self._topics = list(topics)
        self._database = database
        require_fit(inbox, database)
        self._inbox = inbox
        self._config: dict[str, object] = {
            **DEFAULTS,
            **checked(bootstrap, config or {}, insecure=insecure),
            **FIXED,
            "bootstrap.servers": bootstrap,
            "group.id": group or inbox.consumer,
            "on_commit": self._on_commit,
            "error_cb": self._on_error,
            "logger": log,
        }
        self._lanes = Lanes(self._options)
        self.standing = Standing(inbox.consumer, "kafka")
        self._asking = Asking(self._config)
        self._cluster_id = ""
        self._draining = False
        self._fatal: str | None = None
        self._refusal: Refusal | None = None
        self._offsets: Offsets | None = None
        self._lag_at = 0.0
        self._retrying: Future[bool] | None = None
        self._retry_at = 0.0

    def run(self, stop: threading.Event | None = None) -> None:
        """Runs until ``stop`` is set, then drains: running handlers finish, their offsets are committed.

        Without ``stop``, SIGTERM and SIGINT stop it (main thread only). Raises Unreachable when Kafka does not answer
        within ``start_seconds``, or refuses this consumer for good, ContractMismatch for a database of a version too far away.
        """
        if stop is None:
            with stop_on_signals() as signalled:
                return self.run(signalled)
        require_contract(self._database)
        patience = self._options.start_seconds
        while (doubt := self._session(stop, patience)) is not None and not stop.is_set():
            log.warning("%s: begins anew: %s", self._inbox.consumer, doubt)
            self._pause(stop, time.monotonic() + self._options.backoff(1))
            patience = math.inf  # As within a session: a broker may be away for as long as it is.

    def _session(self, stop: threading.Event, patience: float) -> str | None:
        """One membership, until stopped; or why what it believes of its partitions may not be so any more."""
        self._draining, self._fatal, self._refusal = False, None, None
        self._lanes = lanes = Lanes(self._options)
        self.standing.draining, self.standing.in_flight, self.standing.oldest = (
            False,
            lambda: lanes.running,
            lanes.oldest,
        )
        self.standing.asks = self._asking.state
        consumer = self._consumer()
        running = attempts(self._inbox, self._database, self._options)
        self._start, self._retry, self._retrying = running.start, running.retry, None
        upkeep = Upkeep(self._inbox.consumer, self._database, topics=lambda: retentions(self._config, self._topics))
        try:
            self._connect(consumer, stop, patience)
            point = when_armed(self._inbox.consumer, running.fetch, self._options, stop, self.standing.moved)
            if point is None:
                return None
            group = str(self._config["group.id"])
            positions = Positions(self._inbox.consumer, group, self._cluster_id, running.fetch, point)
            self._offsets = offsets = Offsets(consumer, lanes, positions, self._on_commit)
            upkeep.start()
            consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
            self._loop(consumer, stop, offsets)
            self._drain(consumer, offsets)
            return offsets.doubt
        finally:
            self._draining = True
            lanes.close()
            upkeep.stop()
            consumer.close()
            for lane in lanes.all:
                lanes.forget(lane.topic, lane.partition)
            self.standing.consuming, self.standing.assigned = False, 0
            self._offsets = None
            running.close()

    # The poll loop: one thread, never blocked by a handler.

    def _loop(self, consumer: Consumer, stop: threading.Event, offsets: Offsets) -> None:
        due = 0.0
        while not stop.is_set() and offsets.doubt is None:
            self.standing.moved()
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
                self._tend(consumer, offsets)
                due = time.monotonic() + POLL_SECONDS

    def _drain(self, consumer: Consumer, offsets: Offsets) -> None:
        self._draining = self.standing.draining = True
        self._lanes.close()
        with suppress(KafkaException):
            consumer.pause(consumer.assignment())
        deadline = time.monotonic() + self._options.drain_seconds
        while self._busy() and time.monotonic() < deadline:
            self.standing.moved()
            with suppress(KafkaException):
                consumer.poll(POLL_SECONDS)
        if left := self._lanes.running:
            log.warning("%d handlers were still running after %.0f s", left, self._options.drain_seconds)
        offsets.flush(self._lanes.all)

    def _busy(self) -> bool:
        retrying = self._retrying is not None and not self._retrying.done()
        return retrying or self._lanes.running > 0

    def _arrived(self, consumer: Consumer, message: Message) -> None:
        if (error := message.error()) is not None:
            self._on_error(error)
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            return
        lane = self._lanes.of(topic, partition)
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
        self._lanes.add(lane, offset, delivery)
        if lane.full and not lane.paused:
            consumer.pause([TopicPartition(topic, partition)])
            lane.paused = True
        self._advance()

    def _tend(self, consumer: Consumer, offsets: Offsets) -> None:
        now = time.monotonic()
        for lane in self._lanes.all:
            if lane.paused and lane.roomy:
                consumer.resume([TopicPartition(lane.topic, lane.partition)])
                lane.paused = False
        offsets.tend()
        self._advance()
        if now >= self._lag_at:
            self._tell(consumer)
            self._lag_at = now + LAG_SECONDS
        if now >= self._retry_at and not self._lanes.running and offsets.going:
            self._give_back(now)

    def _tell(self, consumer: Consumer) -> None:
        """Membership and lag, from what the client knows without asking anybody."""
        self.standing.consuming = bool(consumer.memberid())
        self.standing.assigned = len(self._lanes)
        self.standing.lag = self._lag(consumer)

    def _lag(self, consumer: Consumer) -> int | None:
        lag = 0
        for lane in self._lanes.all:
            with suppress(KafkaException):
                _, high = consumer.get_watermark_offsets(TopicPartition(lane.topic, lane.partition), cached=True)
                if high >= 0:
                    lag += lane.behind(high)
                    continue
            return None
        return lag

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

    # Handlers: called by the poll loop and by whoever finishes one.

    def _advance(self) -> None:
        """Starts what may run; nothing once draining, nor while the database is not armed."""
        lanes, offsets = self._lanes, self._offsets
        while offsets is not None and offsets.going and (works := lanes.start()):
            given = [(work.delivery, work.tries) for work in works if work.delivery is not None]
            try:
                self._start(given).add_done_callback(partial(self._finished, lanes, works))
            except RuntimeError:  # The executor is shut down: the process is ending.
                for work in works:
                    lanes.again(work, self._options.backoff_max)
                return

    def _finished(self, lanes: Lanes, works: list[Work], future: Future[list[Handled | Again]]) -> None:
        results: list[Handled | Again]
        try:
            results = future.result()
        except BaseException as error:  # noqa: BLE001  # whatever it was, the messages are not done
            lane = works[0].lane
            if not lane.closed:
                log.error("%s/%d: the runner failed: %s", lane.topic, lane.partition, type(error).__name__)
            results = [Again(self._options.backoff_max)] * len(works)
        for work, result in zip(works, results, strict=True):
            if isinstance(result, Again):
                self.standing.failed()
                lanes.again(work, result.seconds)
            else:
                self.standing.told(result)
                lanes.finished(work)
        self._advance()

    # Offsets and membership.

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        for each in offsets:
            failed = error or each.error
            if failed is None:
                continue
            log.warning("%s/%d: offset %d not committed: %s", each.topic, each.partition, each.offset, failed.name())
            if (lane := self._lanes.of(each.topic, each.partition)) is not None:
                lane.committed = None

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._offsets is not None:
            self._offsets.take(
                [Place(each.topic, each.partition, self._topic_ids.of(each.topic)) for each in partitions]
            )

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Still ours while this runs: what is done is committed now, and nothing of these partitions later."""
        lanes = [lane for each in partitions if (lane := self._lanes.of(each.topic, each.partition)) is not None]
        if self._offsets is not None:
            self._offsets.flush(lanes)
        self._forget(partitions, "revoked")

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Somebody else may own them already: nothing may be committed."""
        for _ in partitions:
            self.standing.lost()
        self._forget(partitions, "lost")

    def _forget(self, partitions: list[TopicPartition], why: str) -> None:
        for each in partitions:
            log.info("%s/%d: %s", each.topic, each.partition, why)
            self._lanes.forget(each.topic, each.partition)

    # The broker.

    def _consumer(self) -> Consumer:
        try:
            return Consumer(cast(dict[str, Any], self._config))
        except KafkaException as error:
            raise unusable(cast(KafkaError, error.args[0]), self._config) from None

    def _connect(self, consumer: Consumer, stop: threading.Event, patience: float) -> None:
        deadline = time.monotonic() + patience
        tries = 0
        while True:
            self.standing.moved()
            try:
                found = consumer.list_topics(timeout=min(5.0, max(0.5, deadline - time.monotonic())))
                self._cluster_id = str(getattr(found, "cluster_id", None) or "")
                self._topic_ids = TopicIds(self._config, found)
                self.standing.broker = BrokerState.CONNECTED
                return
            except KafkaException as error:
                consumer.poll(0)  # Tells what went wrong on the way.
                tries += 1
                pause = self._options.backoff(tries)
                if stop.is_set() and deadline == math.inf:
                    return
                if stop.is_set() or time.monotonic() + pause > deadline:
                    if (told := self._refusal) is not None:
                        raise Unreachable(
                            told.message, address=self._bootstrap, field=told.field, hint=told.hint
                        ) from None
                    name = cast(KafkaError, error.args[0]).name()
                    raise self._unreachable(f"Kafka did not answer: {name}") from None
                log.warning("Kafka does not answer at %s, again in %.1f s", self._bootstrap, pause)
                self._pause(stop, time.monotonic() + pause)

    def _pause(self, stop: threading.Event, until: float) -> None:
        # Invariant: never waits for the event, whose lock this thread would hold when a signal's handler sets it.
        while time.monotonic() < until and not stop.is_set():
            self.standing.moved()
            time.sleep(POLL_SECONDS)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = error.name()
        self._refusal = refusal(error) or self._refusal
        log.warning("Kafka at %s: %s", self._bootstrap, error.name())

    def _unreachable(self, message: str) -> Unreachable:
        return Unreachable(message, address=self._bootstrap, field="bootstrap", hint="check that Kafka runs there")


def _headers(message: Message) -> list[tuple[str, str | bytes | None]]:
    try:
        headers = message.headers() or []
    except UnicodeDecodeError:
        return [(":unreadable", None)]  # Becomes undecodable, and is kept as such.
    return list(headers.items()) if isinstance(headers, dict) else headers
