"""One run: jobs are submitted, workers run, faults are committed until enough is settled; then all comes to rest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from bench.chaos import domain
from bench.chaos.faults import Faults
from bench.chaos.stage import Stage
from bench.chaos.systems import Found, Progress, System

TICK_SECONDS = 0.1
SUBMIT_AT_ONCE = 100
REST_SECONDS = 180.0
ENDING_SECONDS = 30.0
# Faults go on until so much is settled: the rest waits for quiescence and for people.
ENOUGH = 0.97


@dataclass(frozen=True, slots=True)
class Options:
    """``rate``: jobs per second, None: all before the first worker starts. ``seconds``: the longest time with faults.

    A fault comes ``pace`` seconds after the last in the mean, and not before ``every`` more jobs are settled. With
    ``each_once`` every kind of fault comes once, in an order by the seed, and jobs are added until all have been.
    """

    jobs: int
    seconds: float
    workers: int = 4
    concurrency: int = 8
    rate: float | None = None
    pace: float = 1.0
    every: int = 0
    each_once: bool = False


class Engine:
    """Drives one system on one stage."""

    def __init__(self, system: System, stage: Stage, options: Options, say: Callable[[str], None]) -> None:
        self._system = system
        self._stage = stage
        self._options = options
        self._say = say
        self._conn: psycopg.Connection[Any] | None = None
        self._submitted = 0
        self._oldest_job = self._oldest_unknown = 0.0

    def run(self) -> Found:
        """From the first job to rest, or to the end of the time; then the check."""
        began = time.monotonic()
        self._system.prepare(self._stage)
        options = self._options
        if options.rate is None:
            self._submit(options.jobs)
        workers = [self._system.worker(self._stage, n, options.concurrency) for n in range(options.workers)]
        people = self._system.people(self._stage)
        faults = Faults(self._stage, workers, people, random.Random(self._stage.seed))
        for child in (*workers, *([people] if people is not None else [])):
            child.start()
        self._chaos(faults)
        faults.end()
        self._say(f"  faults end after {time.monotonic() - began:.0f} s: {shown(faults)}")
        self._rest(faults)
        self._close()
        for child in (*workers, *([people] if people is not None else [])):
            try:
                code: int | None = child.terminate(ENDING_SECONDS)
            except AssertionError:
                code = None
            if code != 0:
                faults.ended.append(f"code {code} when told to stop: {child.text[-1500:]}")
        with self._stage.database.connect(autocommit=True) as conn:
            found = self._system.found(self._stage, conn, [worker.text for worker in workers])
        found.faults, found.ended, found.seconds = faults.done, faults.ended, time.monotonic() - began
        found.oldest_job, found.oldest_unknown = self._oldest_job, self._oldest_unknown
        return found

    def _chaos(self, faults: Faults) -> None:
        options, decide = self._options, random.Random(self._stage.seed + 1)
        kinds = sorted(faults.kinds())
        decide.shuffle(kinds)
        began = at = told = time.monotonic()
        pause, settled = options.pace, 0
        while time.monotonic() - began < options.seconds:
            faults.tick()
            if options.rate is not None:
                self._submit(min(options.jobs, int((time.monotonic() - began) * options.rate)))
            looked = time.monotonic()
            progress = self._look()
            # Looking must not become the load.
            time.sleep(max(TICK_SECONDS, 4 * (time.monotonic() - looked)))
            if progress is None:
                continue
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                self._say(f"  {progress.settled:,} of {progress.accepted:,} settled; {shown(faults)}")
            if options.each_once and kinds and progress.accepted - progress.settled < 2 * max(options.every, 1):
                self._submit(self._submitted + 4 * max(options.every, 1))
            if not (options.each_once and kinds) and self._submitted >= options.jobs and _enough(progress):
                return
            if time.monotonic() - at >= pause and progress.settled - settled >= options.every:
                if not options.each_once:
                    faults.commit(faults.draw())
                elif kinds and faults.commit(kinds[-1]):
                    kinds.pop()
                at, pause, settled = time.monotonic(), options.pace * decide.uniform(0.5, 1.5), progress.settled

    def _rest(self, faults: Faults) -> None:
        until, progress = time.monotonic() + REST_SECONDS, None
        while time.monotonic() < until:
            faults.tick()
            progress = self._look()
            if progress is not None and progress.at_rest:
                return
            time.sleep(TICK_SECONDS)
        self._say(f"  NOT AT REST after {REST_SECONDS:.0f} s without faults: {progress}")

    def _submit(self, target: int) -> None:
        """Up to so many in all; what a lost commit left open is submitted again and changes nothing."""
        while self._submitted < target:
            last = min(target, self._submitted + SUBMIT_AT_ONCE)
            rows = [domain.row(self._stage.seed, f"op-{n:06d}") for n in range(self._submitted, last)]
            try:
                self._system.submit(self._connection(), rows)
            except psycopg.OperationalError:
                self._close()
                return
            self._submitted = last

    def _look(self) -> Progress | None:
        try:
            progress = self._system.progress(self._connection())
        except psycopg.OperationalError:
            self._close()
            return None
        self._oldest_job = max(self._oldest_job, progress.oldest_job)
        self._oldest_unknown = max(self._oldest_unknown, progress.oldest_unknown)
        return progress

    def _connection(self) -> psycopg.Connection[Any]:
        if self._conn is None or self._conn.closed:
            self._conn = self._stage.database.connect(autocommit=True)
        return self._conn

    def _close(self) -> None:
        if self._conn is not None:
            self._conn.close()
        self._conn = None


def _enough(progress: Progress) -> bool:
    return progress.settled >= ENOUGH * progress.accepted


def shown(faults: Faults) -> str:
    """The faults so far."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(faults.done.items())) or "no fault yet"
