"""Breadth first over everything a scenario allows: either the shortest way to a broken invariant, or every state there is."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from fencepost.jobs import machine
from fencepost.jobs.states import Guard
from model.world import Scenario, Seven, World


class Counterexample(NamedTuple):
    broken: str
    trace: tuple[str, ...]


class Explored(NamedTuple):
    """All states of a scenario, or as many as there were up to a counterexample."""

    states: int
    seconds: float
    found: Counterexample | None
    stopped: Counter[tuple[str, str]]  # states that only people move on: what stops them, whose it is


class TooMany(Exception):
    """A scenario has more states than it was given."""


class Graph:
    """Every state reached, in the order of the search, with how it was reached and where it leads without a fault."""

    def __init__(self, first: Seven) -> None:
        self.ids = {first: 0}
        self.states = [first]
        self._came: list[tuple[int, str, str]] = [(0, "", "")]
        self.starts, self.ends, self.automatic = array("I", [0]), array("I"), bytearray()

    def add(self, state: Seven, came_from: int, label: str, who: str) -> int:
        number = self.ids[state] = len(self.states)
        self.states.append(state)
        self._came.append((came_from, label, who))
        return number

    def trace(self, number: int) -> tuple[str, ...]:
        """How this state was reached, by the fewest steps."""
        labels: list[str] = []
        while number:
            number, label, who = self._came[number]
            labels.append(label + who)
        return tuple(reversed(labels))

    def reaches(self, goal: bytearray, *, alone: bool) -> bytearray:
        """From which states the goal is reached; `alone` without people. Few passes from the end: most steps lead on."""
        good, starts, ends, automatic = bytearray(goal), self.starts, self.ends, self.automatic
        changed = True
        while changed:
            changed = False
            for n in range(len(good) - 1, -1, -1):
                if not good[n]:
                    for at in range(starts[n], starts[n + 1]):
                        if good[ends[at]] and (automatic[at] or not alone):
                            good[n] = changed = True
                            break
        return good


def search(
    scenario: Scenario,
    off: Collection[Guard] = (),
    only: Collection[str] = (),
    *,
    fold: bool = False,
    limit: int = 2_000_000,
) -> Explored:
    """The shortest trace that breaks an invariant (of `only`, if given), else all states and who owns those that stop.

    With `fold` the workers are not told apart, which halves the states and leaves their letters in a trace ambiguous.
    """
    began = time.perf_counter()
    world = World(scenario, off, fold)
    graph = Graph(world.first())
    ids, states = graph.ids, graph.states

    def ended(found: Counterexample | None = None, stopped: Counter[tuple[str, str]] | None = None) -> Explored:
        return Explored(len(states), time.perf_counter() - began, found, stopped or Counter())

    at = 0
    while at < len(states):
        if len(states) > limit:
            raise TooMany(f"{scenario.name}: more than {limit} states")
        for kind, label, who, to, broken in world.steps(states[at]):
            for name in broken:
                if not only or name in only:
                    return ended(Counterexample(name, (*graph.trace(at), label + who)))
            number = ids.get(to)
            if number is None:
                number = graph.add(to, at, label, who)
            if kind == "automatic" or kind == "operator":
                graph.ends.append(number)
                graph.automatic.append(kind == "automatic")
        at += 1
        graph.starts.append(len(graph.ends))
    if only and "I15" not in only:
        return ended()
    stuck, stopped = _liveness(world, graph)
    return ended(None if stuck is None else Counterexample("I15", graph.trace(stuck)), stopped)


def _liveness(world: World, graph: Graph) -> tuple[int | None, Counter[tuple[str, str]]]:
    """I15: the first state from which nobody reaches done, or which stops without an owner; else who owns what stops."""
    done, listed = bytearray(len(graph.states)), bytearray(len(graph.states))
    for n, state in enumerate(graph.states):
        s = world.dbs[state[0]]
        done[n] = s.job is not None and s.job.exec == "done"
        listed[n] = done[n] or s.job is not None and s.job.exec == "cancelled" or bool(machine.holds(s))
    with_people = graph.reaches(done, alone=False)
    by_itself = graph.reaches(done, alone=True)
    owned = graph.reaches(listed, alone=True)
    stopped: Counter[tuple[str, str]] = Counter()
    for n, state in enumerate(graph.states):
        if not with_people[n] or not owned[n]:
            return n, stopped
        if not by_itself[n]:
            stopped.update((hold.what, hold.owner) for hold in set(machine.holds(world.dbs[state[0]])))
    return None, stopped
