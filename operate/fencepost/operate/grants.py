"""`fencepost grants apply|verify`: the privileges of every role are exactly the matrix, or it is told where they are not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from psycopg import Connection, sql

from fencepost.operate import printing, settings
from fencepost.operate.refusals import ExitCode
from fencepost.schemas import grants, privileges
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Each role can do its row of the privilege matrix and nothing else.")

INSTALLED = "SELECT i.name, i.single_role FROM fencepost.installation AS i"
SEPARATED = "UPDATE fencepost.installation SET single_role = false WHERE single_role"
LOCK = "SELECT pg_advisory_xact_lock(7310579032614957)"


@app.callback()
def group() -> None:
    """Each role can do its row of the privilege matrix and nothing else."""


@app.command("apply")
def apply(
    separate_roles: Annotated[
        bool, typer.Option("--separate-roles", help="Make the roles of an installation that was made without any.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the statements, and execute nothing.")] = False,
) -> None:
    """Make the privileges of every role exactly the matrix; once more changes nothing."""
    with connect(settings.load().dsn()) as conn:
        conn.execute("SET LOCAL lock_timeout = '10s'")
        conn.execute(LOCK)
        install, single = _installed(conn)
        if single and not separate_roles:
            raise ConfigError(
                "this installation has no roles of its own", field="roles", hint="make them with --separate-roles"
            )
        made: list[sql.Composed] = [*grants.missing_roles(conn, install)]
        if not dry_run:
            _execute(conn, made)
        handed = grants.hand_over(conn, install)
        granted = grants.statements(conn, install)
        if dry_run:
            for statement in [*made, *handed, *granted]:
                printing.say(f"{statement.as_string(conn)};")
            if single:
                printing.say(f"{SEPARATED};")
            conn.rollback()
            return
        _execute(conn, handed)
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(grants.role(install, "owner"))))
        _execute(conn, granted)
        conn.execute(SEPARATED)
    names = ", ".join(grants.role(install, name) for name in grants.ROLES)
    printing.say(f"installation {install}: {len(granted)} statements executed; grant your logins one of {names}")


@app.command("verify")
def verify(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Compare what each role may do with the matrix, asked of PostgreSQL; exit code 1 and a line for each difference."""
    with connect(settings.load().dsn(), autocommit=True) as conn:
        install, single = _installed(conn)
        if single:
            raise ConfigError(
                "this installation has no roles of its own",
                field="roles",
                hint="make them with `fencepost grants apply --separate-roles`",
            )
        found = privileges.differences(conn, install)
    if as_json:
        printing.as_json([asdict(d) for d in found])
    else:
        for difference in found:
            printing.say(str(difference))
        printing.say(f"installation {install}: {len(found)} differences from the matrix of {len(grants.ROLES)} roles")
    if found:
        raise typer.Exit(int(ExitCode.REFUSED))


def _installed(conn: Connection[Any]) -> tuple[str, bool]:
    row = conn.execute(INSTALLED).fetchone()
    if row is None:
        raise ConfigError("nothing was installed", field="database", hint="run `fencepost migrate`")
    return str(row[0]), bool(row[1])


def _execute(conn: Connection[Any], statements: list[sql.Composed]) -> None:
    for statement in statements:
        conn.execute(statement)
