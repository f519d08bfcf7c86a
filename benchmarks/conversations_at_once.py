"""What the server costs by itself, by the number of conversations of a batch: scripted engines answer at once, so all
of the time is the server's own.

    python -m benchmarks.conversations_at_once [RUN_FOLDER] [--sizes 64 256 1024 4096] [--rounds 5]

The real application plays lessons of the quickstart's classroom over HTTP, with the quickstart's tokenizer, templates,
judge and journal, in a process of its own. The table gives the medians of the rounds, which take the sizes in turns.

ms/message, CPU ms/message  the server's milliseconds by the clock, from the request to the last byte of its answer, and
                            of CPU time until then
longest block ms            the time for which the event loop answered nobody, in the block in which it used the most
                            CPU time, and that CPU time, which other work on the machine does not lengthen; the server's
                            search for garbage in the rest after each batch is among the blocks
journal bytes/conv.         before the journal compresses them
+ memory MB                 the most memory in the batch, beyond that before it
look-up ms                  a reward look-up for the whole batch

The slope is by how much the logarithm of a figure rises with that of the size: 0 if a figure is the same at all sizes,
1 if it is proportional to them. The causes of the longest blocks follow.

RUN_FOLDER holds the quickstart's models (`make quickstart-models`; the default is runs/quickstart), of which only the
tokenizer is read.
"""

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from math import log
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, median

import requests
import uvicorn

import classroom_rl.server.app
from benchmarks.loop_watch import LoopWatch
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.roles import models_in_use
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.server.app import uvicorn_options
from classroom_rl.server.sampling_service import SamplingService
from tests.support.scripted_engine import ScriptedEngine

_TIMEOUT_S = 3600
_REST_S = 1.5
"""After each batch; the server then looks for garbage."""
_MB = 1024**2


@dataclass(frozen=True)
class Figures:
    """One batch: milliseconds per message by the clock and of CPU time, the longest block of the event loop in
    milliseconds by the clock and of CPU time, journal bytes per conversation, the most memory beyond that before it in
    MB, milliseconds of a look-up of all rewards.
    """

    message_ms: float
    message_cpu_ms: float
    block_ms: float
    block_cpu_ms: float
    journal_bytes: float
    memory_mb: float
    look_up_ms: float


@dataclass(frozen=True)
class Costs:
    """What the server's process measured of itself between two calls: bytes of its journal, bytes of memory, the
    longest block in seconds by the clock and of CPU time, and where it was."""

    journal: int
    memory: int
    block_s: float
    block_cpu_s: float
    cause: str


def serve(overrides: Sequence[str], folder: Path, port: int, connection: Connection) -> None:
    """Serve the application with scripted engines. On `connection`, "costs" is answered with the `Costs` since the last
    time, and "cpu" with the seconds of CPU time since then; None ends the server."""
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    weights, tokenizer = reward_weights(config), load_tokenizer("teacher_model", models_of(config))
    engines = {
        "teacher": ScriptedEngine(tokenizer, lambda _: "Good. What do you do at home today?"),
        "student": ScriptedEngine(tokenizer, lambda _: "I cook soup at home today."),
    }
    journal, watch = Journal(folder), LoopWatch()
    environment = environment_of(config).open_with(config, Roles(engines, judge=RubricJudge()), journal, weights)
    service = SamplingService(Runner(environment, journal, weights), journal, keep=1)
    beating = []

    async def open_service(*_: object) -> SamplingService:
        beating.append(asyncio.create_task(watch.beat()))
        return service

    classroom_rl.server.app.open_service = open_service
    server = uvicorn.Server(uvicorn_options(classroom_rl.server.app.create_app(config, folder), "127.0.0.1", port))

    def answer() -> None:
        with suppress(EOFError):  # the benchmark was ended
            answer_all()
        server.should_exit = True

    def answer_all() -> None:
        cpu_before, journal_before, memory_before = 0.0, 0, 0
        while (query := connection.recv()) is not None:
            if query == "cpu":
                connection.send(time.process_time() - cpu_before)
                continue
            costs = Costs(journal.end - journal_before, _memory("VmHWM") - memory_before, *watch.longest)
            for engine in engines.values():
                engine.calls.clear()
            watch.reset()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            cpu_before, journal_before, memory_before = time.process_time(), journal.end, _memory("VmRSS")
            connection.send(asdict(costs))

    threading.Thread(target=answer, daemon=True).start()
    server.run()


