"""`fencepost relay run`: the sidecar that publishes what is committed. SIGTERM drains, a second signal leaves at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import psycopg
import typer
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from fencepost.operate import printing, routing, settings
from fencepost.operate.doctor import show
from fencepost.operate.publishers import maker_of, pace_of
from fencepost.operate.refusals import ExitCode, line_of
from fencepost.operate.relay_check import examine
from fencepost.operate.settings import RelaySettings, Settings
from fencepost.operate.signals import draining
from fencepost.relay.sidecar import Relay, Summary, settle_memory
from fencepost.schemas.errors import ConfigError, Unreachable
from fencepost.schemas.health import HealthAddress

app = typer.Typer(no_args_is_help=True, help="Publish committed events to the brokers.")
app.add_typer(routing.app, name="destinations")
log = logging.getLogger("fencepost.relay")

OFF = "off"
Insecure = Annotated[
    bool, typer.Option("--insecure-db", help="Allow a database on another machine without sslmode=verify-full.")
]


@app.callback()
def group() -> None:
    """Publish committed events to the brokers."""


@app.command("run")
def run(
    once: Annotated[bool, typer.Option("--once", help="Publish what is committed now, then end.")] = False,
    accept_routes: Annotated[
        bool, typer.Option("--accept-routes", help="Replace the routes that a destination was registered with.")
    ] = False,
    insecure_db: Insecure = False,
) -> None:
    """Publish until stopped; the first SIGTERM or SIGINT drains, the second leaves at once.

    An unreachable database or broker is retried with backoff for ever; with --once for FENCEPOST_RELAY_PATIENCE
    seconds, then exit code 3.
    """
    chosen = settings.load()
    dsn = chosen.dsn(insecure=insecure_db)
    make = maker(chosen, dsn, accept_routes=accept_routes, healthy=not once)
    settle_memory()
    summary = _once(make, chosen.relay.patience) if once else _run(make)
    printing.say(f"published {summary.published}, parked {summary.parked}, sent again {summary.resent}")


def maker(chosen: Settings, dsn: str, *, accept_routes: bool = False, healthy: bool = True) -> Callable[[], Relay]:
    """What makes the relay of these settings; what can be refused without connecting is refused here."""
    pace = pace_of(chosen)
    health = _health(chosen.relay) if healthy else None
    destinations = [maker_of(d, pace, accept_routes) for d in chosen.destinations]

    def make() -> Relay:
        return Relay(
            dsn,
            [d() for d in destinations],
            state=chosen.outside(),
            pace=pace,
            health=health,
            stalled=chosen.relay.stalled,
            health_required="health_address" in chosen.relay.model_fields_set,
            doorbell=chosen.relay.doorbell,
        )

    return make


@app.command("check")
def check(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False, insecure_db: Insecure = False
) -> None:
    """Look at settings, database, routes and brokers without sending or changing anything; exit code 1 on a failure."""
    chosen = settings.load()
    dsn = chosen.dsn(insecure=insecure_db)
    pace = pace_of(chosen)
    _health(chosen.relay)
    if show(examine(dsn, chosen.destinations, pace, doorbell=chosen.relay.doorbell), as_json=as_json):
        raise typer.Exit(int(ExitCode.REFUSED))


def _health(chosen: RelaySettings) -> HealthAddress | None:
    if chosen.health_address == OFF:
        return None
    try:
        return HealthAddress.parse(chosen.health_address, exposed=chosen.health_exposed)
    except ConfigError as error:
        raise ConfigError(error.message, field=f"relay.{error.field}", hint=error.hint) from None


def _run(make: Callable[[], Relay]) -> Summary:
    relay = make()
    with draining(relay.stop):
        log.info("the relay runs")
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
