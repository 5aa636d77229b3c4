"""A relay dies of SIGKILL at every `Crash here:` label; its successor loses nothing, keeps the order and repeats little."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import LiteralString, cast

import pytest

from conformance.conftest import BROKERS
from conformance.on_rabbitmq import OnRabbit
from crash.gate import Gate
from crash.points import points
from crash.scene import Lost, Scene
from crash.victim import WINDOW, Act
from support.database import Database
from support.processes import Child, wait_for
from support.relaying import Noted
from support.relays import owner_of
from support.services import Services

README = Path(__file__).parents[2] / "relay" / "README.md"

TAKE_OVER: LiteralString = """
UPDATE fencepost.slot SET owner = NULL, generation = generation + 1 WHERE destination = 'events'"""
ACK_WAITS: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND position('fencepost.ack(' IN query) > 0"""
HELD: LiteralString = "SELECT bool_and(owner IS NOT NULL) FROM fencepost.slot WHERE destination = 'events'"
KEEP_NOTHING: LiteralString = "SELECT fencepost.set_retention('0', NULL, 'ops', 'a test')"
AGE_PARTITION: LiteralString = "UPDATE fencepost.outbox_child SET opened_at = '-infinity'"
# More than what recycling of acks begins with, all of it older than any real one.
MANY_ACKS: LiteralString = """
INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation)
SELECT 0, 'events', 0, -g, 1, 0, 0, 0, 0 FROM generate_series(1, 60000) AS g"""
PARTITION: LiteralString = "SELECT count(*) FROM fencepost.outbox_0"
ACK_CHILD: LiteralString = "SELECT ack_child FROM fencepost.installation"
TICKS: LiteralString = "SELECT min(n) FROM fencepost.tick"


def sending(scene: Scene, label: str, nth: int, **acts: tuple[int, Act]) -> None:
    """In the middle of a backlog, with something recorded before where the point comes late enough."""
    scene.accept(300)
    with scene.relay({label: (nth, "kill"), **acts}) as victim:
        left = scene.dies(victim, label)
    assert 0 < len(left) < len(scene.accepted)
    scene.restarts()
    scene.judge(left)


def leaving(scene: Scene, label: str) -> None:
    """After the drain of a relay that has begun: a loop that finds no destination yet passes there too."""
    scene.accept(20)
    scene.restarts()
    sending(scene, label, 1, B2=(3, "stop"))


def taken_over(scene: Scene, label: str) -> None:
    """While its ack waits, its slots go to somebody else."""
    scene.accept(100)
    with scene.relay({label: (1, "kill")}) as victim, scene.database.connect() as conn:
        scene.recorded()
        conn.execute("SELECT FROM fencepost.slot WHERE destination = 'events' FOR UPDATE")
        scene.accept(100)
        wait_for(lambda: scene.value(ACK_WAITS) > 0, 20, "the ack to wait")
        conn.execute(TAKE_OVER)
        conn.commit()
        left = scene.dies(victim, label)
    assert left
    scene.restarts()
    scene.judge(left)


def handing_over(scene: Scene, label: str) -> None:
    """A second relay wants its share."""
    scene.accept(100)
    with scene.relay({label: (1, "kill")}) as victim, scene.database.connect(autocommit=True) as conn:
        scene.recorded()
        owner_of(scene.database, "events").refresh(conn)
        left = scene.dies(victim, label)
    scene.accept(100)
    scene.restarts()
    scene.judge(left)


def retrying(scene: Scene, label: str, nth: int) -> None:
    """Parked events go out again once their binding is there."""
    parked(scene)
    with scene.relay({label: (nth, "kill")}) as victim:
        left = scene.dies(victim, label)
    assert 0 < len(left) < 60
    scene.restarts()
    scene.judge(left)


def parked(scene: Scene) -> None:
    """Everything of five keys waits behind their first events, which had no binding."""
    broker = cast(OnRabbit, scene.broker)
    scene.route = broker.route(Noted.event_type)
    scene.accept(240, lost=frozenset(range(5)))
    with scene.relay() as first:
        scene.recorded()
        assert first.terminate() == 0
    assert len(scene.left()) == 60
    broker.bind(scene.route, Lost.event_type)


def sending_again(scene: Scene, label: str) -> None:
    """A backfill dies after its third batch; it is begun again behind what it told last."""
    scene.accept(200)
    scene.restarts()
    with scene.relay({label: (3, "kill")}, after=0) as victim:
        assert scene.dies(victim, label) == set()
    told = max(map(int, re.findall(r"up to (\d+)", victim.text)))
    assert told == 2 * WINDOW
    with scene.relay(after=told) as successor:
        assert successor.wait() == 0, successor.text[-2000:]
    arrived = scene.judge(set())
    replays = [one.envelope.sequence for one in arrived if one.envelope.replayed]
    assert set(replays) == {one.envelope.sequence for one in arrived}
    assert {n for n in replays if replays.count(n) > 1} <= set(range(told + 1, told + WINDOW + 1))


# -- labels in SQL: once the session ends with its client, and once what it began is committed by nobody alive --------


def held_up(scene: Scene, label: str) -> None:
    """The function is stopped between two batches of events."""
    left: set[str] = set()
    with Gate(scene.database, scene.point(label)) as gate:
        for commits in (False, True):
            scene.accept(40)
            with scene.relay() as victim:
                scene.recorded()
                gate.shut()
                scene.accept(110)
                left |= dies_at(gate, scene, victim, commits=commits)
    assert left
    scene.restarts()
    scene.judge(left)


