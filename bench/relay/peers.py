"""Another polling relay, at its best settings, in turn with ours."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import venv
from pathlib import Path

from bench.relay import stage
from bench.relay.report import SIZES, Bench

PEER_EVENTS = 40_000
# What is best for throughput here, as for the peer.
BEST = {"batch": 4000}
PEER_PACKAGES = ("txoutbox==0.2.2", "asyncpg", "confluent-kafka==2.16.1", "aio-pika==10.2.1")


def peers(bench: Bench, bootstrap: str) -> None:
    """txoutbox at its best settings, in an environment of its own."""
    folder = stage.ROOT / ".cache" / "bench-peers"
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEER_PACKAGES],
            check=True,
            timeout=300,
        )
    except (subprocess.SubprocessError, OSError) as error:
        bench.report.say(f"PEERS NOT MEASURED: txoutbox could not be had ({type(error).__name__})")
        bench.report.missed.append("peers are missing")
        return
    theirs = bench.databases.empty()
    bench.opened.callback(bench.databases.drop, theirs)
    ours = bench.database()
    stage.fill(ours, bench.options.events, SIZES[0])
    topic = stage.topic(bootstrap)
    rates: dict[str, list[float]] = {"ordered": [], "unordered": [], "relay": []}
    for _ in range(bench.options.rounds):
        for mode in ("ordered", "unordered"):
            rate = peer(bench, python, [theirs.dsn, bootstrap, topic, str(PEER_EVENTS), mode])
            if rate is None:
                return
            rates[mode].append(rate)
        stage.rewind(ours)
        options = {"dsn": ours.dsn, "count": bench.options.events, "seconds": bench.options.seconds, "pace": BEST}
        found = stage.measure("relay_drain", kind="kafka", bootstrap=bootstrap, topic=topic, **options)
        rates["relay"].append(float(found["rate"]))
    for name, found_rates in rates.items():
        shown_rates = ", ".join(f"{rate:,.0f}" for rate in found_rates)
        bench.report.say(
            f"{'txoutbox ' if name != 'relay' else ''}{name}: {statistics.median(found_rates):,.0f}/s ({shown_rates})"
        )
    best = max(rates["ordered"], rates["unordered"], key=statistics.median)
    ratio = statistics.median(a / b for a, b in zip(rates["relay"], best, strict=True))
    bench.report.bound("kafka 200 B, relay to txoutbox", ratio, 5.0, least=True, form=".1f")


def peer(bench: Bench, python: Path, arguments: list[str]) -> float | None:
    """One run of txoutbox in its own environment; None, told loudly, when it failed."""
    run = subprocess.run(
        [str(python), str(Path(__file__).with_name("txoutbox_peer.py")), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if run.returncode != 0:
        bench.report.say(f"PEERS NOT MEASURED: {run.stderr.strip().splitlines()[-1:]}")
        bench.report.missed.append("peers are missing")
        return None
    return float(json.loads(run.stdout.strip().splitlines()[-1]))
