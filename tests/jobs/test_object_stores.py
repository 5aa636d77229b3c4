"""What the port to object stores promises, of the store in a folder and of the one in a bucket alike."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from fencepost.jobs import s3_store
from fencepost.jobs.fence import fence
from fencepost.jobs.manifest import manifest, record
from fencepost.jobs.objects import ObjectStore, Stored
from fencepost.jobs.orphans import Swept, sweep
from fencepost.jobs.publish import publish
from fencepost.schemas.errors import ConfigError, Damaged, InvalidInput, ObjectGone
from support.database import Database
from support.jobs import Background, Conn, claimed, given, waiting
from support.processes import Child
from support.stores import Buckets, Folders, Stores

AS_HERE = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
SHA = hashlib.sha256(b"content").hexdigest()
GRACE = 3600.0
# More than is sent at once.
BIG = os.urandom(1 << 20) * 9


@pytest.fixture(params=["folder", "s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Each kind of store in turn."""
    return Folders(tmp_path) if request.param == "folder" else Buckets(request.getfixturevalue("s3"))


class Pipe(io.RawIOBase):
    """What can be read once, a little at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        return self._data.read(min(size, 1_000_000) if size >= 0 else size)


def test_what_was_put_is_read_listed_and_deleted_by_the_hash_of_its_content(stores: Stores) -> None:
    store = stores.create()
    for data in (b"content", io.BytesIO(b"content"), cast(BinaryIO, Pipe(b"content"))):
        stored = store.put(data)
        assert (stored.store, stored.object, stored.size) == (store.identity, SHA, 7)
    other, empty = store.put(BIG), store.put(b"")
    assert store.read(SHA) == b"content" and store.read(other.object) == BIG and store.read(empty.object) == b""
    assert {name for name, _ in stores.open().names()} == {SHA, other.object, empty.object}
    age = store.age(SHA)
    assert age is not None and age < 60
    for _ in range(2):
        store.delete(SHA)
    assert store.age(SHA) is None and {name for name, _ in store.names()} == {other.object, empty.object}
    with pytest.raises(ObjectGone):
        store.read(SHA)


def test_a_file_is_put_from_where_it_stands_whether_it_can_seek_or_not(stores: Stores) -> None:
    store = stores.create()
    for content in (b"content", BIG):
        name = hashlib.sha256(content).hexdigest()
        seeking = io.BytesIO(b"before" + content)
        seeking.seek(6)
        for data in (seeking, cast(BinaryIO, Pipe(content))):
            assert store.put(data) == Stored(store.identity, name, len(content))
            assert store.read(name) == content
            store.delete(name)
    assert stores.incoming() == 0


def test_an_object_put_again_is_young_and_whole_again(stores: Stores) -> None:
    store = stores.create()
    for content in (b"content", BIG):
        name = store.put(content).object
        stores.aged(name)
        age = store.age(name)
        assert age is not None and age > GRACE
        assert [found > GRACE for listed, found in store.names() if listed == name] == [True]
        stores.place(name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(Damaged) as error:
            store.read(name)
        assert error.value.field == "object"
        store.put(content)
        age = store.age(name)
        assert store.read(name) == content and age is not None and age < 60


def test_only_a_place_that_was_made_a_store_is_one_and_it_is_made_once(stores: Stores) -> None:
    stores.create("made")
    stores.marker("made").unlink()
    for wrong in ("none", "made"):
        with pytest.raises(ConfigError) as error:
            stores.open(wrong)
        assert error.value.field in ("folder", "prefix", "bucket")
    kept = stores.create().put(b"content")
    stores.marker().unlink()
    with ThreadPoolExecutor(8) as makers:
        made = {store.identity for store in makers.map(stores.create, ["store"] * 8)}
    assert made == {stores.open().identity} != {kept.store}
    assert stores.open().read(kept.object) == b"content" and stores.incoming() == 0
    stores.marker().write_text("")
    with pytest.raises(ConfigError):
        stores.open()


def test_a_name_that_is_no_hash_leads_nowhere(stores: Stores) -> None:
    store = stores.create()
    store.put(b"content")
    for name in ("", "..", "../" + SHA[3:], SHA.upper(), SHA + "0", SHA[:-1] + "/"):
        for act in (store.delete, store.age, store.read):
            with pytest.raises(InvalidInput):
                act(name)
    stores.place(SHA).with_name("notes.txt").write_text("not an object")
    assert [name for name, _ in store.names()] == [SHA]


def test_a_source_that_fails_leaves_nothing(stores: Stores) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == len(self.getvalue()):
                raise OSError("gone")
            return super().read(size)

    store = stores.create()
    for content in (b"", BIG):
        with pytest.raises(OSError, match="gone"):
            store.put(Failing(content))
        assert list(store.names()) == [] and stores.incoming() == 0


def test_many_who_put_the_same_at_a_time_put_one_object(stores: Stores) -> None:
    store = stores.create()
    begin = threading.Barrier(6)

    def put(content: bytes) -> Stored:
        begin.wait(60)
        return store.put(content)

    with ThreadPoolExecutor(6) as putting:
        found = set(putting.map(put, [b"content", BIG] * 3))
    assert found == {(small := store.put(b"content")), (big := store.put(BIG))}
    assert {name for name, _ in store.names()} == {small.object, big.object}
    assert store.read(SHA) == b"content" and store.read(big.object) == BIG and stores.incoming() == 0


DYING = """
import io, os, signal, sys
from pathlib import Path
from fencepost.jobs.file_store import FileStore
from fencepost.jobs.s3_store import S3Store
from support.stores import PREFIX, Buckets, client

