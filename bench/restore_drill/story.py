"""One restore, from the copy to publishing again: what is allowed before, what is refused, what evidence settles.

before       published before the copy
applied      begun before the copy; the provider accepted it after
twice        failed before its dispatch, when the copy was made; then begun again by a worker that was lost with its
             journal, and accepted
later        queued when the copy was made; paid and published after
unsent       begun before the copy, and never sent
plain        queued, without any effect
new          submitted and paid after the copy, which has no trace of it
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from bench.restore_drill.cast import (
    CLASS,
    DIRECT,
    INSTALL,
    KEY,
    LOGINS,
    POLICY,
    TENANT,
    Conn,
    Worker,
    by,
    make_domain,
    make_logins,
)
from bench.restore_drill.checks import Checks
from bench.restore_drill.kinds import Kind
from bench.restore_drill.mutants import Mutant
from psycopg.conninfo import make_conninfo

from fencepost.jobs import effects
from fencepost.jobs.authority import By, lift, release, restrict, rotate, thaw
from fencepost.jobs.claim import register_class
from fencepost.jobs.fail import fail
from fencepost.jobs.journal_disk import machine_id
from fencepost.jobs.reconcile import Verdict, reconcile
from fencepost.jobs.recovery import Recovered, holds, recover
from fencepost.jobs.renew import renew
from fencepost.jobs.submit import submit
from fencepost.schemas import arming, migrate
from fencepost.schemas.errors import (
    EffectOpen,
    FencepostError,
    NotArmed,
    NotFenced,
    NotQuiescent,
    StaleEffectAttempt,
    StaleFence,
    WitnessMismatch,
)
from fencepost.schemas.witness import FileWitness
from support.command_line import CLI
from support.provider import Client, Provider

__all__ = ["Drill"]

WHY = By("ann", "the database was restored", "ticket 7")
OTHER = "globex"

UNKNOWN: LiteralString = """
SELECT e.operation, e.version FROM fencepost.effect AS e WHERE e.state = 'unknown' ORDER BY e.operation"""
STATES: LiteralString = "SELECT j.operation, j.exec FROM fencepost.job AS j WHERE j.tenant = %(tenant)s"
SUSPECTS: LiteralString = "SELECT j.operation FROM fencepost.job AS j WHERE j.suspect"
EFFECT: LiteralString = """
SELECT e.state, e.contradicted, e.effect_attempt IS NULL FROM fencepost.effect AS e WHERE e.operation = %(operation)s"""
PAYMENTS: LiteralString = "SELECT operation, by FROM payment ORDER BY operation"
BY_HAND: LiteralString = "INSERT INTO payment (tenant, operation, by) VALUES ('acme', 'plain', 'by hand')"


class Drill:
    """Opened once, run once; `checks` tells what did not hold. A mutant is put into the restored database."""

    def __init__(self, kind: Kind, mutant: Mutant | None = None) -> None:
        self.kind = kind
        self.mutant = mutant
        self.checks = Checks()
        self._opened = contextlib.ExitStack()

    def run(self) -> Checks:
        """All steps; an error that ends it early is one more thing that did not hold."""
        step = 0
        with self._opened:
            folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="restore-drill-")))
            self.state, self.journal = folder / "witness", folder / "journal"
            self.provider = self._opened.enter_context(Provider())
            client = Client(self.provider.port)
            self.a = Worker.with_journal("a", client, self.journal, machine_id())
            self.c = Worker("c", client)
            self.b = Worker("b", client)
            steps = (
                self.before_the_copy,
                self.after_the_copy,
                self.disarmed,
                self.old_tokens,
                self.recovered,
                self.settled,
                self.publishing,
                self.counted,
            )
            try:
                for act in steps:
                    step += 1
                    act()
            except (FencepostError, psycopg.Error, KeyError, AssertionError) as error:
                self.checks.holds(step, "the step comes to its end", False, repr(error))
        return self.checks

    def before_the_copy(self) -> None:
        """Step 1: A claims and begins, and the copy is made."""
        dsn = self.kind.dsn
        migrate.apply(dsn, state=self.state, single_role=False, install=INSTALL)
        self.kind.prepare()
        with psycopg.connect(dsn, autocommit=True) as owner:
            make_logins(owner)
            make_domain(owner)
        with by(dsn, "worker") as worker, by(dsn, "app") as app:
            register_class(worker, POLICY)
            for operation in ("before", "applied", "twice", "unsent"):
                self.submit(app, operation)
            self.a.claim(worker)
            for operation in ("applied", "twice", "unsent"):
                self.checks.allowed(1, f"begin {operation}", partial(self.a.begin, worker, operation))
            self.a.record(worker, "twice", "failed_before_dispatch")
            fail(worker, self.a.fences["twice"], "not_sent")
            self.checks.allowed(1, "renew", partial(renew, worker, self.a.fences["applied"]))
            self.checks.allowed(1, "publish", partial(self.a.publish, worker, "before"))
            for operation in ("later", "plain"):
                self.submit(app, operation)
            self.submit(app, "suspended", tenant=OTHER)
        self.kind.copy()

    def after_the_copy(self) -> None:
        """Step 2: everything goes on, and will be lost."""
        # The control of all that is refused later: a plain restart arms itself again, by equality.
        arming.ensure_armed(self.operator, self.state)
        with by(self.kind.dsn, "worker") as worker, by(self.kind.dsn, "app") as app:
            receipt = self.a.dispatch("applied")
            self.a.record(worker, "applied", "success", receipt)
            self.checks.allowed(2, "publish applied", partial(self.a.publish, worker, "applied", receipt))
            before = FileWitness(self.state).read().epoch
            for _ in range(2):
                rotate(self.operator, self.state, WHY)
            restrict(self.operator, self.state, WHY, "tenant", OTHER)
            with by(self.kind.dsn, "operator") as admin:
                thaw(admin, WHY)
                release(admin, WHY)
            self.checks.holds(2, "two epochs were given", FileWitness(self.state).read().epoch == before + 2)
            self.submit(app, "new")
            self.c.claim(worker)
            self.c.begin(worker, "twice")
            self.c.dispatch("twice")
            for operation in ("later", "new"):
                self.a.fences[operation] = self.c.fences[operation]
                self.a.begin(worker, operation)
                receipt = self.a.dispatch(operation)
                self.a.record(worker, operation, "success", receipt)
                self.checks.allowed(2, f"publish {operation}", partial(self.a.publish, worker, operation, receipt))
            renew(worker, self.c.fences["plain"])
        # The beat that comes every two seconds.
        with by(self.kind.dsn, "operator") as admin:
            arming.beat(admin, FileWitness(self.state))
        self.dispatched = len(self.provider.accepted)

    def disarmed(self) -> None:
        """Step 3: the old copy is back, and nobody may do anything."""
        self.kind.restore()
        if self.mutant is not None:
            self.mutant.apply(self.kind.dsn)
        with by(self.kind.dsn, "worker") as worker, by(self.kind.dsn, "operator") as admin:
            self.not_armed(worker, admin)
        self.by_hand(3)
        with by(self.kind.dsn, "operator") as admin:
            found = {h.what for h in holds(admin)}
        self.checks.holds(3, "what is shown as held is `disarmed`", "disarmed" in found, found)
        shown = self.command("authority", "status", "--history", "0")
        self.checks.holds(3, "the status says DISARMED", "DISARMED" in shown.stdout, shown.stdout + shown.stderr)

    def not_armed(self, worker: Conn, admin: Conn) -> None:
        """Every way to use authority, each through the login that may."""
        mismatch = self.caught(partial(arming.ensure_armed, self.operator, self.state))
        self.checks.holds(3, "the witness notices", mismatch == self.kind.differs, mismatch)
        self.checks.refused(3, "claim", NotArmed, partial(self.b.claim, worker))
        for what in (partial(thaw, admin, WHY), partial(release, admin, WHY)):
            self.checks.refused(3, what.func.__name__, NotArmed, what)
        self.checks.refused(3, "reconcile", NotArmed, partial(self.settle, admin, "applied", 1, "applied", "r"))
        self.checks.refused(3, "rotate", NotArmed, partial(rotate, self.operator, self.state, WHY))
        with by(self.kind.dsn, "relay") as relay:
            self.checks.refused(3, "tick", NotArmed, partial(relay.execute, "SELECT fencepost.tick()"))

    def old_tokens(self) -> None:
        """Step 4: A still runs, with what it was given before and after the copy."""
        with by(self.kind.dsn, "worker") as worker:
            self.refuse_old(4, worker, NotArmed)
            for outcome in ("success", "failed_before_dispatch"):
                receipt = "r" if outcome == "success" else None
                record = partial(effects.record, worker, self.a.fences["applied"], KEY, self.a.attempts["applied"])
                self.checks.refused(4, f"record {outcome}", NotArmed, partial(record, outcome, receipt=receipt))

    def refuse_old(self, step: int, worker: Conn, error: type[Exception]) -> None:
        """Renew, publish and begin of every job that A or C ever had, but what was published before the copy."""
        for old in (self.a, self.c):
            for operation, f in old.fences.items():
                if operation == "before" or operation == "new" and step > 4:
                    continue
                self.checks.refused(step, f"renew of {operation}", error, partial(renew, worker, f))
                self.checks.refused(step, f"publish of {operation}", error, partial(old.publish, worker, operation))
                begin = partial(old.begin, worker, operation, fresh=False)
                self.checks.refused(step, f"begin of {operation}", error, begin)

    def recovered(self) -> None:
        """Step 5: the recovery, beyond everything that the witness has seen."""
        seen = FileWitness(self.state).read().epoch
        tried = self.recover(dry_run=True)
        self.checks.holds(5, "a dry run changes nothing", not self.armed() and tried.epoch == seen + 1, tried)
        done = self.recover()
        self.checks.holds(5, "the epoch is the witness's and one", done.epoch == seen + 1, (done.epoch, seen))
        unknown = set(self.unknown())
        expected = {"applied", "twice", "later", "unsent"}
        self.checks.holds(5, "what needs evidence is all that may have been begun", unknown == expected, unknown)
        with psycopg.connect(self.kind.dsn, autocommit=True) as owner:
            suspects = {row[0] for row in owner.execute(SUSPECTS)}
            states: dict[str, str] = dict(owner.execute(STATES, {"tenant": TENANT}).fetchall())
        self.checks.holds(
            5, "every job that is not done is suspect", suspects == expected | {"plain", "suspended"}, suspects
        )
        self.checks.holds(5, "what was done stays done", states["before"] == "done", states)
        lost = [begin.operation for begin in done.lost]
        self.checks.holds(5, "the journal's begin of a lost job is told", lost == ["new"], lost)
        held = {h.what for h in done.holds}
        self.checks.holds(5, "frozen, and suspended by no restore lifted", {"frozen", "suspended"} <= held, held)
        with by(self.kind.dsn, "worker") as worker:
            self.checks.holds(5, "nothing can be claimed", self.b.claim(worker) == set())
            self.refuse_old(5, worker, StaleFence)
            never = partial(self.a.record, worker, "applied", "failed_before_dispatch")
            self.checks.refused(5, "A records that it never sent", StaleEffectAttempt, never)
            became = self.a.record(worker, "applied", "success", "receipt-of-a")
        with psycopg.connect(self.kind.dsn, autocommit=True) as owner:
            row = owner.execute(EFFECT, {"operation": "applied"}).fetchone()
        self.checks.holds(5, "A's receipt is evidence only", became == "superseded", became)
        self.checks.holds(
            5, "and flagged for whoever settles it", row is not None and row[:2] == ("unknown", True), row
        )

    def settled(self) -> None:
        """Step 6: the provider's ledger settles each, and nothing is sent for it."""
        client = Client(self.provider.port)
        with by(self.kind.dsn, "operator") as admin:
            for operation, version in self.unknown().items():
                receipt = client.look_up(effects.idempotency_key(TENANT, operation, KEY))
                if receipt is not None:
                    self.checks.allowed(
                        6, f"{operation} applied", partial(self.settle, admin, operation, version, "applied", receipt)
                    )
                    continue
                settle = partial(self.settle, admin, operation, version, "not_applied", None)
                self.checks.refused(6, f"{operation} not applied, too early", NotQuiescent, settle)
                # The machine of before is gone, with every call that it had under way.
                self.checks.allowed(
                    6, f"{operation} not applied, attested", partial(settle, kind="termination_attested")
                )
        self.checks.holds(6, "nothing is unknown any more", self.unknown() == {}, self.unknown())
        self.checks.holds(6, "nothing was sent", len(self.provider.accepted) == self.dispatched, self.provider.accepted)

    def publishing(self) -> None:
        """Step 7: thawed and released, a new worker publishes under the new epoch; nobody else does."""
        with (
            by(self.kind.dsn, "operator") as admin,
            by(self.kind.dsn, "worker") as worker,
            by(self.kind.dsn, "app") as app,
            by(self.kind.dsn, "relay") as relay,
        ):
            thaw(admin, WHY)
            freed = release(admin, WHY)
            self.checks.holds(
                7, "all but the suspended tenant's is released", (freed.released, freed.open) == (5, 0), freed
            )
            relay.execute("SELECT fencepost.tick()")
            self.submit(app, "new")
            got = self.b.claim(worker)
            expected = {"applied", "twice", "later", "unsent", "plain", "new"}
            self.checks.holds(7, "the new worker gets what was released", got == expected, got)
            self.checks.refused(7, "begin of a job that was lost", EffectOpen, partial(self.b.begin, worker, "new"))
            receipt = Client(self.provider.port).look_up(effects.idempotency_key(TENANT, "new", KEY))
            self.settle(admin, "new", 0, "applied", receipt)
            for operation in sorted(got & expected):
                self.checks.allowed(7, f"publish {operation}", partial(self.work, worker, operation))
            self.refuse_old(7, worker, StaleFence)
            self.checks.holds(7, "a suspended tenant waits", self.b.claim(worker) == set())
            lift(self.operator, self.state, WHY, "tenant", OTHER)
            release(admin, WHY, tenant=OTHER)
            self.checks.holds(7, "until it is lifted", self.b.claim(worker) == {"suspended"})
        self.by_hand(7)

    def counted(self) -> None:
        """The end: the provider's ledger and the domain's table."""
        accepted = self.provider.accepted
        keys = {effects.idempotency_key(TENANT, o, KEY): o for o in ("applied", "twice", "later", "unsent", "new")}
        named = sorted(keys.get(key, key) for key in accepted)
        self.checks.holds(8, "nothing was dispatched twice", len(named) == len(set(named)), named)
        self.checks.holds(8, "each payment was made", set(named) == set(keys.values()), named)
        with psycopg.connect(self.kind.dsn, autocommit=True) as owner:
            rows = owner.execute(PAYMENTS).fetchall()
            broken = owner.execute("SELECT fencepost.verify_authority()").fetchone()
        expected = [(o, "a" if o == "before" else "b") for o in sorted({*keys.values(), "before", "plain"})]
        self.checks.holds(8, "each operation was published once", rows == expected, rows)
        self.checks.holds(8, "the history of authority is whole", broken == (None,), broken)

    def work(self, worker: Conn, operation: str) -> None:
        """As a handler does it: pays what was not paid, and publishes."""
        if operation == "plain" or self.b.modes[operation] == "finish":
            self.b.publish(worker, operation)
            return
        begun = self.b.begin(worker, operation)
        if isinstance(begun, effects.Recorded):
            self.b.publish(worker, operation, begun.receipt)
            return
        receipt = self.b.dispatch(operation)
        self.b.record(worker, operation, "success", receipt)
        self.b.publish(worker, operation, receipt)

    def by_hand(self, step: int) -> None:
        """Direct statements: refused to each login, and possible for the owner alone."""
        for login in LOGINS:
            with by(self.kind.dsn, login) as conn:
                for statement in DIRECT:
                    what = f"{login}: {statement}"
                    self.checks.refused(
                        step, what, psycopg.errors.InsufficientPrivilege, partial(conn.execute, statement)
                    )
        with by(self.kind.dsn, "worker") as conn:
            self.checks.refused(step, f"worker: {BY_HAND}", NotFenced, partial(conn.execute, BY_HAND))
        with psycopg.connect(self.kind.dsn) as owner:
            self.checks.allowed(step, "the owner could", partial(owner.execute, DIRECT[2]))
            owner.rollback()

    def submit(self, conn: Conn, operation: str, *, tenant: str = TENANT) -> None:
        """One job."""
        with conn.transaction():
            submit(conn, CLASS, tenant=tenant, operation=operation, args={"pay": operation})

    def settle(
        self,
        conn: Conn,
        operation: str,
        version: int,
        verdict: Verdict,
        receipt: str | None,
        kind: Any = "receipt_lookup",
    ) -> str:
        """A reconciliation by what the provider says."""
        return reconcile(
            *(conn, TENANT, operation, KEY),
            version=version,
            verdict=verdict,
            evidence_kind=kind,
            evidence_ref="provider/ledger",
            receipt=receipt,
            actor="ann",
            reason="the provider was asked",
        )

    def recover(self, *, dry_run: bool = False) -> Recovered:
        """By the operator, with the journal of A."""
        return recover(self.operator, self.state, WHY, journals=[self.journal], dry_run=dry_run)

    def armed(self) -> bool:
        """As the database says."""
        with by(self.kind.dsn, "operator") as admin:
            return arming.read_tip(admin).armed

    def unknown(self) -> dict[str, int]:
        """The operations with an unknown effect, with its version."""
        with psycopg.connect(self.kind.dsn, autocommit=True) as owner:
            return dict(owner.execute(UNKNOWN).fetchall())

    @property
    def operator(self) -> str:
        """The database as the operator reaches it."""
        return make_conninfo(self.kind.dsn, user="operator")

    def caught(self, act: Any) -> str | None:
        """The part that the witness says is not equal; None when it found nothing."""
        try:
            act()
        except WitnessMismatch as error:
            return error.field
        return None

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`fencepost` as the operator runs it."""
        env = {"FENCEPOST_DATABASE": self.operator, "FENCEPOST_STATE": str(self.state)}
        argv = [sys.executable, *CLI, *arguments]
        return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
