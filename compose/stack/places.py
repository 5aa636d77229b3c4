"""Where services keep their files, who they run as and which ports they listen on."""

import atexit
import fcntl
import os
import pwd
import random
import shutil
import socket
import tempfile
from functools import cache
from pathlib import Path

from . import ownership

LOOPBACK = "127.0.0.1"
COMPOSE = Path(__file__).resolve().parents[1]
REPOSITORY = COMPOSE.parent
# Below the range that Linux hands out for outgoing connections: a service that restarts finds its port still free.
FIRST_PORT, LAST_PORT, PORT_TRIES = 15_000, 31_999, 200

_given: set[int] = set()


def cache_folder() -> Path:
    """The folder for downloads that outlive a run: $FENCEPOST_CACHE, else the user's cache folder."""
    named = os.environ.get("FENCEPOST_CACHE")
    if named:
        folder = Path(named)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fencepost"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


@cache
def run_folder() -> Path:
    """A fresh folder for this process, reachable by the plain user, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-")).resolve()
    folder.chmod(0o711)
    owner = os.getpid()
    ownership.own_folder(folder)

    def remove() -> None:
        if os.getpid() == owner and not ownership.kept():
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def service_folder(name: str) -> Path:
    """A new folder for one service, owned by the plain user."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=run_folder()))
    hand_over(folder)
    return folder


def hand_over(path: Path) -> None:
    """Gives the file or folder to the plain user; nothing to do when we are not root."""
    user = plain_user()
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(path, entry.pw_uid, entry.pw_gid)


@cache
def plain_user() -> str | None:
    """The user that services run as when we are root (PostgreSQL and PgBouncer refuse root); None: as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise RuntimeError("running as root and neither user 'postgres' nor 'nobody' exists: run as a plain user")


def free_port() -> int:
    """A port on loopback that nothing listens on and that no living process of this user has been given here."""
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().randint(FIRST_PORT, LAST_PORT)
        if port in _given or not _reserve(port):
            continue
        _given.add(port)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port between {FIRST_PORT} and {LAST_PORT} after {PORT_TRIES} tries")


def _reserve(port: int) -> bool:
    """Takes the byte of this port in a file of all processes; the kernel gives it back when we end.

    Between a choice and the service that listens there are seconds, in which others choose as well.
    """
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@cache
def _reservations() -> int:
    # Never closed before we end: with any descriptor of the file all our locks on it would go.
    path = Path(tempfile.gettempdir()) / f"fencepost-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def listens(port: int) -> bool:
    """Whether something accepts connections on this port of loopback."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False
