"""Serves the recorded batches of a server again over HTTP, to trainers with any number of processes."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pydantic import BaseModel

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.models.policy_folder import check_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import read_records
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.server.schemas import Health, LoadWeightsRequest, LoadWeightsResponse

Batches = list[list[ConversationRecord]]
WEIGHTS = {"pedagogical": 1.0}
"""The reward weights of the recorded run."""


def health(run_folder: Path | str, **more: object) -> Health:
    """What a server at rest says that works in a run folder."""
    fields = {"status": "ok", "roles": {}, "policy": PolicyVersion("run", 0), "run_folder": str(run_folder)}
    counts = {"running_requests": [], "running_conversations": 0, "finished_conversations": 0}
    return Health(**fields | counts | more)


def recorded_batches(run_folder: Path, steps: int, processes: int) -> Batches:
    """For each step, the conversations that a run trained on, in the order of the whole batch."""
    files = [
        [run_folder / "rollouts" / f"step_{step:06d}-{rank}.parquet" for rank in range(processes)]
        for step in range(steps)
    ]
    return [[record for path in paths for record in read_records(path)] for paths in files]


class Replay:
    """Answers each process with its slice of the recorded batch.

    Args:
        health: the health of the recorded server.
        batches: the conversations of each step.
        refuse: called with the rank that asks for conversations; an error that it raises becomes the answer.

    Attributes:
        passes: the optimizer steps that the trainer makes on each batch (`train.mu`); requests count those.
    """

    def __init__(
        self,
        health: Health,
        batches: Sequence[Sequence[ConversationRecord]],
        refuse: Callable[[int], None],
    ):
        self._health = health.model_copy(update={"plays": None})  # trainers may be configured otherwise
        self._batches, self._refuse = batches, refuse
        self.loaded: list[PolicyVersion] = []
        self.passes = 1

    def answer(self, path: str, body: dict) -> BaseModel:
        if path == "/health":
            return self._health
        if path == "/load_weights":
            return self._load(LoadWeightsRequest.model_validate(body))
        if path == "/sample_conversations":
            return self._sample(SampleRequest.model_validate(body))
        raise DataError(f"A trainer has nothing to ask {path} for.")

    def _load(self, request: LoadWeightsRequest) -> LoadWeightsResponse:
        policy = PolicyVersion(request.run_id, request.version)
        check_policy(Path(request.path), policy)
        self.loaded.append(policy)
        return LoadWeightsResponse(policy=policy, seconds=0.0)

    def _sample(self, request: SampleRequest) -> SampleResponse:
        rank, processes = (int(number) for number in re.search(r"rank(\d+)of(\d+)", request.request_id).groups())
        self._refuse(rank)
        batch = self._batches[request.step // self.passes]
        size = len(batch) // processes
        records = batch[rank * size : (rank + 1) * size]
        if [record.problem for record in records] != request.problems:
            raise DataError(f"Process {rank} asks for other problems than those recorded in its place.")
        return SampleResponse(
            request_id=request.request_id, policy=request.wanted_policy, conversations=records, reward_weights=WEIGHTS
        )


@contextmanager
def served(replay: Replay) -> Iterator[int]:
    """Serve on a free port until the end of the block; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict) -> None:
            try:
                status, content = 200, replay.answer(self.path, body).model_dump_json().encode()
            except ClassroomError as error:
                status, content = error.status, json.dumps({"detail": str(error)}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
