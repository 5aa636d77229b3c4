"""librdkafka's mock cluster in a process of its own: the embedded broker of the demo, a stand-in where Kafka is missing.

`python -m stack.mockkafka` prints the bootstrap address and stays until standard input closes or SIGTERM arrives.
It speaks the Kafka protocol but keeps nothing on disk: it proves the wiring, never durability.
"""

import os
import signal
import sys
import threading
from types import TracebackType
from typing import Self

from confluent_kafka import Producer

from . import places
from .process import Process

START_SECONDS = 15.0
VERSION = "mock"


class MockKafka:
    """The mock cluster as a child process; ends when we do."""

    version = VERSION

    def __init__(self) -> None:
        folder = places.service_folder("mockkafka")
        self._process = Process(
            "Kafka mock cluster",
            [sys.executable, "-m", "stack.mockkafka"],
            log=folder / "log",
            env={**os.environ, "PYTHONPATH": str(places.COMPOSE)},
            cwd=folder,
            hold_stdin=True,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the mock cluster."""
        return self._process.pid

    @property
    def bootstrap(self) -> str:
        """Address for `bootstrap.servers`; empty before `start` has returned."""
        lines = self._process.log.read_text().splitlines() if self._process.log.exists() else []
        return next((line.removeprefix("bootstrap ") for line in reversed(lines) if line.startswith("bootstrap ")), "")

    def start(self) -> None:
        """Starts the cluster and returns when its address is known; StartFailed with its output after 15 s."""
        self._process.start()
        self._process.wait_ready(lambda: bool(self.bootstrap), START_SECONDS)

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing is acknowledged."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def close(self) -> None:
        """Ends the cluster; what it held is gone."""
        self._process.stop()


def main() -> None:
    """Holds a mock cluster until standard input closes or SIGTERM arrives."""
    finished = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: finished.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    holder = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = holder.list_topics(timeout=10).brokers.values()
    sys.stdout.write(f"bootstrap {','.join(f'{broker.host}:{broker.port}' for broker in brokers)}\n")
    sys.stdout.flush()

    def watch() -> None:
        sys.stdin.buffer.read()
        finished.set()

    threading.Thread(target=watch, daemon=True).start()
    while not finished.wait(1.0):
        holder.poll(0)


if __name__ == "__main__":
    main()
