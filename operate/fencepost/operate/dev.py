"""`fencepost dev app`: relay, consumers, worker and maintenance in one process, for the first hour.

Each is what its own command would run, from the same settings; nothing is shared but the process. Maintenance needs no part
of its own: the relay recycles and keeps the witness, consumers forget what is old, the worker takes expired leases back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from fencepost.jobs.worker import Worker
from fencepost.operate import consumer, relay, settings, target
from fencepost.operate.refusals import line_of
from fencepost.operate.settings import Settings
from fencepost.operate.signals import draining
from fencepost.schemas import migrate
from fencepost.schemas.errors import ConfigError, Unresolved

__all__ = ["Part", "app", "run_all"]

app = typer.Typer(no_args_is_help=True, help="Everything in one process, for the first hour.")
log = logging.getLogger("fencepost")

LOOK_SECONDS = 0.1
MARGIN_SECONDS = 15.0


@app.callback()
def group() -> None:
    """Everything in one process, for the first hour."""


@app.command("app")
def app_(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="MODULE:NAME...", help="A Worker, and handlers (@inbox) or runners, in any order."),
    ],
    concurrency: Annotated[int, typer.Option(help="Jobs at the same time.")] = 4,
    drain: Annotated[float, typer.Option(help="Seconds that running handlers of jobs get after a stop.")] = 10.0,
) -> None:
    """Run all of it until stopped; the first SIGTERM or SIGINT drains, the second leaves at once.

    The relay runs where destinations are set. Consumers stop first, then the worker, then the relay, so that each still
    finds what it hands on to. When one of them fails, all are stopped and its refusal is told.
    """
    chosen = settings.load()
    dsn = chosen.dsn()
    if pending := migrate.status(dsn).pending:
        raise ConfigError(f"{pending[0]} is pending", field="database", hint="run `fencepost migrate`")
    run_all([*_relay(chosen, dsn), *_targets(targets, chosen, dsn, concurrency, drain)])


@dataclass(slots=True)
class Part:
    """What one command would run: `run` returns within `patience` seconds after `stop` was called, or raises."""

    name: str
    run: Callable[[], object]
    stop: Callable[[], None]
    patience: float
    failure: BaseException | None = None

    def guarded(self) -> None:
        """Runs in a thread of its own."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 (raised by run_all)
            self.failure = error


def run_all(parts: Sequence[Part]) -> None:
    """Runs all of them until a signal, or until one ends; stops them in reverse, each once the one before has ended.

    Raises what the first one raised that failed, ConfigError when there is none to run, Unresolved when one does not end.
    """
    if not parts:
        raise ConfigError("there is nothing to run", field="target", hint="name a worker, a handler or a runner")
    threads = [threading.Thread(target=part.guarded, name=part.name, daemon=True) for part in parts]
    asked = threading.Event()
    with draining(asked.set):
        for part, thread in zip(parts, threads, strict=True):
            thread.start()
            log.info("%s runs", part.name)
        # Invariant: this thread never waits for an event whose lock a signal's handler could want.
        while not asked.is_set() and all(thread.is_alive() for thread in threads):
            time.sleep(LOOK_SECONDS)
        for part in parts:
            if part.failure is not None:
                log.error("%s failed: %s", part.name, line_of(part.failure))
        stuck: list[str] = []
        for part, thread in reversed(list(zip(parts, threads, strict=True))):
            part.stop()
            thread.join(part.patience + MARGIN_SECONDS)
            if thread.is_alive():
                stuck.append(part.name)
                log.error("%s did not end", part.name)
            else:
                log.info("%s has ended", part.name)
    for part in parts:
        if part.failure is not None:
            raise part.failure
    if stuck:
        raise Unresolved(
            f"{', '.join(stuck)} did not end in time",
            field="drain",
            hint="what was not recorded is done again by whoever comes",
        )


def _relay(chosen: Settings, dsn: str) -> list[Part]:
    if not chosen.destinations:
        log.warning("no destination is set, so nothing is relayed")
        return []
    made = relay.maker(chosen, dsn)()
    return [Part("relay", made.run, made.stop, chosen.relay.drain + chosen.relay.confirm)]


def _targets(paths: Sequence[str], chosen: Settings, dsn: str, concurrency: int, drain: float) -> list[Part]:
    workers: list[Part] = []
    consumers: list[Part] = []
    for path in paths:
        found = target.load(path, "target")
        stop = threading.Event()
        if isinstance(found, Worker):
            run = partial(found.run, dsn, concurrency=concurrency, stop=stop, drain=drain, state=chosen.outside())
            workers.append(Part(f"worker {path}", run, stop.set, drain))
        else:
            run = partial(consumer.runner(path, found, dsn, chosen.consumer).run, stop)
            consumers.append(Part(f"consumer {path}", run, stop.set, chosen.consumer.drain))
    return [*workers, *consumers]
