"""Objects in a bucket: conditional writes, parts, what boto3 and the server say when they refuse, and no secret in it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSPreparedRequest

from fencepost.jobs.manifest import record
from fencepost.jobs.publish import publish
from fencepost.jobs.s3_store import OBJECTS, PART_BYTES, S3Store
from fencepost.schemas.errors import ConfigError, FencepostError, InvalidInput, Unreachable
from stack import places
from stack.obtain import Obtained
from stack.s3 import S3Server
from support.command_line import Result, run_here
from support.database import Database
from support.jobs import claimed, given
from support.processes import Child
from support.services import unique
from support.stores import PREFIX, Buckets, client

AS_HERE = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
BIG = os.urandom(1 << 20) * 9
PRIVATE = b"most private"
NAME = hashlib.sha256(BIG).hexdigest()


@pytest.fixture
def buckets(s3: Obtained[S3Server]) -> Buckets:
    return Buckets(s3)


def bucket(buckets: Buckets) -> str:
    return buckets.arguments()[0]


class Writes:
    """What was sent to the server to write, in order: the operation, and whether it was conditional."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, request: AWSPreparedRequest, event_name: str, **_: object) -> None:
        operation = event_name.rpartition(".")[2]
        if operation in ("PutObject", "CompleteMultipartUpload"):
            self.seen.append((operation, request.headers.get("If-None-Match") in ("*", b"*")))


@pytest.mark.parametrize("conditional", [True, False])
def test_only_what_is_known_to_be_there_is_written_over(buckets: Buckets, conditional: bool) -> None:
    buckets.create()
    writes = Writes()
    store = S3Store(bucket(buckets), PREFIX, connect=lambda: buckets.client(writes), conditional=conditional)
    for content, operation, again in (
        (b"content", "PutObject", [("PutObject", conditional), ("PutObject", False)][not conditional :]),
        (BIG, "CompleteMultipartUpload", [("CompleteMultipartUpload", False)]),
    ):
        store.put(content)
        assert writes.seen == [(operation, conditional)]
        writes.seen.clear()
        store.put(content)
        assert writes.seen == again
        writes.seen.clear()


def test_a_store_without_conditional_writes_is_made_and_opened(buckets: Buckets) -> None:
    made = buckets.create()
    assert S3Store.create(bucket(buckets), PREFIX, connect=buckets.client, conditional=False).identity == made.identity
    fresh = S3Store.create(bucket(buckets), "other/", connect=buckets.client, conditional=False)
    assert fresh.identity == S3Store(bucket(buckets), "other/", connect=buckets.client).identity != made.identity
    fresh.put(b"content")
    assert list(made.names()) == []


def test_parts_that_come_second_to_the_same_content_end_in_the_same_object(buckets: Buckets) -> None:
    first = buckets.create()

    def meanwhile(**_: object) -> None:
        if first.age(NAME) is None:
            first.put(BIG)

    writes = Writes()

    def connect() -> Any:
        made = buckets.client(meanwhile, "before-parameter-build.s3.CompleteMultipartUpload")
        made.meta.events.register("before-send.s3", writes)
        return made

    second = S3Store(bucket(buckets), PREFIX, connect=connect)
    assert second.put(io.BytesIO(BIG)) == first.put(BIG)
    assert writes.seen == [("CompleteMultipartUpload", True), ("CompleteMultipartUpload", False)]
    assert first.read(NAME) == BIG and buckets.incoming() == 0


