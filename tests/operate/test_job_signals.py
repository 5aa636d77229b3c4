"""`fencepost jobs signal`, and what status, list and show say of a job that waits; never what a signal carried."""

import json
from pathlib import Path

from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.context import Context
from fencepost.jobs.fence import complete
from fencepost.jobs.progress import report
from fencepost.jobs.result import result
from fencepost.jobs.signals import Signal
from fencepost.jobs.signals import signal as tell
from fencepost.jobs.submit import submit
from fencepost.jobs.wait import wait
from fencepost.jobs.worker import Worker
from fencepost.operate.testing.ageing import age
from fencepost.operate.testing.jobs import run_jobs
from fencepost.schemas.identity import JobClass
from support.command_line import Fencepost
from support.database import Database

CLASS = "report.make"
WHICH = ("--tenant", "acme", "--operation", "op", "--class", CLASS)
SIGNAL = ("jobs", "signal", *WHICH, "--name", "approved")


def given(database: Database) -> None:
    with database.connect() as conn:
        register_class(conn, JobClassPolicy(JobClass(CLASS)))
        submit(conn, CLASS, tenant="acme", operation="op", args={})


def test_an_operator_sees_who_waits_and_tells_them(database18: Database, fencepost: Fencepost, tmp_path: Path) -> None:
    given(database18)
    with database18.connect(autocommit=True) as conn:
        (job,) = claim(conn, "w", [CLASS], 1)
        report(conn, job.fence, 0.5, "half")
        assert wait(conn, job.fence, signal="approved") == "waiting"
        conn.execute("UPDATE fencepost.job SET changed_at = changed_at - interval '3 hours'")

    (state,) = json.loads(fencepost(database18, "status", "--json").out)["states"]
    assert (state["state"], state["kind"], state["reason"], state["count"]) == (
        *("waiting", CLASS, "waiting_for_signal"),
        1,
    )
    assert 3 * 3600 <= state["age_seconds"] < 4 * 3600
    (listed,) = json.loads(fencepost(database18, "jobs", "list", "--state", "waiting", "--json").out)
    assert listed["operation"] == "op"

    payload = tmp_path / "payload.json"
    payload.write_text('{"secret": 1}')
    told = fencepost(database18, *SIGNAL, "--payload-file", str(payload), "--key", "k", "--actor", "ann", "--json")
    assert (told.code, json.loads(told.out)["result"]) == (0, "recorded")
    again = fencepost(database18, *SIGNAL, "--payload-file", str(payload), "--key", "k")
    assert again.code == 0 and "known" in again.out
    refused = fencepost(database18, *SIGNAL, "--key", "k")
    assert refused.code == 1 and "[key]" in refused.line

    plain = fencepost(database18, "jobs", "show", *WHICH).out
    shown = json.loads(fencepost(database18, "jobs", "show", *WHICH, "--json").out)
    (signal,) = shown["signals"]
    assert (signal["signal"], signal["actor"], shown["detail"]) == ("approved", "ann", "approved")
    assert (shown["progress"]["fraction"], shown["progress"]["current"]) == (0.5, False)
    assert "ann" in plain and "half" in plain and "secret" not in plain + json.dumps(shown)

    with database18.connect(autocommit=True) as conn:
        (job,) = claim(conn, "w", [CLASS], 1)
        answer = wait(conn, job.fence, signal="approved")
        assert isinstance(answer, Signal) and answer.payload == {"secret": 1}
        complete(conn, job.fence)
    late = fencepost(database18, *SIGNAL)
    assert late.code == 1 and "too_late" in late.out


def test_what_cannot_be_sent_is_refused_in_one_line(database18: Database, fencepost: Fencepost, tmp_path: Path) -> None:
    given(database18)
    assert fencepost(database18, *SIGNAL).code == 0
    bad = tmp_path / "bad.json"
    for content in ("not json", f'"{"x" * 65_536}"'):
        bad.write_text(content)
        refused = fencepost(database18, *SIGNAL, "--payload-file", str(bad))
        assert refused.code == 1 and "[payload_file]" in refused.line
    assert "[payload_file]" in fencepost(database18, *SIGNAL, "--payload-file", str(tmp_path / "none")).line
    unknown = fencepost(database18, *SIGNAL, "--operation", "other")
    assert unknown.code == 1 and "[operation]" in unknown.line


def test_a_users_test_runs_what_is_woken_by_a_signal_or_by_age(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS)
    def handler(ctx: Context, job: Job) -> object:
        return "in time" if ctx.wait(signal="approved", until=3600.0) else "too late"

    with database18.connect() as conn:
        for operation in ("told", "aged"):
            submit(conn, CLASS, tenant="acme", operation=operation, args={})
    assert [ran.state for ran in run_jobs(worker, database18)] == ["waiting", "waiting"]
    assert run_jobs(worker, database18) == []
    with database18.connect() as conn:
        tell(conn, tenant="acme", operation="told", job_class=CLASS, name="approved")
    assert [(ran.operation, ran.state) for ran in run_jobs(worker, database18)] == [("told", "done")]
    with database18.connect() as conn:
        age(conn, 3601, of="jobs")
    assert [(ran.operation, ran.state) for ran in run_jobs(worker, database18)] == [("aged", "done")]
    with database18.connect() as conn:
        kept = {o: result(conn, tenant="acme", operation=o, job_class=CLASS) for o in ("told", "aged")}
    assert {o: r.value for o, r in kept.items() if r is not None} == {"told": "in time", "aged": "too late"}
