"""What the measurements stand on: services, a backlog, counters of PostgreSQL, and children that do the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, Protocol, cast

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from support.database import Database

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")

FILL: LiteralString = """
SELECT count(*) FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS g,
LATERAL fencepost.enqueue(gen_random_uuid(), 't' || g %% 4, 'op-' || g, 'bench.filled', 1, 'k' || g %% %(keys)s,
    'jcs-sha256:' || encode(sha256(int8send(g)), 'hex'), 'application/json', NULL,
    convert_to(rpad('{"n": ' || g || ', "pad": "', %(size)s - 2, md5(g::text)) || '"}', 'UTF8'))"""
FILL_AT_ONCE = 1000
REWIND: LiteralString = """
TRUNCATE fencepost.ack;
DELETE FROM fencepost.relay;
UPDATE fencepost.slot SET owner = NULL, generation = generation + 1;"""
COUNTERS: LiteralString = """
SELECT pg_current_wal_lsn() - '0/0'::pg_lsn,
       (SELECT coalesce(sum(n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables WHERE schemaname = 'fencepost')"""


class TopicAdmin(Protocol):
    """What is called of the admin client, whose own types leave the futures open."""

    def create_topics(self, topics: list[NewTopic], *, operation_timeout: float) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes of write-ahead log and versions of rows made dead, so far."""

    wal: int
    dead: int

    def since(self, before: Counters) -> Counters:
        """What came in between."""
        return Counters(self.wal - before.wal, self.dead - before.dead)


def counters(database: Database) -> Counters:
    """Read after the children have ended, for only then their statistics are complete."""
    with database.connect(autocommit=True) as conn:
        row = conn.execute(COUNTERS).fetchone()
        assert row is not None
        return Counters(int(row[0]), int(row[1]))


def fill(database: Database, count: int, size: int, *, keys: int = 1000, first: int = 1) -> None:
    """A backlog of events accepted as applications do, a thousand in a transaction, payloads of `size` bytes."""
    with database.connect(autocommit=True) as conn:
        conn.execute("SET synchronous_commit = off")
        for start in range(first, first + count, FILL_AT_ONCE):
            last = min(start + FILL_AT_ONCE, first + count) - 1
            conn.execute(FILL, {"first": start, "last": last, "size": size, "keys": keys})
        conn.execute("VACUUM ANALYZE fencepost.outbox")
        conn.execute("CHECKPOINT")


def rewind(database: Database) -> None:
    """Everything is to be sent again; only a benchmark may do this."""
    with database.connect(autocommit=True) as conn:
        conn.execute(REWIND)


def topic(bootstrap: str) -> str:
    """A new topic of one partition."""
    name = f"bench-{uuid.uuid4().hex[:12]}"
    admin = cast(TopicAdmin, AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}))
    admin.create_topics([NewTopic(name, 1, 1)], operation_timeout=15)[name].result(timeout=20)
    return name


def started(kind: str, options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A child at work."""
    env = dict(os.environ)
    roots = ["schemas", "relay", "consumer", "jobs", "operate", "compose", "tests"]
    env["PYTHONPATH"] = os.pathsep.join([*(str(ROOT / root) for root in roots), env.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(CHILD), kind, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


def result(child: subprocess.Popen[str], within: float) -> dict[str, Any]:
    """What the child found; ends it when it takes longer."""
    try:
        out, _ = child.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(10)
        raise SystemExit("a measurement did not end in time") from None
    if child.returncode != 0:
        raise SystemExit(f"a measurement failed with code {child.returncode}")
    return cast("dict[str, Any]", json.loads(out.strip().splitlines()[-1]))


def measure(work: str, **options: Any) -> dict[str, Any]:
    """Runs one child to its end."""
    return result(started(work, options), options["seconds"] + 60)


def idle_database(dsn: str) -> psycopg.Connection[Any]:
    """A session whose snapshot stays where it is until it is closed."""
    conn = psycopg.connect(dsn, connect_timeout=10)
    conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    conn.execute("SELECT pg_current_snapshot()")
    return conn
