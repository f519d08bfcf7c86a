"""The client for the server's HTTP API, used by trainer and evaluation."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.judge_check import JudgeCheckRequest, JudgeCheckResponse
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import (
    AccessDenied,
    ClassroomError,
    DataError,
    DeadlineExceeded,
    EngineFailure,
    ForeignRequest,
    GpuFull,
    PolicyMismatch,
    ProviderFailure,
    RequestTooLarge,
    ServerLost,
    SpendingCapReached,
    UnknownConversation,
)
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.agreement import digest_of, refuse_other_play
from classroom_rl.server.auth import token_from_environment
from classroom_rl.server.schemas import (
    LARGEST_BODY,
    Health,
    LoadWeightsRequest,
    LoadWeightsResponse,
    ProcessId,
    ReceiveWeightsRequest,
    RewardResponse,
    SleepRequest,
    SleepResponse,
)

logger = logging.getLogger(__name__)

_ERRORS: dict[int, type[ClassroomError]] = {
    401: AccessDenied,
    402: SpendingCapReached,
    403: ForeignRequest,
    404: UnknownConversation,
    409: PolicyMismatch,
    413: RequestTooLarge,
    422: DataError,
    423: GpuFull,
    424: ProviderFailure,
    503: EngineFailure,
    504: DeadlineExceeded,
}
_BROKEN_CONNECTION = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
"""A `ChunkedEncodingError` is a response that breaks off because the server ended while sending it."""
_REQUEST_TIMEOUT_S = 60.0
_TIME_TO_ANSWER_S = 5.0
"""How much longer than its own deadline a server may take to say that it has passed."""
_RETRY_PAUSE_S = 2.0
_SECONDS_BETWEEN_MESSAGES = 30.0
_CONNECTIONS = 64


class ClassroomClient:
    """A client of one server. It sends the token of the environment, if there is one.

    Args:
        url: the server's address, such as http://127.0.0.1:8005.
        sample_timeout_s: how long a batch of conversations may take.
        load_timeout_s: how long loading a policy may take.
        return_timeout_s: how long a server that ended may take to come back.
        log: the path of the server's log, for error messages.
        record: the class of the environment's trajectories.
        has_others: whether other servers can do this one's work: then requests to a server that has not answered for
            `return_timeout_s` are given up (`ServerLost`), also those that have more time.
    """

    def __init__(
        self,
        url: str,
        sample_timeout_s: float = 3600.0,
        load_timeout_s: float = 600.0,
        return_timeout_s: float = 1800.0,
        log: Path | None = None,
        record: type[Trajectory] = ConversationRecord,
        has_others: bool = False,
    ):
        self.url = url.rstrip("/")
        self._sample_timeout_s = sample_timeout_s
        self._load_timeout_s = load_timeout_s
        self._return_timeout_s = return_timeout_s
        self._log = log
        self._record = record
        self._has_others = has_others
        self._silent_since: float | None = None
        self._plays: dict[str, str] | None = None
        self._session = requests.Session()
        self._session.trust_env = False  # proxy settings are for the internet, not for this server
        self._session.mount("http://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
        token = token_from_environment()
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"

    @property
    def is_lost(self) -> bool:
        """Whether the server has not answered for so long that its work is to be done by others."""
        since = self._silent_since
        return self._has_others and since is not None and time.monotonic() - since >= self._return_timeout_s

    def health(self) -> Health:
        """Return the server's models and running work.

        Raises:
            DeadlineExceeded: if nothing answers.
            AccessDenied: if the server requires a token and got none, or a wrong one.
            ClassroomError: if another program answers.
        """
        try:
            return Health.model_validate(self._request("GET", "/health", timeout_s=10.0))
        except ValueError as error:
            raise ClassroomError(
                f"What answers at {self.url} is no server of this project. End it, or choose another port with "
                "generation.server_port=…"
            ) from error

    def wait_until_up(self, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> Health:
        """Wait until the server answers, and return its health.

        Args:
            alive: whether the server's process still runs.

        Raises:
            DeadlineExceeded: after `timeout_s` seconds; the message names the command that starts a server.
            EngineFailure: if the server ended while it was loading.
        """
        started = logged = time.monotonic()
        hint = f"Start one with: python vllm_server.py --config-name …{self._see_log()}"
        while True:
            try:
                return self.health()
            except (DeadlineExceeded, EngineFailure) as error:
                now = time.monotonic()
                if not alive():
                    message = f"The server for {self.url} ended while it was loading.{self._see_log()}"
                    raise EngineFailure(message) from error
                if now - started > timeout_s:
                    message = f"No server answered at {self.url} within {timeout_s:g} s. {hint}"
                    raise DeadlineExceeded(message) from error
                if now - logged >= _SECONDS_BETWEEN_MESSAGES or logged == started:
                    logger.info(
                        "no server answers at %s yet; waiting up to %g s (%.0f s). %s",
                        self.url,
                        timeout_s,
                        now - started,
                        hint,
                    )
                    logged = now
            time.sleep(0.5)

    def expect(self, plays: dict[str, str]) -> None:
        """Refuse a server whose conversations would differ from the trainer's configuration. This is checked now and
        with each batch, because a server may end and come back with another configuration.

        Args:
            plays: the trainer's `conversation_keys`.

        Raises:
            ConfigError: with the keys that differ.
        """
        self._plays = plays
        server_keys = self.health().plays
        if server_keys is not None:
            refuse_other_play(server_keys, plays, self.url)

    def sample(self, body: SampleRequest) -> SampleResponse:
        """Have the server play a batch of conversations and return them. If the connection breaks, the request is sent
        again with the same id, and the server does not run it twice.

        Raises:
            DeadlineExceeded: after `sample_timeout_s` seconds.
            ConfigError: if the server came back with another configuration than `expect` was given.
            ClassroomError: the server's error.
        """
        description = f"the {len(body.problems)} conversations of request {body.request_id}"
        answer = self._request_with_retries(
            "POST", "/sample_conversations", body.model_dump(), self._sample_timeout_s, description
        )
        response = SampleResponse[self._record].model_validate(answer)
        if self._plays is not None and response.plays not in ("", digest_of(self._plays)):
            self.expect(self._plays)
        return response

    def play(self, body: SampleRequest) -> None:
        """Have the server play a batch, as `sample` does, and return once the policy has written all its messages. The
        verdicts may still be missing: `sample` with the same body waits for them.

        Raises:
            DeadlineExceeded: after `sample_timeout_s` seconds.
            ClassroomError: the server's error.
        """
        description = f"the messages of request {body.request_id}"
        self._request_with_retries(
            "POST", "/play_conversations", body.model_dump(), self._sample_timeout_s, description
        )

    def rewards(self, name: str, conversations: Sequence[str]) -> list[float | None]:
        """Return one reward per conversation id; None for a conversation without a verdict."""
        body = {"conversations": list(conversations)}
        answer = self._request_with_retries(
            "POST", f"/get_{name}_reward", body, self._return_timeout_s, f"the {name} rewards"
        )
        return RewardResponse.model_validate(answer).rewards

    def check_judge(self, body: JudgeCheckRequest, timeout_s: float) -> JudgeCheckResponse:
        """Have the server check its judge.

        Args:
            timeout_s: how long the server may take for one judgement; it makes all of them concurrently.

        Raises:
            ClassroomError: if the check failed.
        """
        description = f"the check of the judge {body.request_id}"
        answer = self._request_with_retries(
            "POST", "/check_judge", body.model_dump(), timeout_s + _REQUEST_TIMEOUT_S, description
        )
        return JudgeCheckResponse.model_validate(answer)

    def load_weights(self, policy: PolicyVersion, path: Path) -> LoadWeightsResponse:
        """Have the server load published weights from the folder `path`. Raises a `PolicyMismatch` if the server loaded
        another version."""
        body = LoadWeightsRequest(run_id=policy.run_id, version=policy.version, path=str(path)).model_dump()
        limit_s = self._load_timeout_s + self._return_timeout_s
        answer = self._request_with_retries(
            "POST", "/load_weights", body, limit_s, f"policy {policy} loaded", self._load_timeout_s
        )
        loaded = LoadWeightsResponse.model_validate(answer)
        if loaded.policy != policy:
            raise PolicyMismatch(f"{self.url} was given policy {policy} and answers that {loaded.policy} is loaded.")
        return loaded

    def receive_weights(self, body: ReceiveWeightsRequest) -> LoadWeightsResponse:
        """Have the server receive weights that are being sent. It is not asked twice: the others that receive them
        would not wait.

        Raises:
            PolicyMismatch: if the server has another version afterwards.
            DeadlineExceeded, EngineFailure: if it did not receive all of them; it may restart its engine.
        """
        limit_s = self._load_timeout_s + _TIME_TO_ANSWER_S
        answer = self._request("POST", "/weights/receive", body.model_dump(), timeout_s=limit_s)
        received, policy = LoadWeightsResponse.model_validate(answer), PolicyVersion(body.run_id, body.version)
        if received.policy != policy:
            raise PolicyMismatch(f"{self.url} was sent policy {policy} and answers that {received.policy} is loaded.")
        return received

    def stop_receiving(self) -> None:
        """Have the server give up the weights that it is receiving, if any. Its engine counts as dead then."""
        self._request("DELETE", "/weights/receive")

    def sleep(self, borrowers: Sequence[ProcessId]) -> SleepResponse:
        """Put all engines to sleep until `wake_up` is called or all processes in `borrowers` have ended."""
        body = SleepRequest(borrowers=list(borrowers)).model_dump()
        limit_s = self._load_timeout_s + self._return_timeout_s
        answer = self._request_with_retries("POST", "/sleep", body, limit_s, "engines asleep", self._load_timeout_s)
        return SleepResponse.model_validate(answer)

    def wake_up(self) -> SleepResponse:
        """Wake the engines. Raises a `GpuFull` if the GPU has no room for them."""
        limit_s = self._load_timeout_s + self._return_timeout_s
        answer = self._request_with_retries("POST", "/wake_up", {}, limit_s, "engines awake", self._load_timeout_s)
        return SleepResponse.model_validate(answer)

    def _request_with_retries(
        self,
        method: str,
        path: str,
        body: dict[str, Any],
        timeout_s: float,
        description: str,
        request_timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> Any:
        """Repeat an idempotent request until it is answered. A server that ended, or is about to end because an engine
        died, may come back meanwhile.

        Args:
            timeout_s: how long all attempts together may take.
            description: what the request asks for, for log and error messages.
            request_timeout_s: how long one attempt may take.

        Raises:
            DeadlineExceeded: after `timeout_s` seconds.
            ServerLost: if other servers can do it, and this one is lost.
            ClassroomError: the server's error, if waiting would not mend it.
        """
        started = logged = time.monotonic()
        while (remaining_s := started + timeout_s - time.monotonic()) > 0:
            try:
                return self._request(method, path, body, timeout_s=min(request_timeout_s, remaining_s))
            except (DeadlineExceeded, EngineFailure) as error:
                if self.is_lost:
                    raise ServerLost(
                        f"{self.url} has not answered for {self._return_timeout_s:g} s "
                        f"(generation.server_start_timeout_s).{self._see_log()}"
                    ) from error
                now = time.monotonic()
                if now - logged >= _SECONDS_BETWEEN_MESSAGES or logged == started:
                    # A read timeout means that the server works on the request: ask it which API it waits for.
                    troubles = self._api_troubles() if isinstance(error.__cause__, requests.ReadTimeout) else ""
                    logger.info("still waiting for %s (%.0f s): %s%s", description, now - started, error, troubles)
                    logged = now
                time.sleep(min(_RETRY_PAUSE_S, max(0.0, remaining_s)))
        raise DeadlineExceeded(f"{self.url} did not answer with {description} within {timeout_s:g} s.{self._see_log()}")

    def _api_troubles(self) -> str:
        """Describe the APIs that do not answer the server, for how long, and why; empty if the server does not say."""
        try:
            roles = self.health().roles
        except ClassroomError:
            return ""
        return "".join(
            f" The {role} {engine.model} ({engine.engine_version}): {engine.trouble}."
            for role, engine in roles.items()
            if engine.trouble
        )

    def _request(self, method: str, path: str, body: dict | None = None, timeout_s: float = 60.0) -> Any:
        """Send one request and return the JSON of its response.

        Raises:
            DeadlineExceeded: if the server cannot be reached or does not answer in time.
            RequestTooLarge: if the body is larger than a server accepts.
            ClassroomError: the subclass that belongs to the response's status, with the server's message.
        """
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        if data is not None and len(data) > LARGEST_BODY:  # a server may hang up before its refusal is read
            raise RequestTooLarge(
                f"The request to {self.url}{path} has {len(data)} bytes, but a server takes {LARGEST_BODY}: make the "
                "batch or its problems smaller."
            )
        try:
            response = self._session.request(
                method,
                self.url + path,
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=(5.0, timeout_s),
            )
        except requests.ReadTimeout as error:  # the server accepted the request and may still work on it
            if path == "/health":  # which a server answers at once, unless it hangs
                self._silent_since = self._silent_since or time.monotonic()
            raise DeadlineExceeded(
                f"{self.url} took the request and has no answer to it yet.{self._see_log()}"
            ) from error
        except _BROKEN_CONNECTION as error:
            self._silent_since = self._silent_since or time.monotonic()
            raise DeadlineExceeded(f"{self.url} does not answer ({type(error).__name__}).{self._see_log()}") from error
        self._silent_since = None
        if response.status_code == 200:
            return response.json()
        if response.status_code == 204:
            return None
        raise _ERRORS.get(response.status_code, ClassroomError)(f"{self.url}{path}: {_detail(response)}")

    def _see_log(self) -> str:
        return f" Its log is {self._log}." if self._log is not None and self._log.exists() else ""


def _detail(response: requests.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:500]}"


def sample_conversations(body: SampleRequest, server_port: int) -> SampleResponse:
    """Have the server on this machine's `server_port` play a batch."""
    return _local_client(server_port).sample(body)


def get_reward(name: str, conversations: Sequence[str], server_port: int) -> list[float | None]:
    """The named reward of each conversation id, from the server on this machine's `server_port`."""
    return _local_client(server_port).rewards(name, conversations)


def get_pedagogical_reward(conversations: Sequence[str], server_port: int) -> list[float | None]:
    """The pedagogical reward of each conversation id, from the server on this machine's `server_port`."""
    return get_reward("pedagogical", conversations, server_port)


def _local_client(server_port: int) -> ClassroomClient:
    return ClassroomClient(f"http://127.0.0.1:{server_port}")


_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def server_url(generation: GenerationConfig) -> str:
    """The server's address for programs on this machine."""
    host = _LOOPBACK_OF.get(generation.server_host, generation.server_host)
    return f"http://{f'[{host}]' if ':' in host else host}:{generation.server_port}"
