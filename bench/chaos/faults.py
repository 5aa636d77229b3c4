"""The faults, one at a time or side by side, and the supervisor that starts again what was killed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from bench.chaos.plan import PAUSE_SECONDS_LIMIT, PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN
from bench.chaos.stage import Stage

from stack.postgres import Stop
from support.processes import Child

# With their weights.
KINDS = {
    "kill": 5,  # SIGKILL of a worker
    "stop": 4,  # SIGSTOP of a worker past its leases, then SIGCONT
    "cut": 3,  # every connection to the database is cut
    "lose replies": 3,  # what the database answers is thrown away, then the connections are cut
    "silence": 1,  # the database acknowledges and says nothing
    "restart": 2,  # PostgreSQL ends at once and recovers
    "provider": 2,  # SIGKILL of the provider: refused connections, and answers that never come
    "operator": 1,  # SIGKILL of the operator
}


class Faults:
    """Commits faults to what runs on a stage; `tick` does what has become due meanwhile."""

    def __init__(self, stage: Stage, workers: Sequence[Child], people: Child | None, decide: random.Random) -> None:
        self._stage = stage
        self._workers = list(workers)
        self._people = people
        self._decide = decide
        self._paused: dict[int, float] = {}
        self._down: set[int] = set()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.done: Counter[str] = Counter()
        self.ended: list[str] = []
        """Last words of workers that ended although nobody had killed them."""

    def kinds(self) -> list[str]:
        """What can be done here."""
        return [kind for kind in KINDS if kind != "operator" or self._people is not None]

    def draw(self) -> str:
        """The next fault, by weight."""
        kinds = self.kinds()
        return self._decide.choices(kinds, [KINDS[kind] for kind in kinds])[0]

    def commit(self, kind: str) -> bool:
        """Does it, and returns at once but for a restart of the database; False when nothing is there to be hit."""
        match kind:
            case "kill":
                if not self._kill():
                    return False
            case "stop":
                if not self._stop():
                    return False
            case "cut":
                self._stage.proxy.cut(reset=self._decide.random() < 0.5)
            case "lose replies":
                self._stage.proxy.drop_replies()
                self._later(self._decide.uniform(0.1, 0.4), self._cut_and_heal)
            case "silence":
                self._stage.proxy.blackhole()
                self._later(self._decide.uniform(0.5, 1.5), self._stage.proxy.heal)
            case "restart":
                self._stage.server.restart(Stop.IMMEDIATE)
            case "provider":
                if not self._stage.provider.alive:
                    return False
                self._stage.provider.kill()
                self._later(self._decide.uniform(0.1, 1.0), self._stage.provider.start)
            case _:
                assert self._people is not None
                self._people.kill()
                self._people.start()
        self.done[kind] += 1
        return True

    def tick(self) -> None:
        """What is due now, and workers that ended by themselves are started again."""
        now = time.monotonic()
        due = [what for at, what in self._due if at <= now]
        self._due = [(at, what) for at, what in self._due if at > now]
        for what in due:
            what()
        for number, worker in enumerate(self._workers):
            if not worker.alive and number not in self._down:
                self.ended.append(worker.text[-1500:])
                worker.start()

    def end(self) -> None:
        """No fault any more, nothing paused, everything running."""
        while self._due:
            self.tick()
            time.sleep(0.05)
        self._stage.proxy.heal()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, what))

    def _cut_and_heal(self) -> None:
        self._stage.proxy.cut()
        self._stage.proxy.heal()

    def _free(self) -> int | None:
        """A worker that runs."""
        free = [n for n in range(len(self._workers)) if n not in self._paused and n not in self._down]
        return self._decide.choice(free) if free else None

    def _kill(self) -> bool:
        if (number := self._free()) is None:
            return False
        self._down.add(number)
        self._workers[number].kill()
        self._later(self._decide.uniform(0.0, 0.5), lambda: self._start(number))
        return True

    def _start(self, number: int) -> None:
        self._workers[number].start()
        self._down.discard(number)

    def _stop(self) -> bool:
        if (number := self._free()) is None or not self._workers[number].alive:
            return False
        self._paused[number] = time.monotonic()
        self._workers[number].pause()
        self._later(self._decide.uniform(PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX), lambda: self._resume(number))
        return True

    def _resume(self, number: int) -> None:
        worker = self._workers[number]
        # Invariant: no worker goes on after a pause that is longer than the network bound allows for.
        if time.monotonic() - self._paused.pop(number) > PAUSE_SECONDS_LIMIT:
            worker.kill()
            worker.start()
        else:
            worker.resume()
