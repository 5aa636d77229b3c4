"""`fencepost parked`: events that a relay set aside: look at them, retry, skip or export them; payloads only into a file."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.operate.refusals import ExitCode, line_of
from fencepost.relay import acts
from fencepost.relay.publisher import ParkReason
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Parked events: list, show, retry, skip, export.")

LIMIT_MAX = 10_000
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION = re.compile(r"([0-9]{1,6})([smhd])")

LIST: LiteralString = """
SELECT k.destination, k.seq, k.tenant, k.operation, k.type, k.version, k.ordering_key, k.reason, k.detail, k.attempts,
       k.next_try_at, k.overtaken_by, k.event_id, k.recorded_at, k.parked_at, clock_timestamp() - k.parked_at AS age
FROM fencepost.parked AS k
WHERE (%(tenant)s::text IS NULL OR k.tenant = %(tenant)s::text)
  AND (%(type)s::text IS NULL OR k.type = %(type)s::text)
  AND (%(reason)s::text IS NULL OR k.reason = %(reason)s::text)
  AND (%(destination)s::text IS NULL OR k.destination = %(destination)s::text)
  AND (%(older)s::interval IS NULL OR k.parked_at < clock_timestamp() - %(older)s::interval)
  AND (%(seqs)s::bigint[] IS NULL OR k.seq = ANY (%(seqs)s::bigint[]))
ORDER BY k.destination, k.seq LIMIT %(limit)s"""
SHOW: LiteralString = """
SELECT k.destination, k.seq, k.slot, k.tenant, k.operation, k.type, k.version, k.epoch, k.ordering_key, k.event_id, k.reference,
       octet_length(k.payload) AS bytes, k.reason, k.detail, k.attempts, k.next_try_at, k.overtaken_by, k.recorded_at, k.parked_at,
       (SELECT count(*) FROM fencepost.parked AS e
        WHERE e.destination = k.destination AND e.slot = k.slot AND e.tenant = k.tenant
          AND e.ordering_key = k.ordering_key AND e.seq < k.seq) AS before_it
