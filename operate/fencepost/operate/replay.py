"""`fencepost replay module:projection`: builds a projection anew from history, as a login that can cause nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fencepost.consumer import replay as building
from fencepost.consumer.history import BEGINNING, END, Bound, History, bound
from fencepost.consumer.outbox_history import OutboxHistory
from fencepost.consumer.projection import Projection
from fencepost.operate import printing, settings, target
from fencepost.operate.refusals import ExitCode
from fencepost.operate.settings import DestinationSettings, Settings
from fencepost.operate.signals import draining
from fencepost.relay.kafka_options import checked_options
from fencepost.schemas.errors import ConfigError

# What a consumer may take over of a destination's options; the rest is for producers.
OF_THE_CONNECTION = ("security.", "sasl.", "ssl.", "enable.ssl.", "broker.", "client.", "socket.")


def replay(
    path: Annotated[str, typer.Argument(metavar="MODULE:PROJECTION", help="What @projection made of a handler.")],
    topic: Annotated[str | None, typer.Option(help="Read this topic of Kafka.")] = None,
    outbox: Annotated[bool, typer.Option("--outbox", help="Read the retained outbox.")] = False,
    since: Annotated[
        str,
        typer.Option("--from", help="beginning; the first offset of each partition, or number; or a time with a zone."),
    ] = BEGINNING,
    until: Annotated[
        str, typer.Option("--to", help="end; the last offset, or number; or the time before which.")
    ] = END,
    destination: Annotated[
        str | None, typer.Option(help="Whose Kafka; one of the settings' destinations. Default: the only one.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Throw an unfinished build away.")] = False,
    accept_held: Annotated[
        bool, typer.Option("--accept-held", help="Swap although events could not be read and were held.")
    ] = False,
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Drop the tables that this replay, or an earlier one, replaced.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Build a projection's tables from history in a shadow schema, then swap them in; interrupted, it goes on there.

    FENCEPOST_DATABASE must be a login that is a member of the projector role and of nothing else. Exit code 1 when the tables
    were not swapped: stopped by a signal, or events were held.
    """
    chosen = settings.load()
    projection = _projection(path)
    dsn = chosen.dsn()
    if (topic is None) is not outbox:
        raise ConfigError("neither --topic nor --outbox, or both", field="topic", hint="give one of them")
    first, last = bound("from", since), bound("to", until)
    history: History = (
        OutboxHistory(dsn, first, last) if topic is None else _kafka(chosen, destination, topic, first, last)
    )
    stop = threading.Event()
    with draining(stop.set), _seldom_collecting(), _bar(projection.name) as shown:
        done = building.replay(
            projection,
            dsn,
            history,
            stop=stop,
            restart=restart,
            accept_held=accept_held,
            drop_old=drop_old,
            told=shown,
        )
    _tell(projection, done, as_json)
    if not done.swapped:
        raise typer.Exit(int(ExitCode.REFUSED))


@contextmanager
def _seldom_collecting() -> Generator[None]:
    """A batch is very many objects for a short time, in no cycles: looking for some among them took a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _projection(path: str) -> Projection[Any]:
    found = target.load(path, "projection")
    if not isinstance(found, Projection):
        raise ConfigError(f"{path} is not a projection", field="target", hint="decorate its handler with @projection")
    return found  # pyright: ignore[reportUnknownVariableType]  # what it takes is its own matter


def _tell(projection: Projection[Any], done: building.Progress, as_json: bool) -> None:
    if as_json:
        printing.as_json({"projection": projection.name, **asdict(done), "complete": done.complete})
        return
    printing.say(
        f"{projection.name}: applied {done.applied}, not newer {done.older}, of other types {done.passed_over},"
        f" held {done.held}; read {done.read} of {done.total}"
    )
    if done.swapped:
        printing.say(f"swapped into schema {projection.schema}")
    elif not done.complete:
        printing.say("not finished; the same command goes on")
    else:
        printing.say(
            f"not swapped: see {projection.shadow}.{projection.name}_held, then --restart with a newer version,"
            " or --accept-held"
        )


def _kafka(chosen: Settings, name: str | None, topic: str, since: Bound, until: Bound) -> History:
    d = _destination(chosen, name)
    address = d.address.get_secret_value()
    options = {n: v.get_secret_value() for n, v in d.options.items() if n.startswith(OF_THE_CONNECTION)}
    checked_options(address, options, insecure=d.insecure)
    from fencepost.consumer.kafka_history import KafkaHistory

    return KafkaHistory(address, topic, since, until, config=options)


def _destination(chosen: Settings, name: str | None) -> DestinationSettings:
    found = [d for d in chosen.destinations if d.kind == "kafka" and name in (None, d.name)]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"the settings have {len(found) or 'no'} such destinations of kind kafka",
        field="destination",
        hint="name one with --destination; see FENCEPOST_DESTINATIONS",
    )


class _Bar:
    """A progress bar on standard error, for people."""

    def __init__(self, name: str) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(name, total=None)

    def __enter__(self) -> Callable[[building.Progress], None]:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, at: building.Progress) -> None:
        self._progress.update(self._task, completed=at.read, total=at.total)


def _bar(name: str) -> AbstractContextManager[Callable[[building.Progress], None]]:
    return _Bar(name) if printing.is_terminal() else nullcontext(_silent)


def _silent(at: building.Progress) -> None:
    """Nobody is looking."""