def _memory(name: str) -> int:
    """This process's memory in bytes: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Server:
    """The application with scripted engines, in a process and on a port of its own."""

    def __init__(self, overrides: Sequence[str], folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        overrides = [*overrides, f"generation.server_port={port}"]
        processes = multiprocessing.get_context("spawn")
        self._connection, other = processes.Pipe()
        self._process = processes.Process(target=serve, args=(overrides, folder, port, other), daemon=True)

    def __enter__(self) -> "Server":
        self._process.start()
        while True:
            try:
                requests.get(f"{self.url}/health", timeout=10).raise_for_status()
                return self
            except requests.ConnectionError:
                if not self._process.is_alive():
                    raise
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._connection.send(None)
        self._process.join()

    def costs(self) -> Costs:
        """What the server cost since the last call."""
        self._connection.send("costs")
        return Costs(**self._connection.recv())

    def cpu_s(self) -> float:
        """The server's seconds of CPU time since the last call of `costs`."""
        self._connection.send("cpu")
        return self._connection.recv()

    def play(self, problems: Sequence[str], count: int, number: int) -> tuple[Figures, str]:
        """Play a batch of conversations. Returns its figures, and where the longest block was."""
        batch_problems = [problems[index // 8 % len(problems)] for index in range(count)]
        request = SampleRequest(
            problems=batch_problems, answers=[""] * count, request_id=f"n{count}-{number}", seed=number, step=number
        )
        body = request.model_dump_json()
        self.costs()
        started = time.perf_counter()
        with closing(self._post("/sample_conversations", body)) as answer:
            seconds, cpu_s = time.perf_counter() - started, self.cpu_s()
            records = answer.json()["conversations"]
        time.sleep(_REST_S)
        costs = self.costs()
        ids, lookup_started = [record["id"] for record in records], time.perf_counter()
        self._post("/get_pedagogical_reward", None, {"conversations": ids})
        lookup_s = time.perf_counter() - lookup_started
        messages = sum(len(record["turns"]) for record in records)
        milliseconds = (1000 * seconds / messages, 1000 * cpu_s / messages, 1000 * costs.block_s)
        milliseconds = (*milliseconds, 1000 * costs.block_cpu_s)
        return Figures(*milliseconds, costs.journal / count, costs.memory / _MB, 1000 * lookup_s), costs.cause

    def _post(self, path: str, body: str | None, content: object = None) -> requests.Response:
        headers = {"Content-Type": "application/json"} if content is None else None
        answer = requests.post(self.url + path, data=body, json=content, headers=headers, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        return answer


def models_of(config: TrainRLConfig) -> str:
    """The folder of the teacher's tokenizer."""
    return models_in_use(config, reward_weights(config))["teacher"].model_name_or_path


def slope(by_size: dict[int, float]) -> float:
    """By how much the logarithm of a figure rises with that of the size: 0 for a constant one, 1 for a proportional
    one. A figure of 0 counts as one in a thousand."""
    sizes, figures = map(log, by_size), (log(max(figure, 1e-3)) for figure in by_size.values())
    return linear_regression(list(sizes), list(figures)).slope


def show(found: dict[int, list[tuple[Figures, str]]]) -> None:
    """Print the table of medians with their slopes, the ratio of the largest size to the smallest, and the causes."""
    titles = (
        "ms/message",
        "CPU ms/message",
        "longest block ms",
        "CPU ms of it",
        "journal bytes/conv.",
        "+ memory MB",
        "look-up ms",
    )
    print("conversations", *(f"{title:>20}" for title in titles))
    names = [field.name for field in fields(Figures)]
    medians = {
        name: {size: median(getattr(figures, name) for figures, _ in rounds) for size, rounds in found.items()}
        for name in names
    }
    for size in found:
        print(f"{size:13}", *(f"{medians[name][size]:20.3f}" for name in names))
    smallest, largest = min(found), max(found)
    if smallest < largest:
        print(f"{'slope':>13}", *(f"{slope(medians[name]):20.2f}" for name in names))
    pairs = list(zip(found[largest], found[smallest], strict=True))
    for name, what in (("message_ms", "by the clock"), ("message_cpu_ms", "in CPU time")):
        ratio = median(getattr(large, name) / getattr(small, name) for (large, _), (small, _) in pairs)
        print(f"a message costs {ratio:.2f} × as much at {largest} as at {smallest} {what} (median of the rounds)")
    for size, rounds in found.items():
        longest, cause = max((figures.block_cpu_ms, cause) for figures, cause in rounds)
        where = cause or "too short to be looked at"
        print(f"the longest block at {size} of all rounds: {longest:.0f} ms of CPU time, {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    overrides = ["--config-name", "quickstart", f"logging.save_dir={arguments.run_folder}"]
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    problems = [problem.text for problem in load_problems(config.dataset.train_datasets)]
    rounds_by_size: dict[int, list[tuple[Figures, str]]] = {size: [] for size in arguments.sizes}
    with tempfile.TemporaryDirectory() as folder, Server(overrides, Path(folder)) as server:
        server.play(problems, min(arguments.sizes), 0)  # warms up
        for number in range(1, arguments.rounds + 1):
            for size in arguments.sizes:
                rounds_by_size[size].append(server.play(problems, size, number))
    show(rounds_by_size)


if __name__ == "__main__":
    main()
