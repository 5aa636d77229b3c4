"""The world around the state machine: workers, a provider, time, faults and copies of the database, with finite budgets.

A state is seven small integers: the database (interned), its backup (interned), two workers (interned, in order: they are
alike), what the provider accepted, the newest grant, and what is left of the budgets. Workers all have the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from fencepost.jobs import machine
from fencepost.jobs import states as on
from fencepost.jobs.states import Effect, Grant, Guard, Job, JobClass, State, Witness
from model.invariants import of_state, of_step

Seven = tuple[int, int, int, int, int, int, int]
# Automatic: workers and maintenance. Operator: people. Choice: allowed, but nobody can count on it. Fault: has a budget.
Kind = Literal["automatic", "operator", "choice", "fault"]
# Kind, name, worker (A, B, or nobody), where it leads, and the invariants it breaks.
Edge = tuple[Kind, str, str, Seven, tuple[str, ...]]

OWNER = "worker"
IDLE, NO_COPY, KEEP, NO_KEY = 0, -1, -1, -1
# What is left of the budgets, in one integer.
FAULT, ROTATION, BACKUP, RESTORE, SIGNAL, WAIT = 1, 1 << 3, 1 << 5, 1 << 7, 1 << 9, 1 << 10
MASK = {FAULT: 7, ROTATION: 3 << 3, BACKUP: 3 << 5, RESTORE: 3 << 7, SIGNAL: SIGNAL, WAIT: WAIT, 0: -1}
# How far a call has come.
FREE, BEGUN, UNSENT, SILENT, ANSWERED = range(5)


class Scenario(NamedTuple):
    """What is explored: the job, its effects, and how much may go wrong."""

    name: str
    job_class: JobClass = JobClass("strict", 9, 9)
    kinds: tuple[on.Kind, ...] = ("opaque",)
    faults: int = 2
    rotations: int = 0
    restores: int = 0
    signals: int = 0
    also: Collection[str] = ()  # crash, restart, unreachable, give back
    born: bool = True  # the job was submitted before any backup was taken


class Held(NamedTuple):
    """What one worker holds: its fence, whether it looked at it, and how far its call has come."""

    attempt: int
    generation: int
    epoch: int
    checked: bool = False
    call: int = FREE
    key: int = NO_KEY
    effect_attempt: int = 0


class Move(NamedTuple):
    """A step of one worker or of the database, as far as it does not depend on the rest of the world."""

    kind: Kind
    label: str
    cost: int
    db: int
    worker: int = KEEP
    send: int = NO_KEY  # the provider accepts a call of this key
    newest: int = KEEP
    stale: str = ""  # what is broken when somebody else holds the newest grant; "only" when it is possible only then
    broken: tuple[str, ...] = ()


class World:
    """Every step that is possible in a scenario, with some guards off."""

    def __init__(self, scenario: Scenario, off: Collection[Guard] = (), fold: bool = True) -> None:
        self.scenario, self.off, self.fold = scenario, frozenset(off), fold
        self.dbs: list[State] = []
        self.held: list[Held] = [Held(0, 0, 0)]
        self.keys = range(len(scenario.kinds))
        self._of_db: list[tuple[str, ...]] = []
        self._db_ids: dict[State, int] = {}
        self._worker_ids: dict[Held, int] = {}
        self._answers: dict[tuple[int, on.Event], tuple[int, on.Action | None, tuple[str, ...]]] = {}
        self._across: dict[tuple[int, int], tuple[str, ...]] = {}
        self._worker_moves: dict[tuple[int, int, int], tuple[Move, ...]] = {}
        self._db_moves: dict[tuple[int, int, int], tuple[Move, ...]] = {}
        self._copies: dict[int, int] = {}

    def first(self) -> Seven:
        """Nothing has happened yet."""
        s = self.scenario
        start = State(s.job_class, Job() if s.born else None, tuple(Effect(kind) for kind in s.kinds))
        left = s.faults * FAULT + s.rotations * ROTATION + s.restores * (BACKUP + RESTORE) + s.signals * (SIGNAL + WAIT)
        return (self.intern(start), NO_COPY, IDLE, IDLE, 0, 0, left)

    def intern(self, state: State) -> int:
        """Versions and earlier attempts are dropped: nobody here looks at an effect before deciding."""
        if any(e.version or e.earlier for e in state.effects):
            plain = (replace(e, version=0, earlier=()) if e.version or e.earlier else e for e in state.effects)
            state = replace(state, effects=tuple(plain))
        known = self._db_ids.get(state)
        if known is None:
            known = self._db_ids[state] = len(self.dbs)
            self.dbs.append(state)
            self._of_db.append(of_state(state, self.off))
        return known

    def worker(self, held: Held) -> int:
        known = self._worker_ids.get(held)
        if known is None:
            known = self._worker_ids[held] = len(self.held)
            self.held.append(held)
        return known

    def ask(self, db: int, event: on.Event) -> tuple[int, on.Action | None, tuple[str, ...]]:
        """The machine's next state, its first action, and what that breaks; each question is put once."""
        known = self._answers.get((db, event))
        if known is None:
            before = self.dbs[db]
            after, actions = machine.step(before, event, self.off)
            first = actions[0] if actions else None
            to = db if after is before else self.intern(after)
            broken = of_step(before, event, after, not isinstance(first, on.Refused))
            known = self._answers[db, event] = (to, first, broken + self._of_db[to])
        return known

    def steps(self, state: Seven) -> Iterator[Edge]:
        """Every step from here that leads elsewhere, or breaks something."""
        db, backup, a, b, provider, newest, left = state
        era = self.scenario.restores - (left >> 7 & 3)
        for slot, worker, other in ((0, a, b), (1, b, a)):
            if slot and a == b and self.fold:
                break
            moves = self._worker_moves.get((db, worker, era))
            if moves is None:
                moves = self._worker_moves[db, worker, era] = tuple(self._of_worker(db, worker, era))
            attempt = self.held[worker].attempt
            for kind, label, cost, to, then, send, granted, stale, broken in moves:
                if cost and not left & MASK[cost]:
                    continue
                if stale and attempt != newest:
                    broken = broken if stale == "only" else (*broken, stale)
                elif stale == "only":
                    continue
                accepted = provider if send == NO_KEY else self._accepted(provider, send)
                pair = (then, other) if slot == 0 else (other, then)
                if self.fold and pair[0] > pair[1]:
                    pair = (pair[1], pair[0])
                now = (to, backup, *pair, accepted, newest if granted == KEEP else granted, left - cost)
                if now != state or broken:
                    yield kind, label, " A" if slot == 0 else " B", now, broken + self.broken(to, accepted)
        found = self._db_moves.get((db, provider, era))
        if found is None:
            found = self._db_moves[db, provider, era] = tuple(self._of_db_alone(db, provider, era))
        for kind, label, cost, to, _, send, granted, _, broken in found:
            if cost and not left & MASK[cost]:
                continue
            accepted = provider if send == NO_KEY else self._accepted(provider, send)
            now = (to, backup, a, b, accepted, newest if granted == KEEP else granted, left - cost)
            yield kind, label, "", now, broken + self.broken(to, accepted)
        yield from self._of_time(state)
        if left & MASK[BACKUP]:
            yield "fault", "backup", "", (db, self._copy(db), a, b, provider, newest, left - BACKUP), ()
        if backup != NO_COPY and left & MASK[RESTORE]:
            to, _, broken = self.ask(db, on.Restore(self.dbs[backup]))
            kept = backup if left - RESTORE & MASK[RESTORE] else NO_COPY
            now = (to, kept, a, b, provider, 0, left - RESTORE)
            yield "fault", "restore", "", now, broken + self.broken(to, provider)

    def _copy(self, db: int) -> int:
        """The database without the witness, which is no part of any backup."""
        known = self._copies.get(db)
        if known is None:
            known = self._copies[db] = self.intern(replace(self.dbs[db], witness=Witness()))
        return known

    def _accepted(self, provider: int, key: int) -> int:
        """One more call accepted; a provider that was given the key before accepts nothing new."""
        count = provider >> (2 * key) & 3
        if count == 2 or count and self.scenario.kinds[key] == "keyed":
            return provider
        return provider + (1 << (2 * key))

    def broken(self, db: int, provider: int) -> tuple[str, ...]:
        """What is wrong between this database and what the provider accepted (I3, I4, I11)."""
        known = self._across.get((db, provider))
        if known is None:
            known = self._across[db, provider] = tuple(self._compare(self.dbs[db], provider))
        return known

    def _compare(self, s: State, provider: int) -> Iterator[str]:
        for key, effect in enumerate(s.effects):
            accepted = provider >> (2 * key) & 3
            if accepted > 1:
                yield "I3"
            if not s.authority.armed or s.job is None:
                continue
            if accepted and effect.state == "none" and not s.job.suspect:
                yield "I4"
            certain = effect.state in ("failed_before_dispatch", "resolved_not_applied") and effect.kind != "keyed"
            if accepted and certain or not accepted and effect.state in on.APPLIED:
                yield "I11"

    def _of_worker(self, db: int, worker: int, era: int) -> Iterator[Move]:
        """Everything one worker can do. Attempts are numbered by era and generation: no restore brings one back."""
        s, held = self.dbs[db], self.held[worker]
        if worker == IDLE:
            if s.job is not None:
                attempt = 16 * era + s.job.generation + 1
                to, action, broken = self.ask(db, on.Claim(attempt, OWNER))
                if isinstance(action, on.Granted):
                    holds = self.worker(Held(attempt, action.grant.generation, action.grant.epoch))
                    yield Move("automatic", "claim", 0, to, holds, newest=attempt, broken=broken)
            return
        if "crash" in self.scenario.also:
            yield Move("fault", "crash", FAULT, db, IDLE)
        if held.call == FREE:
            yield from self._of_free(db, held, era)
        else:
            yield from self._of_call(db, held)

    def _of_free(self, db: int, held: Held, era: int) -> Iterator[Move]:
        s, off = self.dbs[db], self.off
        grant = Grant(held.generation, held.attempt, OWNER, held.epoch)
        old = ("I1",) if held.epoch != s.witness.epoch else ()
        yield Move("automatic", "drop", 0, db, IDLE, stale="only")
        to, action, broken = self.ask(db, on.Publish(grant, held.checked))
        if not isinstance(action, on.Refused):
            kind: Kind = "automatic" if s.applied_effects == len(s.effects) else "choice"
            yield Move(kind, "publish", 0, to, IDLE, newest=0, stale="I1", broken=broken + old)
        for key in self.keys:
            effect_attempt = 16 * era + s.effects[key].begins + 1
            to, action, broken = self.ask(db, on.Begin(grant, key, effect_attempt))
            if isinstance(action, on.Dispatch):
                holds = self.worker(held._replace(call=BEGUN, key=key, effect_attempt=effect_attempt))
                yield Move("automatic", self._label("begin", key), 0, to, holds, stale="I1", broken=broken + old)
            if Guard.RECORD_FIRST in off:
                yield Move("fault", self._label("dispatch without begin", key), FAULT, db, self.worker(held), send=key)
        to, action, broken = self.ask(db, on.Renew(grant))
        if not isinstance(action, on.Refused):
            yield Move("automatic", "renew", 0, to, self.worker(held), stale="I12", broken=broken)
            if Guard.PUBLISH_ATOMIC in off:
                yield Move("choice", "check", 0, db, self.worker(held._replace(checked=True)))
        # A handler that returned with an effect open cannot complete: its worker fails the attempt.
        ends: list[tuple[Kind, str, int, on.Event]] = [
            ("automatic", "fail", 0, on.Fail(grant)) if s.open_effects else ("fault", "fail", FAULT, on.Fail(grant))
        ]
        if "give back" in self.scenario.also:
            ends.append(("fault", "give back", FAULT, on.GiveBack(grant)))
        if self.scenario.signals:
            ends.append(("choice", "wait", WAIT, on.Wait(grant)))
        for kind, label, cost, event in ends:
            to, action, broken = self.ask(db, event)
            # A wait for what has arrived already is none: the handler goes on.
            if not isinstance(action, on.Refused) and action != on.Told("signalled"):
                yield Move(kind, label, cost, to, IDLE, newest=0, broken=broken)

    def _of_call(self, db: int, held: Held) -> Iterator[Move]:
        """A call is under way. Sending and accepting are one moment: what is slow on the network is still unsent here."""
        off, key = self.off, held.key

        def to(call: int) -> int:
            if call == FREE:
                return self.worker(held._replace(call=FREE, key=NO_KEY, effect_attempt=0))
            return self.worker(held._replace(call=call))

        yield Move("fault", self._label("abandon", key), FAULT, db, to(FREE))
        if held.call == BEGUN or held.call == UNSENT and Guard.DISPATCH_DEADLINE in off:
            yield Move("automatic", self._label("dispatch", key), 0, db, to(ANSWERED), send=key)
            yield Move("fault", self._label("dispatch (reply lost)", key), FAULT, db, to(SILENT), send=key)
            yield Move("fault", self._label("dispatch (request lost)", key), FAULT, db, to(SILENT))
        match held.call:
            case 1:
                yield Move("fault", self._label("connection refused", key), FAULT, db, to(UNSENT))
            case 2:
                yield from self._of_record(db, held, "failed_before_dispatch")
            case 3:
                yield from self._of_record(db, held, "unknown")
                if Guard.TIMEOUT_UNKNOWN in off:
                    yield from self._of_record(db, held, "failed_before_dispatch")
            case _:
                yield from self._of_record(db, held, "success")

    def _of_record(self, db: int, held: Held, outcome: on.Outcome) -> Iterator[Move]:
        to, action, broken = self.ask(db, on.Record(held.key, held.effect_attempt, outcome))
        if action == on.Refused("ZF001", "armed"):
            return
        job = self.dbs[to].job
        taken = to != db and job is not None and job.exec != "running"
        free = self.worker(held._replace(call=FREE, key=NO_KEY, effect_attempt=0))
        label = self._label(f"record {outcome}", held.key)
        yield Move("automatic", label, 0, to, free, newest=0 if taken else KEEP, broken=broken)

    def _of_db_alone(self, db: int, provider: int, era: int) -> Iterator[Move]:
        """What users, maintenance, operators and the outside world do."""
        s = self.dbs[db]
        events: list[tuple[Kind, str, int, on.Event, int]] = [
            ("automatic", "reap", 0, on.Reap(), 0),
            ("automatic", "wake", 0, on.Wake(), KEEP),
            ("automatic", "arm", 0, on.Arm(), KEEP),
            ("fault", "cancel", FAULT, on.Cancel(), 0),
            ("operator", "retry", 0, on.Retry(), 0),
            ("operator", "thaw", 0, on.Thaw(), KEEP),
            ("operator", "release", 0, on.Release(), KEEP),
        ]
        if self.scenario.rotations:
            events.append(("fault", "rotate", ROTATION, on.Rotate(), 0))
            events.append(("fault", "rotate (commit lost)", ROTATION, on.Rotate(commits=False), KEEP))
        if self.scenario.signals:
            events.append(("automatic", "signal", SIGNAL, on.Signal(), KEEP))
        if s.job is None:
            events.append(("automatic", "submit", 0, on.Submit(below_recovery=era > 0), KEEP))
        if not s.authority.tip:
            events.append(("operator", "recover", 0, on.Recover(), 0))
        if "restart" in self.scenario.also:
            events.append(("fault", "restart", FAULT, on.Restart(), KEEP))
        if "unreachable" in self.scenario.also:
            reachable = s.witness.reachable
            gone: tuple[Kind, int] = ("fault", FAULT) if reachable else ("operator", 0)
            label = "witness lost" if reachable else "witness found"
            events.append((gone[0], label, gone[1], on.Witnessed(not reachable), KEEP))
        for key in self.keys:
            verdict: on.Verdict = "applied" if provider >> (2 * key) & 3 else "not_applied"
            events.append(("automatic", self._label("deadline", key), 0, on.Deadline(key), KEEP))
            events.append(("operator", self._label(f"reconcile {verdict}", key), 0, on.Reconcile(key, verdict), KEEP))
            events.append(("automatic", self._label("lookup times out", key), 0, on.LookupTimesOut(key), KEEP))
            if "escalate" in self.scenario.also:
                events.append(("automatic", self._label("escalate", key), 0, on.Escalate(key), KEEP))
            if Guard.PROJECTOR in self.off:
                yield Move("choice", self._label("replay dispatches", key), 0, db, send=key, broken=("I16",))
        for kind, label, cost, event, newest in events:
            to, action, broken = self.ask(db, event)
            if not isinstance(action, on.Refused) and (to != db or broken or cost == SIGNAL):
                turned = self.dbs[to].authority.epoch != s.authority.epoch
                yield Move(kind, label, cost, to, newest=0 if turned else newest, broken=broken)

    def _of_time(self, state: Seven) -> Iterator[Edge]:
        """Leases end and calls get too old: a fault while the newest holder lives, only a matter of time when it does not."""
        db, backup, a, b, provider, newest, left = state
        s, held = self.dbs[db], self.held
        if s.job is not None and s.job.exec == "running" and not s.job.expired:
            lives = s.job.attempt == newest and newest in (held[a].attempt, held[b].attempt)
            if not lives or left & MASK[FAULT]:
                to, _, broken = self.ask(db, on.LeaseEnds())
                kind: Kind = "fault" if lives else "automatic"
                yield kind, "lease ends", "", (to, backup, a, b, provider, newest, left - lives), broken
        for key in self.keys:
            if not s.effects[key].quiescent:
                calls = [held[w].key == key and held[w].call == BEGUN for w in (a, b)]
                if not any(calls) or left & MASK[FAULT]:
                    to, _, broken = self.ask(db, on.Quiesces(key))
                    pair = [
                        self.worker(held[w]._replace(call=UNSENT)) if late else w
                        for w, late in zip((a, b), calls, strict=True)
                    ]
                    if self.fold:
                        pair.sort()
                    kind = "fault" if any(calls) else "automatic"
                    now = (to, backup, pair[0], pair[1], provider, newest, left - any(calls))
                    yield kind, self._label("deadline and bound pass", key), "", now, broken

    def _label(self, what: str, key: int) -> str:
        return f"{what} e{key + 1}" if len(self.keys) > 1 else what
