"""A judge behind real HTTP that answers chat completions, misbehaves as scripted, and records every request.

`JudgeEndpoint(script)` calls `script(body, nth)` for the behaviour on each request: `body` is the request, `nth` counts
from 0 how often this model got this content before. The endpoint runs in threads of this process, on 127.0.0.1.
"""

import itertools
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NUMBER, SENT = "X-Request-Number", "X-Request-Sent"
"""Headers of requests that a `TurnedLoop` waits for: a number of its own, and when it was sent by that loop's clock."""
USD_PER_PROMPT_TOKEN, USD_PER_COMPLETION_TOKEN = 0.30e-6, 2.50e-6


@dataclass
class Call:
    """One request as the endpoint saw it. `billed_usd` is the charge; `stated` is whether the reply names it.

    `last_write` is when the endpoint began to write the last piece of its answer. Until then the request surely runs;
    soon afterwards the client may have the answer and send its next request, before this endpoint's thread goes on.
    `sent` is when the client sent it by the clock of its `TurnedLoop`, `number` the name that it gave it; `stalled`
    says that nothing more comes until the client is gone.
    """

    began: float
    body: dict
    key: str | None
    number: str | None = None
    sent: float | None = None
    stalled: bool = False
    behaviour: str = ""
    last_write: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    billed_usd: float = 0.0
    stated: bool = False

    @property
    def prompt(self) -> str:
        """The text of all messages, or that of a request to `/completions`."""
        return "\n".join(message["content"] for message in self.body.get("messages", ())) or self.body["prompt"]


class Exchange:
    """One request, with the methods to answer it, well or badly."""

    def __init__(self, handler: BaseHTTPRequestHandler, call: Call, closing: threading.Event):
        self._handler = handler
        self.call = call
        self.closing = closing

    def bill(self, completion: str = "") -> None:
        self.call.prompt_tokens = len(self.call.prompt.encode()) // 4 + 1
        self.call.completion_tokens = len(completion.encode()) // 4 + 1
        self.call.billed_usd = (
            self.call.prompt_tokens * USD_PER_PROMPT_TOKEN + self.call.completion_tokens * USD_PER_COMPLETION_TOKEN
        )

    def usage(self) -> dict:
        self.call.stated = True
        return {
            "prompt_tokens": self.call.prompt_tokens,
            "completion_tokens": self.call.completion_tokens,
            "cost": self.call.billed_usd,
        }

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self._handler.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(length), **headers}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()

    def send(self, status: int, body: dict | list | str, headers: dict[str, str] | None = None) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.head(status, len(data), headers or {})
        self.write(data)

    def write(self, data: bytes) -> None:
        self.call.last_write = time.monotonic()
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def client_left(self) -> bool:
        """Whether the client has closed the connection."""
        readable, _, _ = select.select([self._handler.connection], [], [], 0)
        try:
            return bool(readable) and not self._handler.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def stall(self, data: bytes = b"") -> None:
        """Wait until the client has gone, and write a byte of `data` now and then meanwhile."""
        self.call.stalled = True
        for offset in itertools.count():
            if self.closing.wait(0.02) or self.client_left():
                return
            self.write(data[offset : offset + 1])

    def hang_up(self) -> None:
        """Close the connection after this reply."""
        self._handler.close_connection = True

    def drop(self) -> None:
        """Break the connection without a reply: the client sees a reset."""
        self._handler.close_connection = True
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self._handler.connection.detach())


Behaviour = Callable[[Exchange], None]
Script = Callable[[dict, int], Behaviour]


def completion(text: str | None, finish_reason: str, usage: dict, is_chat: bool = True) -> dict:
    answer = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"choices": [{"index": 0, **answer, "finish_reason": finish_reason}], "usage": usage}


def _named(name: str, behaviour: Behaviour) -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.call.behaviour = name
        behaviour(exchange)

    return act


def says(text: str, name: str = "says", finish_reason: str = "stop") -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.bill(text)
        is_chat = "messages" in exchange.call.body
        exchange.send(200, completion(text, finish_reason, exchange.usage(), is_chat))

    return _named(name, act)


