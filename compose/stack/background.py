"""Services kept running between commands: `.cache/stack.json` records their addresses and processes."""

import json
import os
import shutil
from pathlib import Path
from typing import cast

from . import kafka, ownership, pgbouncer, places, postgres, rabbitmq
from .guard import Born, end
from .process import Unavailable

RECORD = places.REPOSITORY / ".cache" / "stack.json"
IGNORE = "FENCEPOST_NO_STACK"


def up() -> dict[str, str]:
    """Starts every native service and leaves it running; returns addresses by name. Raises Unavailable when already up."""
    if _running():
        raise Unavailable("the services are running already: see `status`, end them with `down`")
    addresses: dict[str, str] = {}
    for major in postgres.MAJORS:
        server = postgres.PostgresServer(major)
        server.start()
        addresses[f"postgres{major}"] = server.dsn
    pooler = pgbouncer.PgBouncer(addresses[f"postgres{postgres.WHEEL_MAJOR}"])
    pooler.start()
    addresses["pgbouncer"] = pooler.dsn
    rabbit = rabbitmq.RabbitServer()
    rabbit.start()
    addresses["rabbitmq"] = rabbit.url
    node = kafka.KafkaServer()
    node.start()
    addresses["kafka"] = node.bootstrap
    processes = [[process.pid, process.ticks, number] for process, number in ownership.keep()]
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    fresh = RECORD.with_suffix(".new")
    fresh.write_text(
        json.dumps({"addresses": addresses, "processes": processes, "folder": str(places.run_folder())}, indent=2)
    )
    os.replace(fresh, RECORD)
    return addresses


def down() -> bool:
    """Ends what `up` has started and removes its files; False when there was nothing."""
    record = _record()
    if record is None:
        return False
    end((Born(pid, ticks), number) for pid, ticks, number in cast("list[list[int]]", record["processes"]))
    shutil.rmtree(str(record["folder"]), ignore_errors=True)
    RECORD.unlink(missing_ok=True)
    return True


def addresses() -> dict[str, str]:
    """Addresses of the services that `up` left running, by name; empty when they are not all alive."""
    record = _record()
    return cast("dict[str, str]", record["addresses"]) if record is not None and _running() else {}


def address(name: str) -> str:
    """One address of `addresses`, or an empty string; always empty when $FENCEPOST_NO_STACK is set."""
    return "" if os.environ.get(IGNORE) else addresses().get(name, "")


def _running() -> bool:
    record = _record()
    if record is None:
        return False
    return all(Born(pid, ticks).alive() for pid, ticks, _ in cast("list[list[int]]", record["processes"]))


def _record() -> dict[str, object] | None:
    try:
        return cast("dict[str, object]", json.loads(Path(RECORD).read_text()))
    except FileNotFoundError:
        return None
