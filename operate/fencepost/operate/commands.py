"""The tree of commands: one module for each group, one place for logging and for refusals."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from fencepost.operate import (
    authority,
    backfill,
    consumer,
    deadletters,
    dev,
    doctor,
    effects,
    finished,
    grants,
    guard,
    inbox,
    job_signals,
    jobs,
    journal,
    logs,
    migrate,
    orphans,
    owner,
    parked,
    principals,
    protected,
    queues,
    relay,
    replay,
    retention,
    schedules,
    schemas,
    status,
    worker,
)
from fencepost.operate.logs import LogFormat
from fencepost.operate.printing import say
from fencepost.operate.refusals import RefusingGroup

__all__ = ["app"]

EPILOG = (
    "Exit codes: 0 done; 1 refused, or a check failed; 2 the command line or a setting is wrong; 3 a service does not"
    " answer; 4 the outcome is not known. Settings: FENCEPOST_DATABASE, FENCEPOST_STATE, FENCEPOST_DESTINATIONS,"
    " FENCEPOST_RELAY_*, or fencepost.toml."
)

app = typer.Typer(
    cls=RefusingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EPILOG,
    help="Transactional outbox, inbox and fenced jobs on PostgreSQL.",
)
app.add_typer(migrate.app, name="migrate")
app.add_typer(grants.app, name="grants")
relay.app.command("backfill")(backfill.backfill)
relay.app.command("retention")(retention.retention)
app.add_typer(relay.app, name="relay")
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.add_typer(dev.app, name="dev")
app.add_typer(consumer.app, name="consumer")
app.add_typer(deadletters.app, name="deadletters")
app.add_typer(inbox.app, name="inbox")
app.command("replay")(replay.replay)
app.add_typer(worker.app, name="worker")
app.add_typer(effects.app, name="effects")
jobs.app.command("signal")(job_signals.signal_)
jobs.app.command("protect")(protected.protect_)
jobs.app.command("unprotect")(protected.unprotect_)
jobs.app.command("protected")(protected.protected)
jobs.app.command("pause")(queues.pause_)
jobs.app.command("resume")(queues.resume_)
jobs.app.command("queues")(queues.queues)
jobs.app.command("orphans")(orphans.orphans)
jobs.app.command("retention")(finished.retention)
jobs.app.command("purge")(finished.purge)
jobs.app.add_typer(schedules.app, name="schedules")
jobs.app.add_typer(owner.app, name="owner")
app.add_typer(jobs.app, name="jobs")
app.add_typer(journal.app, name="journal")
app.add_typer(parked.app, name="parked")
authority.app.command("guard")(guard.guard)
authority.app.add_typer(principals.app, name="principal")
app.add_typer(authority.app, name="authority")
app.add_typer(schemas.app, name="schemas")


def _version(asked: bool) -> None:
    if asked:
        say(f"fencepost {version('fencepost')}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, on standard error.")] = False,
    log_format: Annotated[
        LogFormat | None, typer.Option("--log-format", help="json or text; text where a person is looking.")
    ] = None,
    shown: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Transactional outbox, inbox and fenced jobs on PostgreSQL."""
    logs.configure(log_format, verbose=verbose)