def cut_off(text: str) -> Behaviour:
    return says(text[: len(text) // 2], "cut off", "length")


def fails(status: int, error: object = "out of order", retry_after: str | None = None) -> Behaviour:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    body = {"error": error if isinstance(error, dict) else {"code": status, "message": error}}
    name = f"{status}" if retry_after is None else f"{status} with Retry-After"
    return _named(name, lambda exchange: exchange.send(status, body, headers))


def resets() -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.bill("something nobody ever reads")
        exchange.drop()

    return _named("reset", act)


def hangs() -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.bill("something nobody ever reads")
        exchange.stall()
        exchange.drop()

    return _named("hang", act)


def drips_for_ever(text: str, name: str = "slow drip") -> Behaviour:
    """The right reply, of which a byte comes now and then: it is not over before the client gives it up."""

    def act(exchange: Exchange) -> None:
        exchange.bill(text)
        data = json.dumps(completion(text, "stop", exchange.usage())).encode()
        exchange.head(200, len(data), {})
        exchange.stall(data[:-1])
        exchange.drop()

    return _named(name, act)


def drips(text: str, seconds: float, name: str = "drip") -> Behaviour:
    """The right reply, sent in pieces over `seconds`, with pauses of at most a tenth of that."""

    def act(exchange: Exchange) -> None:
        exchange.bill(text)
        data = json.dumps(completion(text, "stop", exchange.usage())).encode()
        exchange.head(200, len(data), {})
        step = len(data) // 20 + 1
        for start in range(0, len(data), step):
            if exchange.closing.wait(seconds / 20):
                return
            exchange.write(data[start : start + step])

    return _named(name, act)


def error_inside(code: int = 502) -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.bill()
        exchange.send(200, {"error": {"code": code, "message": "upstream failed"}, "usage": exchange.usage()})

    return _named("error in 200", act)


def no_choices() -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.bill()
        exchange.send(200, {"choices": [], "usage": exchange.usage()})

    return _named("no choices", act)


def empty() -> Behaviour:
    def act(exchange: Exchange) -> None:
        exchange.bill()
        exchange.send(200, completion("", "stop", exchange.usage()))

    return _named("empty", act)


@dataclass
class JudgeEndpoint:
    """The running endpoint: its address, its requests, and what it billed."""

    script: Script
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    _seen: Counter = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    @property
    def billed_usd(self) -> float:
        return sum(call.billed_usd for call in self.calls)

    @property
    def most_running(self) -> int:
        """How many requests ran at once, at most; each runs until the last piece of its answer is written."""
        ends = [(call.last_write or call.ended, -1) for call in self.calls]
        changes = sorted([*ends, *((call.began, 1) for call in self.calls)])
        return max(itertools.accumulate((change for _, change in changes), initial=0))

    def of(self, behaviour: str) -> list[Call]:
        return [call for call in self.calls if call.behaviour == behaviour]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        key = (handler.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        with self._lock:
            sent = handler.headers.get(SENT)
            call = Call(time.monotonic(), body, key, handler.headers.get(NUMBER), sent and float(sent))
            self.calls.append(call)
            content = json.dumps([body["model"], body.get("messages", body.get("prompt"))])
            nth = self._seen[content]
            self._seen[content] += 1
        try:
            self.script(body, nth)(Exchange(handler, call, self._closing))
        except OSError:  # the client is gone
            handler.close_connection = True
        finally:
            call.ended = time.monotonic()


_running: list[JudgeEndpoint] = []


def stalled_requests() -> set[str]:
    """The numbers of requests to any endpoint that runs which get nothing more."""
    return {call.number for endpoint in _running for call in endpoint.calls if call.stalled and call.number}


@contextmanager
def judge_endpoint(script: Script, port: int = 0) -> Iterator[JudgeEndpoint]:
    endpoint = JudgeEndpoint(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            endpoint.answer(self)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512

        def handle_error(self, *about: object) -> None:
            """Print nothing when a client has hung up; any other error is one of the test's script."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(*about)

    server = Server(("127.0.0.1", port), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    _running.append(endpoint)
    try:
        yield endpoint
    finally:
        _running.remove(endpoint)
        endpoint._closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
