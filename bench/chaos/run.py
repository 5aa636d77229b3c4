"""Thousands of jobs under faults; prints how many answers were wrong, and ends with 1 when one was.

Workers, the operator, the provider and PostgreSQL are processes of their own. The oracle is the domain's tables and the
provider's ledger (`checker`). The seed is printed: it repeats what is decided here and how the provider behaves, not
how processes race.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

from bench.chaos.engine import Engine, Options
from bench.chaos.mutants import MUTANTS
from bench.chaos.peer import COMPARED, PgQueuer
from bench.chaos.stage import Stage
from bench.chaos.systems import Fencepost, Found
from bench.relay.report import Report

CHAOS: Mapping[str, Any] = {"jobs": 5000, "seconds": 420.0}
SOAK: Mapping[str, Any] = {"seed": 40, "jobs": 10_000_000, "seconds": 600.0, "rate": 12.0, "age": 180.0}


def say(text: str) -> None:
    """One line."""
    print(text, flush=True)


def listed(counts: Mapping[str, int]) -> str:
    """Names with their numbers."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def report(name: str, found: Found, *, mine: bool = True) -> None:
    """What a run was put through, and what was wrong."""
    say(f"{name}: {found.accepted:,} jobs in {found.seconds:.0f} s: {listed(found.states)}")
    say(f"  faults: {listed(dict(sorted(found.faults.items())))}")
    say(f"  {listed(found.survived)}")
    if mine:
        say(f"  oldest job at any time {found.oldest_job:.0f} s, oldest unknown effect {found.oldest_unknown:.0f} s")
    for words in found.ended:
        say(f"  A WORKER ENDED BY ITSELF: {words}" if mine else "  a worker had to be started again")
    for line in found.wrong.lines():
        say(line)


def main(chosen: argparse.Namespace) -> bool:
    """True when no answer was wrong."""
    logging.disable(logging.CRITICAL)
    seed = chosen.seed if chosen.seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {seed}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    options = Options(
        jobs=chosen.jobs,
        seconds=chosen.seconds,
        workers=chosen.workers,
        concurrency=chosen.concurrency,
        rate=chosen.rate,
        pace=chosen.pace,
    )
    fine = ours(chosen, seed, options)
    if chosen.peer and (peer := PgQueuer.obtained(Report())) is not None:
        with Stage(seed, major=chosen.major, migrated=False) as stage:
            found = Engine(peer, stage, options, say).run()
        report(peer.name, found, mine=False)
        say(COMPARED)
    say("no wrong answer" if fine else f"WRONG ANSWERS; again with --seed {seed}")
    return fine


def ours(chosen: argparse.Namespace, seed: int, options: Options) -> bool:
    """The run of fencepost; True when nothing was wrong with it."""
    with Stage(seed, major=chosen.major) as stage:
        found = Engine(Fencepost(MUTANTS.get(chosen.mutant, "")), stage, options, say).run()
        report("fencepost", found)
        fine = found.wrong.none() and not found.ended
        if chosen.age is not None and max(found.oldest_job, found.oldest_unknown) > chosen.age:
            say(f"  TOO OLD: the bound is {chosen.age:.0f} s")
            fine = False
        if not fine and chosen.keep is not None:
            for log in stage.folder.glob("*.log"):
                (chosen.keep / log.name).write_bytes(log.read_bytes())
        return fine


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--soak", action="store_true", help="ten minutes at a steady rate under a fixed seed; other defaults"
    )
    parser.add_argument("--seed", type=int, help="repeats the decisions of a run")
    parser.add_argument("--jobs", type=int, help="how many (default 5000; soak: as many as come)")
    parser.add_argument(
        "--seconds", type=float, help="longest time with faults (default 420, soak 600); rest follows, 3 min at most"
    )
    parser.add_argument("--rate", type=float, help="jobs per second (default: all at once, soak 12)")
    parser.add_argument(
        "--age", type=float, help="fails when a job or an unknown effect was ever older, in seconds (soak 180)"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes")
    parser.add_argument("--concurrency", type=int, default=8, help="jobs at a time in each")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between two faults in the mean")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without the same run of PgQueuer")
    parser.add_argument("--mutant", choices=MUTANTS, help="takes a guard out of the database: the run must find it")
    parser.add_argument("--keep", type=Path, help="folder for the logs of a run with wrong answers")
    parser.add_argument("--major", default="18", help="PostgreSQL version")
    chosen = parser.parse_args()
    if chosen.soak or chosen.mutant:
        chosen.peer = False
    for name, value in (SOAK if chosen.soak else CHAOS).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    return chosen


if __name__ == "__main__":
    sys.exit(0 if main(arguments()) else 1)
