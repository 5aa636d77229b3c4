"""Kafka: an event counts as published only after its own error-free delivery report from all in-sync replicas."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fencepost.relay.answers import OVERTAKEN, Answers, Key, StoppedKeys, key_of
from fencepost.relay.kafka_inspection import Inspector
from fencepost.relay.kafka_options import checked_options
from fencepost.relay.kafka_topics import Topics
from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, Outgoing, ParkReason, Place, Route
from fencepost.schemas.errors import ConfigError, FencepostError, Unreachable
from fencepost.schemas.kafka_binding import Header, encoder
from fencepost.schemas.kafka_binding import key as kafka_key

LOGGER = logging.getLogger(__name__)
CLIENT_LOGGER = logging.getLogger(f"{__name__}.client")

POLL_SECONDS = 0.05
QUEUE_FULL_SECONDS = 0.005
PURGED_SECONDS = 2.0
CAREFUL_SECONDS = 60.0
BATCH_BYTES = 1_000_000
MESSAGE_BYTES = 1_048_588
RECORD_OVERHEAD = 128
HEADER_OVERHEAD = 10

_REFUSALS: dict[int, ParkReason] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: ParkReason.NOT_AUTHORISED,
    KafkaError.UNKNOWN_TOPIC_OR_PART: ParkReason.NO_SUCH_TOPIC,
    KafkaError._UNKNOWN_TOPIC: ParkReason.NO_SUCH_TOPIC,  # pyright: ignore[reportPrivateUsage]
    KafkaError.TOPIC_EXCEPTION: ParkReason.NO_SUCH_TOPIC,
    KafkaError.INVALID_RECORD: ParkReason.UNDECODABLE,
    KafkaError.INVALID_TIMESTAMP: ParkReason.UNDECODABLE,
}
"""Definite answers about one event. Everything that is not listed is unknown: it may have been stored."""

_INNOCENT = KafkaError._INVALID_DIFFERENT_RECORD  # pyright: ignore[reportPrivateUsage]
_FATAL = KafkaError._FATAL  # pyright: ignore[reportPrivateUsage]


class _Client:
    """One producer of librdkafka, with the batch size it was made for."""

    def __init__(self, configuration: Mapping[str, object], batch_bytes: int, on_error: _OnError) -> None:
        self.batch_bytes = batch_bytes
        self.broken = False
        settings = dict(configuration) | {"batch.size": batch_bytes, "error_cb": partial(on_error, self)}
        self.producer = Producer(settings, logger=CLIENT_LOGGER)


_OnError = Callable[[_Client, KafkaError], None]


class KafkaPublisher:
    """Hands events to Kafka with idempotence and acks=all; the key is the JSON array [tenant, ordering key].

    `source`: CloudEvents source of the installation. `delivery_timeout` (seconds): librdkafka's message timeout; a send
    whose deadline is nearer is withheld, so that nothing can be delivered after the caller has given up the lease.
    `metadata_refresh` (seconds): how long the existence of a topic is believed. `max_queued`: events in the local queue;
    beyond it `send` waits. `options`: see `kafka_options.ALLOWED`; ConfigError for anything else. Topics are only ever
    created by `declare`, with `partitions` and `replication` (default: the broker's). The record's timestamp is the time of sending, since retention would otherwise delete a backlog at once;
    the time of the event is the header `ce_time`.

    Blame: Kafka refuses whole batches as too large. If an event that fits was in such a batch, it is nacked and batches
    hold a single event for a minute, so that only the guilty one is refused.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        source: str,
        delivery_timeout: float = 20.0,
        metadata_refresh: float = 30.0,
        max_message_bytes: int = MESSAGE_BYTES,
        max_queued: int = 50_000,
        options: Mapping[str, str] | None = None,
        insecure: bool = False,
        partitions: int | None = None,
        replication: int | None = None,
    ) -> None:
        if delivery_timeout <= 0:
            raise ConfigError("the delivery timeout must be positive", field="delivery_timeout", hint="seconds")
        self._bootstrap = bootstrap
        self._options = checked_options(bootstrap, options or {}, insecure=insecure)
        self._compressed = any(
            self._options.get(name, "none") not in {"none", "inherit"}
            for name in ("compression.type", "compression.codec")
        )
        self._delivery_timeout = delivery_timeout
        self._max_bytes = max_message_bytes
        self._max_queued = max_queued
        self._encode = encoder(source)
        self._topics = Topics({"bootstrap.servers": bootstrap, **self._options}, metadata_refresh)
        self._inspector = Inspector(bootstrap, self._options)
        self._partitions = partitions
        self._replication = replication
        self._handing = threading.Lock()
        self._marking = threading.Lock()
        self._stopped = StoppedKeys()
        self._unresolved: dict[int, Answers] = {}
        self._failed: dict[Key, tuple[int, int]] = {}
        self._number = 0
        self._batch_bytes = BATCH_BYTES
        self._careful_until = 0.0
        self._client: _Client | None = None
        self._retired: list[_Client] = []
        self._accepting = False
        self._ended = threading.Event()
        self._server: threading.Thread | None = None
        self._last_error = ""

    def __repr__(self) -> str:
        return f"KafkaPublisher({self._bootstrap!r})"

    def open(self, deadline: float) -> None:
        """Connect, or raise `Unreachable` before `deadline` (monotonic seconds)."""
        client = self._make()
        try:
            client.producer.list_topics(timeout=max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            client.producer.poll(0)
            code = cast(KafkaError, error.args[0])
            raise Unreachable(
                f"Kafka does not answer: {self._last_error or code.name()}", address=self._bootstrap, field="bootstrap"
            ) from None
        self._client = client
        self._ended.clear()
        self._accepting = True
        self._server = threading.Thread(target=self._serve, name="fencepost-kafka", daemon=True)
        self._server.start()

    def declare(self, routes: Sequence[Route], deadline: float) -> None:
        """Creates the topics that are missing and leaves the others as they are.

        Raises `Unreachable` when the broker does not answer before `deadline` (monotonic seconds), ConfigError when it
        refuses.
        """
        names = sorted({route.to for route in routes})
        self._topics.create(names, self._partitions, self._replication, deadline)

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        """One outcome per event at `deadline` (monotonic seconds) at the latest.

        Waits for room in the local queue, at the longest until `delivery_timeout` seconds before the deadline. Withheld
        events were not sent. A confirmed event with detail "overtaken" arrived although an earlier one of its key has
        no confirm.
        """
        with self._handing:
            self._number += 1
            answers = Answers(self._number, batch, deadline, self._seal)
            client = self._client
            until = deadline - self._delivery_timeout
            if not self._accepting or client is None:
                self._withhold(answers, 0, "the publisher is closed")
            elif time.monotonic() >= until:
                self._withhold(answers, 0, "the deadline is nearer than the delivery timeout")
            else:
                self._unresolved[answers.number] = answers
                try:
                    self._hand_over(answers, until)
                except Exception:
                    LOGGER.exception("handing a batch over failed in an unexpected way; it is unknown")
                    answers.give_up("unexpected")
        return answers.future

    def inspect(self, names: Sequence[str], deadline: float) -> dict[str, Place]:
        """What Kafka says of these topics now, or `Unreachable`; may be asked from any thread, also before `open`."""
        return self._inspector.inspect(names, deadline)

    def close(self, deadline: float) -> None:
        """Wait for delivery reports until `deadline`, then leave, in at most a few seconds; the rest becomes unknown."""
        self._accepting = False
        with self._handing:
            waiting = [answers.future for answers in self._unresolved.values()]
        wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        self._ended.set()
        if self._server is not None:
            self._server.join(timeout=5)
            self._server = None
        clients, self._client = [*self._retired, *filter(None, [self._client])], None
        self._retired = []
        for client in clients:
            client.producer.purge()
            client.producer.flush(PURGED_SECONDS)
        for answers in list(self._unresolved.values()):
            answers.give_up("the publisher was closed")

    # -- handing over ------------------------------------------------------------------------------------------------

    def _hand_over(self, answers: Answers, until: float) -> None:
        self._stopped.sweep()
        client = self._current(until)
        if client is None:
            self._withhold(answers, 0, "an earlier batch is still on its way")
            return
        for index, event in enumerate(answers.batch):
            key = key_of(event)
            if self._stopped.stopped(key):
                answers.answer(index, Outcome(Answer.WITHHELD, detail="an earlier event of its key has no confirm"))
                continue
            found = self._topics.find(client.producer, event.route.to, until)
            if found is None:
                self._hold(answers, index, key, Outcome(Answer.WITHHELD, detail="the topic could not be looked up"))
                continue
            if found.reason is not None:
                self._hold(answers, index, key, Outcome(Answer.REFUSED, found.reason, event.route.to))
                continue
            if found.max_bytes is not None and found.max_bytes < self._batch_bytes:
                # Broker limits count whole batches: from here on a batch fits into the smallest limit seen.
                self._batch_bytes = found.max_bytes
                client = self._current(until) or client
            if not self._produce(client, answers, index, key, found.max_bytes, until):
                self._withhold(answers, index, "the local queue stayed full")
                return

    def _produce(
        self, client: _Client, answers: Answers, index: int, key: Key, limit: int | None, until: float
    ) -> bool:
        event = answers.batch[index]
        row = event.row
        try:
            if not row.payload:
                raise ValueError("an empty payload would be a tombstone")
            attributes = cast(dict[str, str], json.loads(row.attributes)) if row.attributes else None
            headers = self._encode(
                row.event_id,
                row.type,
                row.version,
                row.tenant,
                row.operation,
                row.ordering_key,
                row.epoch,
                row.digest,
                row.seq,
                row.recorded_at,
                attributes,
                row.reference,
            )
            record_key = kafka_key(row.tenant, row.ordering_key)
        except (FencepostError, ValueError, TypeError, AttributeError) as error:
            self._hold(answers, index, key, Outcome(Answer.REFUSED, ParkReason.UNDECODABLE, type(error).__name__))
            return True
        size = _size(record_key, headers, row.payload)
        if limit is not None and size > limit and not self._compressed:
            detail = f"{size} bytes, the topic takes {limit}"
            self._hold(answers, index, key, Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, detail))
            return True
        report = partial(self._delivered, client, answers, index, limit is not None and size > limit)
        sent: list[tuple[str, str | bytes | None]] = [*headers]
        while True:
            try:
                client.producer.produce(event.route.to, row.payload, record_key, on_delivery=report, headers=sent)
                return True
            except BufferError:
                # The local queue is full: back-pressure. The serving thread makes room.
                if time.monotonic() >= until or not self._accepting:
                    return False
                time.sleep(QUEUE_FULL_SECONDS)
            except KafkaException as error:
                self._not_queued(client, answers, index, key, cast(KafkaError, error.args[0]))
                return True

    def _not_queued(self, client: _Client, answers: Answers, index: int, key: Key, error: KafkaError) -> None:
        """The client refused an event before any of it was sent."""
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            outcome = Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, f"more than {self._max_bytes} bytes")
        else:
            client.broken = client.broken or error.fatal() or error.code() == _FATAL
            outcome = Outcome(Answer.WITHHELD, detail=error.name())
        self._hold(answers, index, key, outcome)

    def _hold(self, answers: Answers, index: int, key: Key, outcome: Outcome) -> None:
        self._stopped.stop(key, answers)
        answers.answer(index, outcome)

    def _withhold(self, answers: Answers, start: int, detail: str) -> None:
        outcome = Outcome(Answer.WITHHELD, detail=detail)
        for index in range(start, len(answers.batch)):
            self._stopped.stop(key_of(answers.batch[index]), answers)
            answers.answer(index, outcome)

    # -- the client --------------------------------------------------------------------------------------------------

    def _make(self) -> _Client:
        configuration: dict[str, object] = {
            "linger.ms": "5",
            **self._options,
            "bootstrap.servers": self._bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": int(self._delivery_timeout * 1000),
            "message.max.bytes": self._max_bytes,
            "queue.buffering.max.messages": self._max_queued,
            "allow.auto.create.topics": False,
        }
        careful = time.monotonic() < self._careful_until
        return _Client(configuration, 1 if careful else self._batch_bytes, self._on_error)

    def _current(self, until: float) -> _Client | None:
        """The client to use now, replaced when it is broken or made for other batches; None when that must wait.

        Invariant: a client for other batches takes over only after its predecessor has nothing left to send, else two
        events of one key could be on their way at once.
        """
        client = self._client
        careful = time.monotonic() < self._careful_until
        wanted = 1 if careful else self._batch_bytes
        if client is None or client.broken:
            if client is not None:
                self._retire(client)
            self._client = self._make()
            return self._client
        if client.batch_bytes == wanted:
            return client
        while len(client.producer):
            if time.monotonic() >= until or client.broken:
                return None
            time.sleep(QUEUE_FULL_SECONDS)
        self._client = self._make()
        return self._client

    def _retire(self, client: _Client) -> None:
        """Crash here: K1, a fatal client error. What was on its way is unknown and is sent again by the caller."""
        LOGGER.error("the Kafka producer failed for good (%s) and is replaced", self._last_error)
        client.producer.purge(blocking=False)
        self._retired.append(client)

    # -- the serving thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended.is_set():
            client = self._client
            try:
                if client is not None:
                    client.producer.poll(POLL_SECONDS)
                for retired in list(self._retired):
                    retired.producer.poll(0)
                    if not len(retired.producer):
                        self._retired.remove(retired)
                self._expire()
            except Exception:
                LOGGER.exception("serving delivery reports failed; going on")
                self._ended.wait(POLL_SECONDS)

    def _expire(self) -> None:
        now = time.monotonic() + POLL_SECONDS
        for number, answers in list(self._unresolved.items()):
            if answers.done:
                self._unresolved.pop(number, None)
            elif answers.deadline <= now:
                answers.give_up("no delivery report by the deadline")

    def _on_error(self, client: _Client, error: KafkaError) -> None:
        self._last_error = error.name()
        if error.fatal() or error.code() == _FATAL:
            client.broken = True

    def _delivered(
        self, client: _Client, answers: Answers, index: int, over: bool, error: KafkaError | None, message: Message
    ) -> None:
        """The delivery report of one event: the only source of a confirm. Never raises into the client."""
        try:
            if error is None:
                answers.answer(index, CONFIRMED)
                return
            key = key_of(answers.batch[index])
            with self._marking:
                self._failed.setdefault(key, (answers.number, self._number))
            self._hold(answers, index, key, self._judge(client, answers.batch[index], over, error))
        except Exception:
            LOGGER.exception("a delivery report could not be recorded; the event stays unknown")

    def _judge(self, client: _Client, event: Outgoing, over: bool, error: KafkaError) -> Outcome:
        if error.fatal():
            client.broken = True
            self._last_error = error.name()
        code = error.code()
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            if over or client.batch_bytes == 1:
                return Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, "the broker's limit")
            self._topics.forget(event.route.to)
            self._careful_until = time.monotonic() + CAREFUL_SECONDS
            return Outcome(Answer.NACKED, detail="its batch was too large")
        if code == _INNOCENT:
            return Outcome(Answer.NACKED, detail="another record of its batch was refused")
        reason = _REFUSALS.get(code)
        if reason is None:
            return Outcome(Answer.UNKNOWN, detail=error.name())
        self._topics.forget(event.route.to)
        return Outcome(Answer.REFUSED, reason, error.name())

    def _seal(self, answers: Answers, outcomes: list[Outcome]) -> None:
        """Marks confirmed events that an earlier, unconfirmed event of their key should have preceded."""
        with self._marking:
            self._mark(answers, outcomes)

    def _mark(self, answers: Answers, outcomes: list[Outcome]) -> None:
        failed = self._failed
        own: set[Key] = set()
        for index, outcome in enumerate(outcomes):
            if outcome.answer is Answer.CONFIRMED:
                if not failed and not own:
                    continue
                key = key_of(answers.batch[index])
                first, last = failed.get(key, (answers.number, -1))
                if key in own or first < answers.number <= last:
                    outcomes[index] = outcome._replace(detail=OVERTAKEN)
            else:
                own.add(key_of(answers.batch[index]))
        self._unresolved.pop(answers.number, None)
        oldest = min(self._unresolved, default=self._number + 1)
        if failed:
            self._failed = {key: span for key, span in failed.items() if span[1] >= oldest}


def _size(key: bytes, headers: list[Header], value: bytes) -> int:
    """An upper bound of the bytes that the record takes uncompressed, alone in its batch."""
    return (
        len(key)
        + len(value)
        + RECORD_OVERHEAD
        + sum(len(name) + len(content) + HEADER_OVERHEAD for name, content in headers)
    )
