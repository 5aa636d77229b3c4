"""An effect over HTTP: one request, never followed or repeated, and only what the application calls a success is one.

    summarise = http_effect(client, "POST", "https://provider.example/summaries", success={201},
                            receipt=lambda answer: answer.json()["receipt"])

    receipt = ctx.effect("summarise", summarise, job.json(), kind="keyed")

    what was seen                                                           the call raises
    a status of ``success``, and a receipt in its answer                    nothing: Success
    no connection (refused, name, TLS, time), no byte of a request written  NotSent: a definite failure
    any other status; a redirect; an answer without a receipt, cut short,   Unclear: unknown
    too large or late; a connection lost once the request had begun

Whether a request had begun is taken from httpx's trace, so a transport that tries again after a lost answer is not
mistaken for one that never got through. A transport of one's own that does not trace is taken at its word.
Needs the extra ``http``.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import httpx

from fencepost.jobs.effects import Dispatch, NotSent, Success, Unclear, request_bytes
from fencepost.schemas.errors import ConfigError

__all__ = ["AsyncHttpEffect", "HttpEffect", "http_effect"]

KEY_HEADER = "Idempotency-Key"
ANSWER_BYTES_MAX = 1_048_576
# Of the time that is left, this much is for what a timeout of httpx does not bound; so the deadline is met by the call itself.
RESERVED_SECONDS_MAX = 1.0
RESERVED_SHARE = 0.1

Request = Mapping[str, object] | bytes
Receipt = Callable[[httpx.Response], str | Success]
Url = str | Callable[[Request], str]
HttpEffect = Callable[[Any, Dispatch], Success]
AsyncHttpEffect = Callable[[Any, Dispatch], Coroutine[Any, Any, Success]]

# What httpx raises where it found no connection to send on; ProxyError: the proxy opened no tunnel.
NO_CONNECTION = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)


@overload
def http_effect(
    client: httpx.Client,
    method: str,
    url: Url,
    *,
    success: Collection[int],
    receipt: Receipt,
    headers: Mapping[str, str] | None = None,
    key_header: str = KEY_HEADER,
    answer_bytes_max: int = ANSWER_BYTES_MAX,
) -> HttpEffect: ...


@overload
def http_effect(
    client: httpx.AsyncClient,
    method: str,
    url: Url,
    *,
    success: Collection[int],
    receipt: Receipt,
    headers: Mapping[str, str] | None = None,
    key_header: str = KEY_HEADER,
    answer_bytes_max: int = ANSWER_BYTES_MAX,
) -> AsyncHttpEffect: ...


def http_effect(
    client: httpx.Client | httpx.AsyncClient,
    method: str,
    url: Url,
    *,
    success: Collection[int],
    receipt: Receipt,
    headers: Mapping[str, str] | None = None,
    key_header: str = KEY_HEADER,
    answer_bytes_max: int = ANSWER_BYTES_MAX,
) -> HttpEffect | AsyncHttpEffect:
    """A call for ``ctx.effect`` that sends the effect's request once; definite only with a receipt or without a connection.

    The body is what the effect's digest is of: bytes as they are, a mapping as canonical JSON. ``success`` lists the
    statuses that mean that it happened (2xx and 3xx; redirects are never followed); ``receipt`` takes the provider's
    reference from such an answer, of ``answer_bytes_max`` bytes at most. ``url`` may be made from the request. Timeouts
    come from the dispatch deadline. The key in ``key_header`` is the same for every begin of a keyed effect, and another
    one for each begin of any other. A Client gives a call for ``Context``, an AsyncClient one for ``AsyncContext``.
    """
    if not success or not all(200 <= status < 400 for status in success):
        raise ConfigError(
            "success is not a list of 2xx and 3xx statuses", field="success", hint="for example {200, 201}"
        )
    if answer_bytes_max < 1:
        raise ConfigError("answer_bytes_max is not positive", field="answer_bytes_max")
    sent = _Sent(method, url, frozenset(success), receipt, dict(headers or {}), key_header, answer_bytes_max)
    return _async(client, sent) if isinstance(client, httpx.AsyncClient) else _sync(client, sent)


def _sync(client: httpx.Client, sent: _Sent) -> HttpEffect:
    def call(request: Any, dispatch: Dispatch) -> Success:
        under_way = _UnderWay(sent, dispatch)
        prepared = under_way.prepare(client, request, under_way.note)
        try:
            answer = client.send(prepared, stream=True, follow_redirects=False)
            try:
                under_way.judge(answer)
                for chunk in answer.iter_bytes():
                    under_way.take(chunk)
            finally:
                with contextlib.suppress(httpx.TransportError):
                    answer.close()
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise under_way.failure(error) from None
        return under_way.success(answer)

    return call


def _async(client: httpx.AsyncClient, sent: _Sent) -> AsyncHttpEffect:
    async def call(request: Any, dispatch: Dispatch) -> Success:
        under_way = _UnderWay(sent, dispatch)

        async def note(name: str, info: Mapping[str, Any]) -> None:
            under_way.note(name, info)

        prepared = under_way.prepare(client, request, note)
        try:
            answer = await client.send(prepared, stream=True, follow_redirects=False)
            try:
                under_way.judge(answer)
                async for chunk in answer.aiter_bytes():
                    under_way.take(chunk)
            finally:
                with contextlib.suppress(httpx.TransportError):
                    await answer.aclose()
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise under_way.failure(error) from None
        return under_way.success(answer)

    return call


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is the same for every dispatch."""

    method: str
    url: Url
    statuses: frozenset[int]
    receipt: Receipt
    headers: dict[str, str]
    key_header: str
    answer_bytes_max: int


