"""How long `/get_<name>_reward` takes: from memory, and as it was before, from the journal.

Before, the server read each conversation's events in the journal, put its tokens together again, and computed the
reward anew. Both ways answer the same request over HTTP, on the conversations of a run that was played.

    python -m benchmarks.reward_lookup [RUN_FOLDER] [--conversations 4096] [--rounds 3]

RUN_FOLDER is a finished run of the classroom; the default is runs/quickstart, which `make quickstart` leaves. Its
journal is copied; nothing in the folder changes.
"""

import argparse
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import requests
import uvicorn
from fastapi import FastAPI

from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal, read_journal
from classroom_rl.rollout.store.journal_segments import segments_folder
from classroom_rl.server.sampling_service import SamplingService
from classroom_rl.server.schemas import RewardRequest, RewardResponse

NAME = "pedagogical"


def open_service(run_folder: Path, most: int) -> tuple[SamplingService, list[str]]:
    """A service without models on a run's journal, with the ids and rewards of its last conversations."""
    config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart"])
    weights, journal = reward_weights(config), Journal(run_folder)
    environment = environment_of(config).open_with(config, Roles({"teacher": None, "student": None}), journal, weights)
    runner = Runner(environment, journal, weights)
    finished = (event for event in read_journal(run_folder / JOURNAL_NAME) if event["event"] == "conversation")
    rewards = {event["conversation"]: event["record"]["rewards"] for event in finished}
    ids = list(rewards)[-most:]
    runner.rewards.update({conversation: rewards[conversation] for conversation in ids})
    return SamplingService(runner, journal), ids


def application(service: SamplingService) -> FastAPI:
    """Both ways as routes."""
    app = FastAPI()

    @app.post("/memory")
    async def memory(body: RewardRequest) -> RewardResponse:
        return RewardResponse(rewards=[service.reward(NAME, conversation) for conversation in body.conversations])

    @app.post("/journal")
    async def journal(body: RewardRequest) -> RewardResponse:
        computed = [
            service.environment.reward_of(NAME, service.record(conversation)) for conversation in body.conversations
        ]
        return RewardResponse(rewards=computed)

    return app


def measure(url: str, ids: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round and way; both have to answer the same."""
    seconds: dict[str, list[float]] = {"memory": [], "journal": []}
    for _ in range(rounds):
        answers = []
        for way, times in seconds.items():
            started = time.perf_counter()
            answer = requests.post(f"{url}/{way}", json={"conversations": list(ids)}, timeout=600)
            times.append(time.perf_counter() - started)
            answer.raise_for_status()
            answers.append(answer.json())
        if answers[0] != answers[1]:
            raise SystemExit("The two ways do not answer the same.")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--conversations", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = arguments.run_folder / JOURNAL_NAME
    if not source.is_file():
        raise SystemExit(f"There is no {source}. Run `make quickstart` first, or name the folder of another run.")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listening:
        shutil.copy(source, folder)
        if (segments := segments_folder(source)).is_dir():
            shutil.copytree(segments, Path(folder) / segments.name)
        service, ids = open_service(Path(folder), arguments.conversations)
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(application(service), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.02)
        try:
            seconds = measure(f"http://127.0.0.1:{listening.getsockname()[1]}", ids, arguments.rounds)
        finally:
            server.should_exit = True
            thread.join()
    print(f"{len(ids)} conversations of {arguments.run_folder}, seconds in {arguments.rounds} rounds:")
    for way, times in seconds.items():
        print(f"  {way:8} {'  '.join(f'{value:.4f}' for value in times)}")
    print(f"the journal takes {median(seconds['journal']) / median(seconds['memory']):.0f} × as long as memory")


if __name__ == "__main__":
    main()
