"""The domain's own tables, in schema `reports`: the oracle of the demo's final check.

Invariant, kept by nothing here: one analysis and one report per submission. The tables have no unique constraint for
that, on purpose, so that a second publication would be seen and not hidden; the fence alone must prevent it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection

from fencepost.schemas.connect import connect

from .analysis import Analysis
from .documents import Document

__all__ = ["SCHEMA", "Submission", "insert_report", "insert_submission", "mark", "read_submission"]

SCHEMA: LiteralString = """
CREATE SCHEMA reports;
CREATE TABLE reports.submission (
    submission_id text PRIMARY KEY,
    package       text NOT NULL,
    version       text NOT NULL,
    kind          text NOT NULL CHECK (kind IN ('licence', 'metadata')),
    file          text NOT NULL,
    sha256        text NOT NULL,
    body          text NOT NULL,
    state         text NOT NULL DEFAULT 'accepted' CHECK (state IN ('accepted', 'scheduled', 'published')),
    accepted_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE reports.analysis (
    submission_id  text NOT NULL REFERENCES reports.submission,
    computed_by    uuid NOT NULL,
    words          integer NOT NULL,
    distinct_words integer NOT NULL,
    sentences      integer NOT NULL,
    syllables      integer NOT NULL,
    reading_ease   numeric NOT NULL,
    family         text NOT NULL,
    frequent       text[] NOT NULL
);
CREATE TABLE reports.report (
    submission_id text NOT NULL REFERENCES reports.submission,
    attempt       uuid NOT NULL,
    generation    bigint NOT NULL,
    worker        text NOT NULL,
    receipt       text NOT NULL,
    summary       text NOT NULL,
    published_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""
INSERT_SUBMISSION: LiteralString = """
INSERT INTO reports.submission (submission_id, package, version, kind, file, sha256, body)
VALUES (%(submission_id)s, %(package)s, %(version)s, %(kind)s, %(file)s, %(sha256)s, %(body)s)"""
READ_SUBMISSION: LiteralString = """
SELECT package, version, kind, file, body FROM reports.submission WHERE submission_id = %(submission_id)s"""
MARK: LiteralString = "UPDATE reports.submission SET state = %(state)s WHERE submission_id = %(submission_id)s"
INSERT_ANALYSIS: LiteralString = """
INSERT INTO reports.analysis (submission_id, computed_by, words, distinct_words, sentences, syllables, reading_ease,
                              family, frequent)
VALUES (%(submission_id)s, %(computed_by)s, %(words)s, %(distinct_words)s, %(sentences)s, %(syllables)s,
        %(reading_ease)s, %(family)s, %(frequent)s)"""
INSERT_REPORT: LiteralString = """
INSERT INTO reports.report (submission_id, attempt, generation, worker, receipt, summary)
VALUES (%(submission_id)s, %(attempt)s, %(generation)s, %(worker)s, %(receipt)s, %(summary)s)"""


@dataclass(frozen=True, slots=True)
class Submission:
    """A stored document under the identity of its request."""

    submission_id: str
    document: Document


def insert_submission(tx: Connection[Any], submission: Submission) -> None:
    """Stores the document in the caller's transaction."""
    d = submission.document
    values = {"package": d.package, "version": d.version, "kind": d.kind, "file": d.file, "sha256": d.sha256}
    tx.execute(INSERT_SUBMISSION, {"submission_id": submission.submission_id, "body": d.text, **values})


def read_submission(dsn: str, submission_id: str) -> Submission:
    """Reads a stored document over a connection of its own."""
    with connect(dsn, autocommit=True) as conn:
        row = conn.execute(READ_SUBMISSION, {"submission_id": submission_id}).fetchone()
    assert row is not None, "a job's submission is committed before the job"
    return Submission(submission_id, Document(*row))


def mark(tx: Connection[Any], submission_id: str, state: str) -> None:
    """Moves a submission on, in the caller's transaction."""
    tx.execute(MARK, {"submission_id": submission_id, "state": state})


def insert_report(
    tx: Connection[Any],
    submission_id: str,
    analysis: Analysis,
    *,
    computed_by: UUID,
    attempt: UUID,
    generation: int,
    worker: str,
    receipt: str,
    summary: str,
) -> None:
    """Publishes analysis and report in the caller's transaction; call it behind the fence only."""
    plain = analysis.plain()
    tx.execute(INSERT_ANALYSIS, {"submission_id": submission_id, "computed_by": computed_by, **plain})
    values = {"attempt": attempt, "generation": generation, "worker": worker, "receipt": receipt, "summary": summary}
    tx.execute(INSERT_REPORT, {"submission_id": submission_id, **values})
