"""A scripted server whose tutor is evaluated, and the configuration that evaluates it."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.lessons import make_lessons, parse_problem, render_problem
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.reviews import Review
from tests.support.configs import loaded
from tests.support.synthetic_run import played

LESSONS = make_lessons(1)[1]


class ScriptedServer(ThreadingHTTPServer):
    """The server's two routes that an evaluation needs, answered by the scripted ideal tutor."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ScriptedRoutes)
        self.requests: list[SampleRequest] = []
        self.version_after: int = 10**9
        """The number of the request from which another policy answers."""
        self.review: Callable[[ConversationRecord], ConversationRecord] = lambda record: record
        """What the server's supervisor makes of a conversation."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _ScriptedRoutes(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        role = {"model": "tutor", "engine": "vllm", "engine_version": "0.32.0", "pids": [1]}
        status = {"status": "ok", "run_folder": "runs/x", "running_requests": [], "running_conversations": 0}
        policy = {"run_id": "abc", "version": 3}
        self._answer({**status, "finished_conversations": 0, "roles": {"teacher": role}, "policy": policy})

    def do_POST(self) -> None:
        body = SampleRequest.model_validate_json(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        version = 3 if len(self.server.requests) < self.server.version_after else 4
        records = [
            played(ideal, parse_problem(text), ["error_student", "correct_student"], number).model_copy(
                update={"id": f"{body.request_id}-{number}", "request_id": body.request_id}
            )
            for number, text in enumerate(body.problems)
        ]
        records = [self.server.review(record) if body.supervised else record for record in records]
        response = SampleResponse(
            request_id=body.request_id,
            policy=PolicyVersion("abc", version),
            conversations=records,
            reward_weights={"pedagogical": 1.0},
        )
        self._answer(response.model_dump(mode="json"))

    def _answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        threading.Thread(target=scripted.serve_forever, daemon=True).start()
        yield scripted
        scripted.shutdown()


@pytest.fixture
def config(server: ScriptedServer, tmp_path: Path) -> EvalConfig:
    lessons = tmp_path / "lessons.jsonl"
    rows = [{"problem": render_problem(lesson), "answer": ""} for lesson in LESSONS[:20]]
    lessons.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    overrides = [f"server_url={server.url}", f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]"]
    return loaded("eval", *overrides, f"logging.save_dir={tmp_path / 'eval'}")


def reviewed(record: ConversationRecord) -> ConversationRecord:
    """What a supervisor makes of a conversation: each message is valid, and the reward is 0.1 less."""
    review = Review(True, "", 0.0)
    turns = [replace(turn, review=review) if turn.role == "teacher" else turn for turn in record.turns]
    return record.model_copy(update={"turns": turns, "reward": record.reward - 0.1})
