"""An effect over HTTP against a real provider with a ledger: definite only with a receipt, or without a connection (B18)."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any
from uuid import uuid4

import httpx
import pytest

from fencepost.jobs import effects
from fencepost.jobs.claim import Job
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.effects import Dispatch, Kind, NotSent, Success, Unclear
from fencepost.jobs.http import http_effect
from fencepost.jobs.worker import Backoff, Worker
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.identity import EffectAttempt
from support.database import Database
from support.jobs import CLASS, column, effect, given, results, save
from support.processes import wait_for
from support.provider import LOOPBACK, Mode, Provider
from support.workers import QUICK, becomes, running

REQUEST = {"text": "geheim", "n": 1}
Send = Callable[..., Success]


def receipt(answer: httpx.Response) -> str:
    found: str = answer.json()["receipt"]
    return found


def dispatch(kind: Kind = "keyed", *, seconds: float = 20.0, operation: str = "op-1") -> Dispatch:
    key = effects.idempotency_key("t", operation, "e1")
    return Dispatch(EffectAttempt(uuid4()), key, time.monotonic() + seconds, kind)


@pytest.fixture(params=["sync", "async"])
def send(request: pytest.FixtureRequest) -> Send:
    """Dispatches one request, by a client of each kind."""

    def sync(url: str, under: Dispatch | None = None, body: Any = REQUEST, **options: Any) -> Success:
        with httpx.Client(trust_env=False) as client:
            settings: dict[str, Any] = {"success": {200}, "receipt": receipt} | options
            return http_effect(client, "POST", url, **settings)(body, under or dispatch())

    def asynchronous(url: str, under: Dispatch | None = None, body: Any = REQUEST, **options: Any) -> Success:
        async def one() -> Success:
            async with httpx.AsyncClient(trust_env=False) as client:
                settings: dict[str, Any] = {"success": {200}, "receipt": receipt} | options
                return await http_effect(client, "POST", url, **settings)(body, under or dispatch())

        return asyncio.run(one())

    return sync if request.param == "sync" else asynchronous


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as made:
        yield made


def closed_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as closed:
        port: int = closed.getsockname()[1]
        return port


def test_a_receipt_in_an_answer_of_success_is_one_and_the_digest_is_that_of_the_body(
    send: Send, provider: Provider
) -> None:
    done = send(provider.url)
    key = effects.idempotency_key("t", "op-1", "e1")
    assert done == Success(f"receipt-{key}") and provider.accepted == [key]
    assert sha256(provider.bodies[0]).digest() == effects.request_digest(REQUEST)
    assert send(provider.url, body=b"\x00bytes").receipt and provider.bodies[1] == b"\x00bytes"
    given_back = Success("r-2", {"summary": "s"})

    def whole(answer: httpx.Response) -> Success:
        return given_back

    assert send(provider.url, receipt=whole) is given_back


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("drop-after-accept", "answer_lost"),
        ("error500", "http_500"),
        ("already-used", "http_409"),
        ("too-many", "http_429"),
        ("redirect", "http_307"),
        ("garbage", "no_receipt"),
        ("truncated", "answer_cut"),
        ("huge", "answer_too_large"),
    ],
)
def test_whatever_else_is_answered_after_the_acceptance_is_unclear_and_never_sent_again(
    send: Send, provider: Provider, mode: Mode, reason: str
) -> None:
    assert send(provider.url).receipt
    provider.mode = mode
    with pytest.raises(Unclear) as unclear:
        send(provider.url, answer_bytes_max=50_000)
    assert unclear.value.reason == reason and len(provider.accepted) == 2
    assert unclear.value.__cause__ is None and "geheim" not in repr(unclear.value)


def test_a_connection_reset_before_the_request_was_read_is_unclear_too(send: Send, provider: Provider) -> None:
    provider.mode = "refuse-before-read"
    with pytest.raises(Unclear):
        send(provider.url)
    assert provider.accepted == []


@pytest.mark.parametrize("mode", ["hang", "drip"])
def test_an_answer_that_does_not_come_by_the_deadline_is_unclear(send: Send, provider: Provider, mode: Mode) -> None:
    provider.mode = mode
    with pytest.raises(Unclear) as unclear:
        send(provider.url, dispatch(seconds=3.0))
    assert unclear.value.reason == "answer_late"
    wait_for(lambda: len(provider.accepted) == 1, 10, "the acceptance")


def test_without_a_connection_nothing_was_sent(send: Send, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *more: Any, **options: Any) -> Any:
        if host in ("nowhere.invalid", b"nowhere.invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for url, reason in (
        (f"http://{LOOPBACK}:{closed_port()}/effects", "connection_refused"),
        (f"http://nowhere.invalid:{provider.port}/effects", "name_not_resolved"),
        (f"https://{LOOPBACK}:{provider.port}/effects", "tls_failed"),
        (f"gopher://{LOOPBACK}:{provider.port}/effects", "unsupported_protocol"),
    ):
        with pytest.raises(NotSent) as refused:
            send(url)
        assert refused.value.reason == reason

    def nowhere(request: dict[str, object]) -> str:
        return str(request["nothing"])

    def there(request: object) -> str:
        return provider.url

    cases: list[tuple[dict[str, Any], Dispatch]] = [
        ({"body": {"price": 1.5}}, dispatch()),
        ({"url": nowhere}, dispatch()),
        ({}, dispatch(seconds=0.0)),
    ]
    for options, under in cases:
        with pytest.raises(NotSent):
            send(**({"url": provider.url, "under": under} | options))
    assert provider.accepted == []
    assert send(there).receipt and len(provider.accepted) == 1


def test_a_pool_without_a_free_connection_sends_nothing(provider: Provider) -> None:
    with httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=1)) as client:
        call = http_effect(client, "POST", provider.url, success={200}, receipt=receipt)
        assert call(REQUEST, dispatch()).receipt
        provider.mode = "drip"
        holding = client.stream("POST", provider.url, content=b"{}", headers={"Idempotency-Key": "other"})
        with holding, pytest.raises(NotSent) as refused:
            call(REQUEST, dispatch(seconds=0.5))
        assert refused.value.reason == "no_free_connection" and len(provider.accepted) == 2


def test_a_transport_that_tries_again_after_a_lost_answer_is_not_taken_for_one_that_never_got_through() -> None:
    """The trap of refused connections: the second one is refused because the provider went down after accepting."""
    with Provider() as provider:

        class Retrying(httpx.HTTPTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                try:
                    return super().handle_request(request)
                except httpx.TransportError:
                    request.url = request.url.copy_with(port=closed_port())
                    return super().handle_request(request)

        with httpx.Client(transport=Retrying()) as client:
            call = http_effect(client, "POST", provider.url, success={200}, receipt=receipt)
            assert call(REQUEST, dispatch()).receipt
            provider.mode = "drop-after-accept"
            with pytest.raises(Unclear):
                call(REQUEST, dispatch())
        assert len(provider.accepted) == 2
        with httpx.Client(transport=Retrying()) as client:
            nobody = f"http://{LOOPBACK}:{closed_port()}/"
            with pytest.raises(NotSent):
                http_effect(client, "POST", nobody, success={200}, receipt=receipt)(REQUEST, dispatch())


@pytest.mark.parametrize("reused", [False, True], ids=["new", "reused"])
def test_a_process_paused_past_the_deadline_before_the_first_byte_sends_nothing(
    provider: Provider, reused: bool
) -> None:
    """As SIGSTOP would, the hook holds the request between the last look at the clock and its first byte."""
    held: list[Dispatch] = []

    def hold(_request: httpx.Request) -> None:
        wait_for(lambda: all(each.seconds_left() == 0 for each in held), 10, "the deadline to pass")

    with httpx.Client(trust_env=False, event_hooks={"request": [hold]}) as client:
        call = http_effect(client, "POST", provider.url, success={200}, receipt=receipt)
        if reused:
            assert call(REQUEST, dispatch()).receipt
        held.append(dispatch(seconds=0.2))
        with pytest.raises(NotSent) as refused:
            call(REQUEST, held[0])
        assert refused.value.reason == "deadline_before_dispatch" and len(provider.accepted) == reused
        held.clear()
        assert call(REQUEST, dispatch()).receipt and len(provider.accepted) == 1 + reused


def test_a_paused_asynchronous_call_sends_nothing_either(provider: Provider) -> None:
    late = dispatch(seconds=0.2)

    async def hold(_request: httpx.Request) -> None:
        wait_for(lambda: late.seconds_left() == 0, 10, "the deadline to pass")

    async def one() -> None:
        async with httpx.AsyncClient(trust_env=False, event_hooks={"request": [hold]}) as client:
            await http_effect(client, "POST", provider.url, success={200}, receipt=receipt)(REQUEST, late)

    with pytest.raises(NotSent) as refused:
        asyncio.run(one())
    assert refused.value.reason == "deadline_before_dispatch" and provider.accepted == []


def test_the_key_is_stable_over_begins_for_a_keyed_effect_only(send: Send, provider: Provider) -> None:
    for kind in ("keyed", "keyed", "lookup", "lookup", "opaque"):
        send(provider.url, dispatch(kind))
    first, second, *others = provider.accepted
    assert first == second == effects.idempotency_key("t", "op-1", "e1")
    assert len({first, *others}) == 4 and all(key.startswith("attempt-") for key in others)
    send(provider.url, headers={"idempotency-key": "mine", "X-Other": "x"})
    assert provider.accepted[-1] == first


def test_success_must_be_said_and_can_be_no_failure(provider: Provider) -> None:
    with httpx.Client() as client:
        for statuses in ((), (404,), (200, 500)):
            with pytest.raises(ConfigError) as refused:
                http_effect(client, "POST", provider.url, success=statuses, receipt=receipt)
            assert refused.value.field == "success"
        provider.mode = "redirect"
        accepted = http_effect(client, "POST", provider.url, success={307}, receipt=lambda answer: "seen")
        assert accepted(REQUEST, dispatch()).receipt == "seen" and len(provider.accepted) == 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_worker_sends_again_what_was_refused_and_keeps_unknown_what_was_lost(
    database18: Database, asynchronous: bool
) -> None:
    target = [f"http://{LOOPBACK}:{closed_port()}/effects"]
    worker = Worker()
    options: dict[str, Any] = QUICK | {"backoff": Backoff(0.0, 0.0), "max_attempts": 100}
    common: dict[str, Any] = {"success": {200}, "receipt": receipt}

    def url(request: object) -> str:
        return target[0]

    def sync(ctx: Context, job: Job) -> None:
        with httpx.Client(trust_env=False) as client:
            done = ctx.effect("e1", http_effect(client, "POST", url, **common), {"op": job.operation}, kind="keyed")
        ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

    async def on_loop(ctx: AsyncContext, job: Job) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            call = http_effect(client, "POST", url, **common)
            done = await ctx.effect("e1", call, {"op": job.operation}, kind="keyed")
        await ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

    worker.job(CLASS, **options)(on_loop if asynchronous else sync)
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        given(conn, max_attempts=100)
        with running(worker, database18):
            wait_for(lambda: column(conn, "attempts") >= 3, 20, "three refused connections")
            target[0] = provider.url
            becomes(conn, "done")
            provider.mode = "drop-after-accept"
            given(conn, "op-2", max_attempts=100)
            becomes(conn, "blocked", "op-2")
        key = effects.idempotency_key("t", "op-1", "e1")
        assert results(conn) == [f"receipt-{key}"] and results(conn, "op-2") == []
        assert (effect(conn, "state", "op-2"), effect(conn, "reason", "op-2")) == ("unknown", "answer_lost")
        assert provider.accepted == [key, effects.idempotency_key("t", "op-2", "e1")]
        reasons = conn.execute(
            "SELECT DISTINCT reason FROM fencepost.effect_event WHERE became = 'failed_before_dispatch'"
        )
        assert reasons.fetchall() == [("connection_refused",)]
