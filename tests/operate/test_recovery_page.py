"""The page about recovery, followed word by word: each of its commands prints what the page says it does."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from bench.restore_drill.cast import CLASS, KEY, POLICY, TENANT, Conn, Worker

from fencepost.jobs import effects
from fencepost.jobs.claim import register_class
from fencepost.jobs.journal_disk import machine_id
from fencepost.jobs.submit import submit
from support.command_line import Fencepost, environment, running
from support.database import Database, Databases
from support.processes import Child, wait_for
from support.provider import Client, Provider
from support.restores import Restores, restores

PAGE = Path(__file__).parents[2] / "docs" / "recovery.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
CODE = '; echo "exit code $?"'
JOURNAL = Path("journals", "worker-1")
DOMAIN = "CREATE TABLE payment (tenant text, operation text, receipt text, by text)"
PAID = "SELECT operation, count(*) FROM payment GROUP BY operation ORDER BY operation"
OPEN = "SELECT count(*) FROM fencepost.job WHERE exec <> 'done'"
APP = """
import json, os, sys, urllib.request
import psycopg
from fencepost.jobs.effects import Success
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker

worker = Worker()


def pay(request, dispatch):
    call = urllib.request.Request(os.environ["PROVIDER"], json.dumps(request).encode())
    call.add_header("Idempotency-Key", dispatch.idempotency_key)
    with urllib.request.urlopen(call, timeout=dispatch.seconds_left()) as answer:
        return Success(json.load(answer)["receipt"])


@worker.job("invoice.pay", max_effect_timeout=60, network_bound=60)
def invoice(ctx, job):
    row = [job.tenant, job.operation]
    if job.operation != "invoice-16":
        row.append(ctx.effect("payment", pay, {"pay": job.operation}).receipt)
    ctx.publish(lambda tx: tx.execute("INSERT INTO payment VALUES (%s, %s, %s, 'worker')", row))


if __name__ == "__main__":
    with psycopg.connect(os.environ["FENCEPOST_DATABASE"]) as conn:
        submit(conn, "invoice.pay", tenant="acme", operation=sys.argv[1], args={"pay": sys.argv[1]})
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """One command of the page and what it prints there."""

    command: str
    output: tuple[str, ...]


def shown(page: str) -> Iterator[Shown]:
    """The commands of the page, in order."""
    for block in BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            command = lines.pop(0)
            while command.endswith("\\"):
                command = command[:-1] + lines.pop(0).strip()
            yield Shown(command, tuple(lines))


def fits(printed: str, expected: tuple[str, ...]) -> bool:
    """As the page has it; columns may be wider, and it may leave out lines, or a part of one."""
    pattern = ""
    for line in expected:
        if line == LEFT_OUT:
            pattern += r"(?:.*\n)*"
        else:
            pattern += ".*".join(re.escape(part) for part in squeezed(line).split(LEFT_OUT)) + r"\n"
    return re.fullmatch(pattern, "".join(squeezed(line) + "\n" for line in printed.splitlines())) is not None


def squeezed(line: str) -> str:
    """With single spaces, and none at its ends."""
    return re.sub(r"\s+", " ", line.strip())


def given(conn: Conn, operation: str) -> None:
    with conn.transaction():
        submit(conn, CLASS, tenant=TENANT, operation=operation, args={"pay": operation})


def lived(made: Restores, journal: Path, provider: Provider) -> Database:
    """A day of which a copy of the evening before is all that is left, and the journals."""
    a = Worker.with_journal("a", Client(provider.port), journal, machine_id())
    with made.live.connect(autocommit=True) as conn:
        conn.execute(DOMAIN)
        register_class(conn, POLICY)
        for operation in ("invoice-16", "invoice-17", "invoice-18"):
            given(conn, operation)
        a.claim(conn)
        a.publish(conn, "invoice-16")
        a.begin(conn, "invoice-17")
        a.begin(conn, "invoice-18")
        given(conn, "invoice-19")
    backup = made.backup()
    with made.live.connect(autocommit=True) as conn:
        a.record(conn, "invoice-17", "success", a.dispatch("invoice-17"))
        a.publish(conn, "invoice-17")
        given(conn, "invoice-20")
        a.claim(conn)
        for operation in ("invoice-19", "invoice-20"):
            a.begin(conn, operation)
            a.dispatch(operation)
    assert a.journal is not None
    a.journal.close()
    return made.restored(backup)


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


def test_the_page_leads_from_a_restored_copy_to_publishing_again(
    made: Restores, fencepost: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    with contextlib.ExitStack() as opened:
        provider = opened.enter_context(Provider())
        old = lived(made, tmp_path / JOURNAL, provider)
        more = {"PROVIDER": provider.url, "FENCEPOST_WORKER_JOURNAL": str(tmp_path / JOURNAL)}
        more["FENCEPOST_WORKER_HEALTH_ADDRESS"] = "127.0.0.1:0"
        dispatched = len(provider.accepted)
        commands = list(shown(PAGE.read_text()))
        for each in commands:
            asked = each.command.removesuffix(CODE)
            words = shlex.split(asked.removesuffix("&"))
            if words[0] == "python":
                with Child(
                    [str(tmp_path / words[1]), *words[2:]], output=tmp_path / "out", env=environment(old, more)
                ) as child:
                    assert child.wait() == 0, child.text
                printed = child.text
            elif asked.endswith("&"):
                assert len(provider.accepted) == dispatched
                opened.enter_context(running(old, *words[1:], folder=tmp_path, PYTHONPATH=path(tmp_path), **more))
                with old.connect(autocommit=True) as conn:
                    wait_for(lambda: conn.execute(OPEN).fetchone() == (0,), 60, "every job to be done")
                printed = ""
            else:
                assert words[0] == "fencepost", each
                done = fencepost(old, *words[1:])
                printed = done.out + done.err
                if asked != each.command:
                    printed += f"exit code {done.code}\n"
                else:
                    assert done.code == 0, (each.command, printed)
            assert fits(printed, each.output), f"$ {each.command}\n{printed}"
        with old.connect() as conn:
            paid = dict(conn.execute(PAID).fetchall())
        accepted = Counter(provider.accepted)
    assert len(commands) >= 20
    assert paid == {f"invoice-{n}": 1 for n in (16, 17, 18, 19, 20)}
    assert accepted == {effects.idempotency_key(TENANT, f"invoice-{n}", KEY): 1 for n in (17, 18, 19, 20)}


def path(folder: Path) -> str:
    """Where the worker's process looks for modules."""
    return ":".join([str(folder), *(entry for entry in sys.path if entry)])


def test_the_comparison_is_able_to_fail() -> None:
    assert fits("a   b\n  c 1\nx\ny\n", ("a b", "  c …", "…"))
    assert not fits("a   b\n  c 1\n", ("a b", "  d …"))
    assert not fits("a b\nmore\n", ("a b",))