def leasing(scene: Scene, label: str) -> None:
    """The function is stopped at the start of the relay."""
    scene.accept(100)
    scene.restarts()
    left: set[str] = set()
    with Gate(scene.database, scene.point(label)) as gate:
        for commits in (False, True):
            scene.accept(100)
            gate.shut()
            with scene.relay() as victim:
                gate.reached(2)  # the loop of the destination, and that of what has no route
                left |= dies_at(gate, scene, victim, commits=commits)
            assert (scene.value(HELD) is True) == commits
    scene.restarts()
    assert len(left) == 200
    scene.judge(set())


def releasing(scene: Scene, label: str) -> None:
    """The function is stopped while a second relay waits for its share."""
    left: set[str] = set()
    with Gate(scene.database, scene.point(label)) as gate, scene.database.connect(autocommit=True) as conn:
        for commits in (False, True):
            scene.accept(100)
            with scene.relay() as victim:
                scene.recorded()
                gate.shut()
                owner_of(scene.database, "events").refresh(conn)
                left |= dies_at(gate, scene, victim, commits=commits)
            assert (scene.value(HELD) is not True) == commits
    scene.accept(50)
    scene.restarts()
    scene.judge(left)


def recording_a_retry(scene: Scene, label: str) -> None:
    parked(scene)
    left: set[str] = set()
    with Gate(scene.database, scene.point(label)) as gate:
        for commits in (False, True):
            gate.shut()
            with scene.relay() as victim:
                before = scene.left()
                after = dies_at(gate, scene, victim, commits=commits)
            assert len(before) - len(after) == (1 if commits else 0)
            left |= after
    scene.restarts()
    scene.judge(left)


def recycling(scene: Scene, label: str, table: str, *, begun: LiteralString, fill: LiteralString | None = None) -> None:
    """The function is stopped while the relay is idle; `begun` is a number that its commit changes."""
    scene.accept(100)
    scene.restarts()
    with scene.database.connect(autocommit=True) as conn:
        conn.execute(KEEP_NOTHING)
        conn.execute(AGE_PARTITION)
        if fill is not None:
            conn.execute(fill)
    left: set[str] = set()
    with Gate(scene.database, scene.point(label), table) as gate:
        for commits in (False, True):
            before = scene.value(begun)
            gate.shut()
            with scene.relay(recycling=True) as victim:
                left |= dies_at(gate, scene, victim, commits=commits)
            assert (scene.value(begun) != before) == commits
            scene.accept(50)
    scene.restarts(recycling=True)
    scene.judge(left)


def at_the_duty(scene: Scene, label: str) -> None:
    """The relay that was to recycle dies before it does."""
    scene.accept(100)
    scene.restarts()
    with scene.database.connect(autocommit=True) as conn:
        conn.execute(KEEP_NOTHING)
        conn.execute(AGE_PARTITION)
    scene.accept(50)
    with scene.relay({label: (1, "kill")}, recycling=True) as victim:
        left = scene.dies(victim, label)
    with scene.relay(recycling=True) as successor:
        wait_for(lambda: scene.value(PARTITION) == 0, 30, "the successor to recycle")
        assert successor.terminate() == 0
    scene.judge(left)


def dies_at(gate: Gate, scene: Scene, victim: Child, *, commits: bool) -> set[str]:
    gate.reached()
    victim.kill()
    gate.settle(commits=commits)
    scene.lapse()
    return scene.left()


@dataclass(frozen=True, slots=True)
class Case:
    """How a label is reached, and on which brokers."""

    play: Callable[[Scene, str], None]
    brokers: tuple[str, ...] = ("rabbitmq",)


BOTH = ("kafka", "rabbitmq")
MATRIX: dict[str, Case] = {
    "B1": Case(partial(sending, nth=3)),
    "B2": Case(partial(sending, nth=3), BOTH),
    "B3": Case(partial(sending, nth=120), ("kafka",)),
    "B4": Case(partial(sending, nth=120)),
    "B5": Case(partial(sending, nth=1, B2=(3, "break")), ("kafka",)),
    "A1": Case(partial(sending, nth=3), ("kafka",)),
    "A": Case(held_up, BOTH),
    "A2": Case(partial(sending, nth=3)),
    "T": Case(held_up),
    "T2": Case(partial(sending, nth=3)),
    "S": Case(taken_over),
    "S1": Case(handing_over),
    "S2": Case(releasing),
    "S3": Case(leasing),
    "D1": Case(partial(sending, nth=1, B2=(3, "stop")), BOTH),
    "D2": Case(leaving),
    "Q1": Case(partial(retrying, nth=3)),
    "Q2": Case(recording_a_retry),
    "Y1": Case(at_the_duty),
    "Y2": Case(partial(recycling, table="fencepost.outbox_0", begun=PARTITION)),
    "Y3": Case(partial(recycling, table="fencepost.ack_0", begun=ACK_CHILD, fill=MANY_ACKS)),
    "Y4": Case(partial(recycling, table="fencepost.tick", begun=TICKS)),
    "F": Case(sending_again),
}


def test_every_label_has_a_case_and_a_line_in_the_failure_table() -> None:
    labels = set(points())
    assert labels == set(MATRIX)
    rows = [line.split("|")[1] for line in README.read_text().splitlines() if line.startswith("| [")]
    assert labels == {label for row in rows for label in re.findall(r"\[([A-Z][0-9]?)\]", row)}


@pytest.mark.parametrize(
    ("label", "on"), [(label, on) for label, case in sorted(MATRIX.items()) for on in case.brokers]
)
def test_nothing_is_lost_and_little_repeated_after_a_kill(
    label: str, on: str, database18: Database, services: Services, tmp_path: Path
) -> None:
    with closing(Scene(database18, BROKERS[on](services), services, tmp_path)) as scene:
        MATRIX[label].play(scene, label)
