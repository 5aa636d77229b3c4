"""S3Proxy: a server of the S3 protocol that keeps its objects as files, from its published jars, started with plain `java`."""

import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from . import jars, places
from .process import Process, Unavailable

START_SECONDS = 60.0
LOGGING = """\
<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder><pattern>%d %p %c{1}: %m%n</pattern></encoder></appender>
  <root level="warn"><appender-ref ref="out"/></root>
</configuration>
"""


class S3Server:
    """One S3 server of ours on loopback, with an account of its own; stop and start keep the data and the port."""

    def __init__(self) -> None:
        java = shutil.which("java")
        if java is None:
            raise Unavailable("S3Proxy: no java found; as root on Debian run compose/install")
        folder = jars.fetched("s3", "S3Proxy")
        self.version = next(folder.glob("s3proxy-*.jar")).stem.removeprefix("s3proxy-")
        self.port = places.free_port()
        self.account, self._secret = "fencepost", secrets.token_hex(16)
        self._folder = places.service_folder("s3")
        self._data = self._folder / "data"
        self._data.mkdir()
        settings = self._folder / "s3proxy.conf"
        settings.write_text(
            f"s3proxy.endpoint=http://{places.LOOPBACK}:{self.port}\n"
            "s3proxy.authorization=aws-v4\n"
            f"s3proxy.identity={self.account}\n"
            f"s3proxy.credential={self._secret}\n"
            "jclouds.provider=filesystem-nio2\n"
            f"jclouds.filesystem.basedir={self._data}\n"
        )
        settings.chmod(0o600)
        logging = self._folder / "logback.xml"
        logging.write_text(LOGGING)
        memory = ["-Xms32m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        self._process = Process(
            "S3Proxy",
            [
                java,
                *memory,
                f"-Dlogback.configurationFile={logging}",
                "-cp",
                f"{folder}/*",
                "org.gaul.s3proxy.Main",
                "--properties",
                str(settings),
            ],
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
    def url(self) -> str:
        """Its address with account and secret, as `http://account:secret@host:port`."""
        return f"http://{self.account}:{self._secret}@{places.LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the Java machine."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process exists."""
        return self._process.running

    def start(self) -> None:
        """Starts the server and returns when it takes connections; StartFailed with the last log lines after 60 s."""
        self._process.start()
        self._process.wait_ready(lambda: places.listens(self.port), START_SECONDS)

    def place(self, bucket: str, key: str) -> Path:
        """The file in which an object is kept: for tests that age or damage it behind the server's back."""
        return self._data / bucket / key

    def kill(self) -> None:
        """SIGKILL to the server, as a crash would look."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP to the server: connections stay open, nothing is answered."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT to the server."""
        self._process.resume()

    def close(self) -> None:
        """Stops the server and removes its data."""
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
