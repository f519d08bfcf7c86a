"""The HTTP client that models behind an API are asked through: it reads so much and no more, and goes nowhere else.

Provider, proxy or hotspot: whoever answers may send anything. A reply is read up to `LARGEST_REPLY` bytes, counted
after unpacking. A redirect is not followed: it would take the prompt, and perhaps the key, to an address that nobody
configured.
"""

from contextlib import aclosing
from typing import Any

import httpx2
from openai import DefaultAsyncHttpxClient

LARGEST_REPLY = 4 * 1024**2
"""Bytes that a reply may have: a million tokens of text, far more than a model says in an answer."""
_OF_THE_BODY_AS_SENT = ("content-encoding", "content-length", "content-type", "transfer-encoding")


class ReplyTooLarge(httpx2.RequestError):
    """A reply of more than `LARGEST_REPLY` bytes."""


class RedirectRefused(httpx2.RequestError):
    """A reply that sends the request on to another address."""


class BoundedClient(DefaultAsyncHttpxClient):
    """The client of the `openai` library, with these limits."""

    def __init__(self, **options: Any):
        super().__init__(**options, follow_redirects=False, event_hooks={"response": [_refuse_redirect]})

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """The reply, read whole. Its body is JSON, and so UTF-8, whatever its headers say.

        Raises:
            ReplyTooLarge: if it is larger than allowed; the rest is not read.
            RedirectRefused: if it sends the request elsewhere.
            httpx2.RequestError: if it cannot be received or unpacked.
        """
        reply = await super().send(request, stream=True, **options)
        try:
            body = await _read(reply)
        finally:
            await reply.aclose()
        headers = [(name, value) for name, value in reply.headers.multi_items() if name not in _OF_THE_BODY_AS_SENT]
        headers.append(("content-type", "application/json"))
        return httpx2.Response(reply.status_code, headers=headers, content=body, request=request)


async def _read(reply: httpx2.Response) -> bytes:
    parts, size = [], 0
    async with aclosing(reply.aiter_bytes()) as unpacked:  # no more than 1 MiB at a time
        async for part in unpacked:
            parts.append(part)
            size += len(part)
            if max(size, reply.num_bytes_downloaded) > LARGEST_REPLY:
                raise ReplyTooLarge(f"it has more than the {LARGEST_REPLY} bytes that are read of one")
    return b"".join(parts)


async def _refuse_redirect(reply: httpx2.Response) -> None:
    if reply.has_redirect_location:
        target = reply.headers["location"][:300]
        raise RedirectRefused(
            f"{reply.status_code}: it sends requests on to {target!r}, and no request goes to an address that is not "
            "configured. If that is the right one, set it as base_url"
        )
