"""The measurements: throughput beside the bare limit and the peers, the fence's price, latency, a pinned snapshot."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tomllib
import venv
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString, cast

from bench.relay import stage
from bench.relay.report import Bench
from psycopg.conninfo import conninfo_to_dict

from fencepost.jobs.worker import POLL_SECONDS_MAX
from support.database import Database

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
PEER = Path(__file__).with_name("peer.py")
PEERS = ("pgqueuer", "procrastinate")
# What each can keep up with here: a queue that grows measures only itself.
PEER_RATES = {"pgqueuer": 2000, "procrastinate": 300}
PEER_JOBS = {"pgqueuer": 20_000, "procrastinate": 1_500}
RATE = 2000
LOW_RATE = 30
POLLING, RUNG = "worker, polling", "worker, doorbell"
CLAIM = 100

REGISTER: LiteralString = """
SELECT fencepost.register_class('bench.noop', 'strict', '30 s', 5, 20, '1 s', '300 s', '30 s', '30 s')"""
FILL: LiteralString = """
SELECT count(fencepost.submit('t' || n %% 4, 'op-' || n, 'bench.noop', a.args, 'jcs-sha256:' || encode(sha256(a.args), 'hex')))
FROM generate_series(1, %(count)s::integer) AS n, LATERAL (SELECT convert_to('{"n":' || n || '}', 'UTF8') AS args) AS a"""
RAW: LiteralString = """
CREATE TABLE raw_job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, state smallint NOT NULL DEFAULT 0, attempt uuid,
                      owner text, lease_until timestamptz, run_at timestamptz NOT NULL DEFAULT now(), payload bytea);
CREATE INDEX ON raw_job (run_at, id) WHERE state = 0"""
FILL_RAW: LiteralString = """
INSERT INTO raw_job (payload) SELECT convert_to('{"n":' || n || '}', 'UTF8') FROM generate_series(1, %(count)s::integer) AS n"""
SETTLED: LiteralString = """
SELECT count(*) FILTER (WHERE exec = 'done'), count(*), max(attempts),
       (SELECT count(*) FROM fencepost.attempt) FROM fencepost.job"""
# The same path without the fence: no gate, no ticket, no lock ahead, and only the key is compared.
UNFENCED: LiteralString = """
CREATE OR REPLACE FUNCTION fencepost._enter() RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE OR REPLACE FUNCTION fencepost.complete_many(
    p_tenants text[], p_operations text[], p_classes text[], p_generations bigint[], p_attempts uuid[], p_owners text[],
    p_epochs bigint[])
