"""Rotations while workers publish a long backlog, and what the check of authority costs a publication; bounds checked.

A rotation is timed from its request to its return. Nothing of the old epoch may commit after it did, by the order of the
commits in the write-ahead log. Ends with 1 when a bound is missed; loads are bounded in count and in time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

from bench.relay.report import Report
from bench.rotation import cost
from bench.rotation.load import CALLBACK_SECONDS, CLASSES, Load, Size, workers

from stack.obtain import obtain_postgres
from support.database import Databases

SECONDS_MAX = 1.0


def rotations(report: Report, databases: Databases, folder: Path, size: Size, count: int) -> None:
    """So many rotations, with a release of everything after each."""
    made = databases.migrated()
    try:
        with made.connect(autocommit=True) as conn:
            load = Load(made, conn, size)
            load.prepare()
            report.say(f"{size.jobs:,} jobs of {len(CLASSES)} classes submitted in {load.fill():.1f} s")
            with workers(load, folder):
                report.say(
                    f"{size.workers} workers publish, {size.concurrency} at a time each, callbacks up to"
                    f" {CALLBACK_SECONDS * 1000:.0f} ms; all of them after {load.publishing():.1f} s"
                )
                for number in range(1, count + 1):
                    load.fill()
                    turned = load.rotate()
                    report.say(
                        f"rotation {number} to epoch {turned.epoch}: {turned.seconds * 1000:.0f} ms; {turned.held} running jobs"
                        f" held, {turned.queued:,} queued ones by comparison"
                    )
                    let = load.release()
                    report.say(
                        f"    released {let.jobs:,} jobs in {let.seconds:.1f} s;"
                        f" every worker publishes again {load.publishing():.1f} s later"
                    )
            judged(report, load)
    finally:
        databases.drop(made)


def judged(report: Report, load: Load) -> None:
    """Each bound, at the end of everything that could still have broken it."""
    turned, size = load.turned, load.size
    late = [load.late(each) for each in turned]
    epochs = [load.published(epoch) for epoch in (turned[0].old, *(each.epoch for each in turned))]
    counts = ", ".join(f"{each.count:,}" for each in epochs)
    report.say(f"published under the epochs {turned[0].old} to {turned[-1].epoch}: {counts}")
    report.bound("slowest rotation, seconds", max(each.seconds for each in turned), SECONDS_MAX, least=False)
    report.bound(
        "fewest jobs queued at a rotation", min(each.queued for each in turned), size.jobs, least=True, form=",.0f"
    )
    report.bound("published under an old epoch after a rotation", sum(n for n, _ in late), 0, least=False, form=".0f")
    report.bound("control: forged rows that were found", min(n for _, n in late), 1, least=True, form=".0f")
    report.bound(
        "control: workers that published under each epoch",
        min(e.workers for e in epochs),
        size.workers,
        least=True,
        form=".0f",
    )
    report.bound("operations published twice", load.twice(), 0, least=False, form=".0f")


def price(report: Report, databases: Databases, batches: int) -> None:
    """The same publication with the check of authority, without it, and without the fence's check at the commit too."""
    found = cost.measure(databases, batches)
    report.say(f"one publication, medians of {batches * cost.BATCH:,} of each, in turns:")
    shipped = found[cost.SHIPPED.name]
    for name, each in found.items():
        report.say(f"    {name:<42} {each.bytes:6.0f} bytes of WAL   {each.milliseconds:6.3f} ms")
    for variant in (cost.WITHOUT, cost.NEITHER):
        other = found[variant.name]
        report.say(
            f"    {cost.SHIPPED.name}, against {variant.name}: {shipped.bytes - other.bytes:+.0f} bytes"
            f" ({shipped.bytes / other.bytes:.3f} times),"
            f" {shipped.milliseconds - other.milliseconds:+.3f} ms ({shipped.milliseconds / other.milliseconds:.3f} times)"
        )


def main(options: argparse.Namespace) -> bool:
    """True when every bound holds."""
    started = time.monotonic()
    report = Report()
    with ExitStack() as opened:
        report.say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before; Python {sys.version.split()[0]}")
        server = obtain_postgres(options.major)
        opened.callback(server.close)
        report.say(f"on {server.label}")
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-rotation-")))
        databases = Databases(server.address, folder)
        opened.callback(databases.close)
        if options.rotations:
            rotations(report, databases, folder, Size(options.jobs, concurrency=options.concurrency), options.rotations)
        if options.batches:
            price(report, databases, options.batches)
    report.say(f"load {os.getloadavg()[0]:.1f} after {time.monotonic() - started:.0f} s")
    report.say("every bound holds" if not report.missed else f"{len(report.missed)} MISSED: {'; '.join(report.missed)}")
    return not report.missed


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000, help="queued at each rotation")
    parser.add_argument("--rotations", type=int, default=3, help="how many; 0: only the price")
    parser.add_argument("--concurrency", type=int, default=1, help="jobs at a time of each of the eight workers")
    parser.add_argument("--batches", type=int, default=10, help="hundreds of publications of each kind; 0: no price")
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(0 if main(arguments()) else 1)
