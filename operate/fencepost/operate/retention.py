"""`fencepost relay retention`: how long events stay in the outbox and operations are remembered, and what is gone."""

from __future__ import annotations

from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.operate.effects import login_name
from fencepost.operate.findings import Finding, ok, warn
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

SET: LiteralString = """
SELECT fencepost.set_retention(%(retention)s::interval, %(window)s::interval, %(actor)s, %(reason)s)"""
SHOW: LiteralString = """
SELECT i.retention, i.replay_window, r.seq AS recycled_up_to,
       CASE WHEN isfinite(r.recorded_at) THEN r.recorded_at END AS recycled_before
FROM fencepost.installation AS i, fencepost.recycled AS r"""
# Partitions whose time was over an hour ago: closed ones that still hold something, and a current one that nobody closed.
OVERDUE: LiteralString = """
SELECT 'outbox_' || c.child
FROM fencepost.outbox_child AS c, fencepost.installation AS i
WHERE pg_relation_size(('fencepost.outbox_' || c.child)::regclass) > 0
  AND CASE WHEN c.child = i.outbox_child THEN greatest(c.opened_at, i.created_at) + i.retention / 2
           ELSE c.closed_at + i.retention END < clock_timestamp() - interval '1 hour'
ORDER BY c.child"""


def retention(
    events: Annotated[
        str | None, typer.Option("--set", help="How long published events stay: 7d, 12h, 30m, 0s.")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--replay-window", help="How long an accepted operation is remembered; not less.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept with the decision.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show how long events are kept and which are gone; with --set or --replay-window, change it."""
    new = {"retention": duration("set", events), "window": duration("replay_window", window)}
    with connect(settings.load().dsn(), autocommit=True) as conn:
        if any(v is not None for v in new.values()):
            if reason is None:
                raise InvalidInput("a change needs a reason", field="reason", hint="give --reason")
            conn.execute(SET, {**new, "actor": actor or login_name(), "reason": reason})
        with conn.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(SHOW).fetchone()
    assert found is not None
    if as_json:
        printing.as_json(found)
    else:
        printing.record("retention", found)


def recycling(conn: Connection[Any]) -> Finding:
    """Somebody recycles the outbox, and nothing holds it up for long."""
    late = [str(name) for (name,) in conn.execute(OVERDUE)]
    if late:
        return warn(
            "recycling",
            f"{', '.join(late)} should have been recycled: a relay whose login has the role maintenance must run, or"
            " `fencepost authority guard`; its log says what it waits for",
        )
    return ok("recycling", "no partition of the outbox is overdue")
