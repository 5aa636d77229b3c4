"""Five ways of coming back from a copy, each from the first claim to publishing again; ends with 1 when a check does not hold.

Then the same with one guard taken out of the restored database: a drill that stays green without it proves nothing, so
that ends with 1 too. Everything runs on servers of its own on loopback; docs/recovery.md is what people do.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

from bench.restore_drill.kinds import KINDS
from bench.restore_drill.mutants import MUTANTS, Mutant
from bench.restore_drill.story import Drill

SHOWN = 12


def say(text: str) -> None:
    """One line."""
    print(text, flush=True)


def drill(name: str, major: str, mutant: Mutant | None = None) -> list[str]:
    """Runs one and says how it went; returns what did not hold."""
    started = time.monotonic()
    with KINDS[name](major) as kind:
        checks = Drill(kind, mutant).run()
        seconds = time.monotonic() - started
    if mutant is None:
        steps = ", ".join(f"{step}: {count}" for step, count in sorted(checks.made.items()))
        verdict = "green" if not checks.wrong else f"RED, {len(checks.wrong)} checks"
        say(f"{KINDS[name].words}: {verdict} in {seconds:.0f} s (checks of step {steps})")
        for line in checks.wrong[:SHOWN]:
            say(f"    {line}")
    return checks.wrong


def unseen(mutant: Mutant, wrong: list[str]) -> list[str]:
    """Those checks that had to fail for it and did not."""
    return [red for red in mutant.red if not any(line.startswith(red) for line in wrong)]


def main(chosen: argparse.Namespace) -> bool:
    """True when every drill was green and every mutant red."""
    logging.disable(logging.CRITICAL)
    fine = True
    for name in chosen.kind or KINDS:
        fine &= not drill(name, chosen.major)
    for mutant in MUTANTS.values() if chosen.mutants else ():
        wrong = drill(chosen.mutants_on, chosen.major, mutant)
        missed = unseen(mutant, wrong)
        fine &= not missed
        if missed:
            say(f"without a guard ({mutant.name}): NOT NOTICED by {', '.join(missed)}")
        else:
            say(
                f"without a guard ({mutant.name}): red, as it must be: {len(wrong)} checks, the first: {wrong[0][:150]}"
            )
    say("the restore drill is green" if fine else "THE RESTORE DRILL IS RED")
    return fine


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kind", action="append", choices=list(KINDS), help="only this one; may be repeated")
    arguments.add_argument("--no-mutants", dest="mutants", action="store_false", help="leave the mutants out")
    arguments.add_argument("--mutants-on", choices=list(KINDS), default="dump-new", help="the restore they run on")
    arguments.add_argument("--major", choices=("18", "15"), default="18", help="the version of PostgreSQL")
    sys.exit(0 if main(arguments.parse_args()) else 1)
