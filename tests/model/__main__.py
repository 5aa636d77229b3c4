"""`make model`: the full bound, every fault variant with its trace, and each guard removed alone."""

from __future__ import annotations

import sys
import time

from fencepost.jobs.states import Guard
from model.explore import search
from model.invariants import INVARIANTS
from model.variants import ALSO, FULL, QUICK, VARIANTS


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
        for name in variant.breaks:
            found = search(variant.scenario, variant.off, (name,)).found
            failed += found is None
            trace = "NO COUNTEREXAMPLE" if found is None else ", ".join(found.trace) or "at once"
            print(f"  {variant.name:6} {name:4} {variant.what}: {trace}", flush=True)

    shown = {guard for variant in VARIANTS if len(variant.off) == 1 for guard in variant.off}
    print("The other guards, each alone:")
    depth: list[Guard] = []
    for guard in (guard for guard in Guard if guard not in shown):
        tried = (search(scenario, (guard,)).found for scenario in (*QUICK, ALSO))
        found = next((found for found in tried if found is not None), None)
        if found is None:
            depth.append(guard)
        else:
            print(f"  {found.broken:4} {guard.value}: {', '.join(found.trace)}", flush=True)
    print("Nothing breaks in that bound without one of these (defence in depth, or against people who err):")
    for guard in depth:
        print(f"  {guard.value}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
