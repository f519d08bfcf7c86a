"""Measures how long a batch takes with concurrent conversations, in comparison to phases and to lockstep.

Each round plays the same conversations, word for word, with every schedule, on the same vLLM engines:

    concurrent   `generation.schedule: concurrent`: no conversation waits for another
    phased       `generation.schedule: phased`: all talk, then all are judged (here no engine sleeps in between)
    lockstep     each message waits for the slowest conversation, and judging for the last message of all

The judge is the embedded rubric with a delay like that of a network: log-normal with the given median, drawn once for
each conversation. The benchmark prints the seconds of each round, and the ratio of medians to that of `concurrent`.

    python -m benchmarks.schedules [--rounds 5] [--judge-s 0.5] [key=value …]

It needs the models of `make quickstart-models`; overrides are those of `vllm_server.py --config-name quickstart`.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Self

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.conversation import State
from classroom_rl.environments.classroom.environment import PHASES, Classroom
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import Judge
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.scheduler import ConcurrentSchedule, PhasedSchedule
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.server.sampling_service import open_service


class DelayedJudge:
    """A judge with delayed answers. The delay depends on problem, conversation and attempt only."""

    SPREAD = 0.6  # standard deviation of the logarithm: one answer in twenty takes over 2.7 times the median

    def __init__(self, judge: Judge, median_s: float):
        self._judge = judge
        self._median_s = median_s

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        transcript = "".join(message["content"] for message in conversation)
        delay = random.Random(f"{problem}|{transcript}|{attempt}").lognormvariate(0, self.SPREAD)
        await asyncio.sleep(self._median_s * delay)
        return await self._judge.judge(rule, conversation, problem, attempt)


class Lockstep:
    """A schedule in which all conversations take each step together. When all of them wait, those whose state comes
    first in `State` go on."""

    ORDER = [*State]

    def __init__(self) -> None:
        self._counted = 0
        self._waiting: list[tuple[State, asyncio.Future[None]]] = []

    def register(self, count: int) -> Self:
        self._counted += count
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: every conversation has called `deregister_one`."""

    async def wait_for_phase(self, state: State) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((state, turn))
        self._move_on()
        await turn

    def deregister_one(self) -> None:
        self._counted -= 1
        self._move_on()

    def _move_on(self) -> None:
        if not self._waiting or len(self._waiting) < self._counted:
            return
        first = min((state for state, _ in self._waiting), key=self.ORDER.index)
        going = [turn for state, turn in self._waiting if state is first]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not first]
        for turn in going:
            turn.set_result(None)


async def _no_engine_sleeps(roles: object) -> None:
    """Do nothing: only the waiting of the phases is measured."""


SCHEDULES = {
    "concurrent": ConcurrentSchedule,
    "phased": lambda: PhasedSchedule(_no_engine_sleeps, PHASES),
    "lockstep": Lockstep,
}


def request_of(config: TrainRLConfig, number: int) -> SampleRequest:
    """The request for one batch of the configuration. `number` changes its id only, not the batch."""
    problems = load_problems(config.dataset.train_datasets, config.train.number_of_problems_per_batch, config.seed)
    group = config.train.num_samples_per_problem
    repeated = [problem for problem in problems for _ in range(group)]
    return SampleRequest(
        problems=[problem.text for problem in repeated],
        answers=[problem.answer for problem in repeated],
        request_id=f"benchmark-{number}",
        seed=config.seed,
        step=0,
        fixed_seeds=True,
    )


async def measure(config: TrainRLConfig, rounds: int, judge_s: float) -> dict[str, list[float]]:
    """The seconds of each round, by schedule. A first round is a warm-up and not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        service = await open_service(config, reward_weights(config), Path(folder))
        roles = service.environment.roles
        try:
            judged = replace(roles, judge=DelayedJudge(roles.judge, judge_s))
            dialogues: dict[str, list[str]] = {}
            for number in range(rounds + 1):
                for index, (name, schedule) in enumerate(SCHEDULES.items()):
                    journal, weights = Journal(Path(folder) / f"{number}-{name}"), reward_weights(config)
                    classroom = Classroom(config.generation, judged, journal, weights, service.environment.rules)
                    runner = Runner(classroom, journal, weights, schedule())
                    started = time.perf_counter()
                    response = await runner.sample(request_of(config, len(SCHEDULES) * number + index))
                    if number:
                        seconds[name].append(time.perf_counter() - started)
                    dialogues[name] = [text_of(record) for record in response.conversations]
            same = sum(len(set(texts)) == 1 for texts in zip(*dialogues.values(), strict=True))
            print(
                f"{same} of {len(dialogues['concurrent'])} conversations are word for word the same with every schedule"
            )
        finally:
            roles.shutdown()
    return seconds


def text_of(record: ConversationRecord) -> str:
    return "\n".join(f"{turn.role}: {turn.text}" for turn in record.turns)


def show(seconds: Mapping[str, list[float]]) -> None:
    """Print the rounds, the median and the ratio of each schedule."""
    base = median(seconds["concurrent"])
    for name, times in seconds.items():
        rounds = " ".join(f"{value:6.2f}" for value in times)
        print(f"{name:<11} {rounds}   median {median(times):6.2f} s   {median(times) / base:5.2f} × concurrent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--judge-s", type=float, default=0.5, help="median seconds of a judge's answer")
    options, overrides = parser.parse_known_args()
    config = load(TrainRLConfig, "train_rl", ["--config-name=quickstart", *overrides], check_train_rl)
    show(asyncio.run(measure(config, options.rounds, options.judge_s)))


if __name__ == "__main__":
    main()
