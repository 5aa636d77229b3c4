"""The tools that break things must themselves work: each first shows the healthy case."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from stack import guard, kafka, ownership, places
from stack.mockkafka import MockKafka
from stack.postgres import MAJORS, PostgresServer, Stop
from stack.process import Process, StartFailed, Unavailable, running_threads
from support.processes import Child, wait_for
from support.proxy import Proxy
from support.services import Kafka, Rabbit, missing


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that this module alone may stop and pause."""
    try:
        server = PostgresServer(MAJORS[0])
        server.start()
    except Unavailable as error:
        missing(str(error))
    yield server
    server.close()


def test_a_server_keeps_its_data_and_address_through_every_kind_of_stop(own_server: PostgresServer) -> None:
    address = own_server.dsn
    with psycopg.connect(address, autocommit=True) as conn:
        conn.execute("CREATE TABLE kept (value int)")
        conn.execute("INSERT INTO kept VALUES (1)")

    own_server.restart(Stop.FAST)
    own_server.restart(Stop.IMMEDIATE)
    own_server.kill()
    own_server.start()

    assert own_server.dsn == address
    with psycopg.connect(address, autocommit=True) as conn:
        assert conn.execute("SELECT value FROM kept").fetchall() == [(1,)]
        conn.execute("DROP TABLE kept")


def test_a_paused_server_takes_no_connection_until_it_is_resumed(own_server: PostgresServer) -> None:
    psycopg.connect(own_server.dsn, connect_timeout=5).close()
    own_server.pause()
    try:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_server.dsn, connect_timeout=2)
    finally:
        own_server.resume()
    psycopg.connect(own_server.dsn, connect_timeout=5).close()


def test_a_paused_service_has_stopped_with_every_thread_of_every_process_when_pause_returns(tmp_path: Path) -> None:
    """Most of the time a signal is slower than the next line of its sender: many rounds, so that one is."""
    source = """
import os, threading
def work():
    while True:
        sum(range(1000))
os.fork()
for _ in range(8):
    threading.Thread(target=work).start()
"""
    with Process("busy", [sys.executable, "-c", source], log=tmp_path / "log") as busy:
        busy.start()
        wait_for(lambda: len(running_threads(busy.pid)) == 18, 20, "two processes with 9 threads each")  # the control
        for _ in range(20):
            busy.pause()
            assert running_threads(busy.pid) == []
            busy.resume()
            wait_for(lambda: len(running_threads(busy.pid)) == 18, 20, "all to go on")
        group = busy.pid
    wait_for(lambda: not running_threads(group), 20, "the forked process to end with the service")


def test_a_service_that_does_not_start_says_why_with_its_log(tmp_path: Path) -> None:
    lives = Process("sleeper", ["sleep", "30"], log=tmp_path / "a")
    dies = Process("broken", ["sh", "-c", "echo the reason; exit 3"], log=tmp_path / "b")
    with lives:
        lives.start()
        lives.wait_ready(lambda: True, 5)

    dies.start()
    with pytest.raises(StartFailed, match="(?s)code 3.*the reason"):
        dies.wait_ready(lambda: False, 5)
    dies.stop()


def test_the_guard_ends_what_a_killed_process_has_started(tmp_path: Path) -> None:
    source = """
import sys, time
from pathlib import Path
from stack import places
from stack.process import Process
sleeper = Process("sleeper", ["sleep", "120"], log=Path(sys.argv[1]) / "log")
sleeper.start()
print(sleeper.pid, places.run_folder(), "started", flush=True)
time.sleep(120)
"""
    child = Child.script(source, folder=tmp_path, arguments=[str(tmp_path)], PYTHONPATH=str(places.COMPOSE))
    with child:
        child.says("started")
        pid, folder, _ = child.text.split()
        assert guard.born(int(pid)) is not None
        assert Path(folder).is_dir()

    wait_for(lambda: guard.born(int(pid)) is None, 10, "the guard to end the orphan")
    wait_for(lambda: not Path(folder).exists(), 10, "the guard to remove the folder")


