"""After a recovery it is printed how far each consumer had come, and from when on it has to be sent events again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from psycopg import Connection

from fencepost.consumer.inbox import inbox
from support.command_line import Fencepost
from support.database import Databases
from support.deliveries import Submitted, envelope, from_kafka, from_rabbitmq
from support.restores import Restores, restores

WHY = ("--reason", "why", "--actor", "ann")
NOTE = "SELECT fencepost.note_positions('reports', 'c', 'g', 0, '{t,t}', '{x,x}', '{0,1}', '{5,7}')"


@inbox(consumer="reports")
def reports(tx: Connection[Any], event: Submitted) -> None: ...


@inbox(consumer="billing")
def billing(tx: Connection[Any], event: Submitted) -> None: ...


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


def test_a_recovery_tells_each_consumer_apart_with_what_it_needs_and_the_status_keeps_it(
    made: Restores, fencepost: Fencepost
) -> None:
    for number, hour in enumerate((12, 9)):
        sent = envelope(operation=f"op-{number}", time=datetime(2026, 1, 1, hour, tzinfo=UTC))
        reports.handle(made.live.dsn, from_kafka(sent, number))
        billing.handle(made.live.dsn, from_rabbitmq(sent))
    with made.live.connect(autocommit=True) as conn:
        conn.execute(NOTE)
        conn.execute("SELECT fencepost.set_inbox_retention('quiet', NULL, 'ann', 'why')")
    assert json.loads(fencepost(made.live, "authority", "status", "--json").out)["consumers"] == []  # the control
    old = made.restored(made.backup())

    would = fencepost(old, "authority", "recover", *WHY, "--dry-run", "--json")
    done = fencepost(old, "authority", "recover", *WHY)

    assert (would.code, done.code) == (0, 0), done.err
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("  ")}
    assert "goes back by itself" in lines["reports"] and " 2 " in lines["reports"]
    assert "no position is known" in lines["billing"] and "2026-01-01 11:00" in lines["billing"].replace("T", " ")
    assert "the oldest retained" in lines["quiet"]
    kept = json.loads(fencepost(old, "authority", "status", "--json").out)["consumers"]
    assert [(c["consumer"], c["positions"]) for c in kept] == [("billing", 0), ("quiet", 0), ("reports", 2)]
    assert kept[0]["backfill_from"].startswith("2026-01-01T11:00") and kept[1]["backfill_from"] is None
    planned = json.loads(would.out)["consumers"]
    assert [(c["consumer"], c["positions"]) for c in planned] == [("billing", 0), ("quiet", 0), ("reports", 2)]
    assert "consumers at the recovery" in fencepost(old, "authority", "status").out