RETURNS TABLE (item bigint, code text, field text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    UPDATE fencepost.job AS j SET exec = 'done', done_attempt = u.attempt, attempt = NULL, owner = NULL, lease_until = NULL,
        reason = NULL, detail = '', changed_at = clock_timestamp()
    FROM unnest(p_tenants, p_operations, p_classes, p_attempts) AS u (tenant, operation, class, attempt)
    WHERE j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class;
END $$"""


def measure(kind: str, options: Mapping[str, Any], within: float) -> dict[str, Any]:
    """One child of ours, to its end."""
    return stage.result(started(kind, options), within)


def started(kind: str, options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A child of ours at work."""
    env = dict(os.environ)
    roots = ["schemas", "relay", "consumer", "jobs", "operate", "compose", "tests"]
    env["PYTHONPATH"] = os.pathsep.join([*(str(ROOT / root) for root in roots), env.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(CHILD), kind, json.dumps(options)], stdout=subprocess.PIPE, text=True, env=env
    )


def peer_python(bench: Bench) -> Path | None:
    """An environment with the packages of the extra `bench`, or None with a loud line."""
    folder = ROOT / ".cache" / "bench-jobs"
    python = folder / "bin" / "python"
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = cast("list[str]", tomllib.load(file)["project"]["optional-dependencies"]["bench"])
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as error:
        bench.report.say(f"PEERS NOT MEASURED: they could not be had ({type(error).__name__})")
        bench.report.missed.append("peers are missing")
        return None
    return python


def peer_started(python: Path, system: str, kind: str, options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A child of a peer at work."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(PEER), system, kind, json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def peer_measure(python: Path, system: str, kind: str, options: Mapping[str, Any], within: float) -> dict[str, Any]:
    """One child of a peer, to its end."""
    return stage.result(peer_started(python, system, kind, options), within)


@contextmanager
def alone(bench: Bench, made: Database) -> Generator[Database]:
    """The database is gone after its measurement: vacuum and its dirty pages would fall into the next one."""
    try:
        yield made
    finally:
        bench.databases.drop(made)


def fill(made: Database, count: int) -> None:
    """A backlog of ours."""
    with made.connect(autocommit=True) as conn:
        conn.execute("SET synchronous_commit = off")
        conn.execute(REGISTER)
        conn.execute(FILL, {"count": count})
        conn.execute("VACUUM ANALYZE fencepost.job")
        conn.execute("VACUUM ANALYZE fencepost.agenda")
        conn.execute("CHECKPOINT")


def drained(bench: Bench, count: int, *, kind: str = "async", fenced: bool = True) -> dict[str, Any]:
    """The worker on a backlog; every job is done once, or the run ends here."""
    with alone(bench, bench.databases.migrated()) as made, made.connect(autocommit=True) as conn:
        fill(made, count)
        if not fenced:
            conn.execute(UNFENCED)
        options = {"dsn": made.dsn, "count": count, "kind": kind, "seconds": bench.options.seconds}
        found = measure("drain", {**options, "concurrency": bench.options.concurrency}, bench.options.seconds + 60)
        row = conn.execute(SETTLED).fetchone()
    assert row == (count, count, 1, count), f"not each job done once: {row}"
    return found


def raw(bench: Bench, count: int) -> dict[str, Any]:
    """The bare limit on a backlog of its own."""
    with alone(bench, bench.databases.empty()) as made:
        with made.connect(autocommit=True) as conn:
            conn.execute(RAW)
            conn.execute(FILL_RAW, {"count": count})
            conn.execute("VACUUM ANALYZE raw_job")
            conn.execute("CHECKPOINT")
        return measure("raw", {"dsn": made.dsn, "count": count, "batch": CLAIM}, bench.options.seconds + 60)


def peer_drained(bench: Bench, python: Path, system: str) -> dict[str, Any]:
    """A peer on a backlog of its own."""
    with alone(bench, bench.databases.empty()) as made:
        options = {"dsn": url(made.dsn), "count": PEER_JOBS[system], "seconds": bench.options.seconds}
        return peer_measure(python, system, "drain", options, bench.options.seconds + 60)


def url(dsn: str) -> str:
    """A connection string of key=value pairs as an address, which every client takes."""
    parts = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    user, host = parts.get("user", ""), parts.get("host", "127.0.0.1")
    secret = f":{parts['password']}" if "password" in parts else ""
    return f"postgresql://{user}{secret}@{host}:{parts.get('port', '5432')}/{parts['dbname']}"


def shown(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """One line for what was repeated."""
    rates = [float(run["rate"]) for run in runs]
    cpu = (
        f"  {statistics.median(float(run['cpu']) for run in runs):5.0f} us CPU of the worker each"
        if "cpu" in runs[0]
        else ""
    )
    return f"  {name:44s} {statistics.median(rates):9,.0f}/s [{min(rates):,.0f}-{max(rates):,.0f}]{cpu}"


def ratio(over: Sequence[Mapping[str, Any]], under: Sequence[Mapping[str, Any]]) -> float:
    """The median of the ratios of each round: what ran side by side is compared."""
    return statistics.median(float(a["rate"]) / float(b["rate"]) for a, b in zip(over, under, strict=True))


def throughput(bench: Bench) -> None:
    """The bare limit, the worker and the peers in turn."""
    count: int = bench.options.jobs
    python = peer_python(bench) if bench.options.peers else None
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(bench.options.rounds):
        runs.setdefault("raw", []).append(raw(bench, count))
        runs.setdefault("worker", []).append(drained(bench, count))
        for system in PEERS if python is not None else ():
            assert python is not None
            runs.setdefault(system, []).append(peer_drained(bench, python, system))
    say = bench.report.say
    say(
        f"claimed and completed, {count:,} jobs that do nothing (peers: {PEER_JOBS['pgqueuer']:,}, {PEER_JOBS['procrastinate']:,})"
    )
    say(shown("bare SQL, claim 100, complete 100", runs["raw"]))
    say(shown(f"worker, full fence, concurrency {bench.options.concurrency}", runs["worker"]))
    bench.report.bound("worker to the bare limit", ratio(runs["worker"], runs["raw"]), 0.45, least=True)
    if python is not None:
        for system in PEERS:
            say(shown(f"{system} {runs[system][0]['version']}", runs[system]))
        fastest = max(PEERS, key=lambda system: statistics.median(float(run["rate"]) for run in runs[system]))
        bench.report.bound(f"worker to {fastest}", ratio(runs["worker"], runs[fastest]), 1.0, least=True)


def fence(bench: Bench) -> None:
    """The same worker with and without the fence."""
    count: int = bench.options.jobs
    on: list[dict[str, Any]] = []
    off: list[dict[str, Any]] = []
    for turn in range(bench.options.rounds):
        for fenced in (True, False) if turn % 2 else (False, True):
            (on if fenced else off).append(drained(bench, count, fenced=fenced))
    bench.report.say(f"the fence on and off, {count:,} jobs")
    bench.report.say(shown("worker, fence off", off))
    bench.report.say(shown("worker, fence on", on))
    bench.report.bound("overhead of the fence", ratio(off, on) - 1, 0.25, least=False)


def sync(bench: Bench) -> None:
    """Handlers in threads of their own, for comparison."""
    runs = [drained(bench, bench.options.jobs // 4, kind="sync") for _ in range(bench.options.rounds)]
    bench.report.say(shown("worker, synchronous handlers", runs))


def quantile(values: Sequence[float], part: float) -> float:
    """In milliseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] * 1000 if values else float("nan")


def latency(bench: Bench) -> None:
    """From the call that commits (the peers': that enqueues, and commits) to the start of the handler, at a low rate."""
    common = {"seconds": bench.options.latency_seconds, "rate": LOW_RATE}
    within = bench.options.latency_seconds + 60
    ages: dict[str, list[float]] = {}
    for name, doorbell in ((POLLING, False), (RUNG, True)):
        options = {"dsn": bench.database().dsn, "name": "low", "concurrency": 10, "doorbell": doorbell, **common}
        found = measure("latency", options, within)
        ages[name], ages[f"{name}, and submit before"] = found["ages"], found["calls"]
    theirs: list[str] = []
    if bench.options.peers and (python := peer_python(bench)) is not None:
        for system in PEERS:
            made = bench.databases.empty()
            bench.opened.callback(bench.databases.drop, made)
            found = peer_measure(python, system, "latency", {"dsn": url(made.dsn), **common}, within)
            theirs.append(f"{system} {found['version']}, notified")
            ages[theirs[-1]] = found["ages"]
    bench.report.say(f"from the call that commits to the start of the handler, {LOW_RATE} jobs/s")
    for name, found_ages in ages.items():
        bench.report.say(
            f"  {name:44s} p50 {quantile(found_ages, 0.5):6.1f} ms  p99 {quantile(found_ages, 0.99):6.1f} ms"
            f"  max {quantile(found_ages, 1.0):6.1f} ms"
        )
    longest = POLL_SECONDS_MAX * 1000
    bench.report.bound(
        "p99 by polling: one interval, ms", quantile(ages[POLLING], 0.99), longest, least=False, form=".1f"
    )
    if theirs:
        fastest = min(quantile(ages[name], 0.5) for name in theirs)
        bench.report.bound("p50 with the doorbell, ms", quantile(ages[RUNG], 0.5), fastest, least=False, form=".1f")


def pinned(bench: Bench) -> None:
    """A steady rate beside an idle snapshot, and the same without it."""
    seconds: float = bench.options.pinned_seconds
    systems: list[str] = bench.options.systems
    python = peer_python(bench) if any(system in PEERS for system in systems) else None
    for system in systems:
        if system in PEERS and python is None:
            continue
        rate = RATE if system == "ours" else PEER_RATES[system]
        medians: dict[bool, tuple[float, float]] = {}
        bench.report.say(f"{system}, {rate:,} jobs/s for {seconds:g} s: age at the start of the handler")
        for held in (False, True):
            made = bench.database() if system == "ours" else bench.databases.empty()
            if system != "ours":
                bench.opened.callback(bench.databases.drop, made)
            ages, sent = _steady(bench, python, system, made, rate, held=held)
            last = [age for at, age in ages if at >= seconds - seconds / 6]
            medians[held] = (quantile([age for _, age in ages], 0.5), quantile(last, 0.5))
            bench.report.say(
                f"  {'snapshot held' if held else 'no snapshot':16s} {len(ages):8,d} of {sent:,d} started"
                f"  p50 {medians[held][0]:7.1f} ms  p99 {quantile([age for _, age in ages], 0.99):7.1f} ms"
                f"  p50 of the last sixth {medians[held][1]:7.1f} ms"
            )
            if system == "ours":
                bench.report.bound("share of the jobs started", len(ages) / sent, 0.99, least=True)
        whole, end = (medians[True][n] / medians[False][n] for n in (0, 1))
        if system == "ours":
            bench.report.bound("median to the control, the whole time", whole, 2.0, least=False)
            bench.report.bound("median to the control, the last sixth", end, 2.0, least=False)
        else:
            bench.report.say(f"    {system}: median to the control {whole:.2f}, the last sixth {end:.2f}")


def _steady(
    bench: Bench, python: Path | None, system: str, made: Database, rate: int, *, held: bool
) -> tuple[list[tuple[float, float]], int]:
    seconds: float = bench.options.pinned_seconds
    options = {"dsn": made.dsn, "rate": rate, "seconds": seconds, "name": "steady", "concurrency": CLAIM}
    longer = {**options, "seconds": seconds + 3}
    within = seconds + 60
    if system == "ours":
        with made.connect(autocommit=True) as conn:
            conn.execute(REGISTER)
        with stage.idle_database(made.dsn) if held else made.connect(autocommit=True):
            worker, producer = started("steady", longer), started("produce", options)
            sent = int(stage.result(producer, within)["sent"])
            return stage.result(worker, within)["ages"], sent
    assert python is not None
    options, longer = options | {"dsn": url(made.dsn)}, longer | {"dsn": url(made.dsn)}
    peer_measure(python, system, "install", options, within)
    with stage.idle_database(made.dsn) if held else made.connect(autocommit=True):
        worker = peer_started(python, system, "steady", longer)
        producer = peer_started(python, system, "produce", options)
        sent = int(stage.result(producer, within)["sent"])
        return stage.result(worker, within)["ages"], sent
