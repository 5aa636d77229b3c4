"""Journals of every format that is read, recorded once by the version that wrote it, are read by today's code; newer ones are refused.

The recordings are evidence and are never made again: who changes the format adds the journal of the new one beside them.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from fencepost.jobs import journal_format as form
from fencepost.jobs.authority import By
from fencepost.jobs.journal_begins import Begins
from fencepost.jobs.journal_records import encode
from fencepost.jobs.journal_repair import repair
from fencepost.jobs.journal_scan import Frame, require_sound, scan
from fencepost.jobs.recovery import recover
from fencepost.schemas.errors import NewerFormat
from support.database import Database
from support.journals import HERE, QUICK, fact, facts, read, writer, written

RECORDED = Path(__file__).parent / "recorded"


def newer(folder: Path, *, longer: int = 0) -> Path:
    """The last segment's header as a later version may have it: another number, more in it, verified as its own."""
    path = max(folder.glob("*.journal"))
    data = path.read_bytes()
    size = form.HEADER_SIZE + longer
    covered = bytearray(data[: form.STATE_AT - 4] + b"\7" * longer)
    struct.pack_into("<HH", covered, 8, max(form.READABLE) + 1, size)
    state = data[form.STATE_AT : form.HEADER_SIZE]
    path.write_bytes(
        bytes(covered) + struct.pack("<I", form.checksum(bytes(covered))) + state + data[form.HEADER_SIZE :]
    )
    return folder


def test_each_readable_format_has_a_recorded_journal_and_what_is_written_is_readable() -> None:
    assert form.VERSION in form.READABLE
    assert {f"journal-{version}" for version in form.READABLE} <= {path.name for path in RECORDED.iterdir()}


@pytest.mark.parametrize("version", form.READABLE)
def test_a_recorded_journal_is_read_word_for_word(version: int) -> None:
    folder = RECORDED / f"journal-{version}"
    frames: list[Frame] = []
    begins = Begins()

    def take(frame: Frame) -> None:
        frames.append(frame)
        begins.take(frame)

    require_sound(scan(folder, take))

    expected: list[dict[str, Any]] = json.loads((folder / "records.json").read_text())
    assert {
        "opened",
        "begin",
        "not_begun",
        "outcome",
        "presented",
        "acknowledged",
        "repaired",
        "rotated",
        "closed",
    } == {each["record"] for each in expected}
    found = [{"seq": f.seq, "segment": f.segment} | json.loads(encode(f.record)) for f in frames]
    # A later version may know more of a record, never less.
    assert [now | each for each, now in zip(expected, found, strict=True)] == found
    assert [b.effect_attempt.int & 0xFF for b in begins.unmatched.values()] == [4]


def test_the_frames_of_the_format_that_is_written_are_those_that_were_recorded() -> None:
    """Else a version that went back could not read what this one wrote."""
    for path in sorted((RECORDED / f"journal-{form.VERSION}").glob("*.journal")):
        data = path.read_bytes()
        decoded = form.Header.decode(data)
        assert not isinstance(decoded, str)
        header, crc = decoded
        assert header.encode(data[form.STATE_AT]) == data[: form.HEADER_SIZE]
        at, seq = form.HEADER_SIZE, header.first_seq
        while at < len(data):
            head = form.frame_head(data, at)
            assert head.length is not None
            payload = data[at + form.FRAME_SIZE : at + form.FRAME_SIZE + head.length]
            made, crc = form.frame(seq, crc, payload)
            assert made == data[at : at + len(made)]
            at, seq = at + len(made), seq + 1


def test_a_recorded_journal_is_gone_on_with(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / f"journal-{form.VERSION}", tmp_path / "j")
    made = writer(tmp_path / "j")
    made.append(fact(7))
    made.close()

    report, records = read(tmp_path / "j")

    require_sound(report)
    assert facts(records)[-1] == 7


@pytest.mark.parametrize("longer", [0, 24])
def test_a_segment_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path, longer: int) -> None:
    folder = written(tmp_path / "j", 5, segment_bytes=1024)
    before = facts(read(folder)[1])
    written(folder, 30, segment_bytes=1024, start=6)
    report, records = read(folder)
    require_sound(report)  # the control
    assert len(report.segments) > 1
    newer(folder, longer=longer)
    data = {path.name: path.read_bytes() for path in folder.glob("*.journal")}

    report, records = read(folder)

    assert report.damage is not None and report.damage.kind == "newer"
    assert facts(records)[: len(before)] == before, "what older versions wrote is still read"
    for act in (
        lambda: require_sound(report),
        lambda: writer(folder),
        lambda: repair(folder, actor="ann", machine=HERE, disk=QUICK),
    ):
        with pytest.raises(NewerFormat, match="newer version") as caught:
            act()
        assert caught.value.field == "journal" and "that version" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.glob("*.journal")} == data


def test_a_newer_number_in_a_header_that_does_not_verify_is_damage(tmp_path: Path) -> None:
    folder = newer(written(tmp_path / "j", 1))
    assert read(folder)[0].damage == scan(folder).damage and scan(folder).damage is not None
    path = folder / "00000001.journal"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)

    damage = scan(folder).damage

    assert damage is not None and (damage.kind, damage.why) == ("corrupt", "header")


def test_a_recovery_refuses_a_newer_journal_before_anything_is_changed(database18: Database, tmp_path: Path) -> None:
    folder = newer(written(tmp_path / "j", 1))
    by = By(actor="ann", reason="drill")
    witness = database18.state / "witness.json"
    before = witness.read_bytes()

    with pytest.raises(NewerFormat):
        recover(database18.dsn, database18.state, by, journals=[folder])

    assert witness.read_bytes() == before
    assert recover(database18.dsn, database18.state, by, journals=[written(tmp_path / "k", 1)]).already  # the control
