"""The demo from start to end: exit code 0 when every submission was published exactly once and every effect accepted
at most once, read from the domain's tables and the provider's ledger; 1 with one clear line otherwise."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import uuid

import psycopg

from fencepost.schemas.errors import FencepostError
from stack.process import Unavailable

from . import checks, domain, statements
from .acts import LOST, Director
from .client import Provider
from .documents import Document, find
from .narrator import DemoFailed, Narrator
from .scene import BROKERS, Scene

__all__ = ["main"]

ORDINARY = 12
NEXT = """what to try next
  make demo BROKER=kafka | BROKER=rabbitmq       the same on the real brokers
  python examples/reports/demo.py --provider-port 9    a provider that is not there
  fencepost --help                               migrate, doctor, status, effects, jobs, relay, consumer, worker
  examples/reports/app.py                        the application: one consumer, one worker, one effect"""


def main() -> int:
    """Runs the demo; returns the exit code."""
    arguments = argparse.ArgumentParser(description="The whole chain on real documents, with everything going wrong.")
    arguments.add_argument("--broker", choices=BROKERS, default="embedded")
    arguments.add_argument(
        "--provider-port", type=int, help="use the provider on this port of loopback, whatever it is"
    )
    chosen = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    narrator = Narrator()
    try:
        with Scene(chosen.broker, chosen.provider_port, narrator) as scene:
            narrator.alive = scene.ended
            return _play(scene, narrator)
    except Unavailable as error:
        narrator.failed(f"a service cannot be had: {error}")
    except (DemoFailed, FencepostError, psycopg.Error) as error:
        narrator.failed(f"the demo could not go on: {error}")
    except KeyboardInterrupt:
        narrator.failed("interrupted; everything that was started has been ended")
        return 130
    return 1


def _play(scene: Scene, narrator: Narrator) -> int:
    director = Director(scene, narrator, Provider(scene.provider_url), f"r{uuid.uuid4().hex[:4]}")
    try:
        total = _acts(director, scene, narrator)
    except (DemoFailed, FencepostError) as error:
        narrator.failed(f"failed: {error}")
        narrator.say("this is how everything stands:")
        narrator.quote(scene.command("status").text)
        return 1
    narrator.act("What is in every state")
    shown = scene.command("status")
    narrator.quote(shown.text)
    ledger = [entry for entry in director.provider.ledger() if entry["operation"].startswith(f"{director.run}-")]
    with scene.connect() as conn:
        found = checks.violations(conn, ledger)
    set_aside = scene.number(statements.DEAD_LETTERS) + scene.number(statements.PARKED)
    if set_aside:
        found.append(f"{set_aside} events or deliveries were set aside")
    if shown.code != 0:
        found.append(f"`fencepost status` ended with code {shown.code}")
    if found:
        for violation in found:
            narrator.failed(violation)
        narrator.failed(
            f"CHECK FAILED: {len(found)} violations, read from the domain's tables and the provider's ledger"
        )
        return 1
    for line in NEXT.splitlines():
        narrator.say(line)
    narrator.seen(
        f"CHECK PASSED in {narrator.seconds:.0f} s: each of {total} submissions was published exactly once, and each of"
        f" {len(ledger)} effects was accepted at most once"
    )
    return 0


def _acts(director: Director, scene: Scene, narrator: Narrator) -> int:
    _prepare(scene, narrator)
    documents = iter(find(ORDINARY + 2 + len(LOST)))

    def take(number: int) -> list[Document]:
        taken = [d for _, d in zip(range(number), documents, strict=False)]
        if len(taken) < number:
            raise DemoFailed("too few packages with licence files are installed here; install fencepost[demo]")
        return taken

    ordinary = [director.submission(d) for d in take(ORDINARY)]
    unlucky, paused = (director.submission(d) for d in take(2))
    lost = {b: director.submission(d) for b, d in zip(LOST, take(len(LOST)), strict=True)}
    director.accept_together_or_not_at_all(ordinary, unlucky)
    director.kill_the_relay_between_confirm_and_ack(len(ordinary))
    director.absorb_duplicates(len(ordinary))
    director.publish_reports(ordinary)
    director.pause_a_worker_past_its_lease(paused)
    director.lose_replies(lost)
    director.reconcile(lost)
    total = len(ordinary) + 1 + len(lost)
    director.until_everything_is_told(total)
    return total


def _prepare(scene: Scene, narrator: Narrator) -> None:
    migrated = scene.command("migrate")
    narrator.quote(migrated.text)
    if migrated.code != 0:
        raise DemoFailed("the database could not be migrated")
    with scene.connect() as conn:
        conn.execute(domain.SCHEMA)
    if not scene.topic_first:
        scene.start("consumer", "consumer", "run", "reports.app:consumer")
    scene.prepare_broker()
    if scene.topic_first:
        scene.start("consumer", "consumer", "run", "reports.app:consumer")
    scene.start("relay-1", "relay", "run")
    scene.start("worker-1", "worker", "run", "reports.app:worker")
    narrator.say("relay, consumer and worker run as processes of their own; the provider keeps a ledger of its own")


if __name__ == "__main__":
    sys.exit(main())
