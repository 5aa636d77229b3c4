"""RabbitMQ from the Debian package: own node name, ports, cookie and folders, and an epmd of its own; no service manager."""

import re
import secrets
import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from . import places
from .certificate import Certificate
from .process import Process, Unavailable, run

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
START_SECONDS = 60.0
STOP_SECONDS = 30.0
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
CONTROL_SECONDS = 60.0


class RabbitServer:
    """A RabbitMQ node of ours on loopback; `guest` may do everything. Stop and start keep data and port.

    With `certificate` it also listens for TLS (`tls_port`), to clients with a certificate of the same authority.
    """

    def __init__(self, *, certificate: Certificate | None = None) -> None:
        epmd = shutil.which("epmd")
        if epmd is None or not (SCRIPTS / "rabbitmq-server").exists():
            raise Unavailable("RabbitMQ: not found; as root on Debian run compose/install")
        self.port = places.free_port()
        self.tls_port = 0 if certificate is None else places.free_port()
        self.version = ""
        self._folder = places.service_folder("rabbitmq")
        self._certificate = certificate
        self._environment = self._settings()
        user = places.plain_user()
        self._epmd = Process(
            "epmd",
            [epmd, "-address", places.LOOPBACK, "-port", self._environment["ERL_EPMD_PORT"]],
            log=self._folder / "epmd.log",
            env=self._environment,
            cwd=self._folder,
            user=user,
        )
        self._process = Process(
            "RabbitMQ",
            [str(SCRIPTS / "rabbitmq-server")],
            log=self._folder / "log",
            env=self._environment,
            cwd=self._folder,
            user=user,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """AMQP address of the default virtual host."""
        return f"amqp://guest:guest@{places.LOOPBACK}:{self.port}/"

    @property
    def pid(self) -> int:
        """Process id of the Erlang machine."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the node's process exists."""
        return self._process.running

    def start(self) -> None:
        """Starts the node and returns when it speaks AMQP; StartFailed with the last log lines after 60 s."""
        epmd_port = int(self._environment["ERL_EPMD_PORT"])
        self._epmd.start()
        self._epmd.wait_ready(lambda: places.listens(epmd_port), 10)
        self._process.start()
        self._process.wait_ready(self._answers, START_SECONDS)

    def stop(self) -> None:
        """Ends the node in order; durable queues and persistent messages stay."""
        self._process.stop(within=STOP_SECONDS)
        self._epmd.stop()

    def kill(self) -> None:
        """SIGKILL to the node, as a crash would look."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP to the node: connections stay open, nothing is confirmed."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT to the node."""
        self._process.resume()

    def rabbitmqctl(self, *arguments: str) -> str:
        """Runs one rabbitmqctl command on this node (takes about a second); raises Unavailable with what it printed."""
        return run(
            [str(SCRIPTS / "rabbitmqctl"), "--quiet", *arguments],
            user=places.plain_user(),
            env=self._environment,
            cwd=self._folder,
            within=CONTROL_SECONDS,
        )

    def close(self) -> None:
        """Stops the node and removes its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        found = version(places.LOOPBACK, self.port)
        self.version = found or self.version
        return found is not None

    def _tls(self) -> str:
        if self._certificate is None:
            return ""
        files = self._certificate.write(self._folder)
        return (
            f"listeners.ssl.1 = {places.LOOPBACK}:{self.tls_port}\n"
            f"ssl_options.cacertfile = {files.authority}\n"
            f"ssl_options.certfile = {files.chain}\n"
            f"ssl_options.keyfile = {files.key}\n"
            "ssl_options.verify = verify_peer\n"
            "ssl_options.fail_if_no_peer_cert = true\n"
        )

    def _settings(self) -> dict[str, str]:
        folder = self._folder
        cookie = folder / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        configuration = folder / "rabbitmq.conf"
        configuration.write_text(
            f"listeners.tcp.1 = {places.LOOPBACK}:{self.port}\n"
            "log.file = false\n"
            "log.console = true\n"
            "log.console.level = info\n"
            "disk_free_limit.absolute = 50MB\n"
            "vm_memory_high_watermark.absolute = 1GB\n" + self._tls()
        )
        plugins = folder / "enabled_plugins"
        plugins.write_text("[].\n")
        environment_file = folder / "rabbitmq-env.conf"
        environment_file.write_text("")
        for path in (cookie, configuration, plugins, environment_file):
            places.hand_over(path)
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "HOME": str(folder),
            "ERL_EPMD_ADDRESS": places.LOOPBACK,
            "ERL_EPMD_PORT": str(places.free_port()),
            "RABBITMQ_NODENAME": f"fencepost-{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(places.free_port()),
            "RABBITMQ_CONF_ENV_FILE": str(environment_file),
            "RABBITMQ_CONFIG_FILE": str(configuration),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_SCHEDULER_BUSY_WAIT_THRESHOLD": "none",
            # With this the start script becomes the Erlang machine, so that the pid we hold is the node's.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput -kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_CRASH_DUMP": "/dev/null",
        }


def version(host: str, port: int) -> str | None:
    """The version that the node gives in its AMQP greeting, or None when it does not greet within 2 s."""
    greeting = b""
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.sendall(PROTOCOL_HEADER)
            while b"mechanisms" not in greeting and len(greeting) < 4096 and b"PLAIN" not in greeting:
                piece = connection.recv(4096)
                if not piece:
                    break
                greeting += piece
    except OSError:
        return None
    found = re.search(rb"\x07versionS\x00\x00\x00(.)", greeting, re.DOTALL)
    if found is None:
        return None
    start = found.end()
    return greeting[start : start + found.group(1)[0]].decode("ascii", "replace")
