"""A runner from settings, for a target that is a handler: what can be checked without connecting is checked here, by name."""

from __future__ import annotations

from typing import Any, TypeGuard

from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.runner import RunnerOptions
from fencepost.operate.publishers import RABBIT_TLS, tls_context
from fencepost.operate.settings import ConsumerSettings
from fencepost.schemas.errors import ConfigError

__all__ = ["is_handler", "runner_of"]


def is_handler(found: object) -> TypeGuard[Inbox[Any] | AsyncInbox[Any]]:
    """Whether a target is a handler, made by `@inbox`."""
    return isinstance(found, Inbox | AsyncInbox)


def runner_of(handler: Inbox[Any] | AsyncInbox[Any], dsn: str, chosen: ConsumerSettings) -> Any:
    """The KafkaRunner or RabbitRunner that the settings describe; ConfigError with the field as it is in the settings."""
    if chosen.kind is None or chosen.address is None:
        missing = "kind" if chosen.kind is None else "address"
        raise ConfigError(
            "the target is a handler, and its broker is not set",
            field=f"consumer.{missing}",
            hint="set kind, address, and topics or queue under [consumer]; or name a runner",
        )
    try:
        return _kafka(handler, dsn, chosen) if chosen.kind == "kafka" else _rabbitmq(handler, dsn, chosen)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the client library {error.name} is not installed",
            field="consumer.kind",
            hint=f"pip install 'fencepost[{chosen.kind}]'",
        ) from None
    except ConfigError as error:
        raise ConfigError(error.message, field=f"consumer.{error.field}", hint=error.hint) from None


def _kafka(handler: Inbox[Any] | AsyncInbox[Any], dsn: str, chosen: ConsumerSettings) -> Any:
    from fencepost.consumer.kafka import KafkaRunner

    assert chosen.address is not None
    return KafkaRunner(
        handler,
        dsn,
        bootstrap=chosen.address.get_secret_value(),
        topics=chosen.topics,
        group=chosen.group,
        config={name: value.get_secret_value() for name, value in chosen.options.items()},
        options=_options(chosen),
        insecure=chosen.insecure,
    )


def _rabbitmq(handler: Inbox[Any] | AsyncInbox[Any], dsn: str, chosen: ConsumerSettings) -> Any:
    from fencepost.consumer.rabbitmq import RabbitRunner

    assert chosen.address is not None
    options = {name: value.get_secret_value() for name, value in chosen.options.items()}
    for name in options:
        if name not in RABBIT_TLS:
            raise ConfigError(
                f"the option {name} cannot be set",
                field=f"options.{name}",
                hint=f"one of {', '.join(sorted(RABBIT_TLS))}",
            )
    return RabbitRunner(
        handler,
        dsn,
        url=chosen.address.get_secret_value(),
        queue=chosen.queue or "",
        exchange=chosen.exchange,
        routing_keys=chosen.routing_keys,
        declare=chosen.declare,
        delivery_limit=chosen.delivery_limit,
        prefetch=chosen.prefetch,
        options=_options(chosen),
        context=tls_context(options),
        insecure=chosen.insecure,
    )


def _options(chosen: ConsumerSettings) -> RunnerOptions:
    return RunnerOptions(
        concurrency=chosen.concurrency,
        batch=chosen.batch,
        max_attempts=chosen.max_attempts,
        drain_seconds=chosen.drain,
        start_seconds=chosen.start,
        answer_seconds=chosen.answer,
    )
