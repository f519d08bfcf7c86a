"""Five training steps whose rewards a judge gives by a rubric of one's own."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import ROOT
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says
from tests.support.judged_room import PRICES, Server, judged_by
from tests.support.offline_trainer import offline_trainer, save_tiny_model
from tests.support.rubrics import RUBRIC, rubric_answer, write_rubric
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room

STEPS, CONVERSATIONS, EVERY = 5, 8, 3


class JudgedClient:
    """Plays each batch in a room with scripted teacher and student, and has it judged over HTTP."""

    def __init__(self, room: Room, generation: GenerationConfig, url: str, **options):
        self._room, self._generation, self._url, self._options = room, generation, url, options
        numbers = count()
        room.teacher = ScriptedEngine(room.tokenizer, lambda _: f"Say {next(numbers)}.")  # equal ones are judged once
        room.teacher.policy = PolicyVersion("run", 0)

    def sample(self, request: SampleRequest) -> SampleResponse:
        server = Server(self._room, self._generation, self._url, **self._options)
        return server.run(lambda service: service.sample(request))


def test_five_steps_are_paid_by_the_rubric(
    world: Path, room: Room, generation: GenerationConfig, tmp_path: Path
) -> None:
    rubric, replies = write_rubric(tmp_path), []

    def judge(body: dict, _: int) -> Behaviour:
        """Every third reply lacks a criterion, and the others differ."""
        number = len(replies)
        replies.append(number)
        if number % EVERY == 0:
            return says(rubric_answer(left_out="warmth"))
        return says(rubric_answer(criterion_8=number % 2, warmth=1 + number % 5))

    options = [f"train.max_steps={STEPS}", "train.mu=1", "train.beta=0", "logging.save_steps=100"]
    options += [f"judge_model.rubric={rubric}", "judge_model.model_name_or_path=judge"]
    trainer = offline_trainer(tmp_path / "run", save_tiny_model(tmp_path / "model", world / "blank"), options)
    rules = replace(
        judged_by({"pedagogical_eval": "not read"}, generation),
        number_judge_attempts=1,
        extra_penalty_for_rejected_judges=0.0,  # what a low score costs besides, by any judge
    )
    template = str(ROOT / trainer.run_config.judge_model.rubric_prompt_path)
    with judge_endpoint(judge) as endpoint:
        trainer.player._client = JudgedClient(
            room, rules, endpoint.url, rubric=rubric, rubric_prompt_path=template, **PRICES
        )
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == STEPS and any(line["grad_norm"] > 0 for line in lines)
    for line in lines:
        means = {entry["name"]: line[f"judge/{entry['name']}_score"] for entry in RUBRIC}
        by_hand = (8 * means["criterion_8"] + 4 * means["warmth"]) / 40
        assert line["reward"] == pytest.approx(by_hand, abs=1e-4) and line["reward_std"] > 0
        assert line["judge/failed_share"] == 0 and "judge/task_final_score" not in line
        assert line["judge/calls"] == CONVERSATIONS + line["judge/unusable_replies"] > CONVERSATIONS
    billed_usd = sum(call.billed_usd for call in endpoint.calls)
    assert (
        lines[-1]["judge/run_cost_usd"]
        == pytest.approx(billed_usd)
        == pytest.approx(sum(line["judge/cost_usd"] for line in lines))
    )
