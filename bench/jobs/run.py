"""What claims, completions and the fence cost beside the limits of this machine and beside other queues, in one run.

Each block prints what it measured; absolute numbers belong to this machine, ratios do not. `--gate` ends with 1 when a
bound is missed. Loads are bounded in count and in time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

from bench.jobs.parts import PEERS, fence, latency, pinned, sync, throughput
from bench.relay.report import Bench, Report

from stack.obtain import obtain_postgres
from support.database import Databases

PARTS = {"throughput": throughput, "fence": fence, "sync": sync, "latency": latency, "pinned": pinned}


def main(options: argparse.Namespace, opened: contextlib.ExitStack) -> bool:
    """Runs the parts that were asked for; True when no bound was missed."""
    report = Report()
    report.say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before; Python {sys.version.split()[0]}")
    server = obtain_postgres(options.major)
    opened.callback(server.close)
    report.say(f"on {server.label}")
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-jobs-")))
    databases = Databases(server.address, folder)
    opened.callback(databases.close)
    bench = Bench(options, report, opened, databases)
    for part in options.only or PARTS:
        PARTS[part](bench)
    report.say(f"load {os.getloadavg()[0]:.1f} after")
    report.say("every bound holds" if not report.missed else f"{len(report.missed)} MISSED: {'; '.join(report.missed)}")
    return not report.missed


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts instead of all")
    parser.add_argument("--jobs", type=int, default=40_000, help="backlog of a throughput round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison")
    parser.add_argument("--concurrency", type=int, default=256, help="of the worker on a backlog")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time of one measurement")
    parser.add_argument("--latency-seconds", type=float, default=10.0, help="length of a latency run")
    parser.add_argument("--pinned-seconds", type=float, default=60.0, help="length of each run at a steady rate")
    parser.add_argument("--systems", nargs="+", choices=("ours", *PEERS), default=["ours", *PEERS], help="of `pinned`")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without the peers")
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    with contextlib.ExitStack() as stacked:
        held = main(given, stacked)
    sys.exit(0 if held or not given.gate else 1)
