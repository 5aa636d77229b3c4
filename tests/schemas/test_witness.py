"""Every witness keeps the same promises: one suite over the file and the second database."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from fencepost.schemas import arming
from fencepost.schemas import witness as port
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import ConfigError, Damaged, Unreachable, WitnessMismatch
from fencepost.schemas.witness import FileWitness, Mark, Record, Witness, confirm, intend
from fencepost.schemas.witness_database import DatabaseWitness
from support.database import Database, Databases

RECORD = Record(uuid4(), 7_000_000_000_000_000_000, 3, 16_384, Mark(5, uuid4(), 2))

# Holds the witness until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from fencepost.schemas.witness import FileWitness
from fencepost.schemas.witness_database import DatabaseWitness
kind, where = sys.argv[1:]
with (FileWitness(Path(where)) if kind == "file" else DatabaseWitness(where)).held():
    print("held", flush=True)
    time.sleep(60)
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A witness, and how somebody else reaches and damages the same one."""

    kind: Literal["file", "database"]
    where: str

    def one(self) -> Witness:
        return FileWitness(Path(self.where)) if self.kind == "file" else DatabaseWitness(self.where)

    def damage(self) -> None:
        if self.kind == "file":
            FileWitness(Path(self.where)).path.write_text('{"format": 1')
            return
        with connect(self.where) as conn:
            conn.execute("UPDATE fencepost_witness.record SET record = record || '{\"head\": null}'")


@pytest.fixture(params=["file", "database"])
def kept(request: pytest.FixtureRequest, databases18: Databases, tmp_path: Path) -> Iterator[Kept]:
    if request.param == "file":
        yield Kept("file", str(tmp_path / "outside"))
        return
    made = databases18.empty()
    yield Kept("database", made.dsn)
    databases18.drop(made)


def test_what_was_written_is_read_by_anybody_word_for_word(kept: Kept) -> None:
    witness = kept.one()
    assert not witness.exists()
    with pytest.raises(ConfigError):
        witness.read()
    with witness.held():
        witness.write(RECORD)
        told = intend(
            witness, replace(RECORD, restrictions=("tenant:ä", "class:a:b")), RECORD.head.rotating("tenant ü")
        )
        assert kept.one().read() == told and told.epoch == 3
        doubted = replace(told, recovering=Mark(9, uuid4(), 7))
        witness.write(doubted)
        assert kept.one().read() == doubted and doubted.epoch == 7
        witness.write(told)
        sealed = replace(told.head.sealing(), epoch=3)
        done = confirm(witness, told, sealed)
    assert kept.one().exists()
    assert kept.one().read() == done == replace(told, head=sealed, intended=None)


def test_a_damaged_record_is_told_from_a_lost_one(kept: Kept) -> None:
    witness = kept.one()
    with witness.held():
        witness.write(RECORD)
    assert kept.one().read() == RECORD  # the control
    kept.damage()
    with pytest.raises(Damaged):
        kept.one().read()


def test_one_process_holds_it_and_the_next_does_when_that_one_dies(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept.one().held():
        kept.one().exists()  # the control: nobody else holds it, and reading needs no hold
    with subprocess.Popen([sys.executable, "-c", HOLDER, kept.kind, kept.where], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        with monkeypatch.context() as patch:
            patch.setattr(port, "HELD_SECONDS", 0.2)
            with pytest.raises(Unreachable), kept.one().held():
                pass
        child.send_signal(signal.SIGKILL)
    with kept.one().held():
        pass


def test_a_database_arms_beats_and_re_arms_by_it(kept: Kept, database18: Database) -> None:
    witness = kept.one()
    arming.create_witness(database18.dsn, witness)
    with database18.connect(autocommit=True) as conn:
        assert arming.beat(conn, witness) == arming.read_tip(conn).seq
        conn.execute("DELETE FROM fencepost.ticket")
        assert not arming.ensure_armed(database18.dsn, kept.one()).already
        # What the file says is older by now.
        with pytest.raises(WitnessMismatch):
            arming.arm(database18.dsn, database18.state)


@pytest.mark.parametrize("kept", ["database"], indirect=True)
def test_a_holder_that_lost_its_hold_writes_nothing(kept: Kept) -> None:
    """A file's lock ends with its process; a connection may end before it."""
    one = kept.one()
    with one.held():
        one.write(RECORD)
    other = kept.one()
    with one.held():
        one.read()
        with connect(kept.where) as conn:
            conn.execute("UPDATE fencepost_witness.record SET revision = revision + 1")
        with pytest.raises(Unreachable):
            one.write(replace(RECORD, timeline=9))
    assert other.read() == RECORD


def test_a_record_of_an_earlier_version_is_read_as_one_without_rotations() -> None:
    old = port.dump(RECORD)
    for mark in (old["head"],):
        for key in ("epoch", "tenant", "sealed"):
            del mark[key]
    del old["restrictions"]

    found = port.load(json.loads(json.dumps(old)))

    assert found == replace(RECORD, head=replace(RECORD.head, epoch=1))
