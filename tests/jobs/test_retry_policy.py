"""A policy in tenacity's words is stricter than its class, never more: what it does not retry is poison, with a reason."""

import math
import threading
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    TryAgain,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
    stop_any,
    wait_chain,
    wait_exponential,
    wait_exponential_jitter,
    wait_fixed,
    wait_random_exponential,
)

from fencepost.jobs.claim import Job, JobClassPolicy
from fencepost.jobs.context import Context
from fencepost.jobs.fence import Fence
from fencepost.jobs.retrying import RetryPolicy, Verdict, policy_of
from fencepost.jobs.worker import Backoff, Retry, Worker
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.identity import (
    Attempt,
    Epoch,
    Generation,
    Owner,
    as_class,
    as_operation,
    as_tenant,
)
from support.database import Database
from support.jobs import CLASS, column, given
from support.processes import wait_for
from support.workers import QUICK, becomes, running

LIMITS = JobClassPolicy(as_class(CLASS), backoff_max=60.0)


def attempt(number: int, most: int = 10) -> Job:
    """The claim of this number."""
    who = (as_tenant("t"), as_operation("op-1"), as_class(CLASS))
    fence = Fence(*who, Generation(number), Attempt(uuid4()), Owner("w"), Epoch(1))
    return Job(fence, "execute", number, most, b"{}", None, 30.0, math.inf)


def delays(policy: RetryPolicy, *numbers: int) -> list[float]:
    """The seconds that it waits after these attempts."""
    said = [policy.verdict(attempt(number), LIMITS, OSError()).delay for number in numbers]
    return [delay.total_seconds() for delay in said if delay is not None]


def test_waits_are_tenacitys_by_the_number_of_the_attempt_and_never_beyond_the_class() -> None:
    assert delays(RetryPolicy(wait=wait_fixed(7)), 1, 9) == [7, 7]
    assert delays(RetryPolicy(wait=wait_exponential(multiplier=2)), 1, 2, 3, 5, 6) == [2, 4, 8, 32, 60]
    assert delays(RetryPolicy(wait=wait_chain(wait_fixed(1), wait_fixed(5))), 1, 2, 3) == [1, 5, 5]
    assert 4 <= delays(RetryPolicy(wait=wait_exponential_jitter(jitter=3)), 3)[0] <= 7
    jittered = delays(RetryPolicy(wait=wait_random_exponential(multiplier=4)), *[4] * 20)
    assert len(set(jittered)) > 1 and all(0 <= seconds <= 32 for seconds in jittered)
    for wild, capped in ((math.inf, 60), (math.nan, 60), (-5.0, 0), (1e300, 60)):
        assert delays(RetryPolicy(wait=lambda _, seconds=wild: seconds), 1) == [capped]  # type: ignore[misc]
    # Without a wait the class's own backoff counts.
    assert RetryPolicy().verdict(attempt(1), LIMITS, OSError()) == Verdict()


def test_what_is_not_retried_and_where_it_stops() -> None:
    only = RetryPolicy(retry=retry_if_exception_type(OSError))
    assert only.verdict(attempt(1), LIMITS, ConnectionResetError()) == Verdict()
    assert only.verdict(attempt(1), LIMITS, ValueError()) == Verdict(reason="not_retried")
    but = RetryPolicy(retry=retry_if_not_exception_type(ValueError))
    assert (but.verdict(attempt(1), LIMITS, OSError()).final, but.verdict(attempt(1), LIMITS, ValueError()).final) == (
        False,
        True,
    )
    # Who says "again" is retried; and the handler's word as well.
    assert not only.verdict(attempt(1), LIMITS, TryAgain()).final
    assert not only.verdict(attempt(1), LIMITS, Retry(), asked=True).final

    limited = RetryPolicy(stop=stop_after_attempt(3), wait=wait_fixed(1))
    assert [limited.verdict(attempt(n), LIMITS, OSError()).reason for n in (1, 2, 3)] == [None, None, "given_up"]
    # The class's own limit is PostgreSQL's to tell.
    assert limited.verdict(attempt(3, most=3), LIMITS, OSError()).reason is None


