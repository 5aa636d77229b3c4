"""`fencepost consumer run module:consumer`: feeds one inbox from its broker until it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Protocol, cast, runtime_checkable

import typer

from fencepost.consumer.health import serving
from fencepost.consumer.standing import Standing
from fencepost.operate import settings, target
from fencepost.operate.runners import is_handler, runner_of
from fencepost.operate.serving import health
from fencepost.operate.settings import ConsumerSettings
from fencepost.operate.signals import draining
from fencepost.schemas.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Handle every event once, whatever the broker delivers.")
log = logging.getLogger("fencepost.consumer")

Insecure = Annotated[
    bool, typer.Option("--insecure-db", help="Allow a database on another machine without sslmode=verify-full.")
]


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
            metavar="MODULE:CONSUMER",
            help="A handler (@inbox), a runner, or a function of the database's address that makes one.",
        ),
    ],
    insecure_db: Insecure = False,
) -> None:
    """Consume until stopped; the first SIGTERM or SIGINT drains, the second leaves at once.

    A handler gets its broker and limits from the settings [consumer]; a runner brings its own. Exit code 3 when the broker
    does not answer within `start` seconds.
    """
    chosen = settings.load()
    dsn = chosen.dsn(insecure=insecure_db)
    made = runner(path, target.load(path, "consumer"), dsn, chosen.consumer)
    stop = threading.Event()
    with draining(stop.set), _health(made, dsn, chosen.consumer):
        log.info("consumer %s runs", path)
        made.run(stop)


def runner(path: str, found: object, dsn: str, chosen: ConsumerSettings) -> Runner:
    """What runs the object that a target names; ConfigError when nothing can."""
    if is_handler(found):
        found = runner_of(found, dsn, chosen)
    # A class of runners has a `run` as well, but is not one.
    elif callable(found) and (isinstance(found, type) or not isinstance(found, Runner)):
        found = cast(Callable[[str], object], found)(dsn)
    if not isinstance(found, Runner):
        raise ConfigError(
            f"{path} is neither a handler nor a runner nor a function that makes one",
            field="target",
            hint="e.g. a function with @inbox, or a KafkaRunner",
        )
    return found


def _health(runner: Runner, dsn: str, chosen: ConsumerSettings) -> AbstractContextManager[None]:
    """Health of a runner that gives an account of itself."""
    standing = getattr(runner, "standing", None)
    if not isinstance(standing, Standing):
        return nullcontext()
    return health("consumer", chosen, lambda address: serving(standing, dsn, address, stalled=chosen.stalled))
