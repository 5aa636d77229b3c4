"""What a recovery is shown of a journal: every begin that may have been, once, however many there are; and no folder that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from fencepost.jobs import journal_begins, journal_evidence
from fencepost.jobs.journal_evidence import Evidence
from fencepost.jobs.journal_records import Acknowledged, Begin, NotBegun, Outcome
from fencepost.schemas import arming
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.witness import FileWitness
from support.database import Databases
from support.journals import writer
from support.restores import Restores, recovered, restores


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


def begin(number: int) -> Begin:
    """A begin that tells its number."""
    return Begin(
        tenant="t",
        operation=f"op-{number}",
        job_class="c",
        effect_key="e1",
        kind="opaque",
        effect_attempt=UUID(int=number),
        attempt=UUID(int=1),
        generation=1,
        epoch=1,
        request_digest="00" * 32,
    )


def numbers(folder: Path) -> tuple[list[int], list[int]]:
    """The begins that are given, and how many at a time."""
    found, sizes = list[int](), list[int]()

    def take(begins: list[Begin]) -> None:
        found.extend(b.effect_attempt.int for b in begins)
        sizes.append(len(begins))

    Evidence(folder).each(take)
    return found, sizes


def test_every_begin_is_given_once_however_many_and_in_how_many_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_begins, "MATCHED_MAX", 3)
    monkeypatch.setattr(journal_evidence, "BATCH", 4)
    folder = tmp_path / "journal"
    journal = writer(folder, segment_bytes=1024)
    for number in range(1, 21):
        journal.note(begin(number))
        if number % 5:
            journal.note(Outcome(effect_attempt=UUID(int=number), outcome="success"))
    journal.note(begin(21))
    journal.note(NotBegun(effect_attempt=UUID(int=21), reason="ZF020"))
    journal.note(Acknowledged(effect_attempt=UUID(int=20), actor="ann", reason="looked into"))
    evidence = Evidence(folder)
    journal.close()
    assert len(list(folder.glob("*.journal"))) > 2

    assert numbers(folder) == (list(range(1, 21)), [4] * 5)

    # What is written meanwhile belongs to whoever comes next.
    later = writer(folder, segment_bytes=1024)
    later.note(begin(30))
    later.close()
    given = list[Begin]()
    evidence.each(given.extend)
    assert [b.effect_attempt.int for b in given] == list(range(1, 21))


def test_a_recovery_is_shown_more_begins_than_a_worker_keeps_in_mind(
    made: Restores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_begins, "MATCHED_MAX", 3)
    journal = writer(tmp_path / "journal")
    for number in range(1, 8):
        journal.note(begin(number))
        journal.note(Outcome(effect_attempt=UUID(int=number), outcome="success"))
    journal.close()
    old = made.restored(made.backup())

    done = recovered(old, journals=[tmp_path / "journal"])

    assert [b.operation for b in done.lost] == [f"op-{number}" for number in range(1, 8)]


def test_a_folder_that_is_no_journal_recovers_nothing(made: Restores, tmp_path: Path) -> None:
    writer(tmp_path / "journals" / "worker-1").close()
    old = made.restored(made.backup())
    told = FileWitness(old.state).read()

    for wrong in (tmp_path / "journals" / "worker-l", tmp_path / "journals"):
        for dry_run in (True, False):
            with pytest.raises(ConfigError) as caught:
                recovered(old, journals=[tmp_path / "journals" / "worker-1", wrong], dry_run=dry_run)
            assert caught.value.field == "journal" and str(wrong) in str(caught.value)

    assert FileWitness(old.state).read() == told
    with old.connect(autocommit=True) as conn:
        assert not arming.read_tip(conn).armed
    assert recovered(old, journals=[tmp_path / "journals" / "worker-1"]).presented == 0  # the control
