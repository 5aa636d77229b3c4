"""`fencepost consumer run module:consumer`: feeds one inbox from its broker until it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Annotated, Protocol, cast, runtime_checkable

import typer

from fencepost.operate import settings, target
from fencepost.operate.signals import draining
from fencepost.schemas.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Handle every event once, whatever the broker delivers.")
log = logging.getLogger("fencepost.consumer")


@runtime_checkable
class Runner(Protocol):
    """What a consumer must offer; `fencepost.consumer.kafka` and `.rabbitmq` have one each."""

    def run(self, stop: threading.Event | None = None) -> None: ...


@app.callback()
def group() -> None:
    """Handle every event once, whatever the broker delivers."""


@app.command("run")
def run(
    path: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CONSUMER", help="A runner, or a function of the database's address that makes one."
        ),
    ],
) -> None:
    """Consume until stopped; the first SIGTERM or SIGINT drains, the second leaves at once.

    Exit code 3 when the broker does not answer within the runner's `start_seconds`.
    """
    dsn = settings.load().dsn()
    found = target.load(path, "consumer")
    # A class of runners has a `run` as well, but is not one.
    if callable(found) and (isinstance(found, type) or not isinstance(found, Runner)):
        found = cast(Callable[[str], object], found)(dsn)
    if not isinstance(found, Runner):
        raise ConfigError(
            f"{path} is neither a runner nor a function that makes one", field="target", hint="e.g. a KafkaRunner"
        )
    stop = threading.Event()
    with draining(stop.set):
        log.info("consumer %s runs", path)
        found.run(stop)
