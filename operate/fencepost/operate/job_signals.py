"""`fencepost jobs signal`: tells a job something by hand; who did is kept with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fencepost.jobs.signals import PAYLOAD_BYTES_MAX, signal
from fencepost.operate import printing, settings
from fencepost.operate.effects import login_name
from fencepost.operate.refusals import ExitCode
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import InvalidInput

__all__ = ["signal_"]


def signal_(
    tenant: Annotated[str, typer.Option("--tenant")],
    operation: Annotated[str, typer.Option("--operation")],
    job_class: Annotated[str, typer.Option("--class", help="The kind of job.")],
    name: Annotated[str, typer.Option("--name", help="The signal, as the handler waits for it.")],
    payload_file: Annotated[
        Path | None, typer.Option("--payload-file", help="JSON of at most 64 KiB. Default: null.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Repeating the command under it changes nothing.")] = None,
    actor: Annotated[str | None, typer.Option(help="Who says so. Default: the login name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Tell a job that waits, or will wait, what it waits for. Exit code 1 when it was done already."""
    payload = None if payload_file is None else _read(payload_file)
    with connect(settings.load().dsn()) as conn:
        heard = signal(
            conn,
            tenant=tenant,
            operation=operation,
            job_class=job_class,
            name=name,
            payload=payload,
            key=key,
            actor=actor or login_name(),
        )
    if as_json:
        printing.as_json(
            {"tenant": tenant, "operation": operation, "class": job_class, "signal": name, "result": heard}
        )
    else:
        printing.say(f"{job_class} of operation {operation}: signal {name} {heard}")
    if heard == "too_late":
        raise typer.Exit(int(ExitCode.REFUSED))


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            raw = file.read(PAYLOAD_BYTES_MAX + 1)
        if len(raw) > PAYLOAD_BYTES_MAX:
            raise InvalidInput("the file is larger than 64 KiB", field="payload_file", hint="send a reference")
        return json.loads(raw)
    except OSError as error:
        raise InvalidInput(f"the file cannot be read: {error.strerror}", field="payload_file") from None
    except ValueError:
        raise InvalidInput("the file is not JSON", field="payload_file") from None
