"""Each act touches the row it names and no other: tenant, operation, class and effect key are all part of the name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from fencepost.jobs.claim import claim
from fencepost.jobs.fence import Fence
from fencepost.schemas.errors import NotArmed
from support.database import Database
from support.jobs import CLASS, Conn, given

KEY = "e1"
TARGET = ("t", "op", CLASS)
# Each differs from the target in one part of its name; before it and behind it in the order of names and of rows.
NEIGHBOURS = [
    ("r", "op", "a.class"), ("t", "nn", "a.class"),
    ("s", "op", CLASS), ("t", "oa", CLASS), ("t", "op", "a.class"), TARGET, ("t", "op", "z.class"), ("t", "oz", CLASS), ("u", "op", CLASS),
]  # fmt: skip
FENCED = "%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s"
NAMED = "%(tenant)s, %(operation)s, %(class)s"
BEGIN = (
    f"SELECT outcome FROM fencepost.begin_effect({FENCED}, %(key)s, %(kind)s, %(effect_attempt)s, %(digest)s, '5 s')"
)
RECORD = "SELECT fencepost.record_effect(%(tenant)s, %(operation)s, %(key)s, %(effect_attempt)s, %(outcome)s, %(receipt)s, NULL, 'why')"
# What must stay: every row that does not belong to the target, and of the target's own the other effects.
KEPT = """
SELECT 'job', to_jsonb(r) FROM fencepost.job AS r WHERE (tenant, operation, class) <> ('t', 'op', %(class)s)
UNION ALL SELECT 'effect', to_jsonb(r) FROM fencepost.effect AS r
    WHERE (tenant, operation) <> ('t', 'op') OR class <> %(class)s OR effect_key <> 'e1' AND NOT %(all)s
UNION ALL SELECT 'event', to_jsonb(r) FROM fencepost.effect_event AS r
    WHERE (tenant, operation) <> ('t', 'op') OR effect_key <> 'e1' AND NOT (%(all)s AND effect_key ~ '^e')
