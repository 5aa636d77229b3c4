"""The services as Docker containers (testcontainers, pinned images), tried only where a Docker engine really answers."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import cast
from urllib.parse import urlsplit

from . import kafka, places, postgres, rabbitmq
from .process import StartFailed

IMAGES: Mapping[str, str] = {
    "postgres18": "postgres:18.0",
    "postgres15": "postgres:15.14",
    "rabbitmq": "rabbitmq:3.13.7",
    "kafka": "apache/kafka:4.1.0",
}
PING_SECONDS = 1.0
START_SECONDS = 180.0


class Container:
    """One running container with a port published on loopback."""

    def __init__(self, name: str, inner: int, env: Mapping[str, str], outer: int, command: Sequence[str] = ()) -> None:
        from testcontainers.core.container import DockerContainer

        self.name = name
        self.port = outer
        self._container = DockerContainer(IMAGES[name])
        # The client library takes (host, port) here although its type does not say so: never on all interfaces.
        self._container.ports = cast("dict[str, int | None]", {f"{inner}/tcp": (places.LOOPBACK, outer)})
        for key, value in env.items():
            self._container.with_env(key, value)
        if command:
            self._container.with_command(list(command))
        self._container.start()

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready()` is true; raises StartFailed with the container's last log lines at the deadline."""
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if time.monotonic() > deadline:
                output, errors = self._container.get_logs()
                lines = (output + errors).decode("utf-8", "replace").splitlines()[-15:]
                self.close()
                raise StartFailed("\n".join([f"container {self.name} was not ready in time:", *lines]))
            time.sleep(0.2)

    def close(self) -> None:
        """Removes the container with its data."""
        self._container.stop()


@cache
def engine_answers() -> bool:
    """Whether a Docker engine answers a ping within a second at $DOCKER_HOST or the usual socket."""
    address = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    target: str | tuple[str, int]
    if address.scheme == "unix":
        family, target = socket.AF_UNIX, address.path
    elif address.hostname in ("localhost", places.LOOPBACK):
        family, target = socket.AF_INET, (places.LOOPBACK, address.port or 2375)
    else:
        return False
    with socket.socket(family) as connection:
        connection.settimeout(PING_SECONDS)
        try:
            connection.connect(target)
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in connection.recv(64)
        except OSError:
            return False


def start_postgres(major: str) -> tuple[Container, str]:
    """A PostgreSQL container and its address; trusted on loopback, with the same settings as the native one."""
    settings = {
        name: value.strip("'")
        for name, value in postgres.SETTINGS.items()
        if name in ("max_connections", "max_prepared_transactions", "wal_level", "fsync")
    }
    command = ["postgres", *(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))]
    container = Container(f"postgres{major}", 5432, {"POSTGRES_HOST_AUTH_METHOD": "trust"}, places.free_port(), command)
    dsn = f"postgresql://{postgres.SUPERUSER}@{places.LOOPBACK}:{container.port}/postgres"
    container.wait_ready(lambda: postgres.version(dsn) is not None)
    return container, dsn


def start_rabbitmq() -> tuple[Container, str]:
    """A RabbitMQ container and its address."""
    account = {"RABBITMQ_DEFAULT_USER": "fencepost", "RABBITMQ_DEFAULT_PASS": "fencepost"}
    container = Container("rabbitmq", 5672, account, places.free_port())
    container.wait_ready(lambda: rabbitmq.version(places.LOOPBACK, container.port) is not None)
    return container, f"amqp://fencepost:fencepost@{places.LOOPBACK}:{container.port}/"


def start_kafka() -> tuple[Container, str]:
    """An Apache Kafka container (one KRaft node) and its address."""
    port = places.free_port()
    env = {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_LISTENERS": f"PLAINTEXT://:{port},CONTROLLER://:9093",
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://{places.LOOPBACK}:{port}",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    }
    container = Container("kafka", port, env, port)
    bootstrap = f"{places.LOOPBACK}:{port}"
    container.wait_ready(lambda: places.listens(port) and kafka.answers(bootstrap))
    return container, bootstrap
