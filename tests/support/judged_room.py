"""A classroom with a judge over real HTTP."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.judges.model_judge import KeptReplies, ModelJudge
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.server.open_models import JUDGE_CALLS_NAME
from classroom_rl.server.sampling_service import SamplingService
from tests.support.chat_client import timed_api
from tests.support.judge_endpoint import (
    USD_PER_COMPLETION_TOKEN,
    USD_PER_PROMPT_TOKEN,
    Behaviour,
    Script,
)
from tests.support.scripted_room import Room
from tests.support.turned_clock import run

PRICES = {
    "usd_per_million_prompt_tokens": USD_PER_PROMPT_TOKEN * 1e6,
    "usd_per_million_completion_tokens": USD_PER_COMPLETION_TOKEN * 1e6,
}


def verdict(task_final: float, progression: float, momentum: float) -> str:
    return json.dumps(
        {
            "task_final_reasoning": "as it was",
            "task_final_score": task_final,
            "forward_progression_reasoning": "as it was",
            "forward_progression_score": progression,
            "overall_momentum_reasoning": "as it was",
            "overall_momentum_score": momentum,
        }
    )


GOOD = verdict(1, 0.5, 5)
OUT_OF_RANGE = verdict(7, 0.5, 5)


def write_rule(folder: Path) -> dict[str, str]:
    """Write what a judge over HTTP reads; returns the path by rule."""
    template = "{{ problem }}\n{% for turn in conversation %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    (folder / "judge.txt").write_text(template)
    return {"pedagogical_eval": str(folder / "judge.txt")}


def judged_by(rules: dict[str, str], generation: GenerationConfig) -> GenerationConfig:
    """Guided conversations of three messages, one scoring rule, two attempts, soft mode with λ = 0.25."""
    return replace(
        generation,
        judges_rules_prompts_paths=rules,
        max_turns=3,
        number_judge_attempts=2,
        extra_penalty_for_rejected_judges=0.25,
    )


class Server:
    """What a server is, but for the engines: opened on a run folder, asked, closed. The clock of the judge's
    client is turned, or runs `speed` times as fast as a real one."""

    def __init__(self, room: Room, generation: GenerationConfig, url: str, speed: float | None = None, **options):
        options = {"model_name_or_path": "judge"} | options
        self.config = JudgeModelConfig(base_url=url, **options)
        self.room, self.generation, self.speed = room, generation, speed
        room.judge_options = self.config
        self.ledger = CallLedger(room.folder / JUDGE_CALLS_NAME, self.config.max_cost_usd)

    def run(self, work: Callable[[SamplingService], Awaitable]):
        async def whole():
            api = timed_api(self.config, self.ledger) if self.speed is None else self._real_api(self.speed)
            rules = self.generation.judges_rules_prompts_paths
            self.room.judge = ModelJudge(self.config, rules, 200, KeptReplies(self.config, self.ledger, api))
            service = self.room.open(self.generation)
            service.environment.roles.apis["judge"] = api
            try:
                return await work(service)
            finally:
                await api._client.close()
                service.journal.close()
                self.ledger.close()

        return (run if self.speed is None else asyncio.run)(whole())

    def _real_api(self, speed: float) -> ChatApi:
        clock, sleep = (lambda: time.monotonic() * speed), (lambda s: asyncio.sleep(s / speed))
        return ChatApi(self.config, self.ledger, "judge", clock=clock, sleep=sleep)

    def sample(self, problems: list[str], request_id: str = "r", **more) -> SampleResponse:
        answers = [""] * len(problems)
        request = SampleRequest(problems=problems, answers=answers, request_id=request_id, seed=1, step=0, **more)
        return self.run(lambda service: service.sample(request))


def always(behaviour: Behaviour) -> Script:
    return lambda body, nth: behaviour


def verdicts_of(room: Room) -> list[dict]:
    return [event for event in read_journal(room.folder / "journal.jsonl") if event["event"] == "verdict"]
