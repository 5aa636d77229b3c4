"""`make model`: the full bound, every fault variant with its trace, and each guard removed alone."""

from __future__ import annotations

import sys
import time

from fencepost.jobs.states import Guard
from model.explore import search
from model.invariants import INVARIANTS
from model.variants import ALONE, FULL, VARIANTS


def main() -> int:
    began, states, failed = time.perf_counter(), 0, 0
    print("Every guard on:")
    for scenario in FULL:
        explored = search(scenario, fold=True)
        states += explored.states
        print(f"  {scenario.name}: {explored.states:,} states in {explored.seconds:.0f} s", flush=True)
        for (what, owner), count in explored.stopped.most_common():
            print(f"      {count:,} wait for people: {what} ({owner})")
        if explored.found is not None:
            failed += 1
            print(f"  BROKEN {explored.found.broken}: {', '.join(explored.found.trace)}")
    if not failed:
        print(f"{states:,} states in {time.perf_counter() - began:.0f} s, held in all of them:")
        for name, meaning in INVARIANTS.items():
            print(f"  {name:4}{meaning}")

    print("Fault variants, the shortest trace of each:")
    for variant in VARIANTS:
        found = search(variant.scenario, variant.off, (variant.breaks,)).found
        failed += found is None
        trace = "NO COUNTEREXAMPLE" if found is None else ", ".join(found.trace) or "at once"
        print(f"  {variant.name:6} {variant.breaks:4} {variant.what}: {trace}", flush=True)

    print("Each guard alone, in the scenarios " + "; ".join(scenario.name for scenario in ALONE) + ":")
    depth: list[Guard] = []
    for guard in Guard:
        for scenario in ALONE:
            found = search(scenario, (guard,)).found
            if found is not None:
                print(f"  {guard.value}: {found.broken}: {', '.join(found.trace)}", flush=True)
                break
        else:
            depth.append(guard)
    print("Nothing breaks when only one of these is removed (defence in depth):")
    for guard in depth:
        print(f"  {guard.value}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
