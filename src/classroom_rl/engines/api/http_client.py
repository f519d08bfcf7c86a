"""The HTTP client for models behind an API. It limits the size of replies, follows no redirects, and uses a connection
for one request only.

A provider, a proxy or a hotspot may answer with anything. At most `LARGEST_REPLY` bytes of a reply are read, counted
after decompression. A redirect would send the prompt, and perhaps the key, to an address that is not configured. If a
reply is longer than announced, or a proxy answers twice, the rest would be taken as the reply to the next request on
the connection: the verdict on another conversation.
"""

from contextlib import aclosing
from typing import Any

import httpx2
from openai import DefaultAsyncHttpxClient

LARGEST_REPLY = 4 * 1024**2
"""In bytes; a million tokens of text, far more than an answer holds."""
_OF_THE_BODY_AS_SENT = ("content-encoding", "content-length", "content-type", "transfer-encoding")


class ReplyTooLarge(httpx2.RequestError):
    """A reply of more than `LARGEST_REPLY` bytes."""


class RedirectRefused(httpx2.RequestError):
    """A reply that redirects to another address."""


class BoundedClient(DefaultAsyncHttpxClient):
    """The HTTP client of the `openai` library with these limits."""

    def __init__(self, **options: Any):
        once = httpx2.Limits(max_keepalive_connections=0)
        super().__init__(**options, limits=once, follow_redirects=False, event_hooks={"response": [_refuse_redirect]})

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request and read the whole reply. The body counts as JSON in UTF-8, whatever the headers say.

        Raises:
            ReplyTooLarge: if the reply exceeds `LARGEST_REPLY`; the rest is not read.
            RedirectRefused: if the reply is a redirect.
            httpx2.RequestError: if it cannot be received or decompressed.
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
    async with aclosing(reply.aiter_bytes()) as unpacked:  # in parts of at most 1 MiB
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