FROM fencepost.parked AS k WHERE k.destination = %(destination)s AND k.seq = %(seq)s"""
DECISIONS: LiteralString = """
SELECT d.at, d.kind, d.verdict, d.actor, d.reason, d.evidence_ref FROM fencepost.decision AS d
WHERE d.kind IN ('retry_parked', 'skip_parked') AND d.subject = %(event)s::uuid::text ORDER BY d.id"""
CONTENT: LiteralString = """
SELECT k.payload, k.attributes, k.content_type, k.reference, k.epoch FROM fencepost.parked AS k
WHERE k.destination = %(destination)s AND k.seq = %(seq)s"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str | None, typer.Option("--tenant")]
Type = Annotated[str | None, typer.Option("--type", help="The event's type, without its version.")]
Reason = Annotated[ParkReason | None, typer.Option("--reason", help="Why it was parked.")]
At = Annotated[str | None, typer.Option("--destination", help="Where it is parked; - for what has no route.")]
Older = Annotated[str | None, typer.Option("--older-than", help="Parked for longer than this: 30s, 10m, 6h, 2d.")]
Seqs = Annotated[list[int] | None, typer.Option("--seq", help="Only these numbers.")]
Everything = Annotated[bool, typer.Option("--all", help="Every parked event; needed where nothing narrows it down.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=LIMIT_MAX)]
Actor = Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")]
Why = Annotated[str, typer.Option("--reason-text", help="Why this is done; kept with the decision.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
Act = Callable[[Connection[Any], str, int], str]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which parked events a command is about."""

    tenant: str | None
    type: str | None
    reason: ParkReason | None
    destination: str | None
    older: timedelta | None
    seqs: list[int] | None

    @property
    def narrow(self) -> bool:
        """Whether anything was said."""
        return any(
            v is not None for v in (self.tenant, self.type, self.reason, self.destination, self.older, self.seqs)
        )

    def values(self, limit: int) -> dict[str, object]:
        """The parameters of `LIST`."""
        return {
            "tenant": self.tenant,
            "type": self.type,
            "reason": None if self.reason is None else self.reason.value,
            "destination": self.destination,
            "older": self.older,
            "seqs": self.seqs,
            "limit": limit,
        }


@app.callback()
def group() -> None:
    """Parked events: list, show, retry, skip, export."""


@app.command("list")
def list_(
    tenant: Tenant = None,
    type_: Type = None,
    reason: Reason = None,
    destination: At = None,
    older_than: Older = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Parked events in the order of their destination and number."""
    which = Filter(tenant, type_, reason, destination, _duration(older_than), None)
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows = _rows(conn, LIST, which.values(limit))
    if as_json:
        printing.as_json(rows)
        return
    columns = (
        "destination",
        "seq",
        "tenant",
        "operation",
        "type",
        "reason",
        "detail",
        "attempts",
        "next_try_at",
        "age",
    )
    printing.table("parked", columns, [[r[c] for c in columns] for r in rows], empty="none")


@app.command("show")
def show(
    destination: Annotated[str, typer.Option("--destination", help="Where it is parked; - for what has no route.")],
    seq: Annotated[int, typer.Option("--seq", help="Its number.")],
    as_json: AsJson = False,
) -> None:
    """One parked event with what operators decided about it; without its payload."""
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = _rows(conn, SHOW, {"destination": destination, "seq": seq})
        decisions = _rows(conn, DECISIONS, {"event": found[0]["event_id"]}) if found else []
    if not found:
        raise InvalidInput("there is no such parked event", field="seq", hint="see: fencepost parked list")
    if as_json:
        printing.as_json({**found[0], "decisions": decisions})
        return
    printing.record("parked event", found[0])
    columns = ("at", "kind", "verdict", "actor", "reason", "evidence_ref")
    printing.table("decisions", columns, [[r[c] for c in columns] for r in decisions], empty="none")


@app.command("retry")
def retry(
    why: Why,
    tenant: Tenant = None,
    type_: Type = None,
    reason: Reason = None,
    destination: At = None,
    older_than: Older = None,
    seq: Seqs = None,
    everything: Everything = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Mark events due: their slots' owners publish them in order. What had no route goes where there is one now.

    Exit code 1 when one of them was refused.
    """
    who = actor or login_name()

    def act(conn: Connection[Any], at: str, number: int) -> str:
        done = acts.retry(conn, at, number, actor=who, reason=why)
        return done.verdict if done.verdict == "due" else f"moved to {', '.join(done.destinations)}"

    which = Filter(tenant, type_, reason, destination, _duration(older_than), seq)
    _each(which, everything, limit, act, dry_run, as_json)


@app.command("skip")
def skip(
    why: Why,
    tenant: Tenant = None,
    type_: Type = None,
    reason: Reason = None,
    destination: At = None,
    older_than: Older = None,
    seq: Seqs = None,
    everything: Everything = False,
    limit: Limit = LIMIT_MAX,
    actor: Actor = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give events up: they are never published there, and their keys go on. The decision is kept for ever.

    Exit code 1 when one of them was refused.
    """
    who = actor or login_name()

    def act(conn: Connection[Any], at: str, number: int) -> str:
        acts.skip(conn, at, number, actor=who, reason=why)
        return "skipped"

    which = Filter(tenant, type_, reason, destination, _duration(older_than), seq)
    _each(which, everything, limit, act, dry_run, as_json)


@app.command("export")
def export(
    tenant: Tenant = None,
    type_: Type = None,
    reason: Reason = None,
    destination: At = None,
    older_than: Older = None,
    seq: Seqs = None,
    limit: Limit = LIMIT_MAX,
    with_payload: Annotated[
        Path | None,
        typer.Option("--with-payload", help="Write payloads too, into this new file, which only you may read."),
    ] = None,
) -> None:
    """One JSON document a line for every parked event, without payloads."""
    which = Filter(tenant, type_, reason, destination, _duration(older_than), seq)
    with connect(settings.load().dsn(), autocommit=True) as conn:
        if with_payload is None:
            for row in _rows(conn, LIST, which.values(limit)):
                printing.say(printing.json_line(row))
            return
        printing.say(
            f"exported {_export(conn, which, limit, with_payload)} events with their payloads to {with_payload}"
        )


def _each(which: Filter, everything: bool, limit: int, act: Act, dry_run: bool, as_json: bool) -> None:
    """Acts on every event in a transaction of its own; a dry run takes the same way and rolls back."""
    if not which.narrow and not everything:
        raise typer.BadParameter("say which: --seq, --destination, --tenant, --type, --reason, --older-than, or --all")
    done: list[dict[str, Any]] = []
    refused = False
    with connect(settings.load().dsn()) as conn:
        rows = _rows(conn, LIST, which.values(limit))
        conn.commit()
        missing = set(which.seqs or ()) - {int(r["seq"]) for r in rows}
        if missing:
            raise InvalidInput(
                f"not parked: {', '.join(str(n) for n in sorted(missing))}",
                field="seq",
                hint="see: fencepost parked list",
            )
        for row in rows:
            at, number = str(row["destination"]), int(row["seq"])
            try:
                with conn.transaction(force_rollback=dry_run):
                    result = act(conn, at, number)
            except InvalidInput as error:
                if error.field not in ("seq", "type"):
                    raise
                refused, result = True, f"refused: {line_of(error)}"
            done.append({c: row[c] for c in ("destination", "seq", "tenant", "operation", "type")} | {"result": result})
    if as_json:
        printing.as_json(done)
    else:
        columns = ("destination", "seq", "tenant", "operation", "type", "result")
        title = "dry run, nothing was changed" if dry_run else "parked"
        printing.table(title, columns, [[r[c] for c in columns] for r in done], empty="none")
    if len(rows) == limit:
        sys.stderr.write(f"fencepost: stopped at {limit} events; there may be more\n")
    if refused:
        raise typer.Exit(int(ExitCode.REFUSED))


def _export(conn: Connection[Any], which: Filter, limit: int, path: Path) -> int:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be made: {error.strerror}", field="with-payload", hint="name a file that does not exist"
        ) from None
    count = 0
    try:
        with os.fdopen(file, "w", encoding="utf-8") as lines:
            for row in _with_content(conn, which, limit):
                lines.write(printing.json_line(row) + "\n")
                count += 1
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return count


def _with_content(conn: Connection[Any], which: Filter, limit: int) -> Iterator[dict[str, Any]]:
    """One payload in memory at a time; what was published meanwhile is left out."""
    for row in _rows(conn, LIST, which.values(limit)):
        for content in _rows(conn, CONTENT, {"destination": row["destination"], "seq": row["seq"]}):
            payload = base64.b64encode(content.pop("payload")).decode()
            yield {**row, **content, "payload_base64": payload}


def _duration(text: str | None) -> timedelta | None:
    if text is None:
        return None
    found = DURATION.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is not a duration", field="older-than", hint="a number and s, m, h or d: 30s, 2d")
    return timedelta(seconds=int(found[1]) * UNITS[found[2]])


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
