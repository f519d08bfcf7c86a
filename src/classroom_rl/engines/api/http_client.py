"""The HTTP client for models behind an API: it limits the size of replies, follows no redirects, and keeps the limits
on requests and tokens per minute.

A provider, a proxy or a Wi-Fi hotspot may answer with anything. At most `LARGEST_REPLY` bytes of a reply are read,
counted after decompression. Redirects are refused, because they would send the prompt, and perhaps the key, to an
address that is not configured. Connections are not reused: if a reply is longer than announced, or a proxy answers
twice, the rest would be taken for the reply to the next request on the connection, such as the verdict on another
conversation.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import DefaultAsyncHttpxClient

_MINUTE_S = 60.0
_POLL_S = 1.0


@dataclass
class Reservation:
    """A request's share of the tokens per minute: the time at which it was admitted, and its number of tokens. Set
    `tokens` to the real number once it is known."""

    time: float
    tokens: int


class RateLimiter:
    """Spaces requests evenly over the minute, and keeps the tokens in any 60 seconds within a limit. None: no limit."""

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ):
        self._gap_s = _MINUTE_S / requests_per_minute if requests_per_minute else 0.0
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._sleep = sleep
        self._reservations: deque[Reservation] = deque()
        self._next_at = 0.0
        self._queue = asyncio.Lock()

    async def reserve(self, tokens: int) -> Reservation:
        """Wait until a request of at most `tokens` tokens may be sent. A request larger than the limit waits until no
        other request of the last 60 seconds counts."""
        async with self._queue:  # requests are admitted in the order in which they came
            while (wait_s := self._wait_s(tokens)) > 0:
                await self._sleep(min(wait_s, _POLL_S))
            now = self._clock()
            self._next_at = now + self._gap_s
            reservation = Reservation(now, tokens)
            if self._tokens_per_minute is not None:
                self._reservations.append(reservation)
            return reservation

    def _wait_s(self, tokens: int) -> float:
        now = self._clock()
        while self._reservations and self._reservations[0].time <= now - _MINUTE_S:
            self._reservations.popleft()
        wait_s = self._next_at - now
        reserved = sum(reservation.tokens for reservation in self._reservations)
        if self._reservations and reserved + tokens > self._tokens_per_minute:
            wait_s = max(wait_s, self._reservations[0].time + _MINUTE_S - now)
        return wait_s


LARGEST_REPLY = 4 * 1024**2
"""In bytes; a million tokens of text, far more than an answer holds."""
# Headers that describe the body as it was sent. They do not fit the decompressed body any more.
_BODY_HEADERS = ("content-encoding", "content-length", "content-type", "transfer-encoding")


class ReplyTooLarge(httpx2.RequestError):
    """A reply of more than `LARGEST_REPLY` bytes."""


class RedirectRefused(httpx2.RequestError):
    """A reply that redirects to another address."""


class BoundedClient(DefaultAsyncHttpxClient):
    """The `openai` library's HTTP client with the limits of this module on each reply."""

    def __init__(self, **options: Any):
        limits = httpx2.Limits(max_keepalive_connections=0)
        super().__init__(**options, limits=limits, follow_redirects=False, event_hooks={"response": [_refuse_redirect]})

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request and read the whole reply. The body is treated as JSON in UTF-8, whatever the headers say.

        Raises:
            ReplyTooLarge: if the reply exceeds `LARGEST_REPLY`; the rest is not read.
            RedirectRefused: if the reply is a redirect.
            httpx2.RequestError: if the reply cannot be received or decompressed.
        """
        reply = await super().send(request, stream=True, **options)
        try:
            body = await _read(reply)
        finally:
            await reply.aclose()
        headers = [(name, value) for name, value in reply.headers.multi_items() if name not in _BODY_HEADERS]
        headers.append(("content-type", "application/json"))
        return httpx2.Response(reply.status_code, headers=headers, content=body, request=request)


async def _read(reply: httpx2.Response) -> bytes:
    chunks, size = [], 0
    async with aclosing(reply.aiter_bytes()) as decompressed:  # in chunks of at most 1 MiB
        async for chunk in decompressed:
            chunks.append(chunk)
            size += len(chunk)
            if max(size, reply.num_bytes_downloaded) > LARGEST_REPLY:
                raise ReplyTooLarge(f"it has more than the {LARGEST_REPLY} bytes that are read of one")
    return b"".join(chunks)


async def _refuse_redirect(reply: httpx2.Response) -> None:
    if reply.has_redirect_location:
        target = reply.headers["location"][:300]
        raise RedirectRefused(
            f"{reply.status_code}: it sends requests on to {target!r}, and no request goes to an address that is not "
            "configured. If that is the right one, set it as base_url"
        )
