"""A manifest never lacks an object, and only what no manifest references is ever removed (G8)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from fencepost.jobs import orphans
from fencepost.jobs.fence import Fence, fence
from fencepost.jobs.file_store import FileStore
from fencepost.jobs.manifest import manifest, record
from fencepost.jobs.objects import Stored
from fencepost.jobs.orphans import Swept, sweep
from fencepost.jobs.publish import publish
from fencepost.schemas.errors import InvalidInput, NotFenced, ObjectGone, OperationConflict, StaleFence
from support.command_line import run_here
from support.database import Database, Databases
from support.jobs import Background, Conn, claimed, expire, given, show, waiting
from support.processes import Child, wait_for
from support.restores import recovered, restores

AS_HERE = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
GRACE = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore.create(tmp_path / "store")


def aged(store: FileStore, name: str) -> None:
    """The object was put two hours ago."""
    ago = time.time() - 7200
    os.utime(store._path(name), (ago, ago))  # pyright: ignore[reportPrivateUsage]


def published(conn: Conn, store: FileStore, data: bytes = b"kept", operation: str = "kept") -> Stored:
    """A published object, two hours old."""
    given(conn, operation)
    f, stored = claimed(conn, operation).fence, store.put(data)
    publish(conn, f, lambda tx: record(tx, store, f, {"report": stored}))
    aged(store, stored.object)
    return stored


def the_fence(conn: Conn, operation: str = "op-1") -> Fence:
    given(conn, operation)
    return claimed(conn, operation).fence


def swept(database: Database, store: FileStore) -> Swept:
    with database.connect(autocommit=True) as conn:
        return sweep(conn, store, grace=GRACE)


def test_objects_are_published_with_the_result_or_not_at_all(database: Database, store: FileStore) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as manual:
        f = the_fence(conn)
        first, second = store.put(b"one"), store.put(b"two")
        entries = {"a.pdf": first, "b.pdf": second, "copy.pdf": first}
        with pytest.raises(NotFenced):
            record(conn, store, f, entries)
        with suppress(ZeroDivisionError), manual.transaction():
            fence(manual, f)
            record(manual, store, f, entries)
            raise ZeroDivisionError
        assert manifest(conn, "t", "op-1") == {}
        with manual.transaction():
            fence(manual, f)
            for _ in range(2):
                record(manual, store, f, entries)
            with pytest.raises(NotFenced), manual.transaction():
                record(manual, store, the_fence(conn, "op-2"), {"a.pdf": first})
            with pytest.raises(OperationConflict) as error, manual.transaction():
                record(manual, store, f, {"a.pdf": second})
            assert error.value.field == "name"
        assert manifest(conn, "t", "op-1") == entries and manifest(conn, "u", "op-1") == {}
        publish(conn, f, lambda tx: record(tx, store, f, {"c.pdf": store.put(b"three")}))
        assert sorted(manifest(conn, "t", "op-1")) == ["a.pdf", "b.pdf", "c.pdf", "copy.pdf"]
        for change in ("UPDATE fencepost.manifest SET name = 'x'", "DELETE FROM fencepost.manifest"):
            with pytest.raises(InvalidInput, match="append-only"):
                conn.execute(change.encode())


def test_a_manifest_of_what_is_not_in_the_store_is_refused(
    database18: Database, store: FileStore, tmp_path: Path
) -> None:
    with database18.connect(autocommit=True) as conn:
        f = the_fence(conn)
        stored = store.put(b"one")
        wrong: list[tuple[dict[str, Stored], str]] = [
            ({}, "objects"),
            ({"a": Stored(store.identity, "no hash", 1)}, "objects"),
            ({"a": Stored(store.identity, stored.object, -1)}, "objects"),
            ({" ": stored}, "name"),
            ({"a": FileStore.create(tmp_path / "other").put(b"one")}, "store"),
        ]
        for entries, field in wrong:
            with pytest.raises(InvalidInput) as error:
                publish(conn, f, lambda tx, e=entries: record(tx, store, f, e))  # type: ignore[misc]
            assert error.value.field == field
        store.delete(stored.object)
        with pytest.raises(ObjectGone):
            publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))
        assert manifest(conn, "t", "op-1") == {} and show(conn) == "running"
        store.put(b"one")
        publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))
        assert manifest(conn, "t", "op-1") == {"a": stored}


def test_only_orphans_older_than_the_grace_period_are_removed(database: Database, store: FileStore) -> None:
    with database.connect(autocommit=True) as conn:
        kept, old, young = published(conn, store), store.put(b"old"), store.put(b"young")
        aged(store, old.object)
        assert sweep(conn, store, grace=GRACE, remove=False) == Swept(3, 1, 0, 0)
        assert {name for name, _ in store.names()} == {kept.object, old.object, young.object}
        assert sweep(conn, store, grace=GRACE) == Swept(3, 1, 1, 0)
        assert {name for name, _ in store.names()} == {kept.object, young.object}
        assert sweep(conn, store, grace=GRACE) == Swept(2, 0, 0, 0)
        assert conn.execute("SELECT object FROM fencepost.object").fetchall() == [(kept.object,)]
        # The same content can be published afterwards.
        aged(store, published(conn, store, b"old", "op-1").object)
        assert sweep(conn, store, grace=GRACE) == Swept(3, 0, 0, 0)


def test_what_a_lost_publication_may_name_stays_until_somebody_has_looked(
    databases18: Databases, store: FileStore
) -> None:
    with restores(databases18) as made:
        with made.live.connect(autocommit=True) as conn:
            published(conn, store)
        backup = made.backup()
        with made.live.connect(autocommit=True) as conn:
            lost = published(conn, store, b"lost", "later")
            assert sweep(conn, store, grace=GRACE) == Swept(2, 0, 0, 0)
        old = made.restored(backup)
        recovered(old)
        with old.connect(autocommit=True) as conn:
            for remove in (False, True):
                assert sweep(conn, store, grace=GRACE, remove=remove) == Swept(2, 1, 0, 0, doubtful=1)
            assert store.read(lost.object) == b"lost"
            # A removal that had begun when the copy was made, of the same content.
            mark = (store.identity, lost.object)
            conn.execute("INSERT INTO fencepost.object VALUES (%s, %s, clock_timestamp() - interval '2 days')", mark)
            assert sweep(conn, store, grace=GRACE) == Swept(2, 1, 0, 0, doubtful=1)
            assert store.read(lost.object) == b"lost"
            assert sweep(conn, store, grace=GRACE, remove=False) == Swept(2, 1, 0, 0, doubtful=1)
            # The control: what was put after the recovery, and forgotten.
            conn.execute("UPDATE fencepost.installation SET recovered_at = recovered_at - interval '3 hours'")
            assert sweep(conn, store, grace=GRACE, remove=False) == Swept(2, 1, 0, 0)
            conn.execute("UPDATE fencepost.installation SET recovered_at = recovered_at + interval '3 hours'")
            assert sweep(conn, store, grace=GRACE, lost=True) == Swept(2, 1, 1, 0)


def test_a_store_and_a_database_that_do_not_belong_together_are_refused(
    database18: Database, store: FileStore, tmp_path: Path
) -> None:
    with database18.connect(autocommit=True) as conn, database18.connect() as manual:
        published(conn, store)
        other = FileStore.create(tmp_path / "other")
        strange = other.put(b"old")
        aged(other, strange.object)
        for using, of, grace, field in (
            (conn, other, GRACE, "store"),
            (conn, store, 59.0, "grace"),
            (manual, store, GRACE, "connection"),
        ):
            with pytest.raises(InvalidInput) as error:
                sweep(using, of, grace=grace)
            assert error.value.field == field
        assert other.age(strange.object) is not None
        assert sweep(conn, store, grace=GRACE) == Swept(1, 0, 0, 0)


def test_an_orphan_that_a_publication_is_about_to_reference_stays(database: Database, store: FileStore) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as manual:
        published(conn, store)
        f, stored = the_fence(conn), store.put(b"late")
        aged(store, stored.object)
        fence(manual, f)
        record(manual, store, f, {"a": stored})
        run = Background(database, lambda c: sweep(c, store, grace=GRACE))
        waiting(conn, run.pid)
        manual.commit()
        assert run.outcome().removed == 0
        assert store.read(stored.object) == b"late" and manifest(conn, "t", "op-1") == {"a": stored}


def test_a_publication_of_what_is_just_being_removed_is_refused_and_works_when_it_is_put_again(
    database: Database, tmp_path: Path
) -> None:
    reached, go = threading.Event(), threading.Event()

    class Slow(FileStore):
        def delete(self, name: str) -> None:
            reached.set()
            assert go.wait(60)
            super().delete(name)

    store = FileStore.create(tmp_path / "store")
    with database.connect(autocommit=True) as conn:
        published(conn, store)
        f, stored = the_fence(conn), store.put(b"late")
        aged(store, stored.object)
        run = Background(database, lambda c: sweep(c, Slow(tmp_path / "store"), grace=GRACE))
        assert reached.wait(60)
        for _ in range(2):
            with pytest.raises(ObjectGone):
                publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))
            store.put(b"late")
        assert swept(database, store).removed == 0
        go.set()
        assert run.outcome().removed == 1
        with pytest.raises(ObjectGone):
            publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))
        store.put(b"late")
        publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))
        assert store.read(stored.object) == b"late"


def test_an_orphan_that_is_put_again_before_its_removal_stays(database18: Database, tmp_path: Path) -> None:
    class Touched(FileStore):
        def age(self, name: str) -> float | None:
            self.put(b"again")
            return super().age(name)

    store = FileStore.create(tmp_path / "store")
    with database18.connect(autocommit=True) as conn:
        published(conn, store)
        stored = store.put(b"again")
        aged(store, stored.object)
        assert sweep(conn, Touched(tmp_path / "store"), grace=GRACE) == Swept(2, 1, 0, 0)
        f = the_fence(conn)
        publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))


def test_a_removal_that_was_given_up_holds_its_content_until_a_day_later(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash here: [R], before the object goes and after it."""

    class Dying(FileStore):
        after = False

        def delete(self, name: str) -> None:
            if self.after:
                super().delete(name)
            raise ZeroDivisionError

    store = FileStore.create(tmp_path / "store")
    with database18.connect(autocommit=True) as conn:
        published(conn, store)
        for after in (False, True):
            dying = Dying(tmp_path / "store")
            dying.after = after
            stored = store.put(b"orphan")
            aged(store, stored.object)
            with pytest.raises(ZeroDivisionError):
                sweep(conn, dying, grace=GRACE)
            f = the_fence(conn, f"op-{after}")
            with pytest.raises(ObjectGone):
                publish(conn, f, lambda tx, f=f, s=stored: record(tx, store, f, {"a": s}))  # type: ignore[misc]
            assert swept(database18, store).removed == 0
            conn.execute("UPDATE fencepost.object SET condemned_at = condemned_at - interval '25 hours'")
            assert swept(database18, store).orphans == 1
            assert conn.execute("SELECT count(*) FROM fencepost.object").fetchone() == (1,)
            assert store.age(stored.object) is None
        store.put(b"orphan")
        publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))

        # Whoever was held up after the mark for too long does not act on it.
        slow = store.put(b"slow")
        aged(store, slow.object)
        monkeypatch.setattr(orphans, "ACT_WITHIN_SECONDS", -1.0)
        assert sweep(conn, store, grace=GRACE).removed == 0 and store.age(slow.object) is not None