class Dying(io.BytesIO):
    passes = 0
    def read(self, size=-1):
        part = super().read(size)
        if not part:
            os.kill(os.getpid(), signal.SIGKILL)
        return part

OPENED
store.put(Dying(b"content"))
"""
SENDING = """
import io, os, signal, sys
from fencepost.jobs.s3_store import S3Store
from support.stores import PREFIX, client

def die(**_):
    os.kill(os.getpid(), signal.SIGKILL)

connect = lambda: client(sys.argv[2], die, "before-send.s3.CompleteMultipartUpload")
S3Store(sys.argv[1], PREFIX, connect=connect).put(b"content" * 2_000_000)
"""


def test_a_put_that_is_killed_leaves_no_object_and_its_rest_is_tidied_when_it_is_old(
    stores: Stores, tmp_path: Path
) -> None:
    """Crash here: [M], before the object is there."""
    store = stores.create()
    script = SENDING if isinstance(stores, Buckets) else DYING.replace("OPENED", stores.script)
    with Child.script(script, folder=tmp_path, arguments=stores.arguments(), **AS_HERE) as child:
        assert child.wait() == -signal.SIGKILL
    assert list(store.names()) == [] and stores.incoming() == 1
    assert store.tidy(GRACE) == 0
    stores.aged_incoming()
    assert store.tidy(GRACE) == 1 and store.tidy(GRACE) == 0 and stores.incoming() == 0


def published(conn: Conn, store: ObjectStore, data: bytes, operation: str) -> Stored:
    given(conn, operation)
    f, stored = claimed(conn, operation).fence, store.put(data)
    publish(conn, f, lambda tx: record(tx, store, f, {"report": stored}))
    return stored


def test_only_orphans_older_than_the_grace_period_are_removed(database18: Database, stores: Stores) -> None:
    store = stores.create()
    with database18.connect(autocommit=True) as conn:
        kept = published(conn, store, b"kept", "kept")
        old, young = store.put(b"old"), store.put(b"young")
        for each in (kept, old):
            stores.aged(each.object)
        assert sweep(conn, store, grace=GRACE, remove=False) == Swept(3, 1, 0, 0)
        assert sweep(conn, store, grace=GRACE) == Swept(3, 1, 1, 0)
        assert {name for name, _ in store.names()} == {kept.object, young.object}
        assert sweep(conn, store, grace=GRACE) == Swept(2, 0, 0, 0)
        # The same content can be published afterwards, and is never an orphan then.
        again = published(conn, store, b"old", "op-1")
        stores.aged(again.object)
        assert sweep(conn, store, grace=GRACE) == Swept(3, 0, 0, 0) and store.read(again.object) == b"old"
        other = stores.create("other")
        stores.aged(other.put(b"old").object, "other")
        with pytest.raises(InvalidInput) as error:
            sweep(conn, other, grace=GRACE)
        assert error.value.field == "store" and [name for name, _ in other.names()] == [old.object]


def test_an_object_is_referenced_or_removed_never_both(database18: Database, stores: Stores) -> None:
    store = stores.create()
    with database18.connect(autocommit=True) as conn, database18.connect() as manual:
        published(conn, store, b"kept", "kept")
        given(conn)
        f, stored = claimed(conn).fence, store.put(b"late")
        stores.aged(stored.object)
        fence(manual, f)
        record(manual, store, f, {"a": stored})
        run = Background(database18, lambda c: sweep(c, store, grace=GRACE))
        waiting(conn, run.pid)
        manual.commit()
        assert run.outcome().removed == 0 and store.read(stored.object) == b"late"
        assert manifest(conn, "t", "op-1") == {"a": stored}

        gone = store.put(b"gone")
        stores.aged(gone.object)
        assert sweep(conn, store, grace=GRACE).removed == 1
        given(conn, "op-2")
        f = claimed(conn, "op-2").fence
        with pytest.raises(ObjectGone):
            publish(conn, f, lambda tx: record(tx, store, f, {"a": gone}))
        assert manifest(conn, "t", "op-2") == {}
        publish(conn, f, lambda tx: record(tx, store, f, {"a": store.put(b"gone")}))
        assert manifest(conn, "t", "op-2") == {"a": gone} and store.read(gone.object) == b"gone"


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(s3_store, "PAGE", 2)
    yield


@pytest.mark.usefixtures("small_pages")
def test_objects_are_listed_and_swept_page_by_page(database18: Database, stores: Stores) -> None:
    store = stores.create()
    with database18.connect(autocommit=True) as conn:
        names = {published(conn, store, bytes([i]), f"op-{i}").object for i in range(3)}
        orphans = {store.put(bytes([i])).object for i in range(3, 7)}
        for name in names | orphans:
            stores.aged(name)
        assert {name for name, _ in store.names()} == names | orphans
        assert sweep(conn, store, grace=GRACE) == Swept(7, 4, 4, 0)
        assert {name for name, _ in store.names()} == names
