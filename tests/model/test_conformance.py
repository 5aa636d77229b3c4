"""PostgreSQL and the state machine are given the same events and must say and become the same.

Seeded random sequences, fair and foul: superseded and forged grants, old and unknown effect attempts, old versions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.sql import SQL, Identifier

from fencepost.jobs import authority, effects, machine
from fencepost.jobs import states as on
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.recovery import recover
from fencepost.jobs.renew import renew
from fencepost.jobs.signals import signal
from fencepost.jobs.states import Authority, Effect, Grant, Guard, Job, JobClass, State, Witness
from fencepost.jobs.submit import submit
from fencepost.jobs.wait import wait
from fencepost.schemas import arming
from fencepost.schemas.errors import FencepostError
from fencepost.schemas.identity import Attempt, Epoch, Generation, Owner, as_class
from fencepost.schemas.witness import FileWitness, intend
from support.database import Database
from support.jobs import Conn, age_effect, expire

SEQUENCES, STEPS = 300, 16
FORGED = 999
POLICIES: tuple[on.Policy, ...] = ("strict", "strict", "resumable")
KINDS: tuple[on.Kind, ...] = ("opaque", "opaque", "keyed")
VERDICTS: tuple[on.Verdict, ...] = ("applied", "not_applied", "not_applied")
OUTCOMES: tuple[on.Outcome, ...] = ("success", "success", "failed_before_dispatch", "unknown")
CODES = ("001", "002", "010", "020", "021", "030", "031", "032", "033", "034", "035", "036")
BY: dict[str, Any] = {"actor": "ann", "reason": "looked"}
WHO = authority.By("ann", "why")

LOOK = """SELECT j.exec, j.mode, j.generation, j.attempts, j.finishes, j.attempt, j.owner, j.epoch, j.open_effects, j.applied_effects,
    j.suspect, fencepost._epoch(j.tenant), fencepost._frozen(j.tenant), fencepost.armed(),
    e.effect_key, e.state, e.effect_attempt, e.begun_by, e.quiescent_at <= clock_timestamp(), e.contradicted, e.begins, e.version
