"""`make mutate-guards`: every guard of the SQL removed in turn; for each, the test that notices.

Ends with an error when a mutant survives that is not listed as equivalent, when a listed one is noticed after all, when a
listed one no longer exists, or when a mutant is no valid SQL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mutation.areas import AREAS, TESTS, Area, guards, written
from mutation.catalog import TABLES
from mutation.equivalent import EQUIVALENT
from mutation.loop import Loop, Outcome
from mutation.predicates import Mutant, mutants

SURVIVOR = re.compile(r"^ +survived +[0-9.]+ s  (.*)$", re.MULTILINE)
QUIET = (
    "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:terminal",
    # What a failing test leaves behind must not fail the next one.
    "-p", "no:threadexception", "-p", "no:unraisableexception",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate-guards", description=__doc__)
    parser.add_argument("--area", choices=sorted(AREAS), default="jobs")
    parser.add_argument("--only", action="append", metavar="FUNCTION", help="mutants of this function or table only")
    parser.add_argument("--match", default="", help="mutants only whose name contains this")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="mutants only that this output of an earlier run tells as survivors"
    )
    parser.add_argument(
        "--first", action="append", default=[], metavar="NAME", help="tests whose names contain this are tried first"
    )
    parser.add_argument("--list", action="store_true", help="say what would be removed from functions, and stop")
    parser.add_argument("--sample", type=int, metavar="N", help="so many at random, none of the equivalent ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--near", action="store_true", help="try only the tests that are likely to notice, which is quicker"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    area = AREAS[args.area]
    if args.list:
        return _list(area, args.only)
    if args.part is not None:
        return _part(area, args)
    return _whole(args)


def _list(area: Area, only: list[str] | None) -> int:
    named = {function.name for function in guards(area)}
    for function in written(area):
        if only and function.name not in only:
            continue
        if function.name not in named and not only:
            print(f"{function.file}:{function.line}: {function.name} is left out")
            continue
        for mutant in mutants(function):
            mark = "  (equivalent)" if mutant.key in EQUIVALENT else ""
            print(f"{mutant.file}:{mutant.line}: {mutant.key}{mark}")
    return 0


def _part(area: Area, args: argparse.Namespace) -> int:
    """One process: every n-th mutant, so that the slow ones of a function are shared."""
    part, parts = (int(number) for number in args.part.split("/"))
    report = args.report.open("w")

    survivors = set(SURVIVOR.findall(args.again.read_text())) if args.again else None

    def choose(found: list[Mutant]) -> list[Mutant]:
        if survivors is not None:
            found = [mutant for mutant in found if mutant.key in survivors]
        if args.only:
            found = [mutant for mutant in found if mutant.function in args.only]
        found = [mutant for mutant in found if args.match in mutant.key]
        if args.sample is not None:
            telling = [mutant for mutant in found if mutant.key not in EQUIVALENT]
            found = random.Random(args.seed).sample(telling, min(args.sample, len(telling)))
        return found[part::parts]

    def tell(outcome: Outcome) -> None:
        by = outcome.by.rsplit("/", 1)[-1] or outcome.why
        print(f"{outcome.verdict:>12} {outcome.seconds:5.1f} s  {outcome.mutant.key}\n{'':22}{by}", flush=True)
        row = {"key": outcome.mutant.key, "verdict": outcome.verdict, "by": outcome.by, "why": outcome.why,
               "seconds": outcome.seconds, "tried": outcome.tried, "where": f"{outcome.mutant.file}:{outcome.mutant.line}"}  # fmt: skip
        report.write(json.dumps(row) + "\n")
        report.flush()

    named = guards(area) if not args.only else [f for f in written(area) if f.name in args.only]
    made = [mutant for function in named for mutant in mutants(function)]
    loop = Loop(area, made, choose, EQUIVALENT, tell, near=args.near, first=tuple(args.first))
    paths = sorted({*area.tests, *(file for near in area.first.values() for file in near)})
    with report:
        return int(pytest.main([*QUIET, *(str(TESTS / path) for path in paths)], plugins=[loop]))


def _whole(args: argparse.Namespace) -> int:
    began = time.monotonic()
    parts = max(1, args.workers)
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{part}.jsonl" for part in range(parts)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "mutation", *sys.argv[1:], "--part", f"{part}/{parts}", "--report", str(report)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
            )
            for part, report in enumerate(reports)
        ]
        ended = [process.wait() for process in running]
        rows: list[dict[str, Any]] = []
        for report in reports:
            rows += [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    seconds = time.monotonic() - began
    counted = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} mutants in {seconds:.0f} s: " + ", ".join(f"{n} {what}" for what, n in sorted(counted.items())))
    wrong = [row for row in rows if row["verdict"] not in ("killed", "equivalent")]
    for row in wrong:
        print(f"{row['verdict'].upper()}: {row['where']}: {row['key']} {row['by']} {row['why']}")
    whole = not (args.only or args.match or args.sample or args.again)
    gone = sorted(key for key in _of(args.area) if key not in {row["key"] for row in rows}) if whole else []
    for key in gone:
        print(f"LISTED AS EQUIVALENT, BUT NO LONGER A MUTANT: {key}")
    if not rows or any(ended):
        print("a part of the run did not end by itself")
    return int(bool(wrong or gone or any(ended) or not rows))


def _of(area: str) -> set[str]:
    """What is listed as equivalent in this area."""
    named = {function.name for function in guards(AREAS[area])}
    if AREAS[area].tables:
        named.update(TABLES)
    return {key for key in EQUIVALENT if key.split(":")[0] in named}


if __name__ == "__main__":
    sys.exit(main())
