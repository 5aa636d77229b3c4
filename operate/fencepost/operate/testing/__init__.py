"""The test kit: real PostgreSQL, the real relay, inbox and worker, and only the broker in memory.

The fixtures are in `fencepost.operate.pytest_plugin`, which pytest loads by itself.
"""

from fencepost.operate.testing.ageing import age
from fencepost.operate.testing.assertions import (
    Submitted,
    assert_enqueued,
    assert_enqueued_async,
    assert_submitted,
    assert_submitted_async,
)
from fencepost.operate.testing.broker import MemoryBroker
from fencepost.operate.testing.crash import Crash, crash, reach
from fencepost.operate.testing.databases import Database, Databases
from fencepost.operate.testing.jobs import Ran, lose_jobs, run_jobs
from fencepost.operate.testing.messages import Message

__all__ = [
    "Crash",
    "Database",
    "Databases",
    "MemoryBroker",
    "Message",
    "Ran",
    "Submitted",
    "age",
    "assert_enqueued",
    "assert_enqueued_async",
    "assert_submitted",
    "assert_submitted_async",
    "crash",
    "lose_jobs",
    "reach",
    "run_jobs",
]