UNION ALL SELECT 'lookup', to_jsonb(r) FROM fencepost.lookup AS r WHERE (tenant, operation, effect_key) <> ('t', 'op', 'e1')
UNION ALL SELECT 'staged', to_jsonb(r) FROM fencepost.staged AS r WHERE (tenant, operation, class) <> ('t', 'op', %(class)s)
UNION ALL SELECT 'decision', to_jsonb(r) FROM fencepost.decision AS r WHERE (tenant, operation) <> ('t', 'op')
UNION ALL SELECT 'attempt', to_jsonb(r) FROM fencepost.attempt AS r WHERE (tenant, operation, class) <> ('t', 'op', %(class)s)
UNION ALL SELECT 'wait', to_jsonb(r) FROM fencepost.wait AS r WHERE (tenant, operation, class) <> ('t', 'op', %(class)s)
UNION ALL SELECT 'agenda', to_jsonb(r) FROM fencepost.agenda AS r WHERE (tenant, operation, class) <> ('t', 'op', %(class)s)
ORDER BY 1, 2"""


@dataclass(slots=True)
class World:
    """Jobs that differ in one part of their name, all in one state; effects of theirs too, where the state has them."""

    conn: Conn
    fences: dict[tuple[str, str, str], Fence] = field(default_factory=dict[tuple[str, str, str], Fence])
    effects: dict[tuple[tuple[str, str, str], str], UUID] = field(default_factory=dict[tuple[tuple[str, str, str], str], UUID])  # fmt: skip
    kind: str = "lookup"

    def say(self, statement: str, name: tuple[str, str, str] = TARGET, key: str = KEY, **more: object) -> Any:
        """The first column of what one statement says about one job."""
        f = self.fences.get(name)
        parameters: dict[str, object] = {
            **(f.parameters() if f is not None else dict(zip(("tenant", "operation", "class"), name, strict=True))),
            "key": key,
            "kind": self.kind,
            "effect_attempt": self.effects.get((name, key)),
            "digest": bytes(32),
            "outcome": None,
            "receipt": None,
            "id": uuid4(),
        }
        row = self.conn.execute(statement.encode(), parameters | more).fetchone()
        return None if row is None else row[0]

    def keys(self, name: tuple[str, str, str]) -> tuple[str, ...]:
        # Where the target's key is free, another class may have taken it.
        return {"a.class": ("d1",) if name[:2] == TARGET[:2] else ("e1",), "z.class": ("f1",)}.get(
            name[2], ("e0", "e1", "e2")
        )

    def kept(self, *, every: bool) -> list[Any]:
        return self.conn.execute(KEPT.encode(), {"class": CLASS, "all": every}).fetchall()


def queued(world: World) -> None:
    for tenant, operation, job_class in NEIGHBOURS:
        given(world.conn, operation, tenant=tenant, job_class=job_class, policy="resumable", max_attempts=9, max_effect_timeout=9.0, network_bound=60.0)  # fmt: skip


def running(world: World) -> None:
    queued(world)
    for job in claim(world.conn, "w", [CLASS, "a.class", "z.class"], 100):
        world.fences[str(job.tenant), str(job.operation), str(job.job_class)] = job.fence
    assert len(world.fences) == len(NEIGHBOURS)


def pending(world: World) -> None:
    running(world)
    for name in NEIGHBOURS:
        for key in world.keys(name):
            world.effects[name, key] = uuid4()
            assert world.say(BEGIN, name, key) == "begun"


def recorded(outcome: str, receipt: str | None = None) -> Callable[[World], None]:
    def state(world: World) -> None:
        pending(world)
        for name in NEIGHBOURS:
            for key in world.keys(name):
                assert world.say(RECORD, name, key, outcome=outcome, receipt=receipt) == outcome

    return state


def unknown(world: World) -> None:
    """Each job failed with its effects pending: all of them are blocked and unknown, and quiet since."""
    pending(world)
    for name in NEIGHBOURS:
        assert world.say(f"SELECT fencepost.fail({FENCED}, 'why', '')", name) == "blocked"
    world.conn.execute("UPDATE fencepost.effect SET quiescent_at = clock_timestamp() - interval '1 s'")


def asked(world: World) -> None:
    unknown(world)
    world.say("SELECT count(*) FROM fencepost.take_lookups(ARRAY[%(class)s, 'a.class', 'z.class'], %(id)s, 99, '60 s')", id=ASKER)  # fmt: skip


def ended(how: str) -> Callable[[World], None]:
    def state(world: World) -> None:
        running(world)
        for name in NEIGHBOURS:
            if how == "cancelled":
                assert world.say(f"SELECT fencepost.cancel({NAMED}, 'ann', 'why')", name) == how
            else:
                assert world.say(f"SELECT fencepost.fail({FENCED}, 'why', '', NULL, true)", name) == how
            # What it was told before is not what it is told when it begins again.
            world.say(f"INSERT INTO fencepost.wait VALUES ({NAMED}, '', 1, now()) RETURNING 1", name)

    return state


def staged(world: World) -> None:
    running(world)
    for name in NEIGHBOURS:
        assert world.say(
            f"SELECT fencepost.stage({NAMED}, %(attempt)s, %(result)s)", name, result="/".join(name).encode()
        )


def gone(world: World) -> None:
    """Cancelled with effects pending, of which only the target's deadline has passed."""
    pending(world)
    for name in NEIGHBOURS:
        assert world.say(f"SELECT fencepost.cancel({NAMED}, 'ann', 'why')", name) == "cancelled"
    world.conn.execute(
        "UPDATE fencepost.effect SET quiescent_at = clock_timestamp() - interval '1 s'"
        " WHERE (tenant, operation, effect_key) = ('t', 'op', 'e1')"
    )


def expired(state: Callable[[World], None]) -> Callable[[World], None]:
    """The target's lease ended a moment ago, and nobody else's."""

    def made(world: World) -> None:
        state(world)
        world.say(
            "UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 ms'"
            f" WHERE (tenant, operation, class) = ({NAMED}) RETURNING 1"
        )

    return made


def urgent(world: World) -> None:
    queued(world)
    world.say(f"UPDATE fencepost.job SET priority = 9 WHERE (tenant, operation, class) = ({NAMED}) RETURNING 1")


def due(world: World) -> None:
    """All have been asked about, and only the target is to be asked about again."""
    asked(world)
    world.conn.execute(
        "UPDATE fencepost.lookup SET due_at = clock_timestamp() WHERE (tenant, operation, effect_key) = ('t', 'op', 'e1')"
    )


def published(world: World) -> None:
    running(world)
    world.say(f"SELECT fencepost.complete({FENCED})")


def twins(state: Callable[[World], None]) -> Callable[[World], None]:
    """All of them under one attempt, one generation and one owner: only their names tell them apart."""

    def made(world: World) -> None:
        state(world)
        attempt = world.fences[TARGET].attempt
        world.conn.execute("UPDATE fencepost.job SET attempt = %(a)s", {"a": attempt})

    return made


