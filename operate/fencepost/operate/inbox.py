"""`fencepost inbox`: what consumers have handled, how long they remember it, and forgetting what is older."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, LiteralString

import typer
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.consumer import acts
from fencepost.consumer.upkeep import Purge
from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.operate.effects import login_name
from fencepost.operate.findings import Finding, fail, ok, warn
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="What consumers remember: list, retention, purge.")

LIMIT_MAX = 10_000
COUNT_MAX = 1_000_000

LIST: LiteralString = """
SELECT r.tenant, r.consumer, r.operation, r.type, r.version, r.event_id, r.epoch, r.event_time, r.reserved_at, r.coordinates
FROM fencepost.reservation AS r
WHERE (%(tenant)s::text IS NULL OR r.tenant = %(tenant)s::text)
  AND (%(consumer)s::text IS NULL OR r.consumer = %(consumer)s::text)
  AND (%(operation)s::text IS NULL OR r.operation = %(operation)s::text)
  AND (%(type)s::text IS NULL OR r.type = %(type)s::text)
ORDER BY r.reserved_at DESC LIMIT %(limit)s"""
RETENTION: LiteralString = """
SELECT c.consumer, c.replay_window, CASE WHEN isfinite(c.horizon) THEN c.horizon END AS horizon,
       ARRAY(SELECT f.type FROM fencepost.consumer_forever AS f WHERE f.consumer = c.consumer ORDER BY 1) AS forever
FROM fencepost.consumer AS c
WHERE %(consumer)s::text IS NULL OR c.consumer = %(consumer)s::text ORDER BY c.consumer"""
# What a purge would delete now, as far as it is worth counting; an hour behind the horizon, as a purge does.
PURGEABLE: LiteralString = """
SELECT c.consumer, greatest(c.horizon, clock_timestamp() - c.replay_window) AS horizon,
       (SELECT count(*) FROM (
            SELECT FROM fencepost.reservation AS r
            WHERE r.consumer = c.consumer AND r.event_time < clock_timestamp() - c.replay_window - interval '1 hour'
              AND r.last_at < clock_timestamp() - c.replay_window - interval '1 hour'
              AND NOT EXISTS (SELECT FROM fencepost.consumer_forever AS f WHERE f.consumer = r.consumer AND f.type = r.type)
            LIMIT %(most)s) AS n) AS reservations
FROM fencepost.consumer AS c
WHERE c.replay_window IS NOT NULL AND (%(consumer)s::text IS NULL OR c.consumer = %(consumer)s::text) ORDER BY c.consumer"""
SHORT: LiteralString = """
SELECT c.consumer, t.topic, t.retention_ms, c.replay_window
FROM fencepost.consumer AS c JOIN fencepost.consumer_topic AS t ON t.consumer = c.consumer
WHERE c.replay_window IS NOT NULL AND t.noted_at > clock_timestamp() - interval '30 days'
  AND (t.retention_ms = -1 OR t.retention_ms > extract(epoch FROM c.replay_window) * 1000)