def test_a_file_that_changes_while_it_is_put_becomes_no_object(buckets: Buckets) -> None:
    class Changing(io.BytesIO):
        passes = 0

        def seek(self, offset: int, whence: int = 0, /) -> int:
            self.passes += 1
            if self.passes == 2:
                self.getbuffer()[-1] ^= 1
            return super().seek(offset, whence)

    class Growing(Changing):
        def seek(self, offset: int, whence: int = 0, /) -> int:
            self.passes += 1
            if self.passes == 2:
                super(Changing, self).seek(0, 2)
                self.write(b"more")
            return super(Changing, self).seek(offset, whence)

    class Shrinking(Changing):
        def seek(self, offset: int, whence: int = 0, /) -> int:
            self.passes += 1
            if self.passes == 2:
                self.truncate(PART_BYTES + 5)
            return super(Changing, self).seek(offset, whence)

    store = buckets.create()
    for changing in (Changing(BIG), Growing(BIG), Shrinking(BIG)):
        with pytest.raises(InvalidInput) as error:
            store.put(changing)
        assert error.value.field == "data"
        assert list(store.names()) == [] and buckets.incoming() == 0
    assert store.put(io.BytesIO(BIG)).object == NAME and store.read(NAME) == BIG


def test_what_arrives_as_another_content_becomes_no_object(buckets: Buckets) -> None:
    def changed(request: Any, **_: object) -> None:
        del request.headers["x-amz-checksum-sha256"]
        request.headers["x-amz-checksum-sha256"] = base64.b64encode(bytes(32)).decode()

    buckets.create()
    store = S3Store(
        bucket(buckets), PREFIX, connect=lambda: buckets.client(changed, "before-sign.s3.PutObject"), conditional=False
    )
    with pytest.raises(Unreachable, match="BadDigest"):
        store.put(b"content")
    assert list(store.names()) == [] and buckets.open().put(b"content").size == 7


def test_an_upload_that_is_tidied_while_it_is_sent_can_be_tried_again(buckets: Buckets) -> None:
    tidying = buckets.create()
    tidied: list[int] = []

    def tidy(**_: object) -> None:
        if not tidied:
            tidied.append(tidying.tidy(-1.0))

    event = "before-parameter-build.s3.CompleteMultipartUpload"
    store = S3Store(bucket(buckets), PREFIX, connect=lambda: buckets.client(tidy, event))
    with pytest.raises(Unreachable, match="NoSuchUpload"):
        store.put(BIG)
    assert tidied == [1] and list(store.names()) == []
    assert store.read(store.put(BIG).object) == BIG


def told(error: FencepostError) -> str:
    """All that a log could show of it."""
    said = "".join(traceback.format_exception(error))
    return f"{said}{error!r}{pickle.loads(pickle.dumps(error))!r}"


def test_what_is_wrong_is_named_and_no_secret_is_told(buckets: Buckets, s3: Obtained[S3Server]) -> None:
    store = buckets.create()
    store.put(b"payload")
    scheme, _, rest = s3.address.partition("://")
    account, secret = rest.partition("@")[0].split(":")
    wrong = f"{scheme}://{account}:wrong-secret@{rest.partition('@')[2]}"
    nobody = f"{scheme}://nobody:{secret}@{rest.partition('@')[2]}"
    refused: list[tuple[str, str, str, str]] = [
        (bucket(buckets), PREFIX, wrong, "credentials"),
        (bucket(buckets), PREFIX, nobody, "credentials"),
        (unique("none"), PREFIX, s3.address, "bucket"),
        ("No", PREFIX, s3.address, "bucket"),
        (bucket(buckets), "none/", s3.address, "prefix"),
        (bucket(buckets), "results", s3.address, "prefix"),
        (bucket(buckets), "/", s3.address, "prefix"),
    ]
    for where, prefix, address, field in refused:
        with pytest.raises(ConfigError) as error:
            S3Store(where, prefix, connect=lambda a=address: client(a))  # type: ignore[misc]
        assert error.value.field == field and error.value.hint
        assert secret not in told(error.value) and "wrong-secret" not in told(error.value)