ASKER = uuid4()
COMPLETE_MANY = (
    "SELECT count(*) FROM fencepost.complete_many(ARRAY[%(tenant)s], ARRAY[%(operation)s], ARRAY[%(class)s],"
    " ARRAY[%(generation)s]::bigint[], ARRAY[%(attempt)s], ARRAY[%(owner)s], ARRAY[%(epoch)s]::bigint[])"
)
HELD = (
    "SELECT FROM fencepost.job WHERE (tenant, operation, class) <> ('t', 'op', 'report.analyse') FOR UPDATE",
    "SELECT FROM fencepost.effect WHERE (tenant, operation) <> ('t', 'op') FOR UPDATE",
)
RECONCILE = "SELECT fencepost.reconcile(%(tenant)s, %(operation)s, %(key)s, 2, '{}', 'operator', 'mail', 'r', %(id)s, 'ann', 'why')"
PRESENT = f"SELECT fencepost.present_begin({NAMED}, %(key)s, 'opaque', %(id)s, %(attempt)s, %(digest)s)"
SETTLE = "SELECT fencepost.settle_lookup(%(tenant)s, %(operation)s, %(key)s, %(asker)s, 2, 'applied', 'ref', 'r', %(id)s, 'ann')"
EXEC = f"SELECT exec FROM fencepost.job WHERE (tenant, operation, class) = ({NAMED})"
STATE = (
    "SELECT state FROM fencepost.effect WHERE (tenant, operation, effect_key) = (%(tenant)s, %(operation)s, %(key)s)"
)


@dataclass(frozen=True, slots=True)
class Case:
    """In this state this statement says that, and then this one that; `every`: of the target's job all effects may change."""

    state: Callable[[World], None]
    act: str
    says: object
    look: str
    shows: object
    every: bool = False
    outcome: str | None = None
    free: bool = False


