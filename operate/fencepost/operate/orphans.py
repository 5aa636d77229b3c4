"""`fencepost jobs orphans`: objects of a store in a folder or bucket that were never published, counted or removed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fencepost.jobs.file_store import FileStore
from fencepost.jobs.objects import ObjectStore
from fencepost.jobs.orphans import sweep
from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import ConfigError

__all__ = ["orphans"]


def orphans(
    folder: Annotated[Path | None, typer.Option("--folder", help="Where the object store is.")] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", help="Or its bucket, found as boto3 finds it.")] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="The folder in the bucket, with its slash.")] = "",
    older_than: Annotated[str, typer.Option("--older-than", help="Only objects put before that: 1d, 12h, 30m.")] = "1d",
    remove: Annotated[bool, typer.Option("--remove", help="Remove them. Default: count them.")] = False,
    lost: Annotated[
        bool, typer.Option("--lost", help="Also what was put before a recovery, which a lost publication may name.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Count objects that no manifest references, or remove them; needs the role maintenance."""
    grace = duration("older_than", older_than)
    assert grace is not None
    store = _store(folder, bucket, prefix)
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = asdict(sweep(conn, store, grace=grace.total_seconds(), remove=remove, lost=lost))
    if as_json:
        printing.as_json(found)
    else:
        printing.record("object store", found)


def _store(folder: Path | None, bucket: str | None, prefix: str) -> ObjectStore:
    if (folder is None) == (bucket is None):
        raise ConfigError("a store is in a folder or in a bucket", field="folder", hint="give --folder or --bucket")
    if folder is not None:
        return FileStore(folder)
    assert bucket is not None
    try:
        from fencepost.jobs.s3_store import S3Store
    except ModuleNotFoundError as error:
        raise ConfigError(f"a bucket needs {error.name}", field="bucket", hint="pip install 'fencepost[s3]'") from None
    return S3Store(bucket, prefix)
