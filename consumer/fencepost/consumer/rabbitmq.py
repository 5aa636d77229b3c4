"""RabbitMQ: a delivery is acknowledged on its own channel, and only after the commit in the database.

Messages of a queue are handled side by side, up to ``concurrency``; who needs their order declares the queue with a
single active consumer and uses prefetch 1. The broker closes the channel of a delivery that stays unacknowledged
for too long (30 minutes by default): a handler that takes longer is run again elsewhere and finds itself a duplicate.

Crash here (R1): after the commit, before the acknowledgement. The broker delivers again; the reservation knows.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ProbableAuthenticationError,
)
from yarl import URL

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries, require_fit
from fencepost.consumer.signals import stop_on_signals
from fencepost.consumer.transactions import AsyncDatabase, Database
from fencepost.consumer.upkeep import Upkeep
from fencepost.schemas.errors import ConfigError, Unreachable

__all__ = ["RabbitRunner"]

log = logging.getLogger("fencepost.consumer.rabbitmq")

CONNECT_SECONDS = 10.0
CHECK_SECONDS = 5.0
HEARTBEAT_SECONDS = 20
STOP_POLL_SECONDS = 0.1

_LOSSES = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, RuntimeError)


class _Connection(aio_pika.Connection):
    """Closed by the runner, never by the garbage collector, which may run in another thread."""

    def __del__(self) -> None:
        """The library would begin an orderly close here, without a loop to run it."""


class RabbitRunner:
    """Feeds an inbox from one queue until it is stopped; every message is handled or a dead letter, none is dropped.

    ``database`` as of `Inbox.handle`. The queue must exist, unless ``declare``: then a durable topic exchange, a quorum
    queue bound to it by ``routing_keys`` and limited to ``delivery_limit`` deliveries, and a queue ``<queue>.dead`` for
    what exceeds the limit are declared. ``prefetch`` bounds what is unacknowledged at a time.
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
    ) -> None:
        if not queue:
            raise ConfigError("queue is empty", field="queue")
        if not 1 <= prefetch <= 10_000:
            raise ConfigError(
                "prefetch is not between 1 and 10000", field="prefetch", hint="without it memory has no bound"
            )
        if not 1 <= delivery_limit <= 1_000_000:
            raise ConfigError("delivery_limit is not between 1 and 1000000", field="delivery_limit")
        self._inbox = inbox
        self._database = database
        require_fit(inbox, database)
        require_fit(inbox, database)
        self._url = url
        self._queue = queue
        self._exchange = exchange
        self._routing_keys = list(routing_keys)
        self._declare = declare
        self._delivery_limit = delivery_limit
        self._prefetch = prefetch
        self._options = options or RunnerOptions()

    def run(self, stop: threading.Event | None = None) -> None:
        """Runs until ``stop`` is set, then drains: running handlers finish and are acknowledged, the rest goes back.

        Without ``stop``, SIGTERM and SIGINT stop it (main thread only). Connects again by itself for as long as it
        runs; raises Unreachable when RabbitMQ does not answer within ``start_seconds`` at the start, and ConfigError
        for a queue that does not exist or is declared differently.
        """
        if stop is None:
            with stop_on_signals() as signalled:
                return self.run(signalled)
        asyncio.run(self._until(stop))

    async def serve(self, stop: asyncio.Event) -> None:
        """As `run`, in the caller's event loop."""
        serving = _Serving(self._inbox, self._database, self._options, stop)
        upkeep = Upkeep(self._inbox.consumer, self._database)
        upkeep.start()
        serving.give_back()
        try:
            await self._connected(serving, stop)
        finally:
            await serving.end()
            await asyncio.to_thread(upkeep.stop)

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

    async def _connected(self, serving: _Serving, stop: asyncio.Event) -> None:
        """Sessions one after the other, each on a connection of its own, until stopped."""
        deadline = time.monotonic() + self._options.start_seconds
        tries, ever = 0, False
        while not stop.is_set():
            session = _Session(stop)
            try:
                await self._session(session, serving)
            except _LOSSES as error:
                ever = ever or session.consuming
                tries = 1 if session.consuming else tries + 1
                pause = self._options.backoff(tries)
                if not ever and (isinstance(error, ChannelPreconditionFailed) or time.monotonic() + pause > deadline):
                    raise self._refused(error) from None
                log.warning("%s: RabbitMQ lost (%s), again in %.1f s", self._queue, type(error).__name__, pause)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)

    async def _session(self, session: _Session, serving: _Serving) -> None:
        url = URL(self._url)
        if "heartbeat" not in url.query:
            url = url.update_query(heartbeat=str(HEARTBEAT_SECONDS))
        connection = await aio_pika.connect(url, timeout=CONNECT_SECONDS, connection_class=_Connection)
        try:
            channel = await connection.channel(publisher_confirms=False)
            await channel.set_qos(prefetch_count=self._prefetch, timeout=CONNECT_SECONDS)
            queue = await self._found(channel)
            session.watch(connection, channel)
            cluster, vhost = _cluster(connection), url.path.removeprefix("/") or "/"

            async def arrived(message: AbstractIncomingMessage) -> None:
                serving.take(session, message, self._delivery(cluster, vhost, message))

            tag = await queue.consume(arrived, no_ack=False, timeout=CONNECT_SECONDS)
            session.consuming = True
            log.info("%s: consuming", self._queue)
            while not await session.over(CHECK_SECONDS):
                await self._check(channel)
            if not session.lost.is_set():
                with suppress(*_LOSSES):
                    await queue.cancel(tag, timeout=CONNECT_SECONDS)
                await serving.drain()
        finally:
            session.closed = True
            with suppress(*_LOSSES):
                await asyncio.wait_for(connection.close(), CONNECT_SECONDS)
        if session.lost.is_set():
            raise ConnectionError("the channel or the consumer is gone")

    async def _check(self, channel: AbstractChannel) -> None:
        """A queue that was deleted cancels its consumers, and not every client tells: ask."""
        found = await channel.declare_queue(self._queue, passive=True, timeout=CONNECT_SECONDS)
        if not found.declaration_result.consumer_count:
            raise ConnectionError("the broker does not know this consumer any more")

    async def _found(self, channel: AbstractChannel) -> AbstractQueue:
        if not self._declare:
            return await channel.declare_queue(self._queue, passive=True, timeout=CONNECT_SECONDS)
        dead = f"{self._queue}.dead"
        await channel.declare_queue(dead, durable=True, arguments={"x-queue-type": "quorum"}, timeout=CONNECT_SECONDS)
        queue = await channel.declare_queue(
            self._queue,
            durable=True,
            arguments={
                "x-queue-type": "quorum",
                "x-delivery-limit": self._delivery_limit,
                # Invariant: what exceeds the limit moves to a queue, confirmed; without this it would be dropped.
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": dead,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            },
            timeout=CONNECT_SECONDS,
        )
        if self._exchange:
            exchange = await channel.declare_exchange(
                self._exchange, aio_pika.ExchangeType.TOPIC, durable=True, timeout=CONNECT_SECONDS
            )
            for key in self._routing_keys:
                await queue.bind(exchange, key, timeout=CONNECT_SECONDS)
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

    def _refused(self, error: Exception) -> Exception:
        match error:
            case ChannelNotFoundEntity():
                return ConfigError(
                    f"the queue {self._queue} does not exist", field="queue", hint="declare it, or use declare=True"
                )
            case ChannelPreconditionFailed():
                return ConfigError(
                    f"the queue {self._queue} or its exchange exists with other properties",
                    field="queue",
                    hint="declare it as it is elsewhere, or use declare=False",
                )
            case AuthenticationError() | ProbableAuthenticationError():
                what = "RabbitMQ refused the login"
            case _:
                what = f"RabbitMQ did not answer: {type(error).__name__}"
        return Unreachable(what, address=self._url, field="url", hint="check that RabbitMQ runs there")


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


class _Serving:
    """The deliveries in hand: they outlive the session that brought them, their acknowledgement does not."""

    def __init__(
        self,
        inbox: Inbox[Any] | AsyncInbox[Any],
        database: Database | AsyncDatabase,
        options: RunnerOptions,
        stop: asyncio.Event,
    ) -> None:
        self._options = options
        self._stop = stop
        self._slots = asyncio.Semaphore(options.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving_back: asyncio.Task[None] | None = None
        self._retrying = False
        self._pool: ThreadPoolExecutor | None = None
        self._sync: Handling | None = None
        self._async: AsyncHandling | None = None
        if isinstance(inbox, AsyncInbox):
            self._async = AsyncHandling(inbox, cast(AsyncDatabase, database), options)
        else:
            self._sync = Handling(inbox, cast(Database, database), options)
            self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="fencepost-consumer")

    def take(self, session: _Session, message: AbstractIncomingMessage, delivery: Delivery) -> None:
        """Works on a delivery in a task of its own; prefetch bounds their number."""
        task = asyncio.create_task(self._work(session, message, delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_back(self) -> None:
        """Handles dead letters that an operator gave back, one at a time where no message waits, until it ends."""
        self._giving_back = asyncio.create_task(self._given_back())

    async def _given_back(self) -> None:
        while not self._stop.is_set():
            found = False
            if not self._slots.locked():
                async with self._slots:
                    self._retrying = True
                    try:
                        found = await self._retry()
                    finally:
                        self._retrying = False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.001 if found else self._options.idle_seconds)

    async def _retry(self) -> bool:
        if self._async is not None:
            return await self._async.retry()
        assert self._sync is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._sync.retry)

    async def _work(self, session: _Session, message: AbstractIncomingMessage, delivery: Delivery) -> None:
        tries = Tries(self._options)
        while True:
            async with self._slots:
                if self._stop.is_set() or session.closed:
                    return  # Not acknowledged: the broker gives it to somebody else.
                result = await self._attempt(delivery, tries)
            if isinstance(result, Handled):
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), result.seconds)
        if session.closed:
            log.warning("%s: acknowledgement dropped, its channel is closed", delivery.coordinates)
            return
        try:
            await message.ack()
        except _LOSSES as error:
            log.warning("%s: acknowledgement lost: %s", delivery.coordinates, type(error).__name__)

    async def _attempt(self, delivery: Delivery, tries: Tries) -> Handled | Again:
        if self._async is not None:
            return await self._async.attempt(delivery, tries)
        assert self._sync is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._sync.attempt, delivery, tries)

    async def drain(self) -> None:
        """Waits for running handlers, at most ``drain_seconds``; what waits for its turn gives up by itself."""
        running = set(self._tasks)
        if self._giving_back is not None and self._retrying:
            running.add(self._giving_back)
        if not running:
            return
        _, pending = await asyncio.wait(running, timeout=self._options.drain_seconds)
        if pending:
            log.warning("%d handlers were still running after %.0f s", len(pending), self._options.drain_seconds)

    async def end(self) -> None:
        """Drains, then cancels what is left; a cancelled handler's transaction is rolled back."""
        await self.drain()
        left = [*self._tasks, *([] if self._giving_back is None else [self._giving_back])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            await self._async.close()


def _cluster(connection: AbstractConnection) -> str:
    """The name the broker gives its cluster, else host and port."""
    transport: Any = connection.transport
    properties = cast(Mapping[str, object], getattr(getattr(transport, "connection", None), "server_properties", {}))
    name = properties.get("cluster_name")
    if isinstance(name, bytes):
        name = name.decode("utf-8", "replace")
    url = getattr(connection, "url", None)
    return name if isinstance(name, str) else f"{getattr(url, 'host', '')}:{getattr(url, 'port', '')}"
