"""`fencepost relay backfill`: retained events are sent to a destination again, marked as replayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fencepost.operate import printing, settings
from fencepost.operate.publishers import maker_of, pace_of
from fencepost.operate.refusals import ExitCode
from fencepost.operate.settings import Settings
from fencepost.operate.signals import draining
from fencepost.relay import backfill as sending
from fencepost.relay.backfill import Chosen, Sent, Span
from fencepost.relay.destination import Destination
from fencepost.relay.pace import Pace
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import ConfigError, InvalidInput

SEQ_MAX = 2**63 - 1


def backfill(
    destination: Annotated[str, typer.Option(help="Where to; one of the settings' destinations.")],
    since: Annotated[str, typer.Option("--from", help="The first number, or a time with a zone.")],
    until: Annotated[
        str | None,
        typer.Option("--to", help="The last number, or the time before which. Default: the newest that was acked."),
    ] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only events of this type, without version.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only events of this tenant.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and send nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Send retained events again, marked as replayed (fpreplayed), in order per key. Consumers see duplicates.

    Ends at the first event that the broker refuses, and at a signal; then exit code 1, and the line says where to go on.
    """
    chosen = settings.load()
    range_ = Chosen(_end("from", since), None if until is None else _end("to", until), type_, tenant)
    make, pace = _destination(chosen, destination)
    with connect(chosen.dsn(), autocommit=True) as conn:
        span = sending.resolve(conn, destination, range_)
        if dry_run:
            found = sending.count(conn, span)
            if as_json:
                printing.as_json(
                    {"destination": destination, "first": span.after + 1, "last": span.last, "events": found}
                )
            else:
                printing.say(
                    f"{found} events would be sent again to {destination}, numbers {span.after + 1} to {span.last}"
                )
            return
        to = make()
        stop = threading.Event()
        at = Sent(span.after, 0)
        try:
            to.open(conn, time.monotonic() + pace.confirm)
            with draining(stop.set), _bar(span) as shown:
                for at in sending.send(conn, span, to, pace=pace, stop=stop):
                    shown(at)
        finally:
            to.close(time.monotonic() + pace.confirm)
    _tell(span, at, as_json)


def _tell(span: Span, at: Sent, as_json: bool) -> None:
    complete = at.position >= span.last and not at.refused
    if as_json:
        printing.as_json(
            {
                "destination": span.destination,
                "sent": at.sent,
                "unrouted": at.unrouted,
                "last": at.position,
                "complete": complete,
                "refused": at.refused or None,
            }
        )
    else:
        printing.say(
            f"sent {at.sent} again to {span.destination}, without a route {at.unrouted}, last number {at.position}"
        )
        if at.refused:
            printing.say(f"refused {at.refused}")
        if not complete:
            printing.say(
                f"go on with --from {at.position + 1}"
                + (f", or leave it out with --from {at.position + 2}" if at.refused else "")
            )
    if not complete:
        raise typer.Exit(int(ExitCode.REFUSED))


def _end(name: str, text: str) -> int | datetime:
    if text.isascii() and text.isdigit():
        if not 0 < int(text) <= SEQ_MAX:
            raise InvalidInput("the number is not between 1 and 2**63 - 1", field=name)
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            "neither a number nor a time", field=name, hint="example: 1200, or 2026-01-31T12:00:00Z"
        ) from None
    if found.tzinfo is None:
        raise InvalidInput("the time has no zone", field=name, hint="example: 2026-01-31T12:00:00Z")
    return found


def _destination(chosen: Settings, name: str) -> tuple[Callable[[], Destination], Pace]:
    pace = pace_of(chosen)
    for d in chosen.destinations:
        if d.name == name:
            return maker_of(d, pace, False), pace
    raise ConfigError(
        f"the settings have no destination {name}", field="destination", hint="see FENCEPOST_DESTINATIONS"
    )


class _Bar:
    """A progress bar on standard error, for people."""

    def __init__(self, span: Span) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._first = span.after
        self._task = self._progress.add_task(f"to {span.destination}", total=span.last - span.after)

    def __enter__(self) -> Callable[[Sent], None]:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, at: Sent) -> None:
        self._progress.update(self._task, completed=at.position - self._first)


def _bar(span: Span) -> AbstractContextManager[Callable[[Sent], None]]:
    return _Bar(span) if printing.is_terminal() else nullcontext(_silent)


def _silent(at: Sent) -> None:
    """Nobody is looking."""
