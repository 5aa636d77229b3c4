"""`fencepost relay run`: the sidecar that publishes what is committed. SIGTERM drains, a second signal leaves at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, assert_never

import psycopg
import typer
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from fencepost.operate import printing, settings
from fencepost.operate.refusals import line_of
from fencepost.operate.settings import DestinationSettings, Settings
from fencepost.operate.signals import draining
from fencepost.relay.destination import Destination
from fencepost.relay.kafka_options import checked_options
from fencepost.relay.loop import Pace
from fencepost.relay.publisher import Publisher, Route
from fencepost.relay.rabbitmq_address import checked_address
from fencepost.relay.sidecar import Relay, Summary
from fencepost.schemas.errors import ConfigError, Unreachable

app = typer.Typer(no_args_is_help=True, help="Publish committed events to the brokers.")
log = logging.getLogger("fencepost.relay")

# Below the wait for the confirm, so that nothing can be delivered after the relay has given up on it.
DELIVERY_SHARE = 0.8
RABBIT_WINDOW = 500
RABBIT_OPTIONS = frozenset({"window", "max_message_bytes"})


@app.callback()
def group() -> None:
    """Publish committed events to the brokers."""


@app.command("run")
def run(
    once: Annotated[bool, typer.Option("--once", help="Publish what is committed now, then end.")] = False,
    accept_routes: Annotated[
        bool, typer.Option("--accept-routes", help="Replace the routes that a destination was registered with.")
    ] = False,
) -> None:
    """Publish until stopped; the first SIGTERM or SIGINT drains, the second leaves at once.

    An unreachable database or broker is retried with backoff for ever; with --once for FENCEPOST_RELAY_PATIENCE
    seconds, then exit code 3.
    """
    chosen = settings.load()
    dsn = chosen.dsn()
    pace = pace_of(chosen)
    destinations = [maker_of(d, pace, accept_routes) for d in chosen.destinations]

    def make() -> Relay:
        return Relay(dsn, [d() for d in destinations], state=chosen.state, pace=pace)

    summary = _once(make, chosen.relay.patience) if once else _run(make)
    printing.say(f"published {summary.published}, parked {summary.parked}, sent again {summary.resent}")


def _run(make: Callable[[], Relay]) -> Summary:
    relay = make()
    log.info("the relay runs")
    with draining(relay.stop):
        return relay.run()


def _once(make: Callable[[], Relay], patience: float) -> Summary:
    def attempt() -> Summary:
        relay = make()
        with draining(relay.stop):
            return relay.run_once()

    retrying = Retrying(
        retry=retry_if_exception(_transient),
        stop=stop_after_delay(patience),
        wait=wait_random_exponential(multiplier=0.2, max=2),
        before_sleep=_tell,
        reraise=True,
    )
    return retrying(attempt)


def _transient(error: BaseException) -> bool:
    return isinstance(error, Unreachable | psycopg.OperationalError | psycopg.InterfaceError)


def _tell(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if error is not None:
        log.warning("%s; trying again", line_of(error))


def pace_of(chosen: Settings) -> Pace:
    r = chosen.relay
    try:
        return Pace(
            lease=r.lease,
            refresh=r.refresh,
            confirm=r.confirm,
            poll_min=r.poll_min,
            poll_max=r.poll_max,
            drain=r.drain,
            batch=r.batch,
        )
    except ConfigError as error:
        raise ConfigError(error.message, field=f"relay.{error.field}", hint=error.hint) from None


def maker_of(d: DestinationSettings, pace: Pace, accept_routes: bool) -> Callable[[], Destination]:
    """Checks what can be checked before anything connects; the destination itself is made for every attempt."""
    routes = [Route(r.match, r.to, r.routing_key) for r in d.routes]
    publisher = _publisher(d, pace)
    return lambda: Destination(d.name, d.kind, routes, publisher, accept_routes=accept_routes)


def _publisher(d: DestinationSettings, pace: Pace) -> Callable[[str], Publisher]:
    place = f"destinations.{d.name}"
    address = d.address.get_secret_value()
    options = {name: value.get_secret_value() for name, value in d.options.items()}
    try:
        match d.kind:
            case "kafka":
                checked_options(address, options, insecure=d.insecure)
                from fencepost.relay.kafka import KafkaPublisher

                timeout = DELIVERY_SHARE * pace.confirm
                return lambda source: KafkaPublisher(
                    address, source=source, delivery_timeout=timeout, options=options, insecure=d.insecure
                )
            case "rabbitmq":
                checked_address(address, insecure=d.insecure)
                numbers = _numbers(options)
                from fencepost.relay.rabbitmq import MESSAGE_BYTES, RabbitPublisher

                window = numbers.get("window", RABBIT_WINDOW)
                most = numbers.get("max_message_bytes", MESSAGE_BYTES)
                return lambda source: RabbitPublisher(
                    address, source=source, window=window, max_message_bytes=most, insecure=d.insecure
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


def _numbers(options: dict[str, str]) -> dict[str, int]:
    for name, value in options.items():
        if name not in RABBIT_OPTIONS:
            raise ConfigError(
                f"the option {name} cannot be set",
                field=f"options.{name}",
                hint=f"one of {', '.join(sorted(RABBIT_OPTIONS))}",
            )
        if not value.isascii() or not value.isdigit():
            raise ConfigError("not a whole number", field=f"options.{name}")
    return {name: int(value) for name, value in options.items()}