CASES = {
    "renew": Case(running, f"SELECT fencepost.renew({FENCED}) IS NULL", False, EXEC, "running"),
    "fence": Case(running, f"SELECT fencepost.fence({FENCED}) IS NULL", False, "SELECT count(*) FROM fencepost.publication", 1),
    "complete": Case(running, f"SELECT fencepost.complete({FENCED}) IS NULL", False, EXEC, "done"),
    "complete many": Case(
        running,
        COMPLETE_MANY,
        0, EXEC, "done",
    ),
    "fail": Case(running, f"SELECT fencepost.fail({FENCED}, 'why', '')", "queued", EXEC, "queued"),
    "fail for good": Case(running, f"SELECT fencepost.fail({FENCED}, 'why', '', NULL, true)", "poison", EXEC, "poison"),
    "fail with effects": Case(pending, f"SELECT fencepost.fail({FENCED}, 'why', '')", "blocked", STATE, "unknown", every=True),
    "release": Case(running, f"SELECT fencepost.release({FENCED})", "queued", EXEC, "queued"),
    "stage": Case(running, f"SELECT fencepost.stage({NAMED}, %(attempt)s, 'x')", True, "SELECT count(*) FROM fencepost.staged", 1, free=True),
    "staged": Case(
        staged, f"SELECT convert_from(result, 'UTF8') FROM fencepost.staged({NAMED})", f"t/op/{CLASS}", EXEC, "running", free=True,
    ),
    "cancel": Case(running, f"SELECT fencepost.cancel({NAMED}, 'ann', 'why')", "cancelled", EXEC, "cancelled"),
    "cancel with effects": Case(pending, f"SELECT fencepost.cancel({NAMED}, 'ann', 'why')", "cancelled", STATE, "pending"),
    "requeue poison": Case(ended("poison"), f"SELECT fencepost.requeue({NAMED}, 'ann', 'why') IS NULL", False, EXEC, "queued"),
    "requeue cancelled": Case(
        ended("cancelled"), f"SELECT fencepost.requeue({NAMED}, 'ann', 'why') IS NULL", False, EXEC, "queued"
    ),
    "claim": Case(
        urgent, "SELECT operation FROM fencepost.claim('w', ARRAY[%(class)s, 'a.class', 'z.class'], 1)", "op", EXEC, "running"
    ),
    "reap": Case(expired(running), "SELECT fencepost._reap(ARRAY[%(class)s, 'a.class', 'z.class'], 9)", 1, EXEC, "queued", free=True),
    "reap with effects": Case(
        expired(pending), "SELECT fencepost._reap(ARRAY[%(class)s, 'a.class', 'z.class'], 9)", 1, EXEC, "blocked", every=True, free=True,
    ),
    "expire effects": Case(
        gone, "SELECT fencepost._expire_effects(ARRAY[%(class)s, 'a.class', 'z.class'], 9)", 1, STATE, "unknown", free=True,
    ),
    "begin": Case(running, BEGIN, "begun", STATE, "pending"),
    "begin again": Case(recorded("failed_before_dispatch"), BEGIN, "begun", STATE, "pending"),
    "begun": Case(
        pending, f"SELECT fencepost.begun({NAMED}, %(key)s, %(effect_attempt)s)", 1, STATE, "pending", free=True,
    ),
    "record success": Case(pending, RECORD, "success", STATE, "success", outcome="success"),
    "record late success": Case(unknown, RECORD, "success", STATE, "success", outcome="success"),
    "record not sent": Case(
        pending, RECORD, "failed_before_dispatch", STATE, "failed_before_dispatch", outcome="failed_before_dispatch"
    ),
    "record unknown": Case(pending, RECORD, "unknown", STATE, "unknown", every=True, outcome="unknown"),
    "record against": Case(
        recorded("failed_before_dispatch"), RECORD, "unknown", STATE, "unknown", outcome="success"
    ),
    "record another receipt": Case(recorded("success", "other"), RECORD, "success", STATE, "success", outcome="success"),
    "reconcile applied": Case(unknown, RECONCILE.format("applied"), "resolved_applied", STATE, "resolved_applied"),
    "reconcile not applied": Case(
        unknown, RECONCILE.format("not_applied"), "resolved_not_applied", STATE, "resolved_not_applied"
    ),
    "assign": Case(
        unknown,
        "SELECT fencepost.assign_effect(%(tenant)s, %(operation)s, %(key)s, 2, 'bob', 'high', %(id)s, 'ann', 'why') IS NULL",
        False, "SELECT count(*) FROM fencepost.effect WHERE assignee = 'bob'", 1,
    ),
    "present unheard of": Case(running, PRESENT, "unknown", STATE, "unknown", every=True),
    "present after another": Case(
        recorded("failed_before_dispatch"), PRESENT, "unknown", STATE, "unknown", every=True
    ),
    "present beside a receipt": Case(recorded("success", "r"), PRESENT, "superseded", STATE, "success"),
    "present beside a pending one": Case(pending, PRESENT, "pending", STATE, "pending"),
    "settle": Case(asked, SETTLE, "resolved_applied", STATE, "resolved_applied"),
    "defer": Case(
        asked, "SELECT fencepost.defer_lookup(%(tenant)s, %(operation)s, %(key)s, %(asker)s, 'inconclusive', '60 s')", True,
        STATE, "unknown", free=True,
    ),
    "published": Case(running, f"SELECT fencepost.published({NAMED}, %(attempt)s)", False, EXEC, "running", free=True),
    "published by it": Case(published, f"SELECT fencepost.published({NAMED}, %(attempt)s)", True, EXEC, "done", free=True),
    "complete many of twins": Case(twins(running), COMPLETE_MANY, 0, EXEC, "done"),
    "complete a twin": Case(twins(running), f"SELECT fencepost.complete({FENCED}) IS NULL", False, EXEC, "done"),
    "take lookups": Case(
        due, "SELECT count(*) FROM fencepost.take_lookups(ARRAY[%(class)s, 'a.class', 'z.class'], %(id)s, 9, '60 s')", 1,
        "SELECT asks FROM fencepost.lookup WHERE (tenant, operation, effect_key) = ('t', 'op', 'e1')", 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_act_touches_the_row_it_names_and_none_that_differs_in_one_part_of_its_name(
    database18: Database, name: str
) -> None:
    """It does not even wait for them; and without an armed database it does nothing."""
    case = CASES[name]
    with database18.connect(autocommit=True) as conn, database18.connect() as holder:
        world = World(conn)
        case.state(world)
        before = world.kept(every=case.every)
        more: dict[str, Any] = {"asker": ASKER, "outcome": case.outcome}
        if case.outcome == "success":
            more["receipt"] = "r"
        if name.startswith("begin"):
            more["effect_attempt"] = uuid4()
        conn.execute("SET lock_timeout = '3s'")
        if not case.free:
            with conn.transaction(force_rollback=True):
                conn.execute("DELETE FROM fencepost.ticket")
                with pytest.raises(NotArmed):
                    world.say(case.act, **more)
        for statement in HELD:
            holder.execute(statement.encode())
        assert world.say(case.act, **more) == case.says
        holder.rollback()
        assert world.say(case.look) == case.shows
        assert world.kept(every=case.every) == before
