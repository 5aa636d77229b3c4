"""`fencepost schemas check|record|export`: an event that could not be read before or after an upgrade never gets released."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from fencepost.operate import asyncapi, printing, settings, target
from fencepost.operate.refusals import ExitCode
from fencepost.schemas import snapshots
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import registry
from fencepost.schemas.snapshots import Snapshot, Verdict
from fencepost.schemas.wire_schema import schema_of

app = typer.Typer(no_args_is_help=True, help="Schemas of the declared events: check, record, export.")

DAYS_MAX = 36_500

Modules = Annotated[list[str], typer.Argument(metavar="MODULE...", help="The modules that declare the events.")]
Folder = Annotated[Path, typer.Option("--snapshots", help="The folder of the recorded schemas, in your repository.")]
Window = Annotated[
    int | None,
    typer.Option("--window-days", min=1, max=DAYS_MAX, help="How long events stay readable. Default: for ever."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.callback()
def group() -> None:
    """Schemas of the declared events: check, record, export."""


@app.command("check")
def check(modules: Modules, folder: Folder = Path("schemas"), window: Window = None, as_json: AsJson = False) -> None:
    """Compare the declared events with every recorded revision; exit code 1 when one broke or is not recorded."""
    _, verdict = _compared(modules, folder, window)
    if as_json:
        printing.as_json(
            {
                "broken": [
                    {"event": b.event, "field": b.field, "what": b.what, "recorded": b.recorded.isoformat()}
                    for b in verdict.broken
                ],
                "unrecorded": list(verdict.unrecorded),
                "events": len(verdict.events),
                "compared": verdict.compared,
            }
        )
    else:
        _tell(verdict)
        for name in verdict.unrecorded:
            printing.say(f"{name} is new or has grown: run `fencepost schemas record`")
        if not verdict.broken and not verdict.unrecorded:
            printing.say(f"{len(verdict.events)} events are compatible with {verdict.compared} recorded revisions")
    if verdict.broken or verdict.unrecorded:
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command("record")
def record(modules: Modules, folder: Folder = Path("schemas"), window: Window = None) -> None:
    """Record what is new or has grown; nothing is written when anything broke (exit code 1)."""
    recorded, verdict = _compared(modules, folder, window)
    if verdict.broken:
        _tell(verdict)
        raise typer.Exit(int(ExitCode.REFUSED))
    written = snapshots.record(folder, recorded, verdict, _today())
    for path in written:
        printing.say(f"recorded {path}")
    if not written:
        printing.say("nothing to record")


@app.command("export")
def export(
    modules: Modules,
    folder: Annotated[Path, typer.Option("--to", help="Where the files go; files of these names are replaced.")],
    title: Annotated[str, typer.Option("--title", help="The title of the AsyncAPI document.")] = "Events",
    version: Annotated[str, typer.Option("--version", help="The version of the AsyncAPI document.")] = "1.0.0",
) -> None:
    """Write a JSON Schema (2020-12) for every event, and an AsyncAPI 3 document with the channels of the settings' routes."""
    _declare(modules)
    folder.mkdir(parents=True, exist_ok=True)
    events = sorted(registry, key=lambda each: (each.event_type, each.event_version))
    files: dict[str, object] = {f"{asyncapi.name_of(each)}.schema.json": schema_of(each) for each in events}
    files["asyncapi.json"] = asyncapi.document(events, settings.load().destinations, title=title, version=version)
    for name, document in files.items():
        path = folder / name
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        printing.say(f"wrote {path}")


def _declare(modules: list[str]) -> None:
    for module in modules:
        target.module(module)
    if not len(registry):
        raise ConfigError(
            f"{', '.join(modules)}: no event is declared there", field="target", hint="name the module of your events"
        )


def _compared(modules: list[str], folder: Path, window: int | None) -> tuple[dict[str, Snapshot], Verdict]:
    _declare(modules)
    recorded = snapshots.load(folder)
    days = None if window is None else timedelta(days=window)
    return recorded, snapshots.compare(registry, recorded, window=days, today=_today())


def _tell(verdict: Verdict) -> None:
    if verdict.broken:
        columns = ("event", "member", "what", "recorded")
        rows = [(b.event, b.field or None, b.what, b.recorded) for b in verdict.broken]
        printing.table("incompatible events", columns, rows, empty="none")
        printing.say(
            "A changed meaning needs a new version: declare it beside the old one. Delete the file of a version only when"
            " none of its events can arrive any more, or it was never released."
        )


def _today() -> date:
    return datetime.now(UTC).date()
