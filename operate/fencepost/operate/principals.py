"""`fencepost authority principal`: who may act without a job, for which tenant, on work of which class."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from fencepost.jobs import principals
from fencepost.jobs.authority import By
from fencepost.jobs.principals import Granted
from fencepost.operate import printing, settings
from fencepost.operate.authority import Actor, AsJson, DryRun, Evidence, Reason, Version
from fencepost.operate.effects import login_name
from fencepost.operate.refusals import ExitCode
from fencepost.schemas.contract import connect

app = typer.Typer(no_args_is_help=True, help="Who acts without a job: add, grant, revoke, list.")

Name = Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Who acts.")]


@app.callback()
def group() -> None:
    """Who acts without a job, and for whom."""


@app.command("add")
def add(
    principal: Name,
    reason: Reason,
    login: Annotated[
        str | None,
        typer.Option("--login", help="Only sessions of this login may act as it. Default: any that may ask."),
    ] = None,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Register a principal, or give it to another login; it may do nothing before a grant."""
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        by = By(actor or login_name(), reason, evidence, expect_version)
        principals.register(conn, by, principal, login=login)
    words = f"registered: {principal}, of {'any login' if login is None else f'the login {login}'}"
    _told({"principal": principal, "login": login}, words, dry_run, as_json)


@app.command("grant")
def grant_(
    principal: Name,
    tenant: Annotated[str, typer.Option("--tenant", help="For this tenant; * for every one.")],
    job_class: Annotated[str, typer.Option("--class", help="On work of this class; * for every one.")],
    reason: Reason,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let a principal act until the tenant gets another epoch; after a rotation or a recovery, grant again."""
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        by = By(actor or login_name(), reason, evidence, expect_version)
        epoch = principals.grant(conn, by, principal, tenant=tenant, job_class=job_class)
    found = {"principal": principal, "tenant": tenant, "class": job_class, "epoch": epoch}
    _told(found, f"granted: {principal}, tenant {tenant}, class {job_class}, up to epoch {epoch}", dry_run, as_json)


@app.command("revoke")
def revoke_(
    principal: Name,
    reason: Reason,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Grants for this tenant. Default: whichever.")] = None,
    job_class: Annotated[str | None, typer.Option("--class", help="Grants for this class. Default: whichever.")] = None,
    evidence: Evidence = "",
    actor: Actor = None,
    expect_version: Version = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take grants back, as they were given; all of them where none is named. Exit code 1 when there is none.

    `fencepost authority restrict principal` refuses whatever is granted until it is lifted.
    """
    with connect(settings.load().dsn()) as conn, conn.transaction(force_rollback=dry_run):
        by = By(actor or login_name(), reason, evidence, expect_version)
        count = principals.revoke(conn, by, principal, tenant=tenant, job_class=job_class)
    _told({"principal": principal, "revoked": count}, f"{count} grants of {principal} revoked", dry_run, as_json)
    if count == 0:
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command("list")
def list_(
    principal: Annotated[str | None, typer.Argument(metavar="[PRINCIPAL]", help="Only this one.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000)] = 1000,
    as_json: AsJson = False,
) -> None:
    """Who may do what, and whether that stands, or its tenant has another epoch by now, or the principal is revoked."""
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = principals.granted(conn, principal, limit=limit)
    if as_json:
        printing.as_json([asdict(g) for g in found])
        return
    columns = tuple(field.name for field in fields(Granted))
    printing.table("principals", columns, [[getattr(g, c) for c in columns] for g in found], empty="none")


def _told(found: dict[str, Any], words: str, dry_run: bool, as_json: bool) -> None:
    if as_json:
        printing.as_json(found | {"dry_run": dry_run})
    else:
        printing.say(f"{'dry run, nothing was changed: ' if dry_run else ''}{words}")
