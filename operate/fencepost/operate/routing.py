"""`fencepost relay destinations`: where routes lead, how far each destination is, and taking one away."""

from __future__ import annotations

from typing import Annotated, Any, LiteralString

import typer
from psycopg.rows import dict_row

from fencepost.operate import printing, settings, status
from fencepost.operate.effects import login_name
from fencepost.relay import acts
from fencepost.relay.backlog import backlog
from fencepost.schemas.contract import connect

app = typer.Typer(help="Destinations: list them, remove one.")

LIST: LiteralString = """
SELECT d.destination, d.kind, d.on_refusal, d.routes, d.registered_at
FROM fencepost.destination AS d WHERE d.destination <> '-' ORDER BY d.destination"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.callback(invoke_without_command=True)
def bare(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Without a further word: list."""
    if ctx.invoked_subcommand is None:
        _list(as_json)
    elif as_json:
        raise typer.BadParameter(f"give --json behind `{ctx.invoked_subcommand}`, here it would be ignored")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Every destination with its routes, what it has not been sent, and how many relays serve it."""
    _list(as_json)


@app.command("remove")
def remove(
    destination: Annotated[str, typer.Argument(help="Its name.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the decision.")],
    actor: Annotated[str | None, typer.Option("--actor", help="Who decides. Default: the login name.")] = None,
    lose: Annotated[bool, typer.Option("--yes-lose", help="Lose its unsent and parked events.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a destination and its progress; refused while a relay serves it or something of it is unsent or parked."""
    with connect(settings.load().dsn()) as conn:
        removed = acts.remove(conn, destination, actor=actor or login_name(), reason=reason, lose=lose)
    if as_json:
        printing.as_json({"destination": destination, "unsent": removed.unsent, "parked": removed.parked})
    else:
        printing.say(f"destination {destination} is removed; lost: {removed.unsent} unsent, {removed.parked} parked")


def _list(as_json: bool) -> None:
    with connect(settings.load().dsn(), autocommit=True) as conn:
        with conn.cursor(row_factory=dict_row) as cursor:
            found: list[dict[str, Any]] = cursor.execute(LIST).fetchall()
        waiting, live = backlog(conn), status.relays(conn)
    unsent = {b.destination: b for b in waiting or ()}
    for row in found:
        b = unsent.get(row["destination"])
        row["unsent"] = None if b is None else b.waiting
        row["more"] = None if b is None else b.more
        row["oldest_seconds"] = None if b is None else b.oldest_seconds
        row["relays"] = None if live is None else live.get(row["destination"], 0)
    if as_json:
        printing.as_json(found)
        return
    rows = [
        (
            r["destination"],
            r["kind"],
            r["on_refusal"],
            ", ".join(f"{route['match']} -> {route['to']}" for route in r["routes"]),
            unsent[r["destination"]].unsent if r["destination"] in unsent else None,
            r["relays"],
        )
        for r in found
    ]
    columns = ("destination", "kind", "on_refusal", "routes", "unsent", "relays")
    printing.table("destinations", columns, rows, empty="none is registered yet; start `fencepost relay run`")
