"""G13: readers return the verified prefix, torn is told from corrupt, and repair moves aside before it cuts (B27)."""

import shutil
from pathlib import Path
from uuid import UUID

import pytest

from fencepost.jobs import journal_format as form
from fencepost.jobs.journal_records import Opened, Other, Record, Repaired, decode
from fencepost.jobs.journal_repair import repair
from fencepost.jobs.journal_scan import require_sound, scan
from fencepost.schemas.errors import JournalCorrupt, JournalForeign, JournalInUse, JournalTorn, JournalUnusable
from support.journals import BROKEN, FULL, HERE, QUICK, Faulty, crashed, fact, facts, read, writer, written

FIRST = "00000001.journal"


def image(folder: Path, data: bytes) -> Path:
    """A journal whose one segment has these bytes; nothing else of the folder stays."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / FIRST).write_bytes(data)
    return folder


def boundaries(data: bytes) -> list[int]:
    """Where the header and the whole frames end."""
    found = [form.HEADER_SIZE]
    while len(data) - found[-1] >= form.FRAME_SIZE:
        head = form.frame_head(data, found[-1])
        assert head.length is not None
        end = found[-1] + form.frame_size(head.length)
        if end > len(data):
            break
        found.append(end)
    return found


def test_what_a_crash_cut_at_any_byte_is_its_whole_records_and_a_repair_away_from_going_on(tmp_path: Path) -> None:
    data = (crashed(tmp_path / "crashed", 5) / FIRST).read_bytes()
    ends = boundaries(data)
    assert len(ends) == 7  # opened, and five facts
    for cut in range(len(data) + 1):
        folder = image(tmp_path / "cut", data[:cut])
        report, records = read(folder)
        whole = max(0, sum(end <= cut for end in ends) - 1)
        assert len(records) == whole and facts(records) == list(range(1, whole)), cut
        if cut in ends:
            assert report.damage is None, cut
        else:
            assert report.damage is not None and report.damage.kind == "torn", cut
            with pytest.raises(JournalTorn):
                writer(folder)
            assert (folder / FIRST).read_bytes() == data[:cut]
            done = repair(folder, actor="ann", machine=HERE, disk=QUICK)
            assert done is not None and done.offset == (0 if cut < ends[0] else max(e for e in ends if e <= cut))
            assert (folder / done.quarantine).read_bytes() == data[done.offset : cut]
        made = writer(folder)
        made.append(fact(99))
        made.close()
        report, after = read(folder)
        assert report.damage is None and facts(after) == [*range(1, whole), 99], cut
        assert sum(isinstance(r, Repaired) for r in after) == (cut not in ends)


def test_a_closed_journal_that_was_cut_anywhere_is_never_taken_for_whole(tmp_path: Path) -> None:
    data = (written(tmp_path / "closed", 5) / FIRST).read_bytes()
    assert scan(image(tmp_path / "cut", data)).damage is None  # the control
    for cut in range(len(data)):
        report, records = read(image(tmp_path / "cut", data[:cut]))
        assert report.damage is not None
        assert facts(records) == list(range(1, len(facts(records)) + 1))
        assert report.damage.kind == ("torn" if cut < form.HEADER_SIZE else "corrupt"), cut


@pytest.mark.parametrize("closed", [True, False])
def test_no_flipped_bit_gives_a_wrong_record_or_goes_unseen(tmp_path: Path, closed: bool) -> None:
    made = written(tmp_path / "j", 3) if closed else crashed(tmp_path / "j", 3)
    data = bytearray((made / FIRST).read_bytes())
    folder = image(tmp_path / "flipped", bytes(data))
    report, right = read(folder)
    assert report.damage is None and facts(right) == [1, 2, 3]  # the control
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        (folder / FIRST).write_bytes(data)
        report, records = read(folder)
        assert records == right[: len(records)], bit
        assert report.damage is not None and report.damage.kind == "corrupt", bit
        data[bit // 8] ^= 1 << bit % 8


def test_corruption_is_refused_by_writer_and_repair_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "j", 3)
    writer(shutil.copytree(folder, tmp_path / "control")).close()
    data = bytearray((folder / FIRST).read_bytes())
    data[form.HEADER_SIZE + form.FRAME_SIZE] ^= 1
    (folder / FIRST).write_bytes(data)
    for refused in (lambda: writer(folder), lambda: repair(folder, actor="ann", machine=HERE, disk=QUICK)):
        with pytest.raises(JournalCorrupt) as caught:
            refused()
        assert f"{FIRST} at byte {form.HEADER_SIZE} (checksum)" in str(caught.value)
    assert (folder / FIRST).read_bytes() == data
    assert sorted(p.name for p in folder.iterdir()) == [FIRST, "lock"]


def test_zeros_that_were_never_written_are_torn_and_anything_else_behind_the_last_record_is_not(tmp_path: Path) -> None:
    data = (crashed(tmp_path / "j", 2) / FIRST).read_bytes()
    for more, kind in (
        (bytes(3), "torn"),
        (bytes(5000), "torn"),
        (bytes(30) + b"x", "corrupt"),
        (b"x" * 40, "corrupt"),
    ):
        damage = scan(image(tmp_path / "more", data + more)).damage
        assert damage is not None and (damage.kind, damage.offset) == (kind, len(data)), more


def test_a_last_record_with_a_sector_that_was_not_written_is_torn_and_one_without_is_corrupt(tmp_path: Path) -> None:
    made = writer(tmp_path / "live")
    made.append(fact(1))
    before = (tmp_path / "live" / FIRST).stat().st_size
    made.append(Other(record="x" * 3000))
    data = bytearray((tmp_path / "live" / FIRST).read_bytes())
    made.close()
    sector = (before // 512 + 2) * 512
    assert sector + 512 < len(data)
    for until, behind, kind in (
        (sector + 512, b"", "torn"),
        (sector + 511, b"", "corrupt"),
        (sector + 512, b"another record", "corrupt"),
    ):
        spoilt = bytes(data[:sector]) + bytes(until - sector) + bytes(data[until:]) + behind
        damage = scan(image(tmp_path / "spoilt", spoilt)).damage
        assert damage is not None and (damage.kind, damage.offset) == (kind, before)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


def test_a_missing_swapped_foreign_or_older_segment_is_found(tmp_path: Path) -> None:
    sound = written(tmp_path / "sound", 30, segment_bytes=1024)
    other = written(tmp_path / "other", 30, segment_bytes=1024)
    count = len(segments(sound))
    assert count >= 4 and facts(read(sound)[1]) == list(range(1, 31))  # the control

    def spoilt(why: str, at: int, spoil: "dict[int, Path | None]") -> None:
        folder = shutil.copytree(sound, tmp_path / "spoilt", dirs_exist_ok=False)
        for number, source in spoil.items():
            path = segments(sound)[number - 1]
            (folder / path.name).unlink()
            if source is not None:
                shutil.copyfile(source, folder / path.name)
        report, records = read(folder)
        assert report.damage is not None and report.damage.kind == "corrupt"
        assert (report.damage.why, report.damage.segment) == (why, f"{at:08}.journal")
        assert facts(records) == list(range(1, len(facts(records)) + 1))
        with pytest.raises(JournalCorrupt):
            writer(folder)
        shutil.rmtree(folder)

    mine, theirs = segments(sound), segments(other)
    spoilt("segment_missing", 2, {1: None})
    spoilt("segment_missing", 3, {2: None})
    spoilt("segment_missing", count - 1, {count: None})
    spoilt("segment_of_another_place", 2, {2: mine[2], 3: mine[1]})
    spoilt("segment_does_not_follow", 2, {2: theirs[1]})
    spoilt("segment_does_not_follow", 2, {1: theirs[0]})
    spoilt("segment_does_not_follow", count, {count: theirs[count - 1]})


def test_frames_of_another_journal_do_not_chain_to_this_one(tmp_path: Path) -> None:
    mine = (crashed(tmp_path / "a", 3) / FIRST).read_bytes()
    theirs = (crashed(tmp_path / "b", 3) / FIRST).read_bytes()
    at = boundaries(mine)[2]
    damage = scan(image(tmp_path / "c", mine[:at] + theirs[at:])).damage
    assert damage is not None and (damage.kind, damage.why, damage.offset) == ("corrupt", "order", at)


def test_a_journal_of_another_machine_can_be_read_and_not_continued(tmp_path: Path) -> None:
    folder = written(tmp_path / "j", 2)
    report, records = read(folder, UUID(int=8))
    assert report.foreign and report.damage is None and facts(records) == [1, 2]
    with pytest.raises(JournalForeign):
        writer(folder, machine=UUID(int=8))
    with pytest.raises(JournalForeign):
        repair(folder, actor="ann", machine=UUID(int=8), disk=QUICK)
    writer(folder).close()
    assert not read(folder, HERE)[0].foreign


def test_repair_copies_durably_before_it_cuts_and_a_repair_that_was_interrupted_is_taken_up(tmp_path: Path) -> None:
    """Crash here: [K3] [K4]."""
    whole = crashed(tmp_path / "whole", 3)
    assert repair(whole, actor="ann", machine=HERE, disk=QUICK) is None  # the control: nothing to do
    data = (crashed(tmp_path / "j", 3) / FIRST).read_bytes()[:-9]
    folder = image(tmp_path / "torn", data)
    disk = Faulty()
    disk.fail_sync = BROKEN
    with pytest.raises(JournalUnusable):
        repair(folder, actor="ann", machine=HERE, disk=disk.disk)
    assert (folder / FIRST).read_bytes() == data  # the copy was not durable: nothing was cut
    disk.fail_sync, disk.fail_write = 0, FULL
    (folder / f"{FIRST}.quarantine-{boundaries(data)[-1]}").unlink()
    with pytest.raises(JournalUnusable, match="make room"):
        repair(folder, actor="ann", machine=HERE, disk=disk.disk)
    assert (folder / FIRST).read_bytes() == data

    done = repair(folder, actor="ann", machine=HERE, disk=QUICK)
    assert done is not None
    kept = [p for p in folder.iterdir() if "quarantine" in p.name and p.read_bytes() == data[done.offset :]]
    assert [p.name for p in kept] == [done.quarantine]
    report, records = read(folder)
    assert report.damage is None and facts(records) == [1, 2] and done.quarantine in report.quarantined
    (told,) = [r for r in records if isinstance(r, Repaired)]
    assert (told.actor, told.offset, told.length) == ("ann", done.offset, len(data) - done.offset)
    assert repair(folder, actor="ann", machine=HERE, disk=QUICK) is None


def test_a_journal_in_use_is_not_repaired_under_its_writer(tmp_path: Path) -> None:
    made = writer(tmp_path / "j")
    try:
        with pytest.raises(JournalInUse):
            repair(tmp_path / "j", actor="ann", machine=HERE, disk=QUICK)
    finally:
        made.close()


def test_records_of_a_later_version_are_kept_apart_and_what_is_no_record_is_damage(tmp_path: Path) -> None:
    assert decode(b'{"record":"weather","at":"t","sun":1}') == Other(record="weather", at="t")
    assert decode(b'{"record":"opened","at":"t","owner":"o","more":1}') == Opened(owner="o", at="t")
    for wrong in (
        b"[]",
        b"{}",
        b"\xff",
        b'{"record":"begin","at":"t"}',
        b'{"record":"not_begun","at":"t","effect_attempt":1,"reason":""}',
    ):
        with pytest.raises(ValueError):
            decode(wrong)


def test_an_empty_and_a_missing_folder_are_empty_journals(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        report, records = read(tmp_path / name)
        require_sound(report)
        assert records == [] and report.segments == ()
        writer(tmp_path / name).close()
        found: list[Record] = read(tmp_path / name)[1]
        assert [r.name for r in found] == ["opened", "closed"]
