"""`fencepost authority`: who may act, and every change of it: by whom, why, and about which version of the history.

Each command takes --dry-run (says what would happen, and changes nothing), --expect-version (refused when something
changed since `status` was looked at), --reason and --evidence (kept for ever).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.jobs import authority
from fencepost.jobs.authority import By
from fencepost.jobs.recovery import NUMBERS, Consumer, Hold, Recovered, consumers, holds, recover
from fencepost.operate import authority_checks, printing, settings
from fencepost.operate.effects import login_name
from fencepost.operate.refusals import ExitCode
from fencepost.schemas import arming
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

app = typer.Typer(
    no_args_is_help=True,
    help="Authority: status, rotate, freeze, thaw, release, restrict, lift, principal, arm, recover, seal, guard.",
)

STATUS: LiteralString = """
SELECT (SELECT max(l.seq) FROM fencepost.authority_log AS l) AS version, i.epoch_counter AS newest_epoch, i.floor, i.frozen,
       i.era, i.recovered_at, fencepost.verify_authority() AS broken_at
FROM fencepost.installation AS i"""
TENANTS: LiteralString = """
SELECT t.tenant, greatest(i.floor, t.epoch) AS epoch, t.frozen, t.suspended, t.changed_at
FROM fencepost.tenant AS t, fencepost.installation AS i
WHERE t.frozen OR t.suspended OR t.epoch > i.floor ORDER BY t.changed_at DESC LIMIT %(limit)s"""
HISTORY: LiteralString = """
SELECT l.seq AS version, l.at, l.kind, l.actor AS login, l.detail ->> 'actor' AS actor, l.detail ->> 'reason' AS reason,
       l.detail - '{actor,reason}'::text[] AS detail
