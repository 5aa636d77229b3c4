"""Kafka: an event counts as published only after its own error-free delivery report from all in-sync replicas."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Message

from fencepost.relay.answers import Answers, StoppedKeys, key_of
from fencepost.relay.kafka_client import Client, Clients
from fencepost.relay.kafka_inspection import Inspector
from fencepost.relay.kafka_options import checked_options
from fencepost.relay.kafka_record import KEY_AND_HEADERS_BYTES, Record, Records, excess
from fencepost.relay.kafka_reports import judge
from fencepost.relay.kafka_topics import Topic, Topics
from fencepost.relay.publisher import Answer, Outcome, Outgoing, ParkReason, Place, Route
from fencepost.relay.structured import Mode
from fencepost.schemas.errors import ConfigError

LOGGER = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
BUSY_SECONDS = 0.002
SERVE_EVERY = 100
LINGER_MS = "2"
MESSAGE_BYTES = 1_048_588

_FATAL = KafkaError._FATAL  # pyright: ignore[reportPrivateUsage]
_STOPPED = Outcome(Answer.WITHHELD, detail="an earlier event of its key has no confirm")

_Report = Callable[[int, KafkaError | None, Message], None]


class KafkaPublisher:
    """Hands events to Kafka with idempotence and acks=all; the key is the JSON array [tenant, ordering key].

    `source`: CloudEvents source of the installation. `mode`: of CloudEvents. `delivery_timeout` (seconds): librdkafka's
    message timeout; a send whose deadline is nearer is withheld, so that nothing can be delivered after the caller has
    given up the lease.
    `metadata_refresh` (seconds): how long the existence of a topic is believed. `max_queued`: events in the local queue;
    beyond it sends wait for each other. `options`: see `kafka_options.ALLOWED`; ConfigError for anything else. Topics are
    created by `declare` only, with `partitions` and `replication` (default: the broker's). The record's timestamp is the
    time of sending, since retention would otherwise delete a backlog at once; the time of the event is the header
    `ce_time`.

    Blame: Kafka refuses whole batches as too large. If an event that fits was in such a batch, it is nacked and batches
    hold a single event for a minute, so that only the guilty one is refused.

    One thread hands over and runs the delivery reports, so that between a failure and the next event of its key nothing
    slips through, and no two threads fight for the interpreter at every report.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        source: str,
        delivery_timeout: float = 8.0,
        metadata_refresh: float = 30.0,
        max_message_bytes: int = MESSAGE_BYTES,
        max_queued: int = 50_000,
        options: Mapping[str, str] | None = None,
        insecure: bool = False,
        partitions: int | None = None,
        replication: int | None = None,
        mode: Mode = "binary",
    ) -> None:
        if delivery_timeout <= 0:
            raise ConfigError("the delivery timeout must be positive", field="delivery_timeout", hint="seconds")
        self._bootstrap = bootstrap
        checked = checked_options(bootstrap, options or {}, insecure=insecure)
        self._compressed = any(
            checked.get(name, "none") not in {"none", "inherit"} for name in ("compression.type", "compression.codec")
        )
        self._delivery_timeout = delivery_timeout
        self._max_bytes = max_message_bytes
        self._partitions = partitions
        self._replication = replication
        self._inspector = Inspector(bootstrap, checked)
        self._records = Records(source, mode)
        self._topics = Topics({"bootstrap.servers": bootstrap, **checked}, metadata_refresh)
        self._clients = Clients(
            bootstrap,
            {
                "linger.ms": LINGER_MS,
                **checked,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "acks": "all",
                "message.timeout.ms": int(delivery_timeout * 1000),
                "message.max.bytes": max_message_bytes,
                "queue.buffering.max.messages": max_queued,
                "allow.auto.create.topics": False,
            },
            self._serve,
        )
        self._sending = threading.Lock()
        self._sent: SimpleQueue[Answers] = SimpleQueue()
        self._stopped = StoppedKeys()
        self._unresolved: dict[int, Answers] = {}
        self._number = 0
        self._accepting = False
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        return f"KafkaPublisher({self._bootstrap!r})"

    def open(self, deadline: float) -> None:
        """Connect, or raise `Unreachable` before `deadline` (monotonic seconds)."""
        self._clients.open(deadline)
        self._ended.clear()
        self._accepting = True
        self._threads = [
            threading.Thread(target=self._hand_over_all, name="fencepost-kafka", daemon=True),
            threading.Thread(target=self._watch, name="fencepost-kafka-deadlines", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        """One outcome per event at `deadline` (monotonic seconds) at the latest; returns at once.

        A send waits for room in the local queue, at the longest until `delivery_timeout` seconds before its deadline.
        Withheld events were not sent. Where an event fails, later ones of its key that were handed over already may still
        be confirmed.
        """
        with self._sending:
            self._number += 1
            answers = Answers(self._number, batch, deadline, self._seal)
            self._stopped.sending(answers.number)
            if self._accepting and batch:
                self._unresolved[answers.number] = answers
                self._sent.put(answers)
                return answers.future
        self._withhold(answers, 0, "the publisher is closed")
        return answers.future

    def declare(self, routes: Sequence[Route], deadline: float) -> None:
        """Creates the topics that are missing and leaves the others as they are.

        Raises `Unreachable` when the broker does not answer before `deadline` (monotonic seconds), ConfigError when it
        refuses.
        """
        names = sorted({route.to for route in routes})
        self._topics.create(names, self._partitions, self._replication, deadline)

    def inspect(self, names: Sequence[str], deadline: float) -> dict[str, Place]:
        """What Kafka says of these topics now, or `Unreachable`; may be asked from any thread, also before `open`."""
        return self._inspector.inspect(names, deadline)

    def close(self, deadline: float) -> None:
        """Wait for delivery reports until `deadline`, then leave, in at most a few seconds; the rest becomes unknown."""
        with self._sending:
            self._accepting = False
            waiting = [answers.future for answers in list(self._unresolved.values())]
        wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads = []
        self._clients.close()
        for answers in list(self._unresolved.values()):
            answers.give_up("the publisher was closed")

    # -- the thread that hands over and runs the reports ----------------------------------------------------------------

    def _hand_over_all(self) -> None:
        while not self._ended.is_set():
            try:
                if self._clients.outstanding:
                    self._serve(BUSY_SECONDS if self._sent.empty() else 0)
                    answers = self._sent.get_nowait()
                else:
                    self._serve(0)
                    answers = self._sent.get(timeout=IDLE_SECONDS)
            except Empty:
                continue
            self._stopped.reached(answers.number)
            until = answers.deadline - self._delivery_timeout
            if self._ended.is_set():
                self._withhold(answers, 0, "the publisher is closed")
            elif time.monotonic() >= until:
                self._withhold(answers, 0, "the deadline is nearer than the delivery timeout")
            else:
                try:
                    self._hand_over(answers, until)
                except Exception:
                    LOGGER.exception("handing a batch over failed in an unexpected way; it is unknown")
                    answers.give_up("unexpected")

    def _serve(self, seconds: float) -> None:
        try:
            self._clients.serve(seconds)
        except Exception:
            LOGGER.exception("serving delivery reports failed; going on")
            self._ended.wait(IDLE_SECONDS)

    def _hand_over(self, answers: Answers, until: float) -> None:
        client = self._clients.use(until)
        if client is None:
            self._withhold(answers, 0, "an earlier batch is still on its way")
            return
        send, report = client.producer.produce, self._reporter(client, answers)
        records = self._records
        topics: dict[str, Topic | None] = {}
        stopped = self._stopped.keys
        chosen: Route | None = None
        # What is no larger than this fits into its topic whatever its key and headers.
        plain = -1
        for index, event in enumerate(answers.batch):
            row, route = event
            if stopped and (row.tenant, row.ordering_key) in stopped:
                self._hold(answers, index, _STOPPED)
                continue
            name = route.to
            if route is not chosen:
                if name not in topics:
                    topics[name] = found = self._topics.find(client.producer, name, until)
                    if found is not None:
                        self._clients.fit(found.max_bytes)
                        client = self._clients.use(until) or client
                        send, report = client.producer.produce, self._reporter(client, answers)
                topic = topics[name]
                chosen, plain = route, -1 if topic is None else self._plain(topic)
            record = records.of(row)
            if isinstance(record, Outcome) or len(record[2]) > plain:
                record = self._checked(topics[name], name, record)
                if isinstance(record, Outcome):
                    self._hold(answers, index, record)
                    continue
            key, headers, value = record
            try:
                send(name, value, key, on_delivery=partial(report, index), headers=headers)
            except (BufferError, KafkaException) as error:
                again = partial(send, name, value, key, on_delivery=partial(report, index), headers=headers)
                if not self._squeeze(client, answers, index, again, error, until):
                    self._withhold(answers, index, "the local queue stayed full")
                    return
            if index % SERVE_EVERY == SERVE_EVERY - 1:
                self._serve(0)

    def _plain(self, topic: Topic) -> int:
        """The size of a value up to which nothing has to be weighed for this topic; -1 when nothing may go there."""
        if topic.reason is not None:
            return -1
        if self._compressed or topic.max_bytes is None:
            return sys.maxsize
        return topic.max_bytes - KEY_AND_HEADERS_BYTES

    def _checked(self, topic: Topic | None, name: str, record: Record | Outcome) -> Record | Outcome:
        """The record, or why it may not be sent there."""
        if topic is None:
            return Outcome(Answer.WITHHELD, detail="the topic could not be looked up")
        if topic.reason is not None:
            return Outcome(Answer.REFUSED, topic.reason, name)
        if isinstance(record, Outcome) or self._compressed:
            return record
        if more := excess(record, topic.max_bytes):
            return Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, more)
        return record

    def _squeeze(
        self,
        client: Client,
        answers: Answers,
        index: int,
        again: Callable[[], None],
        error: BufferError | KafkaException,
        until: float,
    ) -> bool:
        """Back-pressure: waits for room in the local queue; False when there is none in time."""
        while isinstance(error, BufferError):
            if time.monotonic() >= until or self._ended.is_set():
                return False
            self._serve(BUSY_SECONDS)
            try:
                again()
                return True
            except (BufferError, KafkaException) as other:
                error = other
        # The client refused this event before any of it was sent.
        code = cast(KafkaError, error.args[0])
        if code.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            outcome = Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, f"more than {self._max_bytes} bytes")
        else:
            client.broken = client.broken or code.fatal() or code.code() == _FATAL
            outcome = Outcome(Answer.WITHHELD, detail=code.name())
        self._hold(answers, index, outcome)
        return True

    def _hold(self, answers: Answers, index: int, outcome: Outcome) -> None:
        self._stopped.stop(key_of(answers.batch[index]), answers)
        answers.answer(index, outcome)

    def _withhold(self, answers: Answers, start: int, detail: str) -> None:
        outcome = Outcome(Answer.WITHHELD, detail=detail)
        for index in range(start, len(answers.batch)):
            self._hold(answers, index, outcome)

    # -- reports and deadlines -------------------------------------------------------------------------------------------

    def _reporter(self, client: Client, answers: Answers) -> _Report:
        """The callback of a send: the delivery report of an event is the only source of its confirm."""
        confirm = answers.confirm

        def report(index: int, error: KafkaError | None, message: Message) -> None:
            try:
                if error is None:
                    # Crash here: [B3] stored by Kafka and not counted: sent again, same bytes, with what was sent with it.
                    confirm(index)
                else:
                    self._failed(client, answers, index, error)
            except Exception:
                LOGGER.exception("a delivery report could not be recorded; the event stays unknown")

        return report

    def _failed(self, client: Client, answers: Answers, index: int, error: KafkaError) -> None:
        event = answers.batch[index]
        if error.fatal():
            self._clients.failed(client, error)
        self._hold(answers, index, self._judge(client, event, error))

    def _judge(self, client: Client, event: Outgoing, error: KafkaError) -> Outcome:
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            if client.batch_bytes == 1 or self._over(event):
                return Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, "the broker's limit")
            self._topics.forget(event.route.to)
            self._clients.careful()
            return Outcome(Answer.NACKED, detail="its batch was too large")
        found = judge(error)
        if found.answer is Answer.REFUSED:
            self._topics.forget(event.route.to)
        return found

    def _over(self, event: Outgoing) -> bool:
        """Whether the event is larger, uncompressed, than its topic takes."""
        record = self._records.of(event.row)
        return not isinstance(record, Outcome) and bool(excess(record, self._topics.limit(event.route.to)))

    def _seal(self, answers: Answers, outcomes: list[Outcome]) -> None:
        self._unresolved.pop(answers.number, None)

    def _watch(self) -> None:
        """No answer is later than its deadline, also while the other thread waits for the broker's metadata."""
        while not self._ended.wait(IDLE_SECONDS):
            now = time.monotonic() + IDLE_SECONDS
            for answers in list(self._unresolved.values()):
                if answers.deadline <= now:
                    answers.give_up("no delivery report by the deadline")
