"""A server without engines for whole trainings: it answers with scripted conversations, the same ones for any number of
processes."""

import re
from collections.abc import Callable

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from tests.support.replay_server import WEIGHTS, Replay, health


class ScriptedBatches(Replay):
    """Plays what `play(step, index, problem)` says; `index` counts over all processes.

    Args:
        run_folder: the folder of the run that asks.
    """

    def __init__(self, run_folder: str, play: Callable[[int, int, Problem], ConversationRecord]):
        super().__init__(health(run_folder), [], lambda _: None)
        self._play = play

    def _sample(self, request: SampleRequest) -> SampleResponse:
        rank = int(re.search(r"rank(\d+)of", request.request_id).group(1))
        problems = [Problem.of(*pair) for pair in zip(request.problems, request.answers, strict=True)]
        first = rank * len(problems)
        records = [self._play(request.step, first + index, problem) for index, problem in enumerate(problems)]
        return SampleResponse(
            request_id=request.request_id, policy=request.wanted_policy, conversations=records, reward_weights=WEIGHTS
        )
