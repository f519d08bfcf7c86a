"""What the server costs by itself, by the number of conversations of a batch: scripted engines answer at once, so all
of the time is the server's own.

    python -m benchmarks.conversations_at_once [RUN_FOLDER] [--sizes 64 256 1024 4096] [--rounds 5]

The real application plays lessons of the quickstart's classroom over HTTP, with the quickstart's tokenizer, templates,
judge and journal. The table gives the medians of the rounds, which take the sizes in turns: milliseconds per message,
the longest time for which the event loop answered nobody, the bytes per conversation that the journal writes (before it
compresses them), the memory that the batch takes at most, and the time of a reward look-up for the whole batch.
RUN_FOLDER holds the quickstart's models (`make quickstart-models`; the default is runs/quickstart), of which only the
tokenizer is read.
"""

import argparse
import asyncio
import resource
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import requests
import uvicorn

import src.server.app
from config.checks import check_train_rl, reward_weights
from config.load import load
from config.train_rl_model import TrainRLConfig
from src.classroom.seats import models_in_use
from src.models.pretrained import load_tokenizer
from src.rollout.datasets import load_problems
from src.rollout.journal import Journal
from src.rollout.registry import environment_of
from src.rollout.requests import SampleRequest
from src.rollout.runner import Runner
from src.rollout.seats import Seats
from src.server.client import ClassroomClient
from src.server.sampling_service import SamplingService
from src.toy_language.rubric_judge import RubricJudge
from tests.support.scripted_engine import ScriptedEngine

_BEAT_S = 0.005


@dataclass(frozen=True)
class Figures:
    """One batch: milliseconds per message, the longest block of the event loop in milliseconds, journal bytes per
    conversation, the growth of the process's peak memory in MB, milliseconds of a look-up of all rewards."""

    per_message_ms: float
    longest_block_ms: float
    journal_bytes: float
    memory_mb: float
    look_up_ms: float


class Heartbeat:
    """Notices how long an event loop is blocked."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def beat(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_BEAT_S)
            self.longest = max(self.longest, time.perf_counter() - before - _BEAT_S)


class Server:
    """The application with scripted engines, on a port of this machine."""

    def __init__(self, config: TrainRLConfig, folder: Path):
        weights, tokenizer = reward_weights(config), load_tokenizer("teacher_model", models_of(config))
        engines = {
            "teacher": ScriptedEngine(tokenizer, lambda _: "Good. What do you do at home today?"),
            "student": ScriptedEngine(tokenizer, lambda _: "I cook soup at home today."),
        }
        self.journal = Journal(folder)
        seats = Seats(engines, judge=RubricJudge())
        environment = environment_of(config).open_with(config, seats, self.journal, weights)
        self.service = SamplingService(Runner(environment, self.journal, weights), self.journal, keep=1)
        self.heartbeat = Heartbeat()

        async def open_service(*_: object) -> SamplingService:
            self._beating = asyncio.create_task(self.heartbeat.beat())
            return self.service

        src.server.app.open_service = open_service
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config.generation.server_port = self.port
        app = src.server.app.create_app(config, folder)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> "Server":
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._beating.cancel()
        self._server.should_exit = True
        self._thread.join()

    def play(self, problems: list[str], count: int, number: int) -> Figures:
        """Play a batch of conversations."""
        own = [problems[place // 8 % len(problems)] for place in range(count)]
        request = SampleRequest(
            problems=own, answers=[""] * count, request_id=f"n{count}-{number}", seed=number, step=number
        )
        url = f"http://127.0.0.1:{self.port}"
        written, memory = self.journal.end, peak_mb()
        self.heartbeat.longest = 0.0
        started = time.perf_counter()
        records = ClassroomClient(url, 3600, 600, 60).sample(request).conversations
        seconds, block = time.perf_counter() - started, self.heartbeat.longest
        ids, asked = [each.id for each in records], time.perf_counter()
        requests.post(f"{url}/get_pedagogical_reward", json={"conversations": ids}, timeout=600).raise_for_status()
        looked_up = time.perf_counter() - asked
        messages = sum(len(each.turns) for each in records)
        grown = (self.journal.end - written) / count
        return Figures(1000 * seconds / messages, 1000 * block, grown, peak_mb() - memory, 1000 * looked_up)


def models_of(config: TrainRLConfig) -> str:
    """The folder of the teacher's tokenizer."""
    return models_in_use(config, reward_weights(config))["teacher"].model_name_or_path


def peak_mb() -> float:
    """This process's peak memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    own = ["--config-name", "quickstart", f"logging.save_dir={arguments.run_folder}"]
    config = load(TrainRLConfig, "train_rl", own, check_train_rl)
    problems = [problem.text for problem in load_problems(config.dataset.train_datasets)]
    found: dict[int, list[Figures]] = {size: [] for size in arguments.sizes}
    with tempfile.TemporaryDirectory() as folder, Server(config, Path(folder)) as server:
        server.play(problems, min(arguments.sizes), 0)  # warms up
        for number in range(1, arguments.rounds + 1):
            for size in arguments.sizes:
                found[size].append(server.play(problems, size, number))
    print("conversations   ms/message   longest block ms   journal bytes/conversation   + peak MB   look-up ms")
    for size, rounds in found.items():
        columns = zip(*(vars(each).values() for each in rounds), strict=True)
        first, block, journal, memory, look_up = (median(column) for column in columns)
        print(f"{size:13} {first:12.3f} {block:18.0f} {journal:28.0f} {memory:11.0f} {look_up:12.1f}")
    smallest, largest = min(found), max(found)
    pairs = zip(found[largest], found[smallest], strict=True)
    ratio = median(large.per_message_ms / small.per_message_ms for large, small in pairs)
    print(f"a message costs {ratio:.2f} × as much at {largest} as at {smallest} (median of the rounds)")


if __name__ == "__main__":
    main()
