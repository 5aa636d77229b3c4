"""RabbitMQ: a delivery is acknowledged on its own channel, and only after the commit in the database.

Messages of one ordering key are handled one after the other in the order of their arrival, keys side by side, up to
``concurrency``. Several processes share a queue without order between them: where that matters, the queue is declared with
a single active consumer. The broker closes the channel of a delivery that stays unacknowledged for too long (30 minutes by
default): it comes back on a new channel, its acknowledgement is dropped, and the reservation knows it for a duplicate.

While the database is not armed nothing is handled. What it has lost when it was restored is not here any more: it is sent
again from the outbox (`fencepost relay backfill`).

Crash here (R1): after the commit, before the acknowledgement. The broker delivers again; the reservation knows.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import ChannelPreconditionFailed
from yarl import URL

from fencepost.consumer.connections import require_contract
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.rabbitmq_queue import arguments_of, declared, refused, weaknesses
from fencepost.consumer.rabbitmq_serving import LOSSES, Serving
from fencepost.consumer.runner import RunnerOptions, require_fit
from fencepost.consumer.signals import stop_on_signals
from fencepost.consumer.standing import BrokerState, Standing
from fencepost.consumer.transactions import AsyncDatabase, Database
from fencepost.consumer.upkeep import Upkeep
from fencepost.schemas.amqp_address import checked_address
from fencepost.schemas.errors import ConfigError

__all__ = ["RabbitRunner"]

log = logging.getLogger("fencepost.consumer.rabbitmq")

CONNECT_SECONDS = 10.0
CHECK_SECONDS = 5.0
ARMED_SECONDS = 1.0
HEARTBEAT_SECONDS = 20
STOP_POLL_SECONDS = 0.1
MOVE_SECONDS = 0.5


class _Connection(aio_pika.Connection):
    """Closed by the runner, never by the garbage collector, which may run in another thread."""

    def __del__(self) -> None:
        """The library would begin an orderly close here, without a loop to run it."""


class RabbitRunner:
    """Feeds an inbox from one queue until it is stopped; every message is handled or a dead letter, none is dropped.

    ``database`` as of `Inbox.handle`. The queue must exist, unless ``declare``: then a durable topic exchange, a quorum
    queue bound to it by ``routing_keys`` and limited to ``delivery_limit`` deliveries, and a queue ``<queue>.dead`` for
    what exceeds the limit are declared. Of a queue that is not declared here, what could
    drop a message is logged once. ``prefetch`` bounds what is unacknowledged at a time.

    Without ``insecure``, ConfigError for ``amqp://`` off loopback (credentials in the clear) and for TLS that does not
    verify the server. ``context``: TLS with an authority or a client certificate of your own.
    """

    def __init__(
        self,
        inbox: Inbox[Any] | AsyncInbox[Any],
        database: Database | AsyncDatabase,
        *,
        url: str,
        queue: str,
        exchange: str | None = None,
        routing_keys: Sequence[str] = ("#",),
        declare: bool = False,
        delivery_limit: int = 20,
        prefetch: int = 16,
        options: RunnerOptions | None = None,
        context: ssl.SSLContext | None = None,
        insecure: bool = False,
    ) -> None:
        if not queue:
            raise ConfigError("queue is empty", field="queue")
        if not 1 <= prefetch <= 10_000:
            raise ConfigError(
                "prefetch is not between 1 and 10000", field="prefetch", hint="without it memory has no bound"
            )
        if not 1 <= delivery_limit <= 1_000_000:
            raise ConfigError("delivery_limit is not between 1 and 1000000", field="delivery_limit")
        if context is not None and not insecure and context.verify_mode is not ssl.CERT_REQUIRED:
            raise ConfigError("the server would not be verified", field="context", hint="or insecure=True")
        self._inbox = inbox
        self._database = database
        require_fit(inbox, database)
        self._url = checked_address(url, insecure=insecure)
        self._context = context
        self._looked = False
        self.standing = Standing(inbox.consumer, "rabbitmq")
        self._queue = queue
        self._exchange = exchange
        self._routing_keys = list(routing_keys)
        self._declare = declare
        self._delivery_limit = delivery_limit
        self._prefetch = prefetch
        self._options = options or RunnerOptions()
        if prefetch < self._options.batch:
            raise ConfigError("a batch is larger than prefetch", field="prefetch", hint="at least twice the batch")

    def run(self, stop: threading.Event | None = None) -> None:
        """Runs until ``stop`` is set, then drains: running handlers finish and are acknowledged, the rest goes back.

        Without ``stop``, SIGTERM and SIGINT stop it (main thread only). Connects again by itself for as long as it
        runs; raises Unreachable when RabbitMQ does not answer within ``start_seconds`` at the start, and ConfigError
        for a queue that does not exist or is declared differently, ContractMismatch for a database of a version too far away.
        """
        if stop is None:
            with stop_on_signals() as signalled:
                return self.run(signalled)
        asyncio.run(self._until(stop))

    async def serve(self, stop: asyncio.Event) -> None:
        """As `run`, in the caller's event loop."""
        serving = Serving(self._inbox, self._database, self._options, stop, self.standing)
        self._looked, self.standing.draining = False, False
        self.standing.in_flight, self.standing.oldest = serving.in_flight, serving.oldest
        moving = asyncio.create_task(self._moving(stop))
        upkeep = Upkeep(self._inbox.consumer, self._database)
        upkeep.start()
        try:
            await self._connected(serving, stop)
        finally:
            await serving.end()
            moving.cancel()
            await asyncio.to_thread(upkeep.stop)

    async def _moving(self, stop: asyncio.Event) -> None:
        """A loop that a handler blocks does not come here, and is told as standing still."""
        while True:
            self.standing.moved()
            self.standing.draining = stop.is_set()
            await asyncio.sleep(MOVE_SECONDS)

    async def _until(self, stop: threading.Event) -> None:
        stopped = asyncio.Event()

        async def watch() -> None:
            while not stop.is_set():
                await asyncio.sleep(STOP_POLL_SECONDS)
            stopped.set()

        watching = asyncio.create_task(watch())
        try:
            await self.serve(stopped)
        finally:
            watching.cancel()

    async def _connected(self, serving: Serving, stop: asyncio.Event) -> None:
        """Sessions one after the other, each on a connection of its own, until stopped."""
        deadline = time.monotonic() + self._options.start_seconds
        tries, ever = 0, False
        while not stop.is_set():
            if not await serving.armed():
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), ARMED_SECONDS)
                continue
            session = _Session(stop)
            try:
                await asyncio.to_thread(require_contract, self._database)
                serving.give_back()
                await self._session(session, serving)
            except LOSSES as error:
                ever = ever or session.consuming
                if ever:
                    self.standing.broker = BrokerState.UNREACHABLE
                if session.consuming:
                    self.standing.lost()
                tries = 1 if session.consuming else tries + 1
                pause = self._options.backoff(tries)
                if not ever and (isinstance(error, ChannelPreconditionFailed) or time.monotonic() + pause > deadline):
                    raise refused(error, self._queue, self._url) from None
                log.warning("%s: RabbitMQ lost (%s), again in %.1f s", self._queue, type(error).__name__, pause)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)

    async def _session(self, session: _Session, serving: Serving) -> None:
        url = URL(self._url)
        if "heartbeat" not in url.query:
            url = url.update_query(heartbeat=str(HEARTBEAT_SECONDS))
        connection = await aio_pika.connect(
            url, timeout=CONNECT_SECONDS, connection_class=_Connection, ssl_context=self._context
        )
        try:
            channel = await connection.channel(publisher_confirms=False)
            await channel.set_qos(prefetch_count=self._prefetch, timeout=CONNECT_SECONDS)
            queue = await self._found(connection, channel)
            session.watch(connection, channel)
            cluster, vhost = _cluster(connection), url.path.removeprefix("/") or "/"

            async def arrived(message: AbstractIncomingMessage) -> None:
                serving.take(session, message, self._delivery(cluster, vhost, message))

            tag = await queue.consume(arrived, no_ack=False, timeout=CONNECT_SECONDS)
            session.consuming = self.standing.consuming = True
            self.standing.broker = BrokerState.CONNECTED
            log.info("%s: consuming", self._queue)
            while not await session.over(CHECK_SECONDS):
                await self._check(channel)
                if not await serving.armed():
                    # Of what is in hand nothing more is begun: it comes back when this database may be used.
                    session.closed = True
                    return
            if not session.lost.is_set():
                with suppress(*LOSSES):
                    await queue.cancel(tag, timeout=CONNECT_SECONDS)
                await serving.drain()
        finally:
            session.closed = True
            self.standing.consuming = False
            with suppress(*LOSSES):
                await asyncio.wait_for(connection.close(), CONNECT_SECONDS)
        if session.lost.is_set():
            raise ConnectionError("the channel or the consumer is gone")

    async def _check(self, channel: AbstractChannel) -> None:
        """A queue that was deleted cancels its consumers, and not every client tells: ask."""
        found = await channel.declare_queue(self._queue, passive=True, timeout=CONNECT_SECONDS)
        if not found.declaration_result.consumer_count:
            raise ConnectionError("the broker does not know this consumer any more")

    async def _found(self, connection: AbstractConnection, channel: AbstractChannel) -> AbstractQueue:
        if self._declare:
            return await declared(
                channel,
                self._queue,
                exchange=self._exchange,
                routing_keys=self._routing_keys,
                delivery_limit=self._delivery_limit,
            )
        queue = await channel.declare_queue(self._queue, passive=True, timeout=CONNECT_SECONDS)
        if not self._looked:
            self._looked = True
            arguments = await arguments_of(connection, self._queue)
            if arguments is None:
                log.info("%s: how it is declared cannot be seen by this login", self._queue)
                return queue
            for weakness in weaknesses(arguments):
                log.warning("%s: unless a policy says otherwise, %s", self._queue, weakness)
        return queue

    def _delivery(self, cluster: str, vhost: str, message: AbstractIncomingMessage) -> Delivery:
        return Delivery.from_rabbitmq(
            cluster=cluster,
            vhost=vhost,
            queue=self._queue,
            message_id=message.message_id,
            headers=message.headers,
            content_type=message.content_type,
            body=message.body,
            redelivered=bool(message.redelivered),
        )


class _Session:
    """One connection from its opening to its end; ``closed`` makes every acknowledgement of it stale."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self.lost = asyncio.Event()
        self.consuming = False
        self.closed = False

    def watch(self, connection: AbstractConnection, channel: AbstractChannel) -> None:
        connection.close_callbacks.add(self._on_loss)
        channel.close_callbacks.add(self._on_loss)

    def _on_loss(self, *_: object) -> None:
        self.closed = True
        self.lost.set()

    async def over(self, seconds: float) -> bool:
        """True once stopped or lost, False after ``seconds``."""
        waits = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self.lost.wait())]
        done, pending = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return bool(done)


def _cluster(connection: AbstractConnection) -> str:
    """The name the broker gives its cluster, else host and port."""
    transport: Any = connection.transport
    properties = cast(Mapping[str, object], getattr(getattr(transport, "connection", None), "server_properties", {}))
    name = properties.get("cluster_name")
    if isinstance(name, bytes):
        name = name.decode("utf-8", "replace")
    url = getattr(connection, "url", None)
    return name if isinstance(name, str) else f"{getattr(url, 'host', '')}:{getattr(url, 'port', '')}"
