"""The queue a runner reads: declared so that nothing can be dropped, or looked at to say where something could be.

| what is missing | what it costs |
|---|---|
| type quorum | a node that is lost takes messages with it, deliveries are not counted |
| dead-letter exchange | what exceeds the delivery limit (20 by default) or the length is dropped |
| strategy at-least-once | a dead letter can be lost on its way |
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractQueue
from aio_pika.exceptions import (
    AuthenticationError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ProbableAuthenticationError,
)
from aiormq.exceptions import ChannelAccessRefused

from fencepost.schemas.errors import ConfigError, Unreachable

__all__ = ["arguments_of", "declared", "refused", "weaknesses"]

log = logging.getLogger("fencepost.consumer.rabbitmq")

ANSWER_SECONDS = 10.0
# A queue has no more of them; each costs one question.
ARGUMENTS_MAX = 24

_DIFFERENT = re.compile(r"inequivalent arg '([^']+)'.* current is (?:the value '(.*)' of type '(\w+)'|'?(\w+)'?)")


async def declared(
    channel: AbstractChannel,
    name: str,
    *,
    exchange: str | None,
    routing_keys: Sequence[str],
    delivery_limit: int,
) -> AbstractQueue:
    """A durable quorum queue whose messages move to ``<queue>.dead``, confirmed, when they exceed the limit."""
    dead = f"{name}.dead"
    await channel.declare_queue(dead, durable=True, arguments={"x-queue-type": "quorum"}, timeout=ANSWER_SECONDS)
    queue = await channel.declare_queue(
        name,
        durable=True,
        arguments={
            "x-queue-type": "quorum",
            "x-delivery-limit": delivery_limit,
            # Invariant: what exceeds the limit moves to a queue, confirmed; without this it would be dropped.
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": dead,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
        timeout=ANSWER_SECONDS,
    )
    if exchange:
        made = await channel.declare_exchange(
            exchange, aio_pika.ExchangeType.TOPIC, durable=True, timeout=ANSWER_SECONDS
        )
        for key in routing_keys:
            await queue.bind(made, key, timeout=ANSWER_SECONDS)
    return queue


async def arguments_of(connection: AbstractConnection, name: str) -> dict[str, str | int] | None:
    """The arguments that an existing queue was declared with; None where this login may not ask.

    AMQP has no question for them. A declaration that differs changes nothing, and is refused with the first difference:
    asked again with that, it tells the next one. What a policy sets is not among them.
    """
    found: dict[str, str | int] = {}
    durable = True
    for _ in range(ARGUMENTS_MAX):
        channel = connection.channel(publisher_confirms=False)
        await channel.initialize(timeout=ANSWER_SECONDS)
        try:
            # Never made by this: gone in between, it is missed here.
            await channel.declare_queue(name, passive=True, timeout=ANSWER_SECONDS)
            await channel.declare_queue(name, durable=durable, arguments=dict(found), timeout=ANSWER_SECONDS)
            return found
        except ChannelPreconditionFailed as error:
            told = _DIFFERENT.search(str(error))
            if told is None:
                return None
            argument, value, kind, plain = told.groups()
            if argument == "durable":
                durable = plain == "true"
            elif value is None or argument in found:
                return None
            else:
                found[argument] = value if kind == "longstr" else int(value)
        except (ChannelAccessRefused, ValueError):
            return None
        finally:
            if not channel.is_closed:
                with suppress(ChannelPreconditionFailed):
                    await channel.close()
    return None


def weaknesses(arguments: dict[str, str | int]) -> list[str]:
    """What may cost a message with a queue of these arguments; a policy may mend each."""
    found: list[str] = []
    if arguments.get("x-queue-type", "classic") == "classic":
        found.append("it is a classic queue: a lost node takes messages with it, and no limit ends a redelivery")
    elif "x-dead-letter-exchange" not in arguments:
        found.append("it has no dead-letter exchange: what exceeds its delivery limit is dropped")
    elif arguments.get("x-dead-letter-strategy") != "at-least-once":
        found.append("its dead-letter strategy is not at-least-once: a dead letter can be lost on its way")
    return found


def refused(error: Exception, queue: str, url: str) -> Exception:
    """What to raise where a runner cannot begin; the address is without user and password."""
    cause = error if isinstance(error, ssl.SSLError) else error.__cause__
    match error, cause:
        case ChannelNotFoundEntity(), _:
            return ConfigError(
                f"the queue {queue} does not exist", field="queue", hint="declare it, or use declare=True"
            )
        case ChannelPreconditionFailed(), _:
            return ConfigError(
                f"the queue {queue} or its exchange exists with other properties",
                field="queue",
                hint="declare it as it is elsewhere, or use declare=False",
            )
        case _, ssl.SSLCertVerificationError():
            return Unreachable(
                "the server's certificate is not accepted",
                address=url,
                field="context",
                hint="name the authority that signed it, and reach the server by a name in it",
            )
        case ((AuthenticationError() | ProbableAuthenticationError()), _):
            what, hint = "RabbitMQ refused the login", "correct user and password"
        case _:
            what, hint = f"RabbitMQ did not answer: {type(error).__name__}", "check that RabbitMQ runs there"
            if url.startswith("amqps:"):
                hint += "; where it asks clients for a certificate, the context needs one"
    return Unreachable(what, address=url, field="url", hint=hint)
