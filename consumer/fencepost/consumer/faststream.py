"""FastStream: a subscriber whose handler is an inbox; a delivery is acknowledged only after the inbox has committed.

    inboxes = Inboxes(broker, database)

    @inboxes.on(broker.subscriber("reports", ack_policy=AckPolicy.MANUAL, channel=Channel(prefetch_count=16)))
    @inbox(consumer="report-analysis")
    async def on_accepted(tx, event: ReportAccepted) -> None: ...

RabbitMQ: a delivery is tried again where it is, unacknowledged; a nack would count against the limit of a quorum queue,
which then drops it. Kafka: its partition is wound back to it, so that polling goes on; what is committed is an explicit
offset, never the position of the client. Both: a failing handler is set aside after ``max_attempts``.

Crash here (F1): after the commit, before the acknowledgement. The broker delivers again; the reservation knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from aio_pika.exceptions import AMQPError, ChannelInvalidStateError, MessageProcessError
from confluent_kafka import KafkaException
from faststream import AckPolicy, BaseMiddleware, ContextRepo, StreamMessage
from faststream.confluent import KafkaBroker
from faststream.confluent.subscriber.usecase import DefaultSubscriber, LogicSubscriber
from faststream.message import AckStatus
from faststream.rabbit import RabbitBroker
from faststream.rabbit.subscriber import RabbitSubscriber

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.executors import Threads
from fencepost.consumer.faststream_sources import Queue, Topic
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, AsyncHandling, RunnerOptions, Tries, require_fit
from fencepost.consumer.transactions import AsyncDatabase, Database
from fencepost.schemas.errors import ConfigError

__all__ = ["Inboxes"]

log = logging.getLogger("fencepost.consumer.faststream")

PAUSE_SECONDS = 30.0  # Between two polls, far below max.poll.interval.ms.
LOOK_SECONDS = 0.1

_LOSSES = (
    *(AMQPError, ChannelInvalidStateError, MessageProcessError, KafkaException),
    *(OSError, TimeoutError, RuntimeError),
)

AnyInbox = TypeVar("AnyInbox", bound=Inbox[Any] | AsyncInbox[Any])


class Inboxes:
    """The inboxes of one FastStream broker: nothing of theirs is acknowledged before it is committed, nothing skipped.

    Adds an outermost middleware to ``broker``: what any other middleware fails on or swallows is delivered again.
    ``database`` and ``options`` are those of a runner. Give ``close`` to the application's ``after_shutdown``.
    """

    def __init__(
        self,
        broker: RabbitBroker | KafkaBroker,
        database: Database | AsyncDatabase,
        *,
        options: RunnerOptions | None = None,
    ) -> None:
        if not isinstance(cast(object, broker), RabbitBroker | KafkaBroker):
            what = "the broker is not one of RabbitMQ or of Kafka by confluent-kafka"
            raise _refused("broker", what, "give a faststream.rabbit.RabbitBroker or faststream.confluent.KafkaBroker")
        self._broker = broker
        self._database = database
        self._options = options or RunnerOptions()
        if self._options.batch > 1:
            raise _refused("batch", "FastStream hands over one message at a time", "leave batch at 1, or use a runner")
        self._feeds: dict[object, _Feed] = {}
        broker.insert_middleware(cast(Any, self._net))

    def on(self, subscriber: RabbitSubscriber | LogicSubscriber[Any]) -> Callable[[AnyInbox], AnyInbox]:
        """Makes the inbox below the one handler of ``subscriber``, of this broker or of a router included in it.

        Raises ConfigError, now and not at the first message, where the subscriber or its broker would acknowledge by
        itself, hand over several messages at a time, or take deliveries without limit, and for a database that does not
        fit the handler.
        """
        source = self._source(subscriber)

        def register(inbox: AnyInbox) -> AnyInbox:
            if not isinstance(cast(object, inbox), Inbox | AsyncInbox):
                raise _refused("handler", "the handler is not an inbox", "put @inbox(consumer=...) right above it")
            if subscriber.calls:
                raise _refused("subscriber", "the subscriber has a handler already", "one subscriber for each inbox")
            require_fit(inbox, self._database)
            feed = self._feeds[subscriber] = _Feed(inbox, source, self._database, self._options)

            async def handle(message: Any) -> None:
                await feed.handle(message)

            handle.__name__, handle.__doc__ = inbox.__name__, inbox.__doc__
            subscriber(handle, parser=source.parse, decoder=_undecoded)
            return inbox

        return register

    async def close(self) -> None:
        """Closes idle connections; a broker started again opens new ones."""
        for feed in self._feeds.values():
            await feed.close()

    def _source(self, subscriber: RabbitSubscriber | LogicSubscriber[Any]) -> Queue | Topic:
        policy = subscriber.ack_policy
        if policy is not AckPolicy.MANUAL:
            hint = "give ack_policy=AckPolicy.MANUAL to broker.subscriber"
            raise _refused("ack_policy", f"ack_policy {policy.value} acknowledges what is not committed", hint)
        if isinstance(self._broker, RabbitBroker) and isinstance(subscriber, RabbitSubscriber):
            if subscriber.channel is None or not subscriber.channel.prefetch_count:
                hint = "give channel=Channel(prefetch_count=16) to broker.subscriber"
                raise _refused("channel", "without prefetch_count deliveries have no limit", hint)
            return Queue(subscriber)
        if isinstance(self._broker, KafkaBroker) and isinstance(subscriber, LogicSubscriber):
            if getattr(subscriber, "max_workers", 1) > 1:
                raise _refused("max_workers", "max_workers commits offsets above unfinished work", "leave it at 1")
            if not isinstance(subscriber, DefaultSubscriber):
                raise _refused("batch", "an inbox takes one message at a time", "remove batch=True")
            if not subscriber.group_id:
                raise _refused("group_id", "without group_id no offset is kept", "give it to broker.subscriber")
            settings = cast(Any, self._broker).config.connection_config.consumer_config
            for name in ("enable.auto.commit", "auto.commit.enable"):
                if str(settings.get(name, False)).lower() != "false":
                    hint = "remove it from the broker's config"
                    raise _refused(name, f"{name} commits offsets of unfinished work", hint)
            return Topic(subscriber)
        raise _refused("subscriber", "the subscriber belongs to another kind of broker", "use that broker's inboxes")

    def _net(self, message: object, /, *, context: ContextRepo) -> BaseMiddleware[Any, Any]:
        feed = self._feeds.get(context.get_local("handler_"))
        if feed is None or context.get_local("message") is not None:  # Another's, or what a handler asked for.
            return BaseMiddleware(message, context=context)
        return _Net(message, context, feed)


class _Net(BaseMiddleware[Any, Any]):
    """Invariant: what leaves FastStream is acknowledged, or wound back before anything behind it is taken."""

    def __init__(self, raw: Any, context: ContextRepo, feed: _Feed) -> None:
        super().__init__(raw, context=context)
        self._feed = feed
        self._message: StreamMessage[Any] | None = None

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        self._message = msg
        return await call_next(msg)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        settled = self._message is not None and self._message.committed is not None
        if not settled and (exc_val is None or isinstance(exc_val, Exception)):
            await self._feed.missed(self.msg)
        return False


class _Feed:
    """One inbox and where its deliveries come from."""

    def __init__(
        self,
        inbox: Inbox[Any] | AsyncInbox[Any],
        source: Queue | Topic,
        database: Database | AsyncDatabase,
        options: RunnerOptions,
    ) -> None:
        self._inbox, self._source, self._database, self._options = inbox, source, database, options
        self._handling: Threads | AsyncHandling | None = None
        self._slots = asyncio.Semaphore(options.concurrency)
        self._missed = 0

    async def handle(self, message: StreamMessage[Any]) -> None:
        raw = message.raw_message
        if self._source.out_of_turn(raw):
            await self._back(raw)
            message.committed = AckStatus.NACKED
            return
        delivery, tries = await self._source.delivery(raw), self._source.tries(raw, self._options)
        while isinstance(result := await self._attempt(delivery, tries), Again):
            await self._pause(result.seconds)
            if self._source.rewinds or not self._source.subscriber.running:
                await self._back(raw)
                message.committed = AckStatus.NACKED
                return
        try:
            await self._source.done(raw)
        except _LOSSES as error:
            log.warning("%s: acknowledgement lost: %s", delivery.coordinates, type(error).__name__)
        message.committed = AckStatus.ACKED
        self._missed = 0

    async def missed(self, raw: Any) -> None:
        """It never came to the inbox, or the inbox could not take it: not the handler's fault, so it comes again."""
        self._missed += 1
        log.error("%s: a delivery did not reach its inbox, it comes again", self._inbox.consumer)
        await self._pause(self._options.backoff(self._missed))
        await self._back(raw)

    async def _back(self, raw: Any) -> None:
        try:
            await self._source.back(raw)
        except _LOSSES as error:
            log.warning("%s: a delivery was not given back: %s", self._inbox.consumer, type(error).__name__)

    async def _attempt(self, delivery: Delivery, tries: Tries) -> Handled | Again:
        if isinstance(self._inbox, AsyncInbox):
            async with self._slots:
                if not isinstance(self._handling, AsyncHandling):
                    self._handling = AsyncHandling(self._inbox, cast(AsyncDatabase, self._database), self._options)
                return await self._handling.attempt(delivery, tries)
        if not isinstance(self._handling, Threads):
            self._handling = Threads(self._inbox, cast(Database, self._database), self._options)
        (result,) = await asyncio.wrap_future(self._handling.start([(delivery, tries)]))
        return result

    async def _pause(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + min(seconds, PAUSE_SECONDS)
        while self._source.subscriber.running and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, LOOK_SECONDS))

    async def close(self) -> None:
        handling, self._handling, self._slots = self._handling, None, asyncio.Semaphore(self._options.concurrency)
        if isinstance(handling, Threads):
            handling.close()
        elif handling is not None:
            await handling.close()


async def _undecoded(message: StreamMessage[Any]) -> StreamMessage[Any]:
    """What cannot be read is the inbox's to judge."""
    return message


def _refused(field: str, what: str, hint: str) -> ConfigError:
    return ConfigError(what, field=field, hint=hint)
