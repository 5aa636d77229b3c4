"""Every process of a version that the database no longer serves ends with one typed refusal, before it has done anything."""

from collections.abc import Callable
from typing import Any

import pytest
from psycopg import Connection

from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Handled, Outcome
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import Again, Handling, RunnerOptions, Tries
from fencepost.jobs.worker import Worker
from fencepost.relay.destination import Destination
from fencepost.relay.publisher import Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.relay.sidecar import Relay
from fencepost.schemas import contract
from fencepost.schemas.errors import ContractMismatch
from support.command_line import Fencepost
from support.contracts import declare
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka
from support.jobs import given
from support.processes import wait_for
from support.workers import publishing, running

WITHIN = contract.CONTRACT + 8, contract.CONTRACT
BEYOND = contract.CONTRACT + 8, contract.CONTRACT + 1
DONE = "SELECT count(*) = 1 FROM fencepost.job WHERE exec = 'done'"
TRACES = """SELECT (SELECT count(*) FROM fencepost.relay) + (SELECT count(*) FROM fencepost.destination)
                 + (SELECT count(*) FROM fencepost.attempt) + (SELECT count(*) FROM fencepost.duty)
                 + (SELECT seq FROM fencepost.tip)"""
NOWHERE = "127.0.0.1:1"


@inbox(consumer="reports")
def on_submitted(tx: Connection[Any], event: Submitted) -> None:
    tx.execute("INSERT INTO seen (operation) VALUES (%s)", (event.operation,))


def work(database: Database) -> None:
    publishing(Worker()).run(database.dsn, state=database.state)


def relay(database: Database) -> None:
    def made(source: str) -> RabbitPublisher:
        return RabbitPublisher(f"amqp://{NOWHERE}/", source=source)

    Relay(database.dsn, [Destination("events", "rabbitmq", [Route("*", "x")], made)], state=database.state).run()


def consume(database: Database) -> None:
    RabbitRunner(on_submitted, database.dsn, url=f"amqp://{NOWHERE}/", queue="q").run()


@pytest.mark.parametrize("process", [work, relay, consume])
def test_a_process_beyond_the_window_ends_before_it_has_done_anything(
    database18: Database, process: Callable[[Database], None]
) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        declare(database18, *BEYOND)
        before = conn.execute(TRACES).fetchone()

        with pytest.raises(ContractMismatch, match="upgrade this program") as caught:
            process(database18)

        assert caught.value.field == "program"
        assert conn.execute(TRACES).fetchone() == before
        assert conn.execute(DONE).fetchone() == (False,)


def test_a_worker_inside_the_window_works_on_a_newer_database(database18: Database) -> None:
    declare(database18, *WITHIN)
    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(publishing(Worker()), database18, state=database18.state):
            wait_for(lambda: conn.execute(DONE).fetchone() == (True,), 20, "the job to be done")


def test_a_delivery_that_meets_another_version_is_left_for_later_and_never_a_dead_letter(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute("CREATE TABLE seen (operation text)")
        declare(database18, *BEYOND)
        handling = Handling(on_submitted, database18.dsn, RunnerOptions(max_attempts=1))
        delivery = from_kafka(envelope(operation="op-1"))

        assert isinstance(handling.attempt(delivery, Tries(RunnerOptions(max_attempts=1))), Again)

        assert conn.execute("SELECT count(*) FROM fencepost.dead_letter").fetchone() == (0,)
        declare(database18, *WITHIN)
        handled = handling.attempt(delivery, Tries(RunnerOptions(max_attempts=1)))
        assert isinstance(handled, Handled) and handled.outcome is Outcome.HANDLED
        handling.close()


def test_commands_and_doctor_say_what_is_too_old(
    database18: Database, fencepost: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fencepost(database18, "status").code == 0  # the control
    declare(database18, *BEYOND)
    told = fencepost(database18, "status")
    assert told.code == 1 and "[program]; upgrade this program" in told.line
    examined = fencepost(database18, "doctor")
    assert examined.code == 1 and "upgrade this program" in examined.out

    declare(database18, contract.CONTRACT, contract.CONTRACT)
    monkeypatch.setattr(contract, "CONTRACT", contract.CONTRACT + 1)
    monkeypatch.setattr(contract, "OLDEST", contract.CONTRACT)
    told = fencepost(database18, "status")
    assert told.code == 1 and "[database]; run `fencepost migrate`" in told.line
    assert "run `fencepost migrate`" in fencepost(database18, "doctor").out
