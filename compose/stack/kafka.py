"""Apache Kafka as one KRaft node (broker and controller) from its published jars, started with plain `java`."""

import base64
import secrets
import shutil
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from . import jars, places
from .certificate import Certificate
from .process import Process, Unavailable, run

START_SECONDS = 60.0
STOP_SECONDS = 30.0
LOGGING = """\
<Configuration status="error">
  <Appenders><Console name="out"><PatternLayout pattern="%d %p %c{1}: %m%n"/></Console></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


class KafkaServer:
    """One Kafka node of ours on loopback. Topics must be created; stop and start keep the data and the port.

    With `certificate` it also listens as `localhost` for TLS: on `tls_port` to clients with a certificate of the same
    authority, on `sasl_port` to these `users` (name and password; PLAIN and SCRAM-SHA-256).
    """

    def __init__(self, *, certificate: Certificate | None = None, users: Mapping[str, str] | None = None) -> None:
        java = shutil.which("java")
        if java is None:
            raise Unavailable("Apache Kafka: no java found; as root on Debian run compose/install")
        fetched = jars.fetched("kafka", "Apache Kafka")
        self.version = next(fetched.glob("kafka_2.13-*.jar")).stem.removeprefix("kafka_2.13-")
        self.port = places.free_port()
        self.tls_port, self.sasl_port = (0, 0) if certificate is None else (places.free_port(), places.free_port())
        self._folder = places.service_folder("kafka")
        self._certificate = certificate
        self._users = dict(users or {})
        self._properties = self._folder / "server.properties"
        self._properties.write_text(self._settings(places.free_port()))
        logging = self._folder / "log4j2.xml"
        logging.write_text(LOGGING)
        self._java = [java, f"-Dlog4j2.configurationFile={logging}", "-cp", f"{fetched}/*"]
        self._process = Process(
            "Apache Kafka",
            [java, "-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", *self._java[1:], "kafka.Kafka", str(self._properties)],
            log=self._folder / "log",
            cwd=self._folder,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap(self) -> str:
        """Address for `bootstrap.servers`."""
        return f"{places.LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the Java machine."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the node's process exists."""
        return self._process.running

    def start(self) -> None:
        """Starts the node and returns when it answers with its metadata; StartFailed with the last log lines after 60 s."""
        if not (self._folder / "data").exists():
            cluster = base64.urlsafe_b64encode(b"f" + secrets.token_bytes(15)).decode().rstrip("=")
            formatting = [
                "kafka.tools.StorageTool",
                "format",
                "--standalone",
                "-t",
                cluster,
                "-c",
                str(self._properties),
            ]
            for name, password in self._users.items():
                formatting += ["--add-scram", f"SCRAM-SHA-256=[name={name},password={password}]"]
            run([*self._java, *formatting], cwd=self._folder)
        self._process.start()
        self._process.wait_ready(lambda: places.listens(self.port) and answers(self.bootstrap), START_SECONDS)

    def stop(self) -> None:
        """Ends the node in order."""
        self._process.stop(within=STOP_SECONDS)

    def kill(self) -> None:
        """SIGKILL to the node, as a crash would look."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP to the node: connections stay open, nothing is acknowledged."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT to the node."""
        self._process.resume()

    def close(self) -> None:
        """Stops the node and removes its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _settings(self, controller_port: int) -> str:
        controller = f"{places.LOOPBACK}:{controller_port}"
        listeners = f"PLAINTEXT://{self.bootstrap},CONTROLLER://{controller}"
        advertised = listeners
        if self._certificate is not None:
            for name, port in (("SSL", self.tls_port), ("SASL_SSL", self.sasl_port)):
                listeners += f",{name}://{places.LOOPBACK}:{port}"
                advertised += f",{name}://localhost:{port}"
        return (
            "process.roles=broker,controller\n"
            "node.id=1\n"
            f"controller.quorum.bootstrap.servers={controller}\n"
            "controller.listener.names=CONTROLLER\n"
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL\n"
            f"listeners={listeners}\n"
            f"advertised.listeners={advertised}\n"
            f"log.dirs={self._folder / 'data'}\n"
            "auto.create.topics.enable=false\n"
            "num.network.threads=2\n"
            "num.io.threads=4\n"
            "offsets.topic.replication.factor=1\n"
            "offsets.topic.num.partitions=4\n"
            "transaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\n"
            "transaction.state.log.num.partitions=4\n"
            "share.coordinator.state.topic.replication.factor=1\n"
            "share.coordinator.state.topic.min.isr=1\n"
            "share.coordinator.state.topic.num.partitions=1\n"
            # A node that was killed may register again only after its former session has run out.
            "broker.session.timeout.ms=2000\n"
            "broker.heartbeat.interval.ms=500\n"
            "group.initial.rebalance.delay.ms=0\n"
            "group.min.session.timeout.ms=1000\n" + self._tls()
        )

    def _tls(self) -> str:
        if self._certificate is None:
            return ""
        files = self._certificate.write(self._folder)
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        users = "".join(f' user_{name}="{password}"' for name, password in self._users.items())
        return (
            "ssl.keystore.type=PEM\n"
            f"ssl.keystore.location={files.store}\n"
            "ssl.truststore.type=PEM\n"
            f"ssl.truststore.location={files.authority}\n"
            "listener.name.ssl.ssl.client.auth=required\n"
            "listener.name.sasl_ssl.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256\n"
            f"listener.name.sasl_ssl.plain.sasl.jaas.config={plain}{users};\n"
            f"listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config={scram}\n"
        )


def answers(bootstrap: str) -> bool:
    """Whether a broker at this address gives its metadata within 2 s."""
    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "socket.timeout.ms": 2000})
    try:
        return bool(client.list_topics(timeout=2).brokers)
    except KafkaException:
        return False