def test_tenacitys_own_object_is_a_policy() -> None:
    kept: tuple[Retrying | AsyncRetrying, ...] = (
        Retrying(wait=wait_fixed(3), stop=stop_after_attempt(2), retry=retry_if_exception_type(OSError)),
        AsyncRetrying(wait=wait_fixed(3), stop=stop_after_attempt(2), retry=retry_if_exception_type(OSError)),
    )
    for retrying in kept:
        policy = policy_of(retrying)
        assert delays(policy, 1) == [3]
        assert policy.verdict(attempt(2), LIMITS, OSError()).reason == "given_up"
        assert policy.verdict(attempt(1), LIMITS, KeyError()).reason == "not_retried"


@pytest.mark.parametrize(
    "stop",
    [
        stop_after_delay(60),
        stop_any(stop_after_attempt(3), stop_after_delay(60)),
        stop_all(stop_after_attempt(3), stop_after_delay(60)),
    ],
)
def test_a_policy_that_needs_the_time_since_the_first_attempt_is_refused(stop: Any) -> None:
    worker = Worker()
    worker.job("a.allowed", retry=RetryPolicy(stop=stop_after_attempt(3)))
    with pytest.raises(ConfigError) as refused:
        worker.job("a.refused", retry=RetryPolicy(stop=stop))
    assert refused.value.field == "retry" and "stop_after_attempt" in str(refused.value)


def test_an_asynchronous_policy_is_refused_and_one_that_raises_gives_way_to_the_classs_backoff(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def wait(state: RetryCallState) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="asynchronous"):
        policy_of(RetryPolicy(wait=wait))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def broken(state: RetryCallState) -> float:
        raise ValueError("the customer's secret")

    assert policy_of(RetryPolicy(wait=broken)).verdict(attempt(1), LIMITS, OSError()) == Verdict()
    assert "ValueError" in caplog.text and "secret" not in caplog.text


def test_a_worker_follows_the_policy_and_poison_tells_which_exception_was_not_retried(database18: Database) -> None:
    worker = Worker()
    calls: list[str] = []

    @worker.job(
        CLASS,
        max_attempts=9,
        backoff=Backoff(0.0, 0.5),
        retry=Retrying(
            wait=wait_fixed(0), stop=stop_after_attempt(3), retry=retry_if_not_exception_type((ValueError, KeyError))
        ),
        **QUICK,
    )
    def handler(ctx: Context, job: Job) -> None:
        calls.append(job.operation)
        match job.operation:
            case "not-retried":
                raise ValueError("the customer's secret")
            case "given-up":
                raise OSError
            case "asked" if job.attempts == 1:
                raise Retry("not_ready")
            case _:
                pass

    with database18.connect(autocommit=True) as conn:
        for operation in ("not-retried", "given-up", "asked"):
            given(conn, operation, max_attempts=9)
        with running(worker, database18):
            becomes(conn, "poison", "not-retried")
            becomes(conn, "poison", "given-up")
            becomes(conn, "done", "asked")
        assert (calls.count("not-retried"), calls.count("given-up"), calls.count("asked")) == (1, 3, 2)
        assert (column(conn, "reason", "not-retried"), column(conn, "detail", "not-retried")) == (
            "not_retried",
            "ValueError",
        )
        assert (column(conn, "reason", "given-up"), column(conn, "detail", "given-up")) == ("given_up", "OSError")


def test_attempts_that_crashed_count_and_the_classs_limit_and_the_handlers_own_delay_win(database18: Database) -> None:
    worker = Worker()
    failed = threading.Event()

    @worker.job(CLASS, max_attempts=2, backoff=Backoff(0.0, 60.0), retry=RetryPolicy(wait=wait_fixed(3600)), **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        failed.set()
        match job.operation:
            case "own-delay":
                raise Retry(after=1800)
            case _:
                raise OSError

    with database18.connect(autocommit=True) as conn:
        for operation in ("capped", "own-delay", "crashed"):
            given(conn, operation, max_attempts=2)
        conn.execute("UPDATE fencepost.job SET attempts = 1 WHERE operation = 'crashed'")
        with running(worker, database18):
            becomes(conn, "poison", "crashed")
            for operation in ("capped", "own-delay"):
                wait_for(
                    lambda o=operation: column(conn, "reason", o) is not None,  # type: ignore[misc]
                    20,
                    f"{operation} to have failed once",
                )
        assert column(conn, "reason", "crashed") == "attempts_exhausted"
        row = conn.execute(
            "SELECT array_agg(run_at - changed_at ORDER BY operation) FROM fencepost.job WHERE exec <> 'poison'"
        ).fetchone()
        assert row is not None
        capped, own = row[0]
        assert capped <= timedelta(seconds=60) < timedelta(minutes=29) < own
