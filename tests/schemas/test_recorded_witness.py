"""Witness files of every format that is read, recorded once, are read by today's code; newer ones are refused, unknown members kept.

The recordings are evidence and are never made again: who changes the format adds a file of the new one beside them.
"""

import json
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from fencepost.schemas import arming
from fencepost.schemas import witness as port
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import NewerFormat
from fencepost.schemas.witness import FileWitness, Mark, Record, intend
from support.database import Database

RECORDED = Path(__file__).parent / "recorded"
INSTALLATION = UUID("5b6f1c0e-8f1c-4a73-9f0c-2c8f3f1d9a10")
NONCE = UUID("7d2a5c1e-1111-4222-8333-944455556666")
NEXT = UUID("7d2a5c1e-1111-4222-8333-944455556667")
EXPECTED = {
    "witness-1": Record(
        INSTALLATION,
        7400000000000000001,
        3,
        16384,
        Mark(41, NONCE, 7),
        Mark(42, NEXT, 8, "acme ü"),
        ("tenant:acme ü", "principal:bob"),
    ),
    "witness-1-first": Record(INSTALLATION, 7400000000000000001, 1, 16384, Mark(3, NONCE)),
}


def given(folder: Path, name: str) -> FileWitness:
    folder.mkdir(exist_ok=True)
    (folder / "witness.json").write_bytes((RECORDED / f"{name}.json").read_bytes())
    return FileWitness(folder)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_witness_is_read_word_for_word(tmp_path: Path, name: str) -> None:
    assert given(tmp_path, name).read() == EXPECTED[name]


def test_each_format_that_is_written_is_recorded_and_loses_nothing_when_it_is_written_again() -> None:
    recorded = json.loads((RECORDED / f"witness-{port.FORMAT}.json").read_text())

    again = port.dump(port.load(recorded))

    assert again | recorded == again, "a version that went back would miss something"


def test_a_newer_format_is_refused_and_stays(database18: Database) -> None:
    witness = FileWitness(database18.state)
    arming.arm(database18.dsn, witness)  # the control
    newer = json.loads(witness.path.read_text()) | {"format": port.FORMAT + 1}
    witness.path.write_text(json.dumps(newer))

    with pytest.raises(NewerFormat, match="do not remove it") as caught:
        arming.arm(database18.dsn, witness)

    assert caught.value.field == "FENCEPOST_STATE"
    assert json.loads(witness.path.read_text()) == newer


def test_what_a_newer_version_has_added_outlives_the_beats_of_an_older_one(database18: Database) -> None:
    witness = FileWitness(database18.state)
    added = {"guards": [{"since": 7}]}
    witness.path.write_text(json.dumps(json.loads(witness.path.read_text()) | added))

    with connect(database18.dsn, autocommit=True) as conn:
        seq = arming.beat(conn, witness)

    found = json.loads(witness.path.read_text())
    assert found["head"]["seq"] == seq and found["guards"] == added["guards"]
    with witness.held():
        record = witness.read()
        assert intend(witness, replace(record, timeline=9), record.head.following()).others == added
