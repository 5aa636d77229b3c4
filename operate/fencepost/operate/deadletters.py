"""`fencepost deadletters`: what consumers set aside: look at it, give it back, release, discard or export it."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.consumer import acts
from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.operate.effects import login_name
from fencepost.operate.refusals import ExitCode, line_of
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Dead letters: list, show, retry, release, discard, export.")

LIMIT_MAX = 10_000


class Reason(StrEnum):
    """Why a delivery was set aside."""

    CONFLICT = "conflict"
    DELIVERY_CHANGED = "delivery_changed"
    UNDECODABLE = "undecodable"
    UNKNOWN_TYPE = "unknown_type"
    NEWER_VERSION = "newer_version"
    HANDLER_FAILED = "handler_failed"
    BEFORE_HORIZON = "before_horizon"
    OLD_EPOCH = "old_epoch"


LIST: LiteralString = """
SELECT d.id, d.consumer, d.reason, d.field, d.detail, d.tenant, d.operation, d.type, d.version, d.event_id, d.attempts, d.coordinates,
       d.stored_meaning, d.arrived_meaning, d.content, d.bytes, d.created_at, d.last_at, d.due_at, d.takes, d.unhandled,
       d.released_epoch, clock_timestamp() - d.created_at AS age
FROM fencepost.dead_letters AS d
WHERE (%(tenant)s::text IS NULL OR d.tenant = %(tenant)s::text)
  AND (%(consumer)s::text IS NULL OR d.consumer = %(consumer)s::text)
  AND (%(type)s::text IS NULL OR d.type = %(type)s::text)
  AND (%(reason)s::text IS NULL OR d.reason = %(reason)s::text)
  AND (%(older)s::interval IS NULL OR d.created_at < clock_timestamp() - %(older)s::interval)
  AND (%(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[]))
