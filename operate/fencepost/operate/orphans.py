"""`fencepost jobs orphans`: objects of a store in a folder that were never published, counted or removed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fencepost.jobs.file_store import FileStore
from fencepost.jobs.orphans import sweep
from fencepost.operate import printing, settings
from fencepost.operate.durations import duration
from fencepost.schemas.contract import connect

__all__ = ["orphans"]


def orphans(
    folder: Annotated[Path, typer.Option("--folder", help="Where the object store is.")],
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
    with connect(settings.load().dsn(), autocommit=True) as conn:
        found = asdict(sweep(conn, FileStore(folder), grace=grace.total_seconds(), remove=remove, lost=lost))
    if as_json:
        printing.as_json(found)
    else:
        printing.record("object store", found)
