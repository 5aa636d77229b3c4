"""What the relay costs beside the limits of this machine, measured in the same run and interleaved.

Each block prints what it measured; absolute numbers belong to this machine, ratios and counts do not. `--gate` ends
with 1 when a bound is missed. Loads are bounded in count and in time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

from bench.relay.latency import latency
from bench.relay.peers import peers
from bench.relay.report import Bench, Report
from bench.relay.scaling import scaling
from bench.relay.throughput import drain, idle, kafka, pinned, rabbitmq

from stack.obtain import obtain_kafka, obtain_postgres, obtain_rabbitmq
from support.database import Databases

PARTS = ("kafka", "rabbitmq", "drain", "idle", "latency", "pinned", "scaling", "peers")


def main(options: argparse.Namespace, opened: contextlib.ExitStack) -> bool:
    """Runs the parts that were asked for; True when no bound was missed."""
    report = Report()
    parts: list[str] = options.only or [part for part in PARTS if part != "peers" or options.peers]
    report.say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before; Python {sys.version.split()[0]}")
    server = obtain_postgres(options.major)
    opened.callback(server.close)
    report.say(f"on {server.label}")
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-relay-")))
    databases = Databases(server.address, folder)
    opened.callback(databases.close)
    bench = Bench(options, report, opened, databases)
    to_kafka: dict[str, Callable[[Bench, str], None]] = {
        "kafka": kafka,
        "drain": drain,
        "idle": idle,
        "latency": latency,
        "pinned": pinned,
        "peers": peers,
    }
    to_rabbitmq: dict[str, Callable[[Bench, str], None]] = {"rabbitmq": rabbitmq, "scaling": scaling}
    for name, obtain, run in (
        ("Apache Kafka", obtain_kafka, to_kafka),
        ("RabbitMQ", obtain_rabbitmq, to_rabbitmq),
    ):
        wanted = [part for part in parts if part in run]
        address = bench.service(name, obtain) if wanted else None
        if address is not None:
            for part in wanted:
                run[part](bench, address)
    report.say(f"load {os.getloadavg()[0]:.1f} after")
    report.say("every bound holds" if not report.missed else f"{len(report.missed)} MISSED: {'; '.join(report.missed)}")
    return not report.missed


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts instead of all")
    parser.add_argument("--events", type=int, default=200_000, help="backlog of a throughput round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each throughput comparison")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time of one measurement")
    parser.add_argument("--latency-seconds", type=int, default=20, help="length of the latency run")
    parser.add_argument("--pinned-seconds", type=float, default=30.0, help="time of the pinned snapshot")
    parser.add_argument("--full", action="store_true", help="1,000,000 rows, and ten minutes of a pinned snapshot")
    parser.add_argument("--peers", action="store_true", help="also txoutbox, installed into .cache/bench-peers")
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    with contextlib.ExitStack() as stacked:
        held = main(given, stacked)
    sys.exit(0 if held or not given.gate else 1)