FROM fencepost.job AS j LEFT JOIN fencepost.effect AS e ON e.tenant = j.tenant WHERE j.tenant = %(tenant)s"""
# The sequences share a database: each begins as if nothing had been done to anybody's authority.
LEVEL = (
    """UPDATE fencepost.installation SET floor = epoch_counter, frozen = false, recovered_at = NULL RETURNING floor"""
)
# A backup of one tenant, and what is everybody's of authority.
OF_TENANT = ("job", "attempt", "effect", "effect_event", "agenda", "wait", "signal", "tenant")
OF_ALL = ("installation", "tip")
COLUMNS = """SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute AS a
WHERE a.attrelid = ('fencepost.' || %(table)s)::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"""


@dataclass
class Pair:
    """One job, here and in PostgreSQL."""

    conn: Conn
    database: Database
    rng: random.Random
    name: str  # of its tenant, operation and class
    state: State
    log: list[str]
    seen: set[str]
    off: frozenset[Guard]
    numbers: int = 0
    grants: list[Grant] = field(default_factory=list[Grant])
    fences: dict[int, Fence] = field(default_factory=dict[int, Fence])
    begun: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (key, effect attempt)
    uuids: dict[int, UUID] = field(default_factory=dict[int, UUID])
    backup: State | None = None
    ruled: bool = False  # its authority changes

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def uuid(self, number: int) -> UUID:
        return self.uuids.setdefault(number, uuid4())

    def step(self, event: on.Event) -> tuple[on.Action, ...]:
        self.state, actions = machine.step(self.state, event, self.off)
        return actions

    def both(self, event: on.Event, call: Callable[[], object]) -> None:
        """The event in the machine, the call in PostgreSQL: the same refusal, the same answer, the same state."""
        self.log.append(repr(event))
        actions = self.step(event)
        try:
            value: object = call()
            answer: object = on.Told(value) if isinstance(value, str) else None
        except FencepostError as error:
            assert isinstance(error, psycopg.DatabaseError)
            answer = on.Refused(error.sqlstate or "", error.field or "")
        except Exception as error:
            raise AssertionError(self.story(f"PostgreSQL: {error!r}")) from error
        expected = actions[0] if actions and isinstance(actions[0], on.Refused | on.Told) else None
        self.seen.add(f"{type(event).__name__} {getattr(expected, 'code', getattr(expected, 'answer', ''))}")
        assert answer == expected, self.story(f"PostgreSQL {answer}, machine {expected}")
        self.compare()

    def compare(self) -> None:
        here, there = self.projected(), self.read()
        assert there == here, self.story(f"PostgreSQL {there}\nmachine    {here}")

    def projected(self) -> tuple[object, ...]:
        s = self.state
        job = s.job
        assert job is not None
        mode = job.mode if job.exec == "running" else None
        # A receipt against the decision of a job that is done opens its effect again; the job stays done and counts none.
        still_open = 0 if job.exec == "done" else s.open_effects
        part = (job.exec, mode, job.generation, job.attempts, job.finishes, job.attempt, job.owner, job.epoch)
        around = (job.suspect, s.authority.epoch, s.authority.frozen, s.authority.armed)
        keys = {
            f"e{key + 1}": (e.state, e.effect_attempt, e.begun_by, e.quiescent, e.contradicted, e.begins, e.version)
            for key, e in enumerate(s.effects)
            if e.state != "none"
        }
        return (*part, still_open, s.applied_effects, *around, keys)

    def read(self) -> tuple[object, ...]:
        names = {fence.attempt: number for number, fence in self.fences.items()} | {
            uuid: number for number, uuid in self.uuids.items()
        }
        rows = self.conn.execute(LOOK, {"tenant": self.name}).fetchall()
        exec_, mode, generation, attempts, finishes, attempt, owner, epoch, still_open, applied = rows[0][:10]
        around = rows[0][10:14]
        keys = {
            key: (state, names.get(effect_attempt), names.get(begun_by), *rest)
            for key, state, effect_attempt, begun_by, *rest in (row[14:] for row in rows)
            if key is not None
        }
        shown = mode if exec_ == "running" else None
        return (
            exec_,
            shown,
            generation,
            attempts,
            finishes,
            names.get(attempt),
            owner,
            epoch,
            still_open,
            applied,
            *around,
            keys,
        )

    def story(self, what: str) -> str:
        return "\n".join([*self.log, what])

    # What may be done next, fair or foul.

    def some_grant(self) -> tuple[Grant, Fence] | None:
        if not self.grants:
            return None
        kind = self.rng.random()
        grant = self.grants[-1] if kind < 0.8 else self.rng.choice(self.grants)
        held = self.fences[grant.attempt]
        if kind < 0.93:
            return grant, held
        match self.rng.randrange(4):
            case 0:
                return replace(grant, owner="b"), replace(held, owner=Owner("b"))
            case 1:
                return replace(grant, generation=77), replace(held, generation=Generation(77))
            case 2:
                return replace(grant, epoch=77), replace(held, epoch=Epoch(77))
            case _:
                return replace(grant, attempt=FORGED), replace(held, attempt=Attempt(self.uuid(FORGED)))

    def poll(self) -> None:
        """Claim takes back what has expired first, then what it finds."""
        number, owner = self.number(), self.rng.choice(("a", "a", "b"))
        events: list[on.Event] = [on.Reap(), *(on.Deadline(key) for key in range(len(self.state.effects))), on.Wake()]
        for event in events:
            self.log.append(repr(event))
            self.step(event)
        self.log.append(f"claim {number}")
        action = self.step(on.Claim(number, owner))[0]
        expected: object = action if isinstance(action, on.Refused) else isinstance(action, on.Granted)
        try:
            jobs = claim(self.conn, owner, [self.name], 1)
            answer: object = bool(jobs)
            for job in jobs:
                self.fences[number] = job.fence
        except FencepostError as error:
            assert isinstance(error, psycopg.DatabaseError)
            answer = on.Refused(error.sqlstate or "", error.field or "")
        self.seen.add(f"Claim {getattr(expected, 'code', expected)}")
        assert answer == expected, self.story(f"PostgreSQL {answer}, machine {expected}")
        if isinstance(action, on.Granted):
            self.grants.append(action.grant)
        self.compare()

    def by_grant(self) -> None:
        chosen = self.some_grant()
        if chosen is None:
            return
        grant, held = chosen
        match self.rng.choices(
            ("renew", "begin", "publish", "fail", "final", "give back", "wait"), (2, 12, 2, 3, 1, 1, 2)
        )[0]:
            case "renew":
                self.both(on.Renew(grant), lambda: renew(self.conn, held))
            case "begin":
                self.begin(grant, held)
            case "publish":
                self.both(on.Publish(grant), lambda: self.publish(held))
            case "fail":
                self.both(on.Fail(grant), lambda: fail(self.conn, held, "handler_raised"))
            case "final":
                self.both(on.Fail(grant, final=True), lambda: fail(self.conn, held, "handler_raised", final=True))
            case "wait":
                self.both(on.Wait(grant), lambda: self.wait(held))
            case _:
                self.both(on.GiveBack(grant), lambda: release(self.conn, held))

    def wait(self, held: Fence) -> str:
        answer = wait(self.conn, held, signal="go")
        return answer if isinstance(answer, str) else "signalled"

    def begin(self, grant: Grant, held: Fence) -> None:
        key, number = self.rng.choices(range(len(self.state.effects)), (2, 1))[0], self.number()
        kind, name, begins = self.state.effects[key].kind, f"e{key + 1}", self.state.effects[key].begins
        digest, attempt = effects.request_digest({"key": name}), self.uuid(number)
        self.both(
            on.Begin(grant, key, number),
            lambda: effects.begin(
                self.conn, held, name, kind=kind, effect_attempt=attempt, digest=digest, timeout=20.0
            ),
        )
        if self.state.effects[key].begins > begins:
            self.begun.append((key, number))

    def publish(self, held: Fence) -> None:
        with self.conn.transaction():
            fence(self.conn, held)
            complete(self.conn, held)

    def record(self) -> None:
        if not self.begun:
            return
        key, number = self.begun[-1] if self.rng.random() < 0.65 else self.rng.choice(self.begun)
        if self.rng.random() < 0.05:
            number = FORGED
        held = next(iter(self.fences.values()))
        outcome = self.rng.choice(OUTCOMES)
        receipt = "r-1" if outcome == "success" else None
        self.both(
            on.Record(key, number, outcome),
            lambda: effects.record(self.conn, held, f"e{key + 1}", self.uuid(number), outcome, receipt=receipt),
        )

    def decide(self) -> None:
        suspect = self.state.job is not None and self.state.job.suspect
        doubtful = ("unknown", "none") if suspect else ("unknown",)
        unknown = [key for key, effect in enumerate(self.state.effects) if effect.state in doubtful]
        key = self.rng.choice(unknown if unknown and self.rng.random() < 0.9 else range(len(self.state.effects)))
        version = self.state.effects[key].version - (self.rng.random() < 0.1)
        verdict = self.rng.choice(VERDICTS)
        attested = self.rng.random() < 0.3
        self.both(
            on.Reconcile(key, verdict, version, attested),
            lambda: reconcile(
                self.conn,
                self.name,
                self.name,
                f"e{key + 1}",
                version=version,
                verdict=verdict,
                evidence_kind="termination_attested" if attested else "provider_statement",
                evidence_ref="provider/1",
                receipt="r-2" if verdict == "applied" else None,
                kind=self.state.effects[key].kind,
                **BY,
            ),
        )

    def people(self) -> None:
        job, chance = self.state.job, self.rng.random()
        assert job is not None
        if chance < 0.3 or job.exec in ("poison", "cancelled"):
            self.both(on.Retry(), lambda: requeue(self.conn, self.name, self.name, self.name, **BY))
        elif chance < 0.5 or job.exec == "waiting":
            self.both(on.Signal(), self.signal)
        elif chance < 0.75:
            self.both(on.Cancel(), lambda: cancel(self.conn, self.name, self.name, self.name, **BY))
        else:
            meaning = self.rng.choice((1, 2))
            self.both(on.Submit(meaning), lambda: self.submit(meaning))

    def signal(self) -> str:
        with self.conn.transaction():
            return signal(self.conn, tenant=self.name, operation=self.name, job_class=self.name, name="go")

    def submit(self, meaning: int) -> str:
        with self.conn.transaction():
            new = submit(self.conn, self.name, tenant=self.name, operation=self.name, args={"n": meaning})
        return "new" if new else "same"

    def passing(self) -> None:
        """What time and a restart do; there is nothing to refuse."""
        job, conn = self.state.job, self.conn
        assert job is not None
        what = self.rng.choices(("lease", "calls", "restart"), (16, 12, 2))[0]
        self.log.append(what)
        match what:
            case "lease":
                if job.exec == "running" and not job.expired:
                    expire(conn, self.name)
                    self.step(on.LeaseEnds())
            case "calls":
                age_effect(conn, self.name)
                conn.execute(
                    "UPDATE fencepost.job SET quiescent_at = clock_timestamp() - interval '1 ms'"
                    " WHERE tenant = %(tenant)s AND suspect",
                    {"tenant": self.name},
                )
                for key in range(len(self.state.effects)):
                    self.step(on.Quiesces(key))
            case _:
                conn.execute("DELETE FROM fencepost.ticket")
                self.step(on.Restart())
        self.compare()

    def admin(self) -> None:
        """What an authority admin does, and what befalls the database."""
        conn = self.conn
        kinds = ("freeze", "thaw", "release", "rotate", "lost", "backup", "restore", "recover")
        match self.rng.choices(kinds, (2, 5, 6, 2, 1, 2, 2, 2))[0]:
            case "freeze":
                if self.state.authority.armed:
                    authority.freeze(conn, WHO, tenant=self.name)
                    self.state = replace(self.state, authority=replace(self.state.authority, frozen=True))
                    self.compare()
            case "thaw":
                self.both(on.Thaw(), self.thaw)
            case "release":
                self.both(on.Release(), self.release)
            case "rotate":
                if self.rng.random() < 0.8:
                    self.arm()
                self.both(on.Rotate(), lambda: self.rotate(lost=False))
            case "lost":
                self.arm()
                if self.state.authority.armed:
                    self.both(on.Rotate(commits=False), lambda: self.rotate(lost=True))
            case "backup":
                if self.state.authority.armed:
                    self.keep()
            case "restore":
                if self.backup is not None:
                    self.log.append("restore")
                    self.bring_back()
                    self.step(on.Restore(self.backup))
                    self.compare()
            case _:
                self.recover()

    def recover(self) -> None:
        dsn, outside = self.database.dsn, self.database.state
        self.both(on.Recover(), lambda: "armed" if recover(dsn, outside, WHO, numbers=0).already else None)

    def thaw(self) -> None:
        """The machine knows one freeze: a tenant's own and everybody's go together."""
        with self.conn.transaction():
            authority.thaw(self.conn, WHO, tenant=self.name)
            authority.thaw(self.conn, WHO)

    def release(self) -> str | None:
        named: dict[str, Any] = {"tenant": self.name, "job_class": self.name, "operation": self.name}
        return None if authority.release(self.conn, WHO, **named).released else "nothing"

    def rotate(self, *, lost: bool) -> str | None:
        if not lost:
            if not self.state.authority.armed:
                # The machine has said so already; a refused rotation arms again where a keeper would.
                authority.freeze(self.conn, WHO, tenant=self.name)
            authority.rotate(self.database.dsn, self.database.state, WHO, tenant=self.name)
            return None
        witness = FileWitness(self.database.state)
        with witness.held():
            record = arming.settled(witness.read(), arming.read_tip(self.conn))
            self.conn.execute(authority.DISARM)
            intend(witness, record, record.head.rotating(self.name))
        return "lost"

    def keep(self) -> None:
        """A backup of everything that is this tenant's; the witness goes on."""
        self.log.append("backup")
        self.conn.execute("CREATE SCHEMA IF NOT EXISTS kept")
        for table in (*OF_TENANT, *OF_ALL):
            names = {"kept": Identifier("kept", table), "table": Identifier("fencepost", table)}
            self.conn.execute(SQL("DROP TABLE IF EXISTS {kept}").format(**names))
            where = SQL("" if table in OF_ALL else " WHERE tenant = {}").format(self.name)
            self.conn.execute(SQL("CREATE TABLE {kept} AS SELECT * FROM {table}").format(**names) + where)
        arming.beat(self.conn, FileWitness(self.database.state))
        self.backup = self.state

    def bring_back(self) -> None:
        with self.conn.transaction():
            # History is append-only for everybody but a superuser who says so.
            self.conn.execute("SET LOCAL session_replication_role = replica")
            for table in (*OF_TENANT, *OF_ALL):
                where = SQL("" if table in OF_ALL else " WHERE tenant = {}").format(self.name)
                self.conn.execute(SQL("DELETE FROM {}").format(Identifier("fencepost", table)) + where)
                row = self.conn.execute(COLUMNS, {"table": table}).fetchone()
                assert row is not None
                columns = SQL(", ").join(Identifier(name) for name in row[0])
                self.conn.execute(
                    SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}").format(
                        Identifier("fencepost", table), columns, columns, Identifier("kept", table)
                    )
                )
            self.conn.execute("DELETE FROM fencepost.ticket")

    def arm(self) -> None:
        if not self.state.authority.armed:
            self.both(on.Arm(), lambda: arming.ensure_armed(self.database.dsn, self.database.state))

    def act(self) -> None:
        """One event of some kind."""
        if self.rng.random() < 0.3:
            self.arm()
        job = self.state.job
        if self.ruled and self.rng.random() < 0.3:
            # What an admin would do next.
            if not self.state.authority.armed:
                return self.recover()
            if job is not None and job.exec == "held":
                return self.both(on.Release(), self.release)
        likely = {"queued": self.poll, "running": self.by_grant, "blocked": self.decide}.get(job.exec if job else "")
        if likely is not None and self.rng.random() < 0.4:
            likely()
        else:
            kinds = (self.poll, self.by_grant, self.record, self.decide, self.people, self.passing, self.admin)
            self.rng.choices(kinds, (3, 5, 5, 3, 1, 4, 2 if self.ruled else 0))[0]()


