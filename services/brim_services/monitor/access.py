"""Who may ask what, and how much of it: addresses, tokens, rates, sizes and times of requests.

One ASGI middleware in front of everything, so that no route can be forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brim.core.model import Reason
from brim.settings import Monitor, Token

from .problems import Refused, response

log = logging.getLogger("brim.monitor")

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
BODY_TIMEOUT_S = 20.0
"""A request's body has to arrive within this."""
CLIENTS = 10_000
"""For how many clients rates are remembered."""
OPEN = frozenset({"/healthz", "/readyz"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})

SECURITY_HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; "
    b"img-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}


def digest(token: str) -> str:
    """What the settings keep of a token. A token is random and long, so a plain hash tells nothing of it."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(slots=True)
class Bucket:
    """A token bucket: what is left of the burst, and when that was counted."""

    left: float
    at_s: float


class Rates:
    """Requests per client; ``clock`` is monotonic seconds."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, client: str) -> float:
        """0 if the client may ask now, else in how many seconds it may."""
        now_s = self._clock()
        bucket = self._buckets.pop(client, None) or Bucket(self.burst, now_s)
        bucket.left = min(self.burst, bucket.left + (now_s - bucket.at_s) * self.rate)
        bucket.at_s = now_s
        if len(self._buckets) >= CLIENTS:
            del self._buckets[next(iter(self._buckets))]  # the one that was quiet for longest
        self._buckets[client] = bucket
        if bucket.left < 1:
            return (1 - bucket.left) / self.rate
        bucket.left -= 1
        return 0.0


class Gate:
    """Refuses what must not reach the application, with a problem document."""

    def __init__(self, app: ASGIApp, settings: Monitor) -> None:
        self.app = app
        self.settings = settings
        self.tokens = {token.sha256: token for token in settings.tokens}
        self.rates = Rates(settings.request_rate, settings.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks an HTTP request and passes it on with a bounded body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _with_security_headers(send)
        try:
            self._check(scope)
        except Refused as refusal:
            await response(refusal.problem, dict(refusal.headers or {}))(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_site(scope, headers)
        token = self._token(headers)
        client = f"token {token.name}" if token else str((scope.get("client") or ("",))[0])
        wait_s = self.rates.take(client)
        if wait_s:
            message = f"more than {self.settings.request_rate:g} requests per second"
            raise Refused(429, Reason("too_many_requests", message), headers={"Retry-After": str(int(wait_s) + 1)})
        self._check_scope(scope, token)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise self._too_large()

    def _check_site(self, scope: Scope, headers: Headers) -> None:
        """Keeps other sites that a browser visits from using a monitor that trusts this machine."""
        host = headers.get("host", "")
        if not self.tokens and urlsplit(f"//{host}").hostname not in LOOPBACK:
            message = f"without tokens only this machine is served, by the names {', '.join(sorted(LOOPBACK))}"
            raise Refused(403, Reason("foreign_host", message))
        origin = headers.get("origin")
        if origin and scope["method"] not in READING and urlsplit(origin).netloc != host:
            raise Refused(403, Reason("foreign_origin", "another site's page may not send this request"))

    def _token(self, headers: Headers) -> Token | None:
        """The token that came with the request, if it is a known one."""
        kind, _, text = headers.get("authorization", "").partition(" ")
        return self.tokens.get(digest(text.strip())) if kind.lower() == "bearer" else None

    def _check_scope(self, scope: Scope, token: Token | None) -> None:
        path: str = scope["path"]
        if not self.tokens or path in OPEN or not path.startswith(("/v1/", "/metrics")):
            return
        if token is None:
            reason = Reason("no_token", "this needs a bearer token: Authorization: Bearer …")
            raise Refused(401, reason, headers={"WWW-Authenticate": 'Bearer realm="brim"'})
        if token.scope != "submit" and scope["method"] not in READING and path != "/v1/estimate":
            raise Refused(403, Reason("read_only", f"the token {token.name!r} may only read"))

    def _bounded(self, receive: Receive) -> Receive:
        """The request's body within its limits of size and time."""
        size, complete = 0, False
        deadline_s = time.monotonic() + BODY_TIMEOUT_S

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                reason = Reason("slow_body", f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s")
                raise Refused(408, reason, headers={"Connection": "close"}) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.settings.max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> Refused:
        message = f"the request's body has more than monitor.max_body_bytes ({self.settings.max_body_bytes})"
        return Refused(413, Reason("too_large", message), headers={"Connection": "close"})


def _with_security_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS.items()]
        await send(message)

    return sending
