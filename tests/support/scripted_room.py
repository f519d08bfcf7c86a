"""A classroom of scripted engines with a real tokenizer, whose text each test sets."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

import classroom_rl.server.app
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import load
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import PHASED
from classroom_rl.environments.classroom.config import classroom_rules, default_weights
from classroom_rl.environments.classroom.environment import PHASES, Classroom
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.reviews import Supervisor
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.scheduler import ConcurrentSchedule, PhasedSchedule
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.server.app import uvicorn_options
from classroom_rl.server.sampling_service import SamplingService
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge

SCORES = {
    "task_final_score": 1,
    "task_final_reasoning": "",
    "forward_progression_score": 0.5,
    "forward_progression_reasoning": "",
    "overall_momentum_score": 5,
    "overall_momentum_reasoning": "",
}
TEMPLATES = {
    "teacher": "Teach {{ problem }} to {{ student_name or 'someone' }}.{% if include_thinking %} Think.{% endif %}",
    "student": "You are {{ student_name or 'someone' }}.",
    "error": "Make an error.",
    "attempt": "Attempt: {{ problem }}",
    "wrapper": "I tried: {{ attempt }}",
    "final": "Now solve it.",
}


def untimed(response: SampleResponse) -> SampleResponse:
    """A response without what differs each time it is made."""
    return response.model_copy(update={"seconds_after_policy": 0.0})


def write_templates(folder: Path) -> Callable[[str], str]:
    """Write the prompts; returns a function of a prompt's name that gives its path."""
    for name, text in TEMPLATES.items():
        (folder / f"{name}.txt").write_text(text)
    return lambda name: str(folder / f"{name}.txt")


def guided(template: Callable[[str], str]) -> GenerationConfig:
    """The language tutor's rules: guided, five messages, one scoring judge attempt. `template` gives each prompt's
    path."""
    return GenerationConfig(
        teacher_prompt_path=template("teacher"),
        student_personas_prompts_paths={"correct_student": template("student"), "error_student": template("error")},
        student_initial_attempt_prompt_path=template("attempt"),
        initial_attempt_wrapper_prompt_path=template("wrapper"),
        student_final_prompt_path=template("final"),
        judges_rules_prompts_paths={"pedagogical_eval": "scripted"},
        forced_conversation_type="guided",
        max_turns=5,
        max_tokens_in_conversation=900,
        max_tokens_per_turn=48,
        number_judge_attempts=1,
        number_student_attempts=2,
        ignore_rejected_judge=True,
        extra_penalty_for_rejected_judges=1.0,
    )


class Room:
    """A classroom of scripted engines, whose text each test sets. `woken` records the roles that each phase wakes, if
    the schedule has phases. There is no `supervisor` unless a test roles one."""

    def __init__(self, tokenizer, folder: Path):
        self.tokenizer = tokenizer
        self.folder = folder
        self.teacher = ScriptedEngine(tokenizer, lambda _: "Say hello.")
        self.student = ScriptedEngine(tokenizer, lambda _: "Hello.")
        self.judge = ScriptedJudge(lambda rule, conversation, attempt: json.dumps(SCORES))
        self.judge_options = JudgeModelConfig()
        self.reward = None
        self.supervisor: Supervisor | None = None
        self.turn_rewards: tuple[str, ...] = ()
        self.reward_weights: dict[str, float] | None = None
        self.woken: list[tuple[str, ...]] = []
        self.teacher_context = self.student_context = 900

    def open(self, generation: GenerationConfig, keep: int = 8) -> SamplingService:
        weights = self.reward_weights or default_weights(generation)
        rules = classroom_rules(generation, weights, self.teacher_context, graded=True)
        roles = Roles(
            self.teacher,
            Sampling(1.0, max_tokens=generation.max_tokens_per_turn),
            self.student,
            Sampling(0.6, max_tokens=generation.max_tokens_per_turn),
            self.judge,
            {"teacher": self.teacher},
            reward=self.reward,
            supervisor=self.supervisor,
            policy_role=generation.trained_role,
        )
        journal = Journal(self.folder)
        schedule = PhasedSchedule(self._wake_only, PHASES) if generation.schedule == PHASED else ConcurrentSchedule()
        options = (self.turn_rewards, self.judge_options, self.student_context)
        classroom = Classroom(generation, roles, journal, weights, rules, *options)
        return SamplingService(Runner(classroom, journal, weights, schedule), journal, keep)

    async def _wake_only(self, roles: tuple[str, ...]) -> None:
        """Record the roles; real engines would sleep and wake here."""
        self.woken.append(roles)
        await asyncio.sleep(0)

    def play(self, generation: GenerationConfig, **request) -> list[ConversationRecord]:
        body = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0} | request
        return asyncio.run(self.open(generation).sample(SampleRequest(**body))).conversations


def application(room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FastAPI]:
    """A function of host and port that makes the server's real application, with the room's scripted engines. Unless it
    `tells` what it plays, trainers with models of their own are taken."""

    async def open_service(*_: object) -> SamplingService:
        return room.open(generation)

    monkeypatch.setattr(classroom_rl.server.app, "open_service", open_service)

    def make(host: str = "127.0.0.1", port: int = 8005, tells: bool = False) -> FastAPI:
        keys = {"generation.server_host": f"'{host}'", "generation.server_port": port, "logging.save_dir": room.folder}
        config = load(TrainRLConfig, "train_rl", [f"{key}={value}" for key, value in keys.items()])
        config.generation = replace(
            generation,
            server_host=host,
            server_port=port,
            load_weights_timeout_s=config.generation.load_weights_timeout_s,
        )
        app = classroom_rl.server.app.create_app(config, room.folder)
        app.state.plays = app.state.plays if tells else None
        return app

    return make


@contextmanager
def serving(app: FastAPI, port: int) -> Iterator[str]:
    """Serve the application on this machine until the end of the block; yields its URL."""
    server = uvicorn.Server(uvicorn_options(app, "127.0.0.1", port))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