@dataclass(slots=True)
class _UnderWay:
    """One dispatch: whether a request has begun, and what arrived."""

    sent: _Sent
    dispatch: Dispatch
    begun: bool = False
    answered: bool = False
    body: bytearray = field(default_factory=bytearray)

    def prepare(
        self, client: httpx.Client | httpx.AsyncClient, request: Request, trace: Callable[..., Any]
    ) -> httpx.Request:
        """The request; nothing is sent yet, so whatever goes wrong here is definite."""
        left = self.dispatch.seconds_left()
        if left == 0:
            raise NotSent("deadline_before_dispatch")
        try:
            kind = "application/octet-stream" if isinstance(request, bytes) else "application/json"
            url = self.sent.url if isinstance(self.sent.url, str) else self.sent.url(request)
            headers = httpx.Headers({"Content-Type": kind})
            headers.update(self.sent.headers)
            headers[self.sent.key_header] = self.dispatch.request_key
            return client.build_request(
                self.sent.method,
                url,
                content=request_bytes(request),
                headers=headers,
                timeout=left - min(RESERVED_SECONDS_MAX, left * RESERVED_SHARE),
                extensions={"trace": trace},
            )
        except Exception as error:
            raise NotSent("request_not_built") from error

    def note(self, name: str, info: Mapping[str, Any]) -> None:
        """What the transport tells: from the first byte of a request on, nothing is certain but a receipt."""
        if name.endswith(".send_request_headers.started"):
            # A tunnel that a proxy is asked for is not the request.
            if self.begun or getattr(info.get("request"), "method", b"") == b"CONNECT":
                return
            if self.dispatch.seconds_left() == 0:
                # A process that was paused on the way here must not send what others may have settled by now.
                raise NotSent("deadline_before_dispatch")
            self.begun = True

    def judge(self, answer: httpx.Response) -> None:
        """Raises Unclear for every status that was not called a success."""
        self.begun = self.answered = True
        if answer.status_code not in self.sent.statuses:
            raise Unclear(f"http_{answer.status_code}")

    def take(self, chunk: bytes) -> None:
        """Keeps a part of the answer, within its limits of size and time."""
        if len(self.body) + len(chunk) > self.sent.answer_bytes_max:
            raise Unclear("answer_too_large")
        if self.dispatch.seconds_left() == 0:
            raise Unclear("answer_late")
        self.body += chunk

    def failure(self, error: httpx.TransportError | httpx.DecodingError) -> NotSent | Unclear:
        """What the transport's error says about the effect."""
        if not self.begun and isinstance(error, NO_CONNECTION):
            return NotSent(_why(error))
        if isinstance(error, httpx.TimeoutException):
            return Unclear("answer_late")
        return Unclear("answer_cut" if self.answered else "answer_lost")

    def success(self, answer: httpx.Response) -> Success:
        """The receipt in the answer, or Unclear without one; what stands in the answer is never part of the error."""
        plain = [(k, v) for k, v in answer.headers.multi_items() if k not in ("content-encoding", "transfer-encoding")]
        whole = httpx.Response(answer.status_code, headers=plain, content=bytes(self.body), request=answer.request)
        try:
            found = self.sent.receipt(whole)
            return found if isinstance(found, Success) else Success(found)
        except Exception:  # noqa: BLE001 (whatever goes wrong in reading an answer says nothing about the effect)
            raise Unclear("no_receipt") from None


def _why(error: BaseException) -> str:
    match error:
        case httpx.PoolTimeout():
            return "no_free_connection"
        case httpx.ConnectTimeout():
            return "connect_timeout"
        case httpx.ProxyError():
            return "proxy_refused"
        case httpx.UnsupportedProtocol():
            return "unsupported_protocol"
        case _:
            pass
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:
        match cause:
            case ConnectionRefusedError():
                return "connection_refused"
            case socket.gaierror():
                return "name_not_resolved"
            case ssl.SSLError():
                return "tls_failed"
            case _:
                seen.append(cause)
                cause = cause.__cause__ or cause.__context__
    return "no_connection"