def test_a_process_with_our_number_but_another_birth_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as stranger:
        born = ownership.own(stranger.pid, signal.SIGKILL)
        assert born is not None
        ownership.disown(stranger.pid)
        guard.end([(guard.Born(stranger.pid, born.ticks + 1), signal.SIGKILL)])
        assert stranger.poll() is None

        guard.end([(born, signal.SIGKILL)])
        assert stranger.wait(timeout=5) == -signal.SIGKILL


def test_a_child_can_be_stopped_continued_and_killed(tmp_path: Path) -> None:
    source = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)\n"
    with Child.script(source, folder=tmp_path) as child:
        child.says("up")
        child.pause()
        assert child.alive
        child.resume()
        assert child.terminate() == -signal.SIGTERM
        child.start()
        child.kill()
        assert not child.alive


def _through(proxy: Proxy, server: PostgresServer) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(make_conninfo(server.dsn, port=proxy.port), autocommit=True, connect_timeout=3)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_cut_is_seen_by_the_client_at_once(own_server: PostgresServer, reset: bool) -> None:
    with Proxy(own_server.port) as proxy:
        with _through(proxy, own_server) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
            proxy.cut(reset=reset, refuse_new=True)
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            _through(proxy, own_server)
        proxy.heal()
        _through(proxy, own_server).close()


def test_a_blackhole_answers_nothing_and_heals(own_server: PostgresServer) -> None:
    with Proxy(own_server.port) as proxy:
        _through(proxy, own_server).close()
        proxy.blackhole()
        with pytest.raises(psycopg.OperationalError):
            _through(proxy, own_server)
        proxy.heal()
        with _through(proxy, own_server) as conn:
            proxy.delay(0.2)
            began = time.monotonic()
            conn.execute("SELECT 1")
            assert time.monotonic() - began >= 0.4


def test_a_dropped_reply_leaves_the_commit_in_the_database(own_server: PostgresServer) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as direct:
        direct.execute("CREATE TABLE committed (value int)")
        with Proxy(own_server.port) as proxy, _through(proxy, own_server) as conn:
            conn.execute("INSERT INTO committed VALUES (1)")
            proxy.drop_replies()
            conn.pgconn.send_query(b"INSERT INTO committed VALUES (2)")
            wait_for(lambda: direct.execute("SELECT count(*) FROM committed").fetchone() == (2,), 10, "the lost insert")
            wait_for(lambda: proxy.dropped_bytes > 0, 10, "the reply to be dropped")
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                conn.pgconn.consume_input()
                conn.execute("SELECT 1")
        direct.execute("DROP TABLE committed")


def test_rabbitmq_can_be_asked_by_its_own_tool(rabbitmq: Rabbit) -> None:
    if rabbitmq.node is None:
        pytest.skip("RabbitMQ was given by address")
    assert "guest" in rabbitmq.node.rabbitmqctl("list_users")
    assert Path(f"/proc/{rabbitmq.node.pid}/comm").read_text().strip() == "beam.smp"


def test_everything_of_ours_listens_on_loopback_only(
    own_server: PostgresServer, rabbitmq: Rabbit, real_kafka: Kafka
) -> None:
    nodes = [node for node in (own_server, rabbitmq.node, real_kafka.node) if node is not None]
    addresses = {address for node in nodes for address in _listening(node.pid)}

    assert addresses
    assert {address for address in addresses if not _loopback(address)} == set()


def _listening(pid: int) -> set[str]:
    """Hexadecimal local addresses of the sockets that this process listens on."""
    own: set[str] = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.add(fields[1].rpartition(":")[0])
    return found


def _loopback(address: str) -> bool:
    # 127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel prints them on a little-endian machine.
    return address in ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_the_embedded_broker_answers_until_its_owner_lets_go() -> None:
    with MockKafka() as cluster:
        assert kafka.answers(cluster.bootstrap)
        address, pid = cluster.bootstrap, cluster.pid

    assert guard.born(pid) is None
    assert not places.listens(int(address.rpartition(":")[2]))
