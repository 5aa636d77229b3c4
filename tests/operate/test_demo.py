"""The demo, once and to its end, on the embedded broker; and its final check, which must see what it is there for."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest

from support.database import Database

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def play(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the demo as a newcomer does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_RELAY")}
    environment = {**kept, "REPORTS_LEASE_SECONDS": "10", "REPORTS_EFFECT_SECONDS": "8"}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "reports" / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=environment,
    )


@pytest.mark.timeout(180)
def test_demo_runs_to_its_end_and_its_last_line_says_so() -> None:
    done = play("--broker", "embedded")

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.rstrip().splitlines()[-1]
    assert "CHECK PASSED" in last
    assert "published exactly once" in last and "accepted at most once" in last
    assert done.stderr == ""


@pytest.mark.timeout(180)
def test_broken_provider_is_told_clearly() -> None:
    done = play("--provider-port", "9")

    assert done.returncode == 1
    (failed,) = [line for line in done.stdout.splitlines() if "failed: " in line]
    assert "connection refused" in failed and "http://127.0.0.1:9" in failed
    assert "12 submissions were accepted" in failed and "0 are published" in failed and "12 jobs are poison" in failed
    assert "failed_before_dispatch" in done.stdout
    assert done.stderr == ""


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `reports` can be imported, as by the demo's processes."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


@pytest.fixture
def reports(database18: Database, examples: None) -> Any:
    """The demo's module `domain`, with its tables in this database."""
    domain = importlib.import_module("reports.domain")
    with database18.connect() as conn:
        conn.execute(cast(bytes, domain.SCHEMA.encode()))
    return domain


def publish(conn: psycopg.Connection[Any], reports: Any, operation: str, receipt: str) -> None:
    analysis = importlib.import_module("reports.analysis").analyse("Permission is hereby granted.")
    same = uuid4()
    reports.insert_report(
        conn, operation, analysis, computed_by=same, attempt=same, generation=1, worker="w", receipt=receipt, summary=""
    )


def test_final_check_sees_what_it_is_there_for(database18: Database, reports: Any) -> None:
    documents = importlib.import_module("reports.documents")
    violations = importlib.import_module("reports.checks").violations
    found = documents.find(2)
    assert len({d.sha256 for d in found}) == 2
    ledger = [{"receipt": f"r{n}", "key": f"k{n}", "operation": f"op-{n}"} for n in range(2)]
    with database18.connect() as conn:
        for number, document in enumerate(found):
            reports.insert_submission(conn, reports.Submission(f"op-{number}", document))
        publish(conn, reports, "op-0", "r0")
        assert violations(conn, ledger) == ["op-1 was published 0 times, with 0 analyses"]
        publish(conn, reports, "op-1", "r1")
        assert violations(conn, ledger) == []

        assert len(violations(conn, [*ledger, {"receipt": "r2", "key": "k1", "operation": "op-1"}])) == 2
        assert "never submitted" in violations(conn, [*ledger, {"receipt": "r2", "key": "k2", "operation": "op-2"}])[0]
        assert "did not give for it" in violations(conn, ledger[:1])[0]
        publish(conn, reports, "op-1", "r1")
        assert violations(conn, ledger) == ["op-1 was published 2 times, with 2 analyses"]


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("Permission is hereby granted, free of charge, to any person ... without restriction", "MIT"),
        ("Redistribution and use in source and\n   binary forms, with or without", "BSD"),
        ("Apache License\n Version 2.0, January 2004", "Apache-2.0"),
        ("GNU LESSER GENERAL PUBLIC LICENSE, supplements the GNU General Public License", "LGPL"),
        ("Name: x\nLicense-Expression: MIT OR Apache-2.0\n", "declares MIT OR Apache-2.0"),
        ("nothing of the kind", "unknown"),
    ],
)
def test_licence_family_is_told_by_the_text(examples: None, text: str, family: str) -> None:
    assert importlib.import_module("reports.analysis").licence_family(text) == family


def test_reading_ease_is_that_of_flesch(examples: None) -> None:
    found = importlib.import_module("reports.analysis").analyse("The cat sat on the mat. It was happy.")

    # 9 words, 2 sentences, 10 syllables: 206.835 - 1.015 * 4.5 - 84.6 * 10 / 9.
    assert (found.words, found.sentences, found.syllables, found.reading_ease) == (9, 2, 10, 108.3)