FROM fencepost.authority_log AS l ORDER BY l.seq DESC LIMIT %(limit)s"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose. Default: everybody's.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the history.")]
Evidence = Annotated[str, typer.Option("--evidence", help="Where the evidence can be found; kept in the history.")]
Actor = Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")]
Version = Annotated[int | None, typer.Option("--expect-version", help="The version that `status` showed.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
Everybody = Annotated[bool, typer.Option("--all", help="Everybody, where no tenant is named.")]


class KindName(StrEnum):
    """What is restricted."""

    TENANT = "tenant"
    CLASS = "class"
    PRINCIPAL = "principal"


@app.callback()
def group() -> None:
    """Who may act, and every change of it."""


@app.command("status")
def status(
    history: Annotated[int, typer.Option("--history", min=0, max=1000, help="So many entries of the history.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Armed or not and why, epochs, restrictions, what is held and whose it is, and the newest changes."""
    chosen = settings.load()
    with connect(chosen.dsn(), autocommit=True) as conn:
        armed = authority_checks.armed(conn, chosen.outside())
        (now,) = _rows(conn, STATUS)
        tenants, entries, held = _rows(conn, TENANTS, 100), _rows(conn, HISTORY, history), holds(conn)
        read = consumers(conn)
    now["history"] = (
        "verified"
        if now["broken_at"] is None
        else f"NOT THE HISTORY THAT WAS WRITTEN, from version {now['broken_at']} on"
    )
    if as_json:
        found = now | {"armed": armed.level.value == "ok", "why": armed.message}
        printing.as_json(
            found
            | {"tenants": tenants, "holds": [asdict(h) for h in held], "changes": entries, "consumers": _told_of(read)}
        )
    else:
        printing.say(f"armed: {armed.message}")
        printing.record("authority", {k: v for k, v in now.items() if k != "broken_at"})
        columns = ("tenant", "epoch", "frozen", "suspended", "changed_at")
        printing.table("tenants", columns, [[r[c] for c in columns] for r in tenants], empty="all at the floor")
        _show_holds(held)
        _show_consumers(read)
        of_change = ("version", "at", "kind", "actor", "reason", "login", "detail")
        printing.table("history", of_change, [[r[c] for c in of_change] for r in entries], empty="none")
    if now["broken_at"] is not None:
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command("rotate")
def rotate_(
    reason: Reason,
    tenant: Tenant = None,
    everybody: Everybody = False,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a tenant or everybody a new epoch: running and queued work is held, begins are frozen."""
    _scope(tenant, everybody)
    chosen = settings.load()
    by = _by(actor, reason, evidence, expect_version)
    done = authority.rotate(chosen.dsn(), chosen.outside(), by, tenant=tenant, dry_run=dry_run)
    words = (
        f"epoch {done.epoch} for {tenant or 'everybody'}: {done.held} running jobs held, {done.blocked} blocked; frozen"
    )
    _told(done._asdict(), words, dry_run, as_json)


@app.command("freeze")
def freeze_(
    reason: Reason,
    tenant: Tenant = None,
    everybody: Everybody = False,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let no effect begin until the thaw; what runs goes on."""
    _scope(tenant, everybody)
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        authority.freeze(conn, _by(actor, reason, evidence, expect_version), tenant=tenant)
    _told({"tenant": tenant, "frozen": True}, f"frozen: {tenant or 'everybody'}", dry_run, as_json)


@app.command("thaw")
def thaw_(
    reason: Reason,
    tenant: Tenant = None,
    everybody: Everybody = False,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let effects begin again; a tenant's own freeze and everybody's are thawed each for itself."""
    _scope(tenant, everybody)
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        authority.thaw(conn, _by(actor, reason, evidence, expect_version), tenant=tenant)
    _told({"tenant": tenant, "frozen": False}, f"thawed: {tenant or 'everybody'}", dry_run, as_json)


@app.command("release")
def release_(
    reason: Reason,
    tenant: Tenant = None,
    everybody: Everybody = False,
    job_class: Annotated[str | None, typer.Option("--class", help="Only this kind of job.")] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", help="Only this one; refused with an open effect.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Jobs in one transaction.")] = 1000,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let held work go on under the current epoch, batch by batch; jobs with an open effect stay held."""
    _scope(tenant, everybody)
    by = _by(actor, reason, evidence, expect_version)
    released, still_open, after = 0, 0, None
    with connect(settings.load().dsn()) as conn:
        while True:
            with conn.transaction(force_rollback=dry_run):
                done = authority.release(
                    conn, by, tenant=tenant, job_class=job_class, operation=operation, limit=batch, after=after
                )
            released, still_open, after = released + done.released, still_open + done.open, done.after
            if after is None:
                break
            # Its own batches are changes too.
            by = _by(actor, reason, evidence, None)
    words = f"{released} jobs released; {still_open} stay, because an effect is open"
    _told({"released": released, "open": still_open}, words, dry_run, as_json)


@app.command("restrict")
def restrict_(
    kind: Annotated[KindName, typer.Argument(help="What is restricted.")],
    subject: Annotated[str, typer.Argument(help="The tenant, the class, the principal or login.")],
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Suspend a tenant, disable a class or revoke a principal or login; no restore lifts it."""
    chosen = settings.load()
    by = _by(actor, reason, evidence, expect_version)
    done = authority.restrict(chosen.dsn(), chosen.outside(), by, kind.value, subject, dry_run=dry_run)
    _told(
        {"kind": kind.value, "subject": subject, "epoch": done.epoch},
        f"restricted: {kind.value} {subject}",
        dry_run,
        as_json,
    )


@app.command("lift")
def lift_(
    kind: Annotated[KindName, typer.Argument(help="What is restricted.")],
    subject: Annotated[str, typer.Argument(help="The tenant, the class, the principal or login.")],
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Lift a restriction; what it held waits for `release`. Exit code 1 when there is none."""
    chosen = settings.load()
    by = _by(actor, reason, evidence, expect_version)
    found = authority.lift(chosen.dsn(), chosen.outside(), by, kind.value, subject, dry_run=dry_run)
    words = f"lifted: {kind.value} {subject}" if found else f"there is no restriction of {kind.value} {subject}"
    _told({"kind": kind.value, "subject": subject, "lifted": found}, words, dry_run, as_json)
    if not found:
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command("arm")
def arm_(as_json: AsJson = False) -> None:
    """Arm by equality with the witness, as every relay and worker does; this one breaks a seal too."""
    chosen = settings.load()
    with connect(chosen.dsn(), autocommit=True) as conn:
        already = arming.read_tip(conn).armed
    if not already:
        arming.arm(chosen.dsn(), chosen.outside(), unseal=True)
    _told({"armed": True, "already": already}, "armed already" if already else "armed", False, as_json)


@app.command("seal")
def seal_(
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Disarm for a planned move: the database arms itself once it runs elsewhere or was restarted."""
    chosen = settings.load()
    authority.seal(chosen.dsn(), chosen.outside(), _by(actor, reason, evidence, expect_version), dry_run=dry_run)
    _told({"sealed": True}, "sealed; move it, or take it back: fencepost authority arm", dry_run, as_json)


@app.command("recover")
def recover_(
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    journal: Annotated[
        list[Path] | None, typer.Option("--journal", help="A runner's journal; name all that there are.")
    ] = None,
    numbers: Annotated[
        int, typer.Option("--skip-numbers", min=0, help="More than the events that were lost.")
    ] = NUMBERS,
    epoch_floor: Annotated[
        int | None,
        typer.Option(
            "--epoch-floor", help="The witness is lost: no epoch beyond this one was ever given. Needs --evidence."
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring a restored database back under a new epoch: frozen, everything held; says what can resume and what cannot.

    Exit code 1 when a journal could be read in part only, or holds begins of jobs that are lost.
    """
    chosen = settings.load()
    by = _by(actor, reason, evidence, None)
    done = recover(
        *(chosen.dsn(), chosen.outside(), by),
        journals=journal or (),
        numbers=numbers,
        epoch_floor=epoch_floor,
        dry_run=dry_run,
    )
    if as_json:
        printing.as_json(asdict(done) | {"consumers": _told_of(done.consumers), "dry_run": dry_run})
    else:
        _show_recovered(done, dry_run)
    if done.damaged or done.lost:
        raise typer.Exit(int(ExitCode.REFUSED))


def _scope(tenant: str | None, everybody: bool) -> None:
    if (tenant is None) is not everybody:
        raise InvalidInput("name a tenant, or all", field="tenant", hint="--tenant NAME or --all")


def _by(actor: str | None, reason: str, evidence: str, version: int | None) -> By:
    return By(actor or login_name(), reason, evidence, version)


def _told(found: dict[str, Any], words: str, dry_run: bool, as_json: bool) -> None:
    if as_json:
        printing.as_json(found | {"dry_run": dry_run})
    else:
        printing.say(f"{'dry run, nothing was changed: ' if dry_run else ''}{words}")


def _show_recovered(done: Recovered, dry_run: bool) -> None:
    if done.already:
        printing.say(
            f"this database is armed: there is nothing to recover; {done.presented} begins of journals were presented"
        )
    else:
        printing.say(
            f"{'dry run, nothing was changed: ' if dry_run else ''}recovered under epoch {done.epoch}, era {done.era}, frozen:"
            f" {done.jobs} jobs are suspect, {done.unknown} effects unknown, {done.unsent} events are sent again,"
            f" {done.presented} begins of journals were presented"
        )
    for folder in done.damaged:
        printing.say(f"read in part only: the journal {folder}; see: fencepost journal verify")
    columns = ("tenant", "operation", "job_class", "effect_key", "effect_attempt", "at")
    if done.lost:
        rows = [[getattr(b, c) for c in columns] for b in done.lost]
        printing.table("begun, and their jobs are lost", columns, rows, empty="none")
    _show_holds(list(done.holds))
    _show_consumers(done.consumers)
    printing.say("next: settle what is unknown (fencepost effects list), then thaw, then release what can resume")


def _show_holds(held: list[Hold]) -> None:
    columns = ("what", "owner", "tenant", "job_class", "count", "oldest")
    printing.table("holds", columns, [[getattr(h, c) for c in columns] for h in held], empty="nothing is held")


def _show_consumers(found: Sequence[Consumer]) -> None:
    """What each needs to be given again what was lost; nothing where no consumer was there, or nothing was recovered."""
    if not found:
        return
    columns = ("consumer", "positions", "noted_at", "handled_until", "from Kafka", "from RabbitMQ: backfill from")
    rows = [
        [
            *(c.consumer, c.positions, c.noted_at, c.handled_until),
            "goes back by itself" if c.positions else "no position is known",
            c.backfill_from or "the oldest retained",
        ]
        for c in found
    ]
    printing.table("consumers at the recovery", columns, rows, empty="none")


def _told_of(found: Sequence[Consumer]) -> list[dict[str, Any]]:
    return [asdict(c) | {"backfill_from": c.backfill_from} for c in found]


def _rows(conn: Connection[Any], statement: LiteralString, limit: int = 0) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, {"limit": limit}).fetchall()
