"""`fencepost worker run module:worker`: claims and runs the jobs of one worker object."""

from __future__ import annotations

import logging
import threading
from typing import Annotated

import typer

from fencepost.jobs.health import serving
from fencepost.jobs.worker import Worker
from fencepost.operate import settings, target
from fencepost.operate.serving import health
from fencepost.operate.signals import draining
from fencepost.schemas.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Run jobs behind the fence.")
log = logging.getLogger("fencepost.jobs")


@app.callback()
def group() -> None:
    """Run jobs behind the fence."""


@app.command("run")
def run(
    path: Annotated[str, typer.Argument(metavar="MODULE:WORKER", help="Where the fencepost.jobs Worker is.")],
    concurrency: Annotated[int | None, typer.Option(help="Jobs at the same time. Default: 4.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME=JOBS", help="Serve this queue, so many of its jobs at the same time."),
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running handlers get after a stop.")] = 10.0,
    patience: Annotated[float, typer.Option(help="Seconds without the database before giving up.")] = 60.0,
    doorbell: Annotated[
        bool, typer.Option("--doorbell", help="Be rung when work is due instead of polling for it.")
    ] = False,
) -> None:
    """Work until stopped; the first SIGTERM or SIGINT drains, the second leaves at once.

    Exit code 3 when the database does not answer for `--patience` seconds.
    """
    chosen = settings.load()
    dsn = chosen.dsn()
    worker = target.load(path, "worker")
    if not isinstance(worker, Worker):
        raise ConfigError(f"{path} is not a worker", field="target", hint="name a fencepost.jobs.worker.Worker")
    served = _queues(queue)
    stop = threading.Event()
    standing = worker.standing
    told = health("worker", chosen.worker, lambda address: serving(standing, address, stalled=chosen.worker.stalled))
    with draining(stop.set), told:
        log.info("worker %s runs %s", worker.owner, ", ".join(worker.classes))
        worker.run(
            dsn,
            concurrency=concurrency,
            queues=served,
            stop=stop,
            drain=drain,
            state=chosen.outside(),
            patience=patience,
            journal=chosen.worker.journal,
            doorbell=doorbell or chosen.worker.doorbell,
        )


def _queues(given: list[str] | None) -> dict[str, int] | None:
    """What `--queue NAME=JOBS` says; none: every queue."""
    if not given:
        return None
    found: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal() or name in found:
            raise ConfigError(
                f"--queue {text} is not NAME=JOBS, once for each queue", field="queues", hint="slow=2, say"
            )
        found[name] = int(number)
    return found