def test_a_bucket_that_goes_away_is_told_from_an_object_that_does(buckets: Buckets) -> None:
    store = buckets.create()
    kept = store.put(b"content").object
    made = buckets.client()
    for key in (PREFIX + OBJECTS + kept, PREFIX + ".fencepost-store"):
        made.delete_object(Bucket=bucket(buckets), Key=key)
    made.delete_bucket(Bucket=bucket(buckets))
    for act in (
        lambda: store.put(b"content"),
        lambda: store.put(BIG),
        lambda: store.read(kept),
        store.names().__next__,
    ):
        with pytest.raises(ConfigError) as error:
            act()
        assert error.value.field == "bucket"


def test_a_server_that_does_not_answer_is_unreachable_within_boto3s_own_limits(
    buckets: Buckets, s3: Obtained[S3Server]
) -> None:
    if s3.node is None:
        pytest.skip("a server that is not ours cannot be paused")
    store = buckets.create()
    kept = store.put(b"content").object

    hasty = S3Store(bucket(buckets), PREFIX, connect=lambda: client(s3.address, read_timeout=5.0))
    acts: list[Callable[[], object]] = [lambda: hasty.put(PRIVATE), lambda: hasty.age(kept), lambda: hasty.read(kept)]
    s3.node.pause()
    try:
        with ThreadPoolExecutor(3) as acting:
            for outcome in [acting.submit(act) for act in acts]:
                with pytest.raises(Unreachable) as error:
                    outcome.result(60)
                assert error.value.field == "store" and PRIVATE.decode() not in told(error.value)
    finally:
        s3.node.resume()
    assert store.read(kept) == b"content"
    with pytest.raises(Unreachable):
        S3Store("bucket", connect=lambda: client(f"http://a:b@127.0.0.1:{places.free_port()}"))


LARGE = """
import resource, sys
from fencepost.jobs.s3_store import S3Store
from support.stores import PREFIX, client

store = S3Store(sys.argv[1], PREFIX, connect=lambda: client(sys.argv[2]))
store.put(bytes(20_000_000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open(sys.argv[3], "rb") as file:
    size = store.put(file).size
assert size == 160 << 20, size
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print("bounded" if grown < 120 << 10 else f"grown by {grown} KiB", flush=True)
"""


def test_a_large_file_is_never_in_memory_as_a_whole(buckets: Buckets, tmp_path: Path) -> None:
    buckets.create()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(160 << 20)
    arguments = [*buckets.arguments(), str(tmp_path / "large")]
    with Child.script(LARGE, folder=tmp_path, arguments=arguments, **AS_HERE) as child:
        child.says("bounded", within=90)


def test_the_command_counts_and_removes_orphans_of_a_bucket(
    database18: Database, buckets: Buckets, s3: Obtained[S3Server]
) -> None:
    store = buckets.create()
    where = urlsplit(s3.address)
    access = {
        "AWS_ENDPOINT_URL_S3": f"http://{where.hostname}:{where.port}",
        "AWS_ACCESS_KEY_ID": str(where.username),
        "AWS_SECRET_ACCESS_KEY": str(where.password),
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def orphaned(*options: str) -> Result:
        return run_here(database18, "jobs", "orphans", "--older-than", "1h", "--json", *options, **access)

    with database18.connect(autocommit=True) as conn:
        given(conn)
        f, kept, old = claimed(conn).fence, store.put(b"kept"), store.put(b"old")
        publish(conn, f, lambda tx: record(tx, store, f, {"report": kept}))
    for each in (kept, old):
        buckets.aged(each.object)
    place = ("--bucket", bucket(buckets), "--prefix", PREFIX)
    assert json.loads(orphaned(*place).out) == {"objects": 2, "orphans": 1, "removed": 0, "temporary": 0, "doubtful": 0}
    assert json.loads(orphaned(*place, "--remove").out)["removed"] == 1
    assert [name for name, _ in store.names()] == [kept.object]
    for wrong, field in (((), "folder"), ((*place, "--folder", "x"), "folder"), (place[:2], "prefix")):
        refused = orphaned(*wrong)
        assert refused.code == 2 and field in refused.line
