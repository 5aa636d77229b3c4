"""The producers of librdkafka behind one publisher: made, replaced after a fatal error, and for other batch sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Producer

from fencepost.relay.kafka_refusals import Refusal, refusal, unusable
from fencepost.schemas.errors import Unreachable

LOGGER = logging.getLogger(__name__)
CLIENT_LOGGER = logging.getLogger(f"{__name__}.client")

WAIT_SECONDS = 0.005
PURGED_SECONDS = 2.0
CAREFUL_SECONDS = 60.0
BATCH_BYTES = 1_000_000

_FATAL = KafkaError._FATAL  # pyright: ignore[reportPrivateUsage]


class Client:
    """One producer of librdkafka, with the batch size it was made for."""

    def __init__(self, configuration: Mapping[str, object], batch_bytes: int, on_error: _OnError) -> None:
        self.batch_bytes = batch_bytes
        self.broken = False
        settings = dict(configuration) | {"batch.size": batch_bytes, "error_cb": partial(on_error, self)}
        self.producer = Producer(settings, logger=CLIENT_LOGGER)


_OnError = Callable[[Client, KafkaError], None]


class Clients:
    """The producer in use and those that still owe delivery reports. All but `failed` is for the handing thread.

    `configuration`: what every producer gets; `wait` is called with seconds while something must end first.
    """

    def __init__(self, bootstrap: str, configuration: Mapping[str, object], wait: Callable[[float], None]) -> None:
        self._bootstrap = bootstrap
        self._configuration = dict(configuration)
        self._wait = wait
        self._batch_bytes = BATCH_BYTES
        self._careful_until = 0.0
        self._retired: list[Client] = []
        self.current: Client | None = None
        self.last_error = ""
        self._refusal: Refusal | None = None

    def open(self, deadline: float) -> None:
        """Connects, or raises `Unreachable` before `deadline` (monotonic seconds), ConfigError for an unusable option."""
        self._refusal = None
        try:
            client = self._make()
        except KafkaException as error:
            raise unusable(cast(KafkaError, error.args[0])) from None
        try:
            client.producer.list_topics(timeout=max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            client.producer.poll(0)
            if (told := self._refusal) is not None:
                raise Unreachable(told.message, address=self._bootstrap, field=told.field, hint=told.hint) from None
            code = cast(KafkaError, error.args[0])
            raise Unreachable(
                f"Kafka does not answer: {self.last_error or code.name()}", address=self._bootstrap, field="bootstrap"
            ) from None
        self.current = client

    def use(self, until: float) -> Client | None:
        """The client to use now, replaced when it is broken or made for other batches; None when that must wait.

        Invariant: a client takes over only after its predecessor has nothing left to send and every report was seen, else
        two events of one key could be on their way at once, and the later one could arrive although the earlier one failed.
        """
        client = self.current
        if client is None or client.broken:
            if client is not None:
                self._retire(client)
                self.current = None
            while self._retired:
                if time.monotonic() >= until:
                    return None
                self._wait(WAIT_SECONDS)
            self.current = self._make()
            return self.current
        if client.batch_bytes == self._wanted():
            return client
        while len(client.producer):
            if time.monotonic() >= until or client.broken:
                return None
            self._wait(WAIT_SECONDS)
        self.current = self._make()
        return self.current

    def fit(self, max_bytes: int | None) -> None:
        """Broker limits count whole batches: from here on a batch fits into the smallest limit seen."""
        if max_bytes is not None:
            self._batch_bytes = min(self._batch_bytes, max_bytes)

    def careful(self) -> None:
        """Batches hold a single event for a minute, to find out which one the broker refuses."""
        self._careful_until = time.monotonic() + CAREFUL_SECONDS

    @property
    def outstanding(self) -> bool:
        """Whether a delivery report is still to come."""
        return bool(self._retired) or (self.current is not None and len(self.current.producer) > 0)

    def serve(self, seconds: float) -> None:
        """Runs the callbacks of delivery reports and errors that are there, and waits so long for the first."""
        if self.current is not None:
            self.current.producer.poll(seconds)
        for retired in list(self._retired):
            retired.producer.poll(seconds if self.current is None else 0)
            if not len(retired.producer):
                self._retired.remove(retired)

    def failed(self, client: Client, error: KafkaError) -> None:
        """An error of a client, perhaps the last it will ever tell."""
        self.last_error = error.name()
        self._refusal = refusal(error) or self._refusal
        if error.fatal() or error.code() == _FATAL:
            client.broken = True

    def close(self) -> None:
        """Leaves in at most a few seconds; what was on its way is unknown."""
        clients, self.current = [*self._retired, *filter(None, [self.current])], None
        self._retired = []
        for client in clients:
            client.producer.purge()
            client.producer.flush(PURGED_SECONDS)

    def _wanted(self) -> int:
        return 1 if time.monotonic() < self._careful_until else self._batch_bytes

    def _make(self) -> Client:
        return Client(self._configuration, self._wanted(), self.failed)

    def _retire(self, client: Client) -> None:
        """Gives a client up after a fatal error: what was on its way is unknown, and the caller sends it again."""
        LOGGER.error("the Kafka producer failed for good (%s) and is replaced", self.last_error)
        # Crash here: [B5] a dead producer still holds events: the slots' next owner sends them again, same bytes.
        client.producer.purge(blocking=False)
        self._retired.append(client)