def test_a_mark_is_taken_over_after_a_day_and_ended_by_its_maker_only(database18: Database, store: FileStore) -> None:
    which = {"store": store.identity, "object": "0" * 64}

    def condemned(conn: Conn) -> object:
        row = conn.execute(orphans.CONDEMN, which).fetchone()
        return None if row is None else row[0]

    with database18.connect(autocommit=True) as conn:
        first = condemned(conn)
        assert first is not None and condemned(conn) is None
        conn.execute("UPDATE fencepost.object SET condemned_at = condemned_at - interval '25 hours'")
        second = condemned(conn)
        assert second is not None and second != first
        for mark, left in ((first, 1), (second, 0)):
            conn.execute(orphans.FORGET, {**which, "mark": mark})
            assert conn.execute("SELECT count(*) FROM fencepost.object").fetchone() == (left,)


WORKING = """
import sys, time
from pathlib import Path
import psycopg
from fencepost.jobs.claim import claim
from fencepost.jobs.fence import complete, fence
from fencepost.jobs.file_store import FileStore
from fencepost.jobs.manifest import record
from support.jobs import CLASS

store = FileStore(Path(sys.argv[2]))
with psycopg.connect(sys.argv[1]) as conn:
    (job,) = claim(conn, "victim", [CLASS], 1)
    conn.commit()
    stored = store.put(b"by the victim")
    if sys.argv[3] == "recorded":
        fence(conn, job.fence)
        record(conn, store, job.fence, {"report": stored})
        complete(conn, job.fence)
    print("here", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("where", ["put", "recorded"])
def test_a_worker_killed_between_put_and_publication_leaves_an_orphan_and_no_manifest(
    database18: Database, store: FileStore, tmp_path: Path, where: str
) -> None:
    """Crash here: [M], after the rename."""
    with database18.connect(autocommit=True) as conn:
        published(conn, store)
        given(conn)
        script = Child.script(
            WORKING, folder=tmp_path, arguments=[database18.dsn, str(tmp_path / "store"), where], **AS_HERE
        )
        with script as victim:
            victim.says("here")
            victim.kill()
        assert victim.alive is False and manifest(conn, "t", "op-1") == {}
        (orphan,) = {name for name, age in store.names() if age < GRACE}
        assert store.read(orphan) == b"by the victim"
        assert swept(database18, store).removed == 0
        aged(store, orphan)
        # The server notices that the victim is gone in its own time.
        wait_for(lambda: _free(conn), 20, "the victim's transaction to end")
        assert swept(database18, store).removed == 1
        expire(conn)
        f = claimed(conn).fence
        publish(conn, f, lambda tx: record(tx, store, f, {"report": store.put(b"by the successor")}))
        (published_now,) = manifest(conn, "t", "op-1").values()
        aged(store, published_now.object)
        assert swept(database18, store).removed == 0 and store.read(published_now.object) == b"by the successor"


def _free(conn: Conn) -> bool:
    try:
        conn.execute("SELECT FROM fencepost.job FOR UPDATE NOWAIT")
    except psycopg.errors.LockNotAvailable:
        return False
    return True


def test_a_publication_refused_at_its_commit_leaves_an_orphan_and_no_manifest(
    database18: Database, store: FileStore
) -> None:
    with database18.connect(autocommit=True) as conn:
        published(conn, store)
        f, stored = the_fence(conn), store.put(b"stale")
        expire(conn)
        with pytest.raises(StaleFence):
            publish(conn, f, lambda tx: record(tx, store, f, {"a": stored}))
        assert manifest(conn, "t", "op-1") == {}
        aged(store, stored.object)
        assert sweep(conn, store, grace=GRACE).removed == 1


def test_the_command_counts_orphans_and_removes_them_when_told(
    database18: Database, store: FileStore, tmp_path: Path
) -> None:
    def orphaned(*options: str) -> dict[str, int]:
        done = run_here(
            database18, "jobs", "orphans", "--folder", str(tmp_path / "store"), "--older-than", "1h", "--json", *options
        )
        assert done.code == 0, done.err
        found: dict[str, int] = json.loads(done.out)
        return found

    with database18.connect(autocommit=True) as conn:
        kept, old = published(conn, store), store.put(b"old")
        aged(store, old.object)
        assert orphaned() == {"objects": 2, "orphans": 1, "removed": 0, "temporary": 0, "doubtful": 0}
        assert orphaned("--remove")["removed"] == 1
        assert [name for name, _ in store.names()] == [kept.object]
        wrong = run_here(database18, "jobs", "orphans", "--folder", str(tmp_path))
        assert wrong.code == 2 and "folder" in wrong.line
