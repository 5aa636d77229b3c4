"""What is driven through chaos: fencepost's own workers with an operator beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, LiteralString, Protocol

from bench.chaos import domain
from bench.chaos.checker import Wrong, check
from bench.chaos.plan import EFFECT_SECONDS, EFFECTS, LEASE, NETWORK_SECONDS
from bench.chaos.stage import Stage
from psycopg import Connection

from fencepost.jobs.submit import submit
from support.processes import Child

Conn = Connection[Any]

REGISTER: LiteralString = """
SELECT fencepost.register_class(%(class)s, 'strict', %(lease)s, 30, 30, '50 ms', '500 ms', %(timeout)s, %(bound)s)"""
# Settled: nothing will happen to it any more, or it waits for ever and is meant to.
PROGRESS: LiteralString = """
SELECT count(*), count(*) FILTER (WHERE s.settled),
       (SELECT count(*) FROM fencepost.effect AS e JOIN chaos_accepted AS a ON a.operation = e.operation
        WHERE e.state = 'pending' OR e.state = 'unknown' AND NOT (a.leave AND (e.kind = 'opaque' OR e.contradicted))),
       coalesce(extract(epoch FROM max(clock_timestamp() - s.at) FILTER (WHERE NOT s.settled)), 0)::float8,
       coalesce((SELECT extract(epoch FROM max(clock_timestamp() - e.unknown_since))
                 FROM fencepost.effect AS e JOIN chaos_accepted AS a ON a.operation = e.operation
                 WHERE e.state = 'unknown' AND NOT a.leave), 0)::float8
FROM (
    SELECT a.at, coalesce(j.exec = 'done' OR j.exec = 'poison' AND a.bad OR j.exec = 'blocked' AND a.leave
        OR j.exec = 'cancelled' AND (NOT a.again OR j.open_effects > 0 AND a.leave OR EXISTS (
            SELECT FROM fencepost.decision AS d
            WHERE d.tenant = a.tenant AND d.operation = a.operation AND d.kind = 'requeue')), false) AS settled
    FROM chaos_accepted AS a
    LEFT JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class) AS s"""
EXECS: LiteralString = "SELECT exec, count(*) FROM fencepost.job GROUP BY exec ORDER BY exec"
SURVIVED: LiteralString = """
SELECT (SELECT count(*) FROM fencepost.attempt),
       (SELECT count(*) FROM fencepost.effect_event WHERE became = 'unknown' AND was IS DISTINCT FROM 'unknown'),
       (SELECT count(*) FROM fencepost.decision WHERE kind = 'reconcile' AND evidence_kind = 'receipt_lookup'),
       (SELECT count(*) FROM fencepost.decision WHERE kind = 'reconcile' AND evidence_kind <> 'receipt_lookup'),
       (SELECT count(*) FROM fencepost.decision WHERE kind = 'cancel' AND verdict = 'cancelled'),
       (SELECT count(*) FROM fencepost.decision WHERE kind = 'requeue'),
       (SELECT count(*) FROM chaos_result WHERE computed_by <> attempt)"""
REFUSED = "refused as no longer current"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; ages in seconds, of what is not settled."""

    accepted: int
    settled: int
    open_effects: int = 0
    oldest_job: float = 0.0
    oldest_unknown: float = 0.0

    @property
    def at_rest(self) -> bool:
        """Whether nothing is to come any more."""
        return self.settled == self.accepted and self.open_effects == 0


@dataclass(slots=True)
class Found:
    """What a run left behind."""

    wrong: Wrong
    accepted: int
    states: dict[str, int]
    survived: dict[str, int]
    faults: Counter[str] = field(default_factory=Counter[str])
    ended: list[str] = field(default_factory=list[str])
    """Last words of workers that ended although nobody had killed them."""
    seconds: float = 0.0
    oldest_job: float = 0.0
    oldest_unknown: float = 0.0