def drive(conn: Conn, database: Database, seed: int, seen: set[str], off: frozenset[Guard] = frozenset()) -> None:
    """One sequence; AssertionError with its story where the two differ."""
    rng = random.Random(seed)
    job_class = JobClass(rng.choice(POLICIES), rng.choice((1, 2, 3, 9)), rng.choice((1, 2, 9)))
    row = conn.execute(LEVEL).fetchone()
    assert row is not None
    epoch = row[0]
    here, outside = Authority(epoch), Witness(epoch)
    keys = (Effect(rng.choice(KINDS)), Effect(rng.choice(KINDS)))
    start = State(job_class, Job(epoch=epoch), keys, here, outside)
    pair = Pair(conn, database, rng, f"s{seed}", start, [f"seed {seed}, {job_class}"], seen, off, ruled=seed % 4 == 0)
    policy = JobClassPolicy(
        name=as_class(pair.name),
        policy=job_class.policy,
        max_attempts=job_class.max_attempts,
        max_finishes=job_class.max_finishes,
        backoff_base=0.0,
        backoff_max=0.0,
    )
    register_class(conn, policy)
    assert pair.submit(1) == "new"
    try:
        for _ in range(24 if pair.ruled else STEPS):
            pair.act()
    finally:
        with suppress(FencepostError):
            arming.ensure_armed(database.dsn, database.state)
        recover(database.dsn, database.state, WHO, numbers=0)


def test_postgresql_and_the_machine_say_and_become_the_same(database18: Database) -> None:
    seen: set[str] = set()
    with database18.connect(autocommit=True) as conn:
        for seed in range(SEQUENCES):
            drive(conn, database18, seed, seen)
    # The sequences reach what they are there for: every refusal that this machine knows.
    assert {f"ZF{code}" for code in CODES} <= {kind.partition(" ")[2] for kind in seen}, sorted(seen)
    assert {
        "Wait waiting",
        "Wait signalled",
        "Wait ZF030",
        "Signal recorded",
        "Signal too_late",
        "Rotate ",
        "Thaw ",
        "Release ",
        "Recover ",
        "Arm ZF002",
    } <= seen, sorted(seen)
