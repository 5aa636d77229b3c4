"""How the application speaks to the provider: what is definite, what is not, and the receipt look-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import httpx

from fencepost.jobs.effects import Dispatch, Success
from fencepost.schemas.errors import NotDispatched, Unreachable

__all__ = ["Provider"]

READ_SECONDS = 65.0
CONTROL_SECONDS = 5.0


class Provider:
    """One provider by its address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def summarise(self, request: Mapping[str, object], dispatch: Dispatch) -> Success:
        """The effect. Refused connections and 4xx are definite; any other failure leaves the outcome unknown."""
        try:
            answer = httpx.post(
                f"{self.url}/summaries",
                json=dict(request),
                headers={"Idempotency-Key": dispatch.idempotency_key},
                timeout=dispatch.seconds_left(),
            )
        except httpx.ConnectError:
            raise NotDispatched("the provider refused the connection", field="provider") from None
        if answer.is_client_error:
            raise NotDispatched("the provider refused the request", field="provider", hint="nothing was accepted")
        answer.raise_for_status()
        body = answer.json()
        return Success(str(body["receipt"]), {"summary": str(body["summary"])})

    def prefix(self, operation: str) -> str:
        """A read without any effect."""
        answer = httpx.get(f"{self.url}/style/{operation}", timeout=READ_SECONDS)
        answer.raise_for_status()
        return str(answer.json()["prefix"])

    def receipt(self, key: str) -> str | None:
        """What the provider accepted under this idempotency key, if anything."""
        answer = self._ask("GET", f"/summaries/{key}")
        return None if answer.status_code == 404 else str(answer.json()["receipt"])

    def plan(self, operation: str, **behaviours: list[str]) -> None:
        """Plans how the next requests for an operation behave."""
        self._ask("PUT", f"/behaviour/{operation}", behaviours)

    def held(self) -> list[str]:
        """Operations whose requests are held, the oldest first."""
        return cast(list[str], self._ask("GET", "/held").json())

    def release(self) -> None:
        """Lets the oldest held request go on."""
        self._ask("POST", "/release")

    def ledger(self) -> list[dict[str, str]]:
        """Everything that was ever accepted."""
        return cast(list[dict[str, str]], self._ask("GET", "/ledger").json())

    def requests(self) -> dict[str, int]:
        """How many summaries were asked for, by operation."""
        return cast(dict[str, int], self._ask("GET", "/requests").json())

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            answer = httpx.request(method, self.url + path, json=body, timeout=CONTROL_SECONDS)
            if answer.status_code != 404:
                answer.raise_for_status()
            answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(
                f"the provider does not answer ({_words(error)})", address=self.url, field="provider"
            ) from None
        return answer


def _words(error: Exception) -> str:
    match error:
        case httpx.ConnectError():
            return "connection refused"
        case httpx.TimeoutException():
            return "no answer in time"
        case httpx.HTTPStatusError():
            return f"status {error.response.status_code}"
        case _:
            return "what it sends is not what a provider would send"
