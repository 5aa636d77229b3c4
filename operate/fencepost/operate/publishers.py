"""Destinations and their publishers from settings: everything that can be checked without connecting is checked here, by name."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import assert_never

from fencepost.operate.settings import DestinationSettings, Settings
from fencepost.relay.destination import Destination
from fencepost.relay.kafka_options import checked_options
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Publisher, Route
from fencepost.schemas.amqp_address import checked_address
from fencepost.schemas.errors import ConfigError

__all__ = ["RABBIT_TLS", "maker_of", "pace_of", "tls_context"]

# Below the wait for the confirm, so that nothing can be delivered after the relay has given up on it.
DELIVERY_SHARE = 0.8
RABBIT_WINDOW = 500
TOPIC_OPTIONS = ("partitions", "replication")
TOPIC_NUMBER_MAX = 10_000
RABBIT_NUMBERS = frozenset({"window", "max_message_bytes"})
RABBIT_TLS = frozenset({"tls_ca", "tls_certificate", "tls_key"})
RABBIT_OPTIONS = RABBIT_NUMBERS | RABBIT_TLS


def pace_of(chosen: Settings) -> Pace:
    """The times of the relay; ConfigError where they do not fit together."""
    r = chosen.relay
    try:
        pace = Pace(
            lease=r.lease,
            refresh=r.refresh,
            confirm=r.confirm,
            poll_min=r.poll_min,
            poll_max=r.poll_max,
            drain=r.drain,
            answer=r.answer,
            batch=r.batch,
            ahead=r.ahead,
        )
    except ConfigError as error:
        raise ConfigError(error.message, field=f"relay.{error.field}", hint=error.hint) from None
    if r.stalled <= r.answer + r.confirm:
        raise ConfigError(
            "a loop may rightly take one statement and one confirm for a step",
            field="relay.stalled",
            hint="raise it above answer and confirm together, or /livez will say no during an outage",
        )
    return pace


def maker_of(d: DestinationSettings, pace: Pace, accept_routes: bool) -> Callable[[], Destination]:
    """Checks what can be checked before anything connects; the destination itself is made for every attempt."""
    routes = [Route(r.match, r.to, r.routing_key) for r in d.routes]
    publisher = _publisher(d, pace)
    return lambda: Destination(
        d.name, d.kind, routes, publisher, accept_routes=accept_routes, on_refusal=d.on_refusal, declare=d.declare
    )


def _publisher(d: DestinationSettings, pace: Pace) -> Callable[[str], Publisher]:
    place = f"destinations.{d.name}"
    address = d.address.get_secret_value()
    options = {name: value.get_secret_value() for name, value in d.options.items()}
    try:
        match d.kind:
            case "kafka":
                topics = _topics(options, d.declare)
                checked_options(address, options, insecure=d.insecure)
                from fencepost.relay.kafka import KafkaPublisher

                timeout = DELIVERY_SHARE * pace.confirm
                return lambda source: KafkaPublisher(
                    address,
                    source=source,
                    delivery_timeout=timeout,
                    options=options,
                    insecure=d.insecure,
                    partitions=topics.get("partitions"),
                    replication=topics.get("replication"),
                    mode=d.mode,
                )
            case "rabbitmq":
                checked_address(address, insecure=d.insecure)
                numbers = _numbers(options)
                context = tls_context(options)
                from fencepost.relay.rabbitmq import MESSAGE_BYTES, RabbitPublisher

                window = numbers.get("window", RABBIT_WINDOW)
                most = numbers.get("max_message_bytes", MESSAGE_BYTES)
                return lambda source: RabbitPublisher(
                    address,
                    source=source,
                    window=window,
                    max_message_bytes=most,
                    context=context,
                    insecure=d.insecure,
                    mode=d.mode,
                )
            case _ as never:
                assert_never(never)
    except ConfigError as error:
        raise ConfigError(error.message, field=f"{place}.{error.field}", hint=error.hint) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the client library {error.name} is not installed",
            field=f"{place}.kind",
            hint=f"pip install 'fencepost[{d.kind}]'",
        ) from None


def _topics(options: dict[str, str], declare: bool) -> dict[str, int]:
    """Takes what new topics are made with out of the options; only for those who declare."""
    found = {name: options.pop(name) for name in TOPIC_OPTIONS if name in options}
    for name, value in found.items():
        if not declare:
            raise ConfigError("topics are not declared", field=f"options.{name}", hint="set declare = true")
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= TOPIC_NUMBER_MAX:
            raise ConfigError(f"not a whole number from 1 to {TOPIC_NUMBER_MAX}", field=f"options.{name}")
    return {name: int(value) for name, value in found.items()}


def _numbers(options: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in options.items():
        if name not in RABBIT_OPTIONS:
            raise ConfigError(
                f"the option {name} cannot be set",
                field=f"options.{name}",
                hint=f"one of {', '.join(sorted(RABBIT_OPTIONS))}",
            )
        if name in RABBIT_NUMBERS:
            if not value.isascii() or not value.isdigit():
                raise ConfigError("not a whole number", field=f"options.{name}")
            found[name] = int(value)
    return found


def tls_context(options: dict[str, str]) -> ssl.SSLContext | None:
    """TLS that verifies the server: with a certificate authority of one's own, and a client certificate where given."""
    authority, certificate, key = (options.get(name) for name in ("tls_ca", "tls_certificate", "tls_key"))
    if authority is None and certificate is None and key is None:
        return None
    if key is not None and certificate is None:
        raise ConfigError("a key without its certificate", field="options.tls_certificate", hint="give both files")
    field = "options.tls_ca"
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            field = "options.tls_certificate"
            context.load_cert_chain(certificate, key, password=_unprotected)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the file cannot be used ({type(error).__name__})", field=field, hint="PEM files that this login may read"
        ) from None
    return context


def _unprotected() -> str:
    """Instead of a prompt: a sidecar has nobody to ask."""
    raise ValueError("the key is protected by a password")