ORDER BY d.id LIMIT %(limit)s"""
DECISIONS: LiteralString = """
SELECT d.at, d.kind, d.verdict, d.actor, d.reason, d.evidence_kind, d.evidence_ref FROM fencepost.decision AS d
WHERE d.kind IN ('retry_dead_letter', 'release_dead_letter', 'discard_dead_letter', 'read_dead_letter') AND d.subject = 'dead letter ' || %(id)s::bigint
ORDER BY d.id"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str | None, typer.Option("--tenant")]
Consumer = Annotated[str | None, typer.Option("--consumer")]
Type = Annotated[str | None, typer.Option("--type", help="The event's type, without its version.")]
Why = Annotated[Reason | None, typer.Option("--reason", help="Why it was set aside.")]
Older = Annotated[str | None, typer.Option("--older-than", help="Set aside for longer than this: 30s, 10m, 6h, 2d.")]
Ids = Annotated[list[int] | None, typer.Option("--id", help="Only these numbers.")]
Everything = Annotated[bool, typer.Option("--all", help="Every dead letter; needed where nothing narrows it down.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=LIMIT_MAX)]
Actor = Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")]
ReasonText = Annotated[str, typer.Option("--reason-text", help="Why this is done; kept with the decision.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
Act = Callable[[Connection[Any], int], str]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters a command is about."""

    tenant: str | None
    consumer: str | None
    type: str | None
    reason: Reason | None
    older: timedelta | None
    ids: list[int] | None

    @property
    def narrow(self) -> bool:
        """Whether anything was said."""
        said = (self.tenant, self.consumer, self.type, self.reason, self.older, self.ids)
        return any(v is not None for v in said)

    def values(self, limit: int) -> dict[str, object]:
        """The parameters of `LIST`."""
        return {
            "tenant": self.tenant,
            "consumer": self.consumer,
            "type": self.type,
            "reason": None if self.reason is None else self.reason.value,
            "older": self.older,
            "ids": self.ids,
            "limit": limit,
        }


@app.callback()
def group() -> None:
    """Dead letters: list, show, retry, release, discard, export."""


@app.command("list")
def list_(
    tenant: Tenant = None,
    consumer: Consumer = None,
    type_: Type = None,
    reason: Why = None,
    older_than: Older = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Dead letters, oldest first."""
    which = Filter(tenant, consumer, type_, reason, duration("older-than", older_than), None)
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows = _rows(conn, LIST, which.values(limit))
    if as_json:
        printing.as_json(rows)
        return
    columns = ("id", "consumer", "reason", "tenant", "operation", "type", "detail", "attempts", "due_at", "age")
    printing.table("dead letters", columns, [[r[c] for c in columns] for r in rows], empty="none")


@app.command("show")
def show(id: Annotated[int, typer.Argument(metavar="ID", help="Its number.")], as_json: AsJson = False) -> None:
    """One dead letter with both digests and what operators decided about it, also when it is gone; without its payload."""
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = _rows(conn, LIST, Filter(None, None, None, None, None, [id]).values(1))
        decisions = _rows(conn, DECISIONS, {"id": id})
    if not found and not decisions:
        raise InvalidInput("there is no such dead letter", field="id", hint="see: fencepost deadletters list")
    letter: dict[str, Any] = found[0] if found else {"id": id, "state": "handled or discarded"}
    if as_json:
        printing.as_json({**letter, "decisions": decisions})
        return
    printing.record("dead letter", letter)
    columns = ("at", "kind", "verdict", "actor", "reason", "evidence_kind", "evidence_ref")
    printing.table("decisions", columns, [[r[c] for c in columns] for r in decisions], empty="none")


@app.command("retry")
def retry(
    why: ReasonText,
    tenant: Tenant = None,
    consumer: Consumer = None,
    type_: Type = None,
    reason: Why = None,
    older_than: Older = None,
    ids: Ids = None,
    everything: Everything = False,
    unhandled: Annotated[
        bool, typer.Option("--unhandled", help="Of what is older than the purge horizon: it was not handled before.")
    ] = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Mark dead letters due: their consumer handles them in its idle time, each once; a conflict stays a conflict.

    What was accepted under an older epoch is refused: see release. Exit code 1 when one of them was refused.
    """
    who = actor or login_name()

    def act(conn: Connection[Any], number: int) -> str:
        acts.retry(conn, number, actor=who, reason=why, unhandled=unhandled)
        return "due"

    which = Filter(tenant, consumer, type_, reason, duration("older-than", older_than), ids)
    _each(which, everything, limit, act, dry_run, as_json)


@app.command("release")
def release(
    why: ReasonText,
    tenant: Tenant = None,
    consumer: Consumer = None,
    type_: Type = None,
    older_than: Older = None,
    ids: Ids = None,
    everything: Everything = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let events of an old epoch be handled under the present one, each once. For the role authority admin.

    About dead letters old_epoch only. It holds until their tenant's epoch changes again. Exit code 1 when one of them was
    refused.
    """
    who = actor or login_name()

    def act(conn: Connection[Any], number: int) -> str:
        acts.release(conn, number, actor=who, reason=why)
        return "released"

    which = Filter(tenant, consumer, type_, None, duration("older-than", older_than), ids)
    _require_said(which, everything)
    # A number names one letter, and is refused where that is of another kind.
    _each(replace(which, reason=None if ids else Reason.OLD_EPOCH), True, limit, act, dry_run, as_json)


@app.command("discard")
def discard(
    why: ReasonText,
    tenant: Tenant = None,
    consumer: Consumer = None,
    type_: Type = None,
    reason: Why = None,
    older_than: Older = None,
    ids: Ids = None,
    everything: Everything = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give dead letters up: they are never handled. The decision is kept for ever, with digest and coordinates.

    Exit code 1 when one of them was refused.
    """
    who = actor or login_name()

    def act(conn: Connection[Any], number: int) -> str:
        acts.discard(conn, number, actor=who, reason=why)
        return "discarded"

    which = Filter(tenant, consumer, type_, reason, duration("older-than", older_than), ids)
    _each(which, everything, limit, act, dry_run, as_json)


@app.command("export")
def export(
    tenant: Tenant = None,
    consumer: Consumer = None,
    type_: Type = None,
    reason: Why = None,
    older_than: Older = None,
    ids: Ids = None,
    limit: Limit = LIMIT_MAX,
    with_payload: Annotated[
        Path | None,
        typer.Option(
            "--with-payload", help="Write headers and payloads too, into this new file, which only you may read."
        ),
    ] = None,
    why: Annotated[
        str | None, typer.Option("--reason-text", help="Why payloads are read; kept with each of them.")
    ] = None,
    actor: Actor = None,
) -> None:
    """One JSON document a line for every dead letter, without payloads. Reading payloads is kept as a decision."""
    which = Filter(tenant, consumer, type_, reason, duration("older-than", older_than), ids)
    with connect(settings.load().dsn(), autocommit=True) as conn:
        if with_payload is None:
            for row in _rows(conn, LIST, which.values(limit)):
                printing.say(printing.json_line(row))
            return
        if why is None:
            raise InvalidInput("reading payloads needs a reason", field="reason-text", hint="give --reason-text")
        count = _export(conn, which, limit, with_payload, actor or login_name(), why)
    printing.say(f"exported {count} dead letters with their payloads to {with_payload}")


def _each(which: Filter, everything: bool, limit: int, act: Act, dry_run: bool, as_json: bool) -> None:
    """Acts on every letter in a transaction of its own; a dry run takes the same way and rolls back."""
    _require_said(which, everything)
    done: list[dict[str, Any]] = []
    refused = False
    with connect(settings.load().dsn()) as conn:
        rows = _rows(conn, LIST, which.values(limit))
        conn.commit()
        if missing := set(which.ids or ()) - {int(r["id"]) for r in rows}:
            raise InvalidInput(
                f"no dead letter: {', '.join(str(n) for n in sorted(missing))}",
                field="id",
                hint="see: fencepost deadletters list",
            )
        for row in rows:
            try:
                with conn.transaction(force_rollback=dry_run):
                    result = act(conn, int(row["id"]))
            except InvalidInput as error:
                if error.field not in ("id", "unhandled", "coordinates", "epoch"):
                    raise
                refused, result = True, f"refused: {line_of(error)}"
            done.append({c: row[c] for c in ("id", "consumer", "tenant", "operation", "type")} | {"result": result})
    if as_json:
        printing.as_json(done)
    else:
        columns = ("id", "consumer", "tenant", "operation", "type", "result")
        title = "dry run, nothing was changed" if dry_run else "dead letters"
        printing.table(title, columns, [[r[c] for c in columns] for r in done], empty="none")
    if len(rows) == limit:
        sys.stderr.write(f"fencepost: stopped at {limit} dead letters; there may be more\n")
    if refused:
        raise typer.Exit(int(ExitCode.REFUSED))


def _require_said(which: Filter, everything: bool) -> None:
    if not which.narrow and not everything:
        raise typer.BadParameter("say which: --id, --tenant, --consumer, --type, --reason, --older-than, or --all")


def _export(conn: Connection[Any], which: Filter, limit: int, path: Path, actor: str, why: str) -> int:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be made: {error.strerror}", field="with-payload", hint="name a file that does not exist"
        ) from None
    count = 0
    try:
        with os.fdopen(file, "w", encoding="utf-8") as lines:
            for row in _rows(conn, LIST, which.values(limit)):
                # One that was handled or discarded meanwhile is left out.
                with suppress(_Gone):
                    headers, payload = _read(conn, int(row["id"]), actor, why)
                    content = {"headers": headers, "payload_base64": base64.b64encode(payload).decode()}
                    lines.write(printing.json_line({**row, **content}) + "\n")
                    count += 1
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return count


class _Gone(Exception):
    pass


def _read(conn: Connection[Any], number: int, actor: str, why: str) -> tuple[list[list[object]], bytes]:
    try:
        return acts.read(conn, number, actor=actor, reason=why)
    except InvalidInput as error:
        if error.field != "id":
            raise
        raise _Gone from None


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
