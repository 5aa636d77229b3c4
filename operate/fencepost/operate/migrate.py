"""`fencepost migrate`: brings the database to this version of the contract and arms a new installation."""

from __future__ import annotations

from typing import Annotated

import typer

from fencepost.operate import printing, settings
from fencepost.operate.refusals import ExitCode
from fencepost.schemas import migrate
from fencepost.schemas.connect import address

app = typer.Typer(help="Apply the database contract; re-runnable, and safe when two run at once.")

SingleRole = Annotated[
    bool | None,
    typer.Option(
        "--single-role/--separate-roles",
        help="Leave out the roles, or create one for each kind of work. Default: single role on loopback.",
        show_default=False,
    ),
]
Install = Annotated[str, typer.Option("--install", help="Name of the installation; part of the names of its roles.")]
Slots = Annotated[int, typer.Option("--slots", help="Ordered shares of the outbox, fixed for life.")]


@app.callback(invoke_without_command=True)
def bare(ctx: typer.Context, single_role: SingleRole = None, install: Install = "main", slots: Slots = 16) -> None:
    """Without a further word: apply."""
    if ctx.invoked_subcommand is None:
        _apply(single_role, install, slots)
    elif (single_role, install, slots) != (None, "main", 16):
        raise typer.BadParameter(f"give the options behind `{ctx.invoked_subcommand}`, here they would be ignored")


@app.command("apply")
def apply(single_role: SingleRole = None, install: Install = "main", slots: Slots = 16) -> None:
    """Apply what is missing, and arm; exit code 1 when the database stays disarmed."""
    _apply(single_role, install, slots)


@app.command("status")
def status(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Which migrations are applied and which are pending; changes nothing. Exit code 1 when some are pending."""
    found = migrate.status(settings.load().dsn())
    if as_json:
        printing.as_json({"applied": found.applied, "pending": found.pending})
    else:
        rows = [(n, "applied") for n in found.applied] + [
            (n, "pending: run `fencepost migrate`") for n in found.pending
        ]
        printing.table("migrations", ("migration", "state"), rows, empty="none")
    if found.pending:
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command("sql")
def sql() -> None:
    """Print the whole contract as SQL, for review."""
    printing.say(migrate.script())


def _apply(single_role: bool | None, install: str, slots: int) -> None:
    chosen = settings.load()
    dsn = chosen.dsn()
    report = migrate.apply(dsn, state=chosen.outside(), single_role=single_role, install=install, slots=slots)
    done = f"applied {', '.join(report.applied)}" if report.applied else "tables up to date"
    roles = "single role" if report.single_role else "separate roles"
    printing.say(f"{address(dsn)}: {done}, functions applied, {roles}")
    printing.say(report.message)
    if not report.armed:
        raise typer.Exit(int(ExitCode.REFUSED))
