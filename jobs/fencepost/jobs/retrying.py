"""Retry policies in tenacity's words: a handler's exception is retried, given up or not retried as the policy says.

    @worker.job("report.analyse", max_attempts=8, backoff=Backoff(1, 600),
                retry=RetryPolicy(wait=wait_exponential_jitter(max=300),
                                  stop=stop_after_attempt(5),
                                  retry=retry_if_not_exception_type(ValueError)))

A policy can only be stricter than its class: ``max_attempts`` and the class's longest backoff are PostgreSQL's, and hold
for attempts that crashed as well. ``retry=Retrying(wait=..., stop=..., retry=...)`` of tenacity says the same.
Needs the extra ``retry``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tenacity import RetryCallState, Retrying, TryAgain

from fencepost.jobs.claim import Job, JobClassPolicy
from fencepost.schemas.errors import ConfigError

if TYPE_CHECKING:
    from tenacity import AsyncRetrying

__all__ = ["RetryPolicy", "Verdict", "policy_of"]

GIVEN_UP = "given_up"
NOT_RETRIED = "not_retried"
# With which a policy is tried when it is registered: the first, and one that every limit of attempts has passed.
TRIED = (1, 1001)

log = logging.getLogger("fencepost.jobs")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an attempt that raised: retried after ``delay`` (None: the class's backoff), or final for ``reason``."""

    delay: timedelta | None = None
    reason: str | None = None

    @property
    def final(self) -> bool:
        """Whether it is never tried again by itself."""
        return self.reason is not None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which exceptions are retried, how long each retry waits and when to stop; what is None is as the class says.

    Each is called with a ``RetryCallState`` of tenacity: the number of the attempt (every claim counts, also those of
    workers that died) and the exception as its outcome. Times since the first attempt are not known there, because
    attempts run in many processes: ``stop_after_delay`` is refused.
    """

    wait: Callable[[RetryCallState], float] | None = None
    stop: Callable[[RetryCallState], bool] | None = None
    retry: Callable[[RetryCallState], bool] | None = None

    def verdict(self, job: Job, limits: JobClassPolicy, error: BaseException, *, asked: bool = False) -> Verdict:
        """What the policy says of this attempt; with ``asked`` the handler itself asked for a retry, so it is one.

        A policy that raises is told in the log, and the class's backoff takes its place.
        """
        state = _state(job.attempts, error)
        try:
            if not (asked or isinstance(error, TryAgain) or self.retry is None or self.retry(state)):
                return Verdict(reason=NOT_RETRIED)
            if self.stop is not None and job.attempts < job.max_attempts and self.stop(state):
                return Verdict(reason=GIVEN_UP)
            return Verdict(None if self.wait is None else _capped(self.wait(state), limits.backoff_max))
        except Exception as raised:  # noqa: BLE001 (it is the application's code)
            log.error(
                "%s: its retry policy raised %s: the class's backoff is used", job.job_class, type(raised).__name__
            )
            return Verdict()


def policy_of(given: RetryPolicy | Retrying | AsyncRetrying) -> RetryPolicy:
    """The policy that was given; ConfigError when it asks what nobody knows, or is asynchronous."""
    policy = given if isinstance(given, RetryPolicy) else RetryPolicy(given.wait, given.stop, given.retry)
    for attempt in TRIED:
        for name, each in (("wait", policy.wait), ("stop", policy.stop), ("retry", policy.retry)):
            if each is None:
                continue
            try:
                answer: Any = each(_state(attempt, RuntimeError()))
            except _NotKnown:
                raise ConfigError(
                    f"the {name} of this policy asks for the time since the first attempt",
                    field="retry",
                    hint="attempts run in many processes; limit their number: stop_after_attempt(5)",
                ) from None
            except Exception:  # noqa: BLE001 (it may know its own exceptions only)
                answer = None
            if isinstance(answer, Coroutine):
                answer.close()
                raise ConfigError(f"the {name} of this policy is asynchronous", field="retry", hint="give a function")
    return policy


class _NotKnown(Exception):
    pass


class _State(RetryCallState):
    """The state of one attempt; how long ago the first was is not known."""

    @property
    def seconds_since_start(self) -> float | None:
        raise _NotKnown


def _state(attempt: int, error: BaseException) -> RetryCallState:
    state = _State(Retrying(), None, (), {})
    state.attempt_number = attempt
    state.set_exception((type(error), error, error.__traceback__))
    return state


def _capped(seconds: float, most: float) -> timedelta:
    """Never negative, never longer than the class's longest backoff."""
    return timedelta(seconds=most if math.isnan(seconds) else max(0.0, min(float(seconds), most)))
