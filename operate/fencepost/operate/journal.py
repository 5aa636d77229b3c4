"""`fencepost journal`: what a worker's journal holds and whether it verifies; the repair of a torn tail; never a request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from fencepost.jobs.journal import acknowledge
from fencepost.jobs.journal_begins import Begins, missing
from fencepost.jobs.journal_disk import UNKNOWN_MACHINE, machine_id
from fencepost.jobs.journal_records import Begin
from fencepost.jobs.journal_repair import repair
from fencepost.jobs.journal_scan import Frame, Report, require_sound, scan
from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import ConfigError, InvalidInput

app = typer.Typer(no_args_is_help=True, help="A worker's journal of effect begins: verify, show, repair, acknowledge.")

LIMIT_MAX = 1_000_000
LOOKS, LOOK_SECONDS = 3, 0.05
COLUMNS = ("at", "tenant", "operation", "job_class", "effect_key", "effect_attempt")

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Folder = Annotated[
    Path | None, typer.Option("--journal", help="The journal's folder. Default: FENCEPOST_WORKER_JOURNAL.")
]
Actor = Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")]


@app.callback()
def group() -> None:
    """A worker's journal of effect begins: verify, show, repair, acknowledge."""


@app.command("verify")
def verify(journal: Folder = None, as_json: AsJson = False) -> None:
    """Read everything and say how far it verifies; exit code 1 when it does not to the end. Changes nothing."""
    report, _, _ = _read(_folder(journal), 1)
    if as_json:
        printing.as_json(_summary(report))
    else:
        rows = [
            [
                s.path.name,
                s.records,
                s.end,
                s.size,
                "open" if s.online else "closed",
                "yes" if s.damage is None else "no",
            ]
            for s in report.segments
        ]
        printing.table("segments", ("segment", "records", "verified", "size", "state", "sound"), rows, empty="none")
        if report.foreign:
            printing.say("written on another machine: it can be read here, not continued")
        for name in report.quarantined:
            printing.say(f"in quarantine: {name}")
        printing.say(f"{report.records} records verify")
    require_sound(report)


@app.command("show")
def show(
    journal: Folder = None,
    unmatched: Annotated[
        bool, typer.Option("--unmatched", help="Only begins of which the journal says nothing later.")
    ] = False,
    missing_: Annotated[
        bool, typer.Option("--missing", help="Only begins of which the database has no trace; asks the database.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=LIMIT_MAX, help="The newest of them.")] = 100,
    as_json: AsJson = False,
) -> None:
    """The records that verify, the newest last; exit code 1 after them when the journal does not verify to its end."""
    report, begins, newest = _read(_folder(journal), limit)
    if unmatched or missing_:
        found = list(begins.unmatched.values())
        if missing_:
            with connect(settings.load().dsn(), autocommit=True) as conn:
                found = missing(conn, [*begins.matched.values(), *found])
        _show_begins(found[-limit:], "missing" if missing_ else "unmatched", as_json=as_json)
    else:
        _show_frames(newest, as_json=as_json)
    require_sound(report)


@app.command("repair")
def repair_(journal: Folder = None, actor: Actor = None, as_json: AsJson = False) -> None:
    """Move a torn tail into quarantine, so that the journal can be written again. Any other damage is refused."""
    done = repair(_folder(journal), actor=actor or login_name())
    if as_json:
        printing.as_json(None if done is None else asdict(done))
    elif done is None:
        printing.say("nothing to repair: the journal verifies to its end")
    else:
        printing.say(f"{done.length} bytes from byte {done.offset} of {done.segment} are in {done.quarantine} now")


@app.command("acknowledge")
def acknowledge_(
    reason: Annotated[str, typer.Option(help="What was found out.")],
    effect_attempt: Annotated[
        list[UUID] | None, typer.Option("--effect-attempt", help="Only these; see `show --missing`.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every begin that the database does not know.")] = False,
    journal: Folder = None,
    actor: Actor = None,
    as_json: AsJson = False,
) -> None:
    """Settle begins that the database does not know: unknown there where their job exists, and not asked for again.

    The worker of this journal must not be running.
    """
    if bool(effect_attempt) == everything:
        raise InvalidInput("name effect attempts, or all", field="effect_attempt", hint="--effect-attempt ID or --all")
    folder = _folder(journal)
    with connect(settings.load().dsn(), autocommit=True) as conn:
        done = acknowledge(
            folder,
            conn,
            actor=actor or login_name(),
            reason=reason,
            attempts=None if everything else effect_attempt,
        )
    if as_json:
        printing.as_json([_begin(begin) | {"became": verdict} for begin, verdict in done])
        return
    rows = [[_begin(begin)[column] for column in COLUMNS] + [verdict] for begin, verdict in done]
    printing.table("acknowledged", (*COLUMNS, "became"), rows, empty="none")


def _folder(given: Path | None) -> Path:
    found = given or settings.load().worker.journal
    if found is None:
        raise ConfigError(
            "no journal is named", field="FENCEPOST_WORKER_JOURNAL", hint="set it, or give --journal FOLDER"
        )
    if not found.is_dir():
        raise ConfigError(f"there is no folder {found}", field="journal", hint="a worker makes it when it starts")
    return found


def _read(folder: Path, limit: int, looks: int = LOOKS) -> tuple[Report, Begins, deque[Frame]]:
    """Everything that verifies, and the newest frames; looked at again where a worker may just be writing."""
    here = machine_id()
    begins, newest = Begins(), deque[Frame](maxlen=limit)
    report = scan(folder, _taking(begins, newest), machine=None if here == UNKNOWN_MACHINE else here)
    if report.damage is not None and looks > 1:
        time.sleep(LOOK_SECONDS)
        return _read(folder, limit, looks - 1)
    return report, begins, newest


def _taking(begins: Begins, newest: deque[Frame]) -> Callable[[Frame], None]:
    def take(frame: Frame) -> None:
        begins.take(frame)
        newest.append(frame)

    return take


def _summary(report: Report) -> dict[str, Any]:
    return {
        "records": report.records,
        "damage": None if report.damage is None else asdict(report.damage),
        "other_machine": report.foreign,
        "quarantined": list(report.quarantined),
        "segments": [
            {
                "segment": s.path.name,
                "file": None if s.header is None else s.header.file,
                "machine": None if s.header is None else s.header.machine,
                "first_seq": None if s.header is None else s.header.first_seq,
                "records": s.records,
                "verified": s.end,
                "size": s.size,
                "open": s.online,
                "digest": s.digest.hex(),
            }
            for s in report.segments
        ],
    }


def _begin(begin: Begin) -> dict[str, Any]:
    return {column: getattr(begin, column) for column in COLUMNS}


def _show_begins(found: list[Begin], title: str, *, as_json: bool) -> None:
    if as_json:
        printing.as_json([asdict(begin) for begin in found])
    else:
        printing.table(title, COLUMNS, [[_begin(b)[column] for column in COLUMNS] for b in found], empty="none")


def _show_frames(frames: deque[Frame], *, as_json: bool) -> None:
    if as_json:
        shown = [
            {"seq": f.seq, "segment": f.segment, "offset": f.offset, "record": f.record.name} | asdict(f.record)
            for f in frames
        ]
        printing.as_json(shown)
        return
    rows = [
        [f.seq, f.record.at, f.record.name, " ".join(f"{k}={v}" for k, v in asdict(f.record).items() if k != "at")]
        for f in frames
    ]
    printing.table("records", ("seq", "at", "record", "of"), rows, empty="none")