ORDER BY c.consumer, t.topic"""
# The horizon of a consumer that somebody purges is never far behind its window.
OVERDUE: LiteralString = """
SELECT c.consumer FROM fencepost.consumer AS c
WHERE c.replay_window IS NOT NULL
  AND greatest(c.horizon + c.replay_window, c.changed_at) < clock_timestamp() - interval '1 day' ORDER BY c.consumer"""
SET_ASIDE: LiteralString = """
SELECT d.reason, count(*) FROM fencepost.dead_letters AS d GROUP BY d.reason ORDER BY d.reason"""

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Consumer = Annotated[str | None, typer.Option("--consumer")]


@app.callback()
def group() -> None:
    """What consumers remember: list, retention, purge."""


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option("--tenant")] = None,
    consumer: Consumer = None,
    operation: Annotated[str | None, typer.Option("--operation")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="The event's type, without its version.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=LIMIT_MAX)] = 100,
    as_json: AsJson = False,
) -> None:
    """What was handled, newest first."""
    values = {"tenant": tenant, "consumer": consumer, "operation": operation, "type": type_, "limit": limit}
    with connect(settings.load().dsn(), autocommit=True) as conn:
        rows = _rows(conn, LIST, values)
    if as_json:
        printing.as_json(rows)
        return
    columns = ("tenant", "consumer", "operation", "type", "version", "event_time", "reserved_at")
    printing.table("inbox", columns, [[r[c] for c in columns] for r in rows], empty="nothing")


@app.command("retention")
def retention(
    consumer: Consumer = None,
    window: Annotated[
        str | None, typer.Option("--replay-window", help="How long handled operations are remembered: 30d, 12h.")
    ] = None,
    forever: Annotated[
        bool, typer.Option("--forever", help="Remember everything, as where nothing is declared.")
    ] = False,
    keep: Annotated[
        list[str] | None, typer.Option("--keep-type", help="Remember this type for ever: irreversible operations.")
    ] = None,
    keep_no_longer: Annotated[
        list[str] | None, typer.Option("--keep-type-no-longer", help="Remember this type as long as the others.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept with the decision.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who decides. Default: the login name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how long consumers remember and up to where they have forgotten; with an option, change it for one."""
    if forever and window is not None:
        raise InvalidInput("for ever, and a window", field="replay_window", hint="give one of them")
    asked, who = duration("replay_window", window), actor or login_name()
    with connect(settings.load().dsn(), autocommit=True) as conn:
        if forever or asked is not None or keep or keep_no_longer:
            if consumer is None:
                raise InvalidInput("a change is for one consumer", field="consumer", hint="give --consumer")
            if reason is None:
                raise InvalidInput("a change needs a reason", field="reason", hint="give --reason")
            with conn.transaction():
                if forever or asked is not None:
                    acts.set_retention(conn, consumer, asked, actor=who, reason=reason)
                for name, kept in [(n, True) for n in keep or ()] + [(n, False) for n in keep_no_longer or ()]:
                    acts.keep_type(conn, consumer, name, actor=who, reason=reason, forever=kept)
        rows = _rows(conn, RETENTION, {"consumer": consumer})
    if as_json:
        printing.as_json(rows)
        return
    cells = [
        [r["consumer"], r["replay_window"] or "for ever", r["horizon"], ", ".join(r["forever"]) or None] for r in rows
    ]
    columns = ("consumer", "window", "forgotten_before", "types_kept_for_ever")
    printing.table("retention", columns, cells, empty="nothing is declared: every consumer remembers for ever")


@app.command("purge")
def purge(
    consumer: Consumer = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget what is older than the replay window, in batches: one consumer, or each that has a window.

    From then on older events are refused as `before_horizon`, unless they are remembered.
    """
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = _rows(conn, PURGEABLE, {"consumer": consumer, "most": COUNT_MAX})
        if not dry_run:
            found = [_purge(conn, str(r["consumer"])) for r in found]
    if as_json:
        printing.as_json(found)
        return
    columns = tuple(found[0]) if found else ()
    title = "dry run, nothing was changed" if dry_run else "purged"
    printing.table(title, columns, [list(r.values()) for r in found], empty="no consumer has a replay window")


def _purge(conn: Connection[Any], consumer: str) -> dict[str, Any]:
    purging = Purge(consumer)
    reservations = deliveries = 0
    while True:
        done = purging.turn(conn)
        reservations, deliveries = reservations + done.reservations, deliveries + done.deliveries
        if not done.more:
            return {
                "consumer": consumer,
                "horizon": done.horizon,
                "reservations": reservations,
                "deliveries": deliveries,
            }


def remembering(conn: Connection[Any]) -> Finding:
    """No broker keeps events for longer than its consumer remembers them, and somebody purges where that is declared."""
    short = [_short(r) for r in _rows(conn, SHORT, {})]
    if short:
        return fail(
            "inbox",
            f"{'; '.join(short[:3])}: older redeliveries would be refused as before_horizon;"
            " see `fencepost inbox retention`",
        )
    overdue = [str(r["consumer"]) for r in _rows(conn, OVERDUE, {})]
    if overdue:
        return warn(
            "inbox",
            f"nobody purges for {', '.join(overdue[:5])}: run `fencepost inbox purge`, or its consumer with a login that"
            " has the role maintenance, or `fencepost authority guard`",
        )
    return ok("inbox", "every consumer remembers for as long as its broker does, as far as that is known")


def set_aside(conn: Connection[Any]) -> Finding:
    """Dead letters wait for somebody; conflicts first."""
    found = {str(reason): int(number) for reason, number in conn.execute(SET_ASIDE)}
    if not found:
        return ok("deadletters", "no dead letters")
    return warn(
        "deadletters",
        f"dead letters: {', '.join(f'{number} {reason}' for reason, number in found.items())};"
        " see `fencepost deadletters list`"
        + (", and `release` for what is of an old epoch" if "old_epoch" in found else ""),
    )


def _short(row: dict[str, Any]) -> str:
    kept = "for ever" if row["retention_ms"] == -1 else f"for {printing.age(row['retention_ms'] / 1000)}"
    return f"{row['topic']} keeps events {kept}, {row['consumer']} for {printing.age(row['replay_window'].total_seconds())}"


def _rows(conn: Connection[Any], statement: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
