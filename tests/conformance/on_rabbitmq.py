"""RabbitMQ under the suite."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from conformance.harness import READ_SECONDS, SOURCE, Arrived, Features
from fencepost.relay.publisher import ParkReason, Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.schemas import amqp_binding
from support.services import Rabbit

LIMIT = 300_000
T = TypeVar("T")


class OnRabbit:
    """Topic exchanges with one durable queue of the same name bound to everything."""

    def __init__(self, rabbit: Rabbit) -> None:
        self._rabbit = rabbit
        self.features = Features(
            name="rabbitmq",
            missing=ParkReason.NO_SUCH_EXCHANGE,
            unroutable=ParkReason.UNROUTABLE,
            pausable=rabbit.node is not None,
            limit=LIMIT,
            shortest=1.5,
        )

    def publisher(self, *, impatient: bool = False) -> RabbitPublisher:
        return RabbitPublisher(self._rabbit.url, source=SOURCE, max_message_bytes=LIMIT)

    def astray(self) -> RabbitPublisher:
        return RabbitPublisher("amqp://u:SECRET@127.0.0.1:1/", source=SOURCE)

    def destination(self) -> Route:
        return self.route("#")

    def missing(self) -> Route:
        return Route("*", self._rabbit.name("missing"))

    def nowhere(self) -> Route:
        return self.route(None)

    def route(self, binding: str | None, arguments: dict[str, str | int] | None = None) -> Route:
        """A new exchange, with a queue when there is a binding."""
        name = self._rabbit.name()

        async def declare(channel: AbstractChannel) -> None:
            exchange = await channel.declare_exchange(name, "topic", durable=True)
            if binding is not None:
                queue = await channel.declare_queue(name, durable=True, arguments=dict(arguments or {}))
                await queue.bind(exchange, binding)

        self.on_channel(declare)
        return Route("*", name)

    def bind(self, route: Route, binding: str) -> None:
        """One more binding of the queue of a route of ours."""

        async def bind(channel: AbstractChannel) -> None:
            await (await channel.get_queue(route.to)).bind(route.to, binding)

        self.on_channel(bind)

    def delete_exchange(self, route: Route) -> None:
        async def delete(channel: AbstractChannel) -> None:
            await channel.exchange_delete(route.to)

        self.on_channel(delete)

    def read(self, route: Route, expected: int, within: float = READ_SECONDS) -> list[Arrived]:
        async def fetch(channel: AbstractChannel) -> list[AbstractIncomingMessage]:
            queue = await channel.get_queue(route.to)
            found: list[AbstractIncomingMessage] = []
            until = time.monotonic() + within
            while time.monotonic() < until:
                message = await queue.get(no_ack=True, fail=False)
                if message is not None:
                    found.append(message)
                elif len(found) >= expected:
                    break
                else:
                    await asyncio.sleep(0.05)
            return found

        return [_arrived(message) for message in self.on_channel(fetch)]

    def on_channel(self, use: Callable[[AbstractChannel], Awaitable[T]]) -> T:
        """Runs one piece of work on a connection of its own."""

        async def work() -> T:
            connection = await aio_pika.connect(self._rabbit.url, timeout=10)
            try:
                return await use(await connection.channel())
            finally:
                await connection.close()

        return asyncio.run(work())

    def pause(self) -> None:
        assert self._rabbit.node is not None
        self._rabbit.node.pause()

    def resume(self) -> None:
        assert self._rabbit.node is not None
        self._rabbit.node.resume()


def _arrived(message: AbstractIncomingMessage) -> Arrived:
    headers = dict(message.headers)
    envelope = amqp_binding.decode(headers, message.content_type, message.body)
    assert message.delivery_mode == 2
    assert message.message_id == str(envelope.id)
    wire = (
        tuple(sorted(headers.items(), key=lambda header: header[0])),
        message.content_type,
        message.delivery_mode,
        message.message_id,
        message.timestamp,
        message.body,
    )
    return Arrived(wire, envelope)
