"""PgQueuer on the same stage: the same jobs, provider and faults, without what it has none of."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, LiteralString, cast

from bench.chaos import domain
from bench.chaos.checker import Wrong
from bench.chaos.plan import PUBLISHING
from bench.chaos.provider import Accepted
from bench.chaos.stage import PYTHONPATH, Stage
from bench.chaos.systems import Conn, Found, Progress
from bench.jobs.parts import peer_python, url
from bench.relay.report import Bench, Report
from psycopg.rows import dict_row

from support.processes import Child

CALL_SECONDS = 60.0
VERSION = ("-c", "from importlib.metadata import version; print(version('pgqueuer'))")
PROGRESS: LiteralString = """
SELECT count(*), count(*) FILTER (WHERE q.id IS NULL), 0, 0.0, 0.0
FROM chaos_accepted AS a
LEFT JOIN pgqueuer AS q ON q.dedupe_key = a.operation AND q.status IN ('queued', 'picked')"""
ENDS: LiteralString = """
SELECT a.operation, a.class, coalesce(q.status::text, 'finished') AS state,
       ARRAY(SELECT unnest(r.receipts) FROM chaos_result AS r WHERE r.operation = a.operation) AS receipts,
       (SELECT count(*) FROM chaos_result AS r WHERE r.operation = a.operation) AS results
FROM chaos_accepted AS a LEFT JOIN pgqueuer AS q ON q.dedupe_key = a.operation"""
PICKS: LiteralString = "SELECT count(*) FROM pgqueuer_log WHERE status = 'picked'"

COMPARED = """\
  the same: jobs, handlers, provider, kills, stops, cuts, lost replies, restarts, and its heartbeat as long as our lease
  not the same: it has no operator, cancels or look-ups to run beside it; its handlers look the receipt up before they ask.
  counted as stale: every further row of an operation (a unique key would refuse it, and keep whichever came first);
  as lost: an acceptance that no row tells of, unless its job is held as failed."""


class PgQueuer:
    """Its workers in an environment of their own."""

    name = "pgqueuer"

    def __init__(self, python: Path) -> None:
        self._python = python
        self.name = f"pgqueuer {self._run(VERSION)}"

    @classmethod
    def obtained(cls, report: Report) -> PgQueuer | None:
        """From the environment of the benchmarks, or None with a loud line."""
        python = peer_python(cast(Bench, SimpleNamespace(report=report)))
        return None if python is None else cls(python)

    def prepare(self, stage: Stage) -> None:
        """The domain's tables and its schema."""
        with stage.database.connect() as conn:
            conn.execute(domain.SCHEMA)
        self._run(("-m", "bench.chaos.peer_app", "install"), CHAOS_DATABASE=url(stage.database.dsn))

    def submit(self, conn: Conn, rows: Sequence[dict[str, Any]]) -> None:
        """The domain's rows, then its jobs; nothing is broken yet."""
        domain.accept(conn, rows)
        given = "".join(json.dumps(row) + "\n" for row in rows)
        self._run(("-m", "bench.chaos.peer_app", "fill"), given, CHAOS_DATABASE=url(conn.info.dsn))

    def worker(self, stage: Stage, number: int, concurrency: int) -> Child:
        """Its own supervisor in a process, through the proxy."""
        return stage.child(
            f"peer-{number}",
            *("-m", "bench.chaos.peer_app", "work"),
            python=str(self._python),
            CHAOS_DATABASE=url(stage.through_proxy),
            CHAOS_SEED=str(stage.seed),
            CHAOS_PROVIDER=stage.provider_url,
            CHAOS_CONCURRENCY=str(concurrency),
        )

    def people(self, stage: Stage) -> Child | None:
        """Nobody: there is nothing for them to settle."""
        return None

    def progress(self, conn: Conn) -> Progress:
        """From its queue."""
        row = conn.execute(PROGRESS).fetchone()
        assert row is not None
        return Progress(*row)

    def found(self, stage: Stage, conn: Conn, logs: Sequence[str]) -> Found:
        """Counted from the domain's tables and the ledger."""
        ledger = stage.ledger()
        with conn.cursor(row_factory=dict_row) as cursor:
            ends = cursor.execute(ENDS).fetchall()
        row = conn.execute(PICKS).fetchone()
        assert row is not None
        states = Counter(str(end["state"]) for end in ends)
        return Found(
            check(ends, ledger),
            len(ends),
            dict(states),
            {"picks": int(row[0]), "acceptances at the provider": len(ledger)},
        )

    def _run(self, arguments: Sequence[str], given: str = "", **env: str) -> str:
        done = subprocess.run(
            [str(self._python), *arguments],
            input=given,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **env},
            check=True,
            timeout=CALL_SECONDS,
        )
        return done.stdout.strip()


def check(ends: Sequence[dict[str, Any]], ledger: Sequence[Accepted]) -> Wrong:
    """The same questions, of what there is to ask."""
    wrong = Wrong()
    given: dict[str, set[str]] = defaultdict(set)
    for entry in ledger:
        given[entry.subject.rpartition("/")[0]].add(entry.receipt)
    subjects = Counter(entry.subject for entry in ledger)
    wrong.duplicate_effects += [of for of, count in subjects.items() for _ in range(count - 1)]
    for end in ends:
        operation, told = end["operation"], set(end["receipts"])
        wrong.stale_publications += [operation] * max(0, end["results"] - 1)
        if end["state"] == "finished" and end["class"] in PUBLISHING and end["results"] != 1:
            wrong.not_applied_once.append(operation)
        if not told <= given[operation]:
            wrong.fabricated_outcomes.append(operation)
        if end["state"] != "failed":
            wrong.lost_unknowns += [operation] * len(given[operation] - told)
        if end["state"] in ("queued", "picked"):
            wrong.never_finishing.append(operation)
    return wrong