class System(Protocol):
    """What the engine needs of a queue."""

    name: str

    def prepare(self, stage: Stage) -> None:
        """Makes tables and registers what is needed, before anything runs."""
        ...

    def submit(self, conn: Conn, rows: Sequence[dict[str, Any]]) -> None:
        """Accepts operations and schedules their jobs; the same ones again change nothing."""
        ...

    def worker(self, stage: Stage, number: int, concurrency: int) -> Child:
        """A worker process that is not started yet."""
        ...

    def people(self, stage: Stage) -> Child | None:
        """The operator's process, where there is one."""
        ...

    def progress(self, conn: Conn) -> Progress:
        """Where the run stands."""
        ...

    def found(self, stage: Stage, conn: Conn, logs: Sequence[str]) -> Found:
        """What is wrong, and what was survived, once all is at rest."""
        ...


def prepare(conn: Conn) -> None:
    """The domain's tables; classes are registered here, for jobs are submitted before a worker runs."""
    conn.execute(domain.SCHEMA)
    bounds = {
        "lease": timedelta(seconds=LEASE),
        "timeout": timedelta(seconds=EFFECT_SECONDS),
        "bound": timedelta(seconds=NETWORK_SECONDS),
    }
    for name in EFFECTS:
        conn.execute(REGISTER, {"class": name, **bounds})


class Fencepost:
    """Workers by the command line, half of them with a journal; look-ups by themselves, the rest by an operator."""

    name = "fencepost"

    def __init__(self, mutant: LiteralString = "") -> None:
        self._mutant: LiteralString = mutant

    def prepare(self, stage: Stage) -> None:
        """Tables and classes, and what is to be wrong with the database."""
        with stage.database.connect() as conn:
            prepare(conn)
            if self._mutant:
                conn.execute(self._mutant)

    def submit(self, conn: Conn, rows: Sequence[dict[str, Any]]) -> None:
        """The domain's rows and the jobs in one commit."""
        with conn.transaction():
            domain.accept(conn, rows)
            for row in rows:
                submit(
                    conn,
                    row["class"],
                    tenant=row["tenant"],
                    operation=row["operation"],
                    args={"bad": row["bad"]},
                    priority=row["priority"],
                )

    def worker(self, stage: Stage, number: int, concurrency: int) -> Child:
        """`fencepost worker run`, through the proxy."""
        journal = {"FENCEPOST_WORKER_JOURNAL": str(stage.folder / f"journal-{number}")} if number % 2 else {}
        return stage.child(
            f"worker-{number}",
            *("-m", "fencepost.operate.cli", "worker", "run", "bench.chaos.app:worker"),
            *("--concurrency", str(concurrency), "--drain", "5", "--patience", "120"),
            FENCEPOST_DATABASE=stage.through_proxy,
            FENCEPOST_STATE=str(stage.database.state),
            CHAOS_SEED=str(stage.seed),
            CHAOS_PROVIDER=stage.provider_url,
            **journal,
        )

    def people(self, stage: Stage) -> Child | None:
        """The operator, with a connection of its own."""
        return stage.child(
            "people",
            *("-m", "bench.chaos.people"),
            CHAOS_DATABASE=stage.database.dsn,
            CHAOS_LEDGER=str(stage.ledger_path),
            CHAOS_SEED=str(stage.seed),
        )

    def progress(self, conn: Conn) -> Progress:
        """From the jobs and effects."""
        row = conn.execute(PROGRESS).fetchone()
        assert row is not None
        return Progress(*row)

    def found(self, stage: Stage, conn: Conn, logs: Sequence[str]) -> Found:
        """By the offline checker."""
        states = {str(name): int(count) for name, count in conn.execute(EXECS).fetchall()}
        row = conn.execute(SURVIVED).fetchone()
        assert row is not None
        names = (
            "attempts",
            "effects became unknown",
            "settled by look-up",
            "settled by the operator",
            "cancelled",
            "queued anew",
            "published what another attempt had staged",
        )
        survived: dict[str, int] = dict(zip(names, map(int, row), strict=True))
        survived["acceptances at the provider"] = len(stage.ledger())
        survived["outcomes refused as no longer current"] = sum(log.count(REFUSED) for log in logs)
        return Found(check(conn, stage.ledger()), sum(states.values()), states, survived)
