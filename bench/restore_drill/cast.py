"""Who takes part in a drill: logins with one role each, a worker and its claims, the provider's client, the domain table."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.jobs import effects
from fencepost.jobs.claim import JobClassPolicy, claim
from fencepost.jobs.fence import Fence
from fencepost.jobs.journal_records import Begin, Outcome
from fencepost.jobs.journal_writer import Writer
from fencepost.jobs.publish import publish
from fencepost.schemas import grants
from fencepost.schemas.identity import EffectAttempt, as_class
from support.provider import Client

__all__ = [
    "CLASS",
    "DIRECT",
    "INSTALL",
    "KEY",
    "LOGINS",
    "POLICY",
    "TENANT",
    "Conn",
    "Worker",
    "make_domain",
    "make_logins",
]

Conn = psycopg.Connection[Any]

INSTALL = "drill"
TENANT, CLASS, KEY = "acme", "invoice.pay", "payment"
# "Not applied" is not believed for as long as a call of before may last: nothing of the drill waits for that.
POLICY = JobClassPolicy(
    name=as_class(CLASS), lease=600.0, backoff_base=0.0, backoff_max=0.0, max_effect_timeout=60.0, network_bound=60.0
)
CALL_SECONDS = 30.0

# Which roles of the installation each login has.
LOGINS: dict[str, tuple[str, ...]] = {
    "app": ("producer",),
    "relay": ("relay",),
    "consumer": ("consumer",),
    "worker": ("executor",),
    "projector": ("projector",),
    "operator": ("authority_admin", "reconciler", "armer"),
    "janitor": ("maintenance",),
}
# What no login may do by hand, whatever it may call.
DIRECT: tuple[LiteralString, ...] = (
    "UPDATE fencepost.job SET exec = 'queued'",
    "UPDATE fencepost.effect SET state = 'failed_before_dispatch'",
    "UPDATE fencepost.installation SET floor = floor",
    "DELETE FROM fencepost.ticket",
    "UPDATE fencepost.tip SET seq = seq",
    "DELETE FROM fencepost.publication",
)
DOMAIN: LiteralString = """
CREATE TABLE payment (tenant text NOT NULL, operation text NOT NULL, receipt text, by text NOT NULL);
SELECT fencepost.protect('payment'::regclass, 'tenant', 'operation')"""
PAID: LiteralString = "INSERT INTO payment (tenant, operation, receipt, by) VALUES (%(t)s, %(o)s, %(r)s, %(by)s)"


def make_logins(conn: Conn) -> None:
    """The logins; roles belong to the cluster, so every restore on it finds them."""
    for name, roles in LOGINS.items():
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        for role in roles:
            group = grants.role(INSTALL, role)
            conn.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(group), sql.Identifier(name)))


def make_domain(conn: Conn) -> None:
    """The application's table, which no unique key guards: a second publication would be seen as a second row."""
    conn.execute(DOMAIN)
    conn.execute("GRANT SELECT, INSERT ON payment TO worker")


@dataclass(slots=True)
class Worker:
    """A worker that is driven step by step; without a journal it is one that was lost with it."""

    name: str
    provider: Client
    journal: Writer | None = None
    fences: dict[str, Fence] = field(default_factory=dict[str, Fence])
    modes: dict[str, str] = field(default_factory=dict[str, str])
    attempts: dict[str, EffectAttempt] = field(default_factory=dict[str, EffectAttempt])

    @classmethod
    def with_journal(cls, name: str, provider: Client, folder: Path, machine: UUID) -> Worker:
        """One whose journal is kept."""
        return cls(name, provider, Writer(folder, owner=name, machine=machine, segment_bytes=1 << 20))

    def claim(self, conn: Conn) -> set[str]:
        """Claims what is due; returns the operations."""
        found = claim(conn, self.name, [CLASS], 100)
        for job in found:
            self.fences[str(job.operation)] = job.fence
            self.modes[str(job.operation)] = job.mode
        return {str(job.operation) for job in found}

    def begin(self, conn: Conn, operation: str, *, fresh: bool = True) -> effects.Begun | effects.Recorded:
        """First in the journal, then in the database; ``fresh`` False: as a worker tries that may not."""
        f, attempt = self.fences[operation], EffectAttempt(uuid4())
        digest = effects.request_digest({"pay": operation})
        if self.journal is not None and fresh:
            self.journal.append(
                Begin(
                    tenant=f.tenant,
                    operation=f.operation,
                    job_class=CLASS,
                    effect_key=KEY,
                    effect_attempt=attempt,
                    kind="opaque",
                    generation=f.generation,
                    attempt=f.attempt,
                    epoch=f.epoch,
                    request_digest=digest.hex(),
                )
            )
        begun = effects.begin(
            *(conn, f, KEY), kind="opaque", effect_attempt=attempt, digest=digest, timeout=CALL_SECONDS
        )
        if fresh:
            self.attempts[operation] = attempt
        return begun

    def dispatch(self, operation: str) -> str:
        """The call; returns the provider's receipt."""
        key = effects.idempotency_key(TENANT, operation, KEY)
        call = effects.Dispatch(self.attempts[operation], key, time.monotonic() + CALL_SECONDS)
        return self.provider.call({"pay": operation}, call).receipt

    def record(self, conn: Conn, operation: str, outcome: effects.Outcome, receipt: str | None = None) -> str:
        """What became of the begin."""
        attempt = self.attempts[operation]
        became = effects.record(conn, self.fences[operation], KEY, attempt, outcome, receipt=receipt)
        if self.journal is not None:
            self.journal.note(Outcome(effect_attempt=attempt, outcome=outcome, reason=None))
        return became

    def publish(self, conn: Conn, operation: str, receipt: str | None = None) -> None:
        """One row of the domain, behind the fence."""
        values = {"t": TENANT, "o": operation, "r": receipt, "by": self.name}
        publish(conn, self.fences[operation], lambda tx: tx.execute(PAID, values))


def by(dsn: str, login: str) -> Conn:
    """A connection of that login, in autocommit."""
    return psycopg.connect(make_conninfo(dsn, user=login), autocommit=True, connect_timeout=20)
