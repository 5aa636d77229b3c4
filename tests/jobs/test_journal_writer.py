"""G13: what was acknowledged survives a kill at any moment; one writer; a full or failing disk is told, and never retried."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from fencepost.jobs.journal_disk import Disk, Lock
from fencepost.jobs.journal_records import Begin, NotBegun, Outcome
from fencepost.jobs.journal_writer import Writer
from fencepost.schemas.errors import (
    ConfigError,
    InvalidInput,
    JournalCorrupt,
    JournalInUse,
    JournalTorn,
    JournalUnusable,
)
from support.journals import BROKEN, FULL, HERE, Faulty, fact, facts, read, writer
from support.processes import Child
from support.workers import CHILD_PATH

FIRST = "00000001.journal"

KILLED = """
import os, signal, sys
from pathlib import Path
from fencepost.jobs.journal_disk import Disk
from fencepost.jobs.journal_repair import repair
from support.journals import HERE, QUICK, fact, facts, read, writer

def appends(folder, tell, calls, half):
    left = calls
    def counted():
        nonlocal left
        left -= 1
        return left < 0
    def write(file, data, offset):
        if counted():
            if half:
                os.pwrite(file, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwrite(file, data, offset)
    def fsync(file):
        if counted():
            os.kill(os.getpid(), signal.SIGKILL)
    for start in (1, 7):
        made = writer(folder, disk=Disk(write=write, fsync=fsync), segment_bytes=1024)
        for number in range(start, start + 6):
            made.append(fact(number))
            os.write(tell, bytes([number]))
        made.close()

def killed(folder, calls, half):
    hear, tell = os.pipe()
    if (child := os.fork()) == 0:
        os.close(hear)
        appends(folder, tell, calls, half)
        os._exit(0)
    os.close(tell)
    acknowledged = list(os.fdopen(hear, "rb").read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), acknowledged

root = Path(sys.argv[1])
points = torn = 0
for half in (False, True):
    code, calls = -9, 0
    while code != 0:
        folder = root / f"{half}-{calls}"
        code, acknowledged = killed(folder, calls, half)
        assert code in (0, -9), code
        points += code == -9
        report, records = read(folder)
        assert report.damage is None or report.damage.kind == "torn", report.damage
        found = facts(records)
        assert found[: len(acknowledged)] == acknowledged, (found, acknowledged)
        assert len(found) - len(acknowledged) in (0, 1)
        if report.damage is not None:
            torn += 1
            assert repair(folder, actor="ann", machine=HERE, disk=QUICK) is not None
        made = writer(folder, segment_bytes=1024)
        made.append(fact(99))
        made.close()
        report, records = read(folder)
        assert report.damage is None and facts(records) == [*found, 99]
        assert not any(segment.online for segment in report.segments)
        calls += 1
    assert acknowledged == list(range(1, 13))
print("points", points, "torn", torn, "segments", len(report.segments), flush=True)
"""


def test_a_kill_before_any_call_to_the_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Crash here: [K2]. A real SIGKILL at every write and every sync, and in the middle of every write."""
    with Child.script(KILLED, folder=tmp_path, arguments=[str(tmp_path / "journals")], **CHILD_PATH) as child:
        assert child.wait(60) == 0, child.text
        words = child.text.split()
    told = {words[i]: int(words[i + 1]) for i in range(0, len(words), 2)}
    assert told["points"] >= 80 and told["torn"] >= 12 and told["segments"] >= 3


HOLDING = """
import sys, time
from pathlib import Path
from support.journals import fact, writer

made = writer(Path(sys.argv[1]))
made.append(fact(1))
print("writing", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_until_the_first_is_gone_even_if_it_was_killed(tmp_path: Path) -> None:
    """CHECKS 27."""
    folder = tmp_path / "j"
    with Child.script(HOLDING, folder=tmp_path, arguments=[str(folder)], **CHILD_PATH) as child:
        child.says("writing")
        with pytest.raises(JournalInUse) as caught:
            writer(folder)
        assert caught.value.field == "journal" and "folder of its own" in str(caught.value)
        assert facts(read(folder)[1]) == [1]
    made = writer(folder)
    made.append(fact(2))
    made.close()
    report, records = read(folder)
    assert report.damage is None and facts(records) == [1, 2]


def test_a_writer_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    first = writer(tmp_path / "j")
    lock = Lock(tmp_path / "j")
    with pytest.raises(JournalInUse):
        lock.take(within=0)
    first.append(fact(1))
    first.close()
    lock.take(within=0)
    lock.release()


@pytest.mark.parametrize("name", [FIRST, "lock"])
def test_a_writer_whose_file_was_replaced_or_removed_appends_nothing(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "j"
    made = writer(folder)
    made.append(fact(1))
    copy = tmp_path / "copy"
    shutil.copyfile(folder / name, copy)
    before = (folder / FIRST).read_bytes()
    os.replace(copy, folder / name)
    for _ in range(2):
        with pytest.raises((JournalInUse, JournalUnusable)):
            made.append(fact(2))
    made.close()
    assert (folder / FIRST).read_bytes() == before
    again = writer(folder)
    again.append(fact(3))
    again.close()
    assert facts(read(folder)[1]) == [1, 3]


FORKED = """
import os, sys
from pathlib import Path
from fencepost.schemas.errors import JournalInUse
from support.journals import fact, facts, read, writer

made = writer(Path(sys.argv[1]))
made.append(fact(1))
if (child := os.fork()) == 0:
    try:
        made.append(fact(2))
    except JournalInUse:
        made.close()
        os._exit(3)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
made.append(fact(3))
made.close()
report, records = read(Path(sys.argv[1]))
print("child", code, "facts", facts(records), report.damage, flush=True)
"""


def test_a_forked_child_appends_nothing_and_its_parent_goes_on(tmp_path: Path) -> None:
    with Child.script(FORKED, folder=tmp_path, arguments=[str(tmp_path / "j")], **CHILD_PATH) as child:
        assert child.wait() == 0
        assert "child 3 facts [1, 3] None" in child.text


def test_a_sync_that_failed_is_not_repeated_and_the_handle_is_dead(tmp_path: Path) -> None:
    """CHECKS 26."""
    disk = Faulty()
    made = writer(tmp_path / "j", disk=disk.disk)
    assert made.append(fact(1)) == 2
    disk.fail_sync = BROKEN
    with pytest.raises(JournalUnusable) as caught:
        made.append(fact(2))
    assert "could not be synced" in str(caught.value)
    disk.fail_sync, syncs = 0, disk.syncs
    for _ in range(2):
        with pytest.raises(JournalUnusable, match="dead"):
            made.append(fact(3))
    made.close()
    assert disk.syncs == syncs
    again = writer(tmp_path / "j", disk=disk.disk)
    again.append(fact(4))
    again.close()
    report, records = read(tmp_path / "j")
    # The second may or may not be there: nobody was told that it is.
    assert report.damage is None and facts(records) == [1, 2, 4]


def test_a_disk_that_cannot_sync_what_an_earlier_writer_left_is_not_written_to(tmp_path: Path) -> None:
    writer(tmp_path / "j").close()
    disk = Faulty()
    disk.fail_sync = BROKEN
    with pytest.raises(JournalUnusable):
        writer(tmp_path / "j", disk=disk.disk)
    assert [r.name for r in read(tmp_path / "j")[1]] == ["opened", "closed"]


@pytest.mark.parametrize(("error", "torn"), [(FULL, False), (BROKEN, True)])
def test_half_a_record_on_a_full_disk_is_taken_back_and_on_a_broken_one_is_a_torn_tail(
    tmp_path: Path, error: int, torn: bool
) -> None:
    disk = Faulty()
    made = writer(tmp_path / "j", disk=disk.disk)
    made.append(fact(1))
    disk.fail_write = error
    with pytest.raises(JournalUnusable) as caught:
        made.append(fact(2))
    assert ("make room" in str(caught.value)) != torn
    made.close()
    report, records = read(tmp_path / "j")
    assert facts(records) == [1] and (report.damage is not None) == torn
    disk.fail_write = 0
    if torn:
        with pytest.raises(JournalTorn):
            writer(tmp_path / "j", disk=disk.disk)
    else:
        writer(tmp_path / "j", disk=disk.disk).close()


def test_a_rotation_without_room_is_told_and_taken_up_by_the_next_writer(tmp_path: Path) -> None:
    disk = Faulty()
    made = writer(tmp_path / "j", disk=disk.disk, segment_bytes=1024)
    number = 0

    def fill_up() -> None:
        # Only the new segment's header is written between these two syncs.
        if b'"rotated"' in (tmp_path / "j" / FIRST).read_bytes():
            disk.fail_write = FULL

    disk.before_sync = fill_up
    with pytest.raises(JournalUnusable, match="rotated"):
        for number in range(1, 100):
            made.append(fact(number))
    made.close()
    report, records = read(tmp_path / "j")
    assert report.damage is None and facts(records) == list(range(1, number)) and len(report.segments) == 1
    disk.fail_write, disk.before_sync = 0, None
    again = writer(tmp_path / "j", disk=disk.disk, segment_bytes=1024)
    again.append(fact(number))
    again.close()
    report, records = read(tmp_path / "j")
    assert report.damage is None and facts(records) == list(range(1, number + 1)) and len(report.segments) == 2


LIMITED = """
import resource, sys
from pathlib import Path
from fencepost.schemas.errors import JournalUnusable
from support.journals import fact, facts, read, writer

folder = Path(sys.argv[1])
made = writer(folder)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
acknowledged = []
try:
    while True:
        made.append(fact(len(acknowledged) + 1))
        acknowledged.append(len(acknowledged) + 1)
except JournalUnusable as error:
    print(error, flush=True)
made.close()
report, records = read(folder)
assert report.damage is None and facts(records) == acknowledged and len(acknowledged) > 5
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
made = writer(folder)
made.append(fact(99))
made.close()
assert facts(read(folder)[1]) == [*acknowledged, 99]
print("goes on", flush=True)
"""


def test_a_file_that_may_not_grow_keeps_what_was_acknowledged_and_goes_on_once_it_may(tmp_path: Path) -> None:
    with Child.script(LIMITED, folder=tmp_path, arguments=[str(tmp_path / "j")], **CHILD_PATH) as child:
        assert child.wait() == 0, child.text
        assert "File too large" in child.text and "goes on" in child.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; only root may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    done = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
        )
        if shutil.which("mount")
        else None
    )
    if done is None or done.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_file_system_keeps_what_was_acknowledged_and_goes_on_once_there_is_room(small_disk: Path) -> None:
    """CHECKS 26, on a real disk that is full; in the middle of segments and at their ends."""
    (small_disk / "filler").write_bytes(bytes(20_000))
    made = Writer(small_disk / "j", owner="test", machine=HERE, segment_bytes=8192)
    acknowledged: list[int] = []
    with pytest.raises(JournalUnusable, match="make room"):
        while True:
            made.append(fact(len(acknowledged) + 1))
            acknowledged.append(len(acknowledged) + 1)
    made.close()
    report, records = read(small_disk / "j")
    assert report.damage is None and facts(records) == acknowledged and len(acknowledged) > 100
    with pytest.raises(JournalUnusable):
        Writer(small_disk / "j", owner="test", machine=HERE, segment_bytes=8192)
    (small_disk / "filler").unlink()
    again = Writer(small_disk / "j", owner="test", machine=HERE, segment_bytes=8192)
    again.append(fact(0))
    again.close()
    report, records = read(small_disk / "j")
    assert report.damage is None and facts(records) == [*acknowledged, 0]


def begin(number: int) -> Begin:
    return Begin(
        tenant="t",
        operation=f"op-{number}",
        job_class="c",
        effect_key="e",
        effect_attempt=UUID(int=number),
        kind="opaque",
        generation=1,
        attempt=HERE,
        epoch=1,
        request_digest="00" * 32,
    )


def test_unmatched_begins_are_carried_along_however_old_and_older_segments_are_verified_without_being_read(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "j"
    made = writer(folder, segment_bytes=4096)
    for number in range(1, 101):
        made.note(begin(number))
        if number not in (1, 50):
            made.note(Outcome(effect_attempt=UUID(int=number), outcome="success"))
    made.close()
    segments = sorted(folder.glob("*.journal"))
    assert len(segments) > 8
    again = writer(folder, segment_bytes=4096)
    assert [b.operation for b in again.unmatched()] == ["op-1", "op-50"]
    assert [b.operation for b in again.matched()][-1] == "op-100" and len(again.matched()) < 30
    again.note(Outcome(effect_attempt=UUID(int=50), outcome="unknown"))
    again.close()
    assert read(folder)[0].damage is None
    again = writer(folder, segment_bytes=4096)
    assert [b.operation for b in again.unmatched()] == ["op-1"]
    again.close()

    data = bytearray(segments[1].read_bytes())
    data[600] ^= 1
    segments[1].write_bytes(data)
    with pytest.raises(JournalCorrupt, match="00000003.journal at byte 0 .segment_does_not_follow"):
        writer(folder)
    damage = read(folder)[0].damage
    assert damage is not None and (damage.segment, damage.why) == ("00000002.journal", "checksum")


def test_more_unmatched_begins_than_a_segment_should_hold_do_not_make_one_for_each_record(tmp_path: Path) -> None:
    made = writer(tmp_path / "j", segment_bytes=1024)
    for number in range(1, 41):
        made.note(begin(number))
    made.close()
    report, _ = read(tmp_path / "j")
    assert report.damage is None and 3 <= len(report.segments) <= 8
    again = writer(tmp_path / "j", segment_bytes=1024)
    assert len(again.unmatched()) == 40
    again.close()


def test_threads_append_side_by_side_each_record_once_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made = Writer(tmp_path / "j", owner="test", machine=HERE, segment_bytes=4096, disk=Disk(fsync=lambda _: None))
    numbers: dict[int, int] = {}

    def work(first: int) -> None:
        for number in range(first, first + 50):
            numbers[number] = made.append(fact(number))

    threads = [threading.Thread(target=work, args=(n * 100,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    report, records = read(tmp_path / "j")
    assert report.damage is None and len(report.segments) > 5
    assert facts(records) == sorted(numbers, key=numbers.__getitem__) and len(numbers) == 400


def test_a_folder_that_cannot_be_one_and_a_record_that_is_too_large_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        writer(tmp_path / "file")
    assert caught.value.field == "journal"
    made = writer(tmp_path / "j")
    with pytest.raises(InvalidInput, match="larger than 65536"):
        made.append(NotBegun(effect_attempt=HERE, reason="x" * 70_000))
    made.append(fact(1))
    made.close()
    assert facts(read(tmp_path / "j")[1]) == [1]
