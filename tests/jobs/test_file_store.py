"""Objects in a folder: named by their content, whole or not there, the same store for everybody."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from fencepost.jobs import file_store
from fencepost.jobs.file_store import FileStore
from fencepost.jobs.objects import ObjectStore
from fencepost.schemas.errors import ConfigError, Damaged, InvalidInput, ObjectGone
from support.processes import Child

AS_HERE = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
SHA = hashlib.sha256(b"content").hexdigest()


def test_what_was_put_is_read_listed_and_deleted_by_the_hash_of_its_content(tmp_path: Path) -> None:
    store: ObjectStore = FileStore.create(tmp_path / "store")
    for data in (b"content", io.BytesIO(b"content")):
        stored = store.put(data)
        assert (stored.store, stored.object, stored.size) == (store.identity, SHA, 7)
    big = os.urandom(3 * file_store.CHUNK_BYTES + 1)
    other = store.put(io.BytesIO(big))
    assert store.read(SHA) == b"content" and store.read(other.object) == big
    assert {name for name, _ in store.names()} == {SHA, other.object}
    age = store.age(SHA)
    assert age is not None and age < 60
    for _ in range(2):
        store.delete(SHA)
    assert store.age(SHA) is None and [name for name, _ in store.names()] == [other.object]
    with pytest.raises(ObjectGone):
        store.read(SHA)


def test_an_object_put_again_is_young_and_whole_again(tmp_path: Path) -> None:
    store = FileStore.create(tmp_path)
    store.put(b"content")
    place = tmp_path / SHA[:2] / SHA
    os.utime(place, (0, 0))
    age = store.age(SHA)
    assert age is not None and age > 1e6
    place.write_bytes(b"contents")
    with pytest.raises(Damaged):
        store.read(SHA)
    store.put(b"content")
    age = store.age(SHA)
    assert store.read(SHA) == b"content" and age is not None and age < 60


def test_only_a_folder_that_was_made_a_store_is_one_and_it_is_made_once(tmp_path: Path) -> None:
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError) as error:
            FileStore(wrong)
        assert error.value.field == "folder"
    made: list[str] = []
    makers = [
        threading.Thread(target=lambda: made.append(FileStore.create(tmp_path / "store").identity)) for _ in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(20)
    assert len(made) == 8 and set(made) == {FileStore(tmp_path / "store").identity}
    assert list((tmp_path / "store" / file_store.INCOMING).iterdir()) == []
    (tmp_path / "store" / file_store.MARKER).write_text("")
    with pytest.raises(ConfigError):
        FileStore(tmp_path / "store")


def test_a_name_that_is_no_hash_leads_nowhere(tmp_path: Path) -> None:
    store = FileStore.create(tmp_path)
    for name in ("", "..", "../" + SHA[3:], SHA.upper(), SHA + "0", SHA[:-1] + "/"):
        with pytest.raises(InvalidInput):
            store.delete(name)
    (tmp_path / SHA[:2]).mkdir()
    (tmp_path / SHA[:2] / "notes.txt").write_text("not an object")
    assert list(store.names()) == []


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("gone")

    store = FileStore.create(tmp_path)
    with pytest.raises(OSError, match="gone"):
        store.put(Failing())
    assert list(store.names()) == [] and list((tmp_path / file_store.INCOMING).iterdir()) == []


DYING = """
import io, os, signal, sys
from pathlib import Path
from fencepost.jobs.file_store import FileStore

class Dying(io.BytesIO):
    def read(self, size=-1):
        part = super().read(10)
        if not part:
            os.kill(os.getpid(), signal.SIGKILL)
        return part

FileStore(Path(sys.argv[1])).put(Dying(b"content" * 10))
"""


def test_a_put_that_is_killed_leaves_no_object_and_its_rest_is_tidied_when_it_is_old(tmp_path: Path) -> None:
    """Crash here: [M], before the rename."""
    store = FileStore.create(tmp_path / "store")
    script = Child.script(DYING, folder=tmp_path, arguments=[str(tmp_path / "store")], **AS_HERE)
    with script as child:
        assert child.wait() == -signal.SIGKILL
    assert list(store.names()) == []
    (left,) = (tmp_path / "store" / file_store.INCOMING).iterdir()
    assert store.tidy(3600) == 0
    ago = time.time() - 7200
    os.utime(left, (ago, ago))
    assert store.tidy(3600) == 1 and store.tidy(3600) == 0
