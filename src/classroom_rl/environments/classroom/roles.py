"""The classroom's roles: the model of each role, and the models that a configuration needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from classroom_rl.config.base import ModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, EMBEDDED_SUPERVISORS, is_script
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.rollout import environment as rollout_environment
from classroom_rl.rollout.engine import (
    Api,
    ChatEngine,
    EmbeddedJudge,
    Engine,
    Judge,
    RewardModel,
    Sampling,
    Teacher,
    TokenEngine,
)
from classroom_rl.rollout.post_test import Examiner
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Supervisor


@dataclass
class Roles(rollout_environment.LoadedModels):
    """The model of each role, and how it is sampled. `judge` is None if nothing is judged, `supervisor` if nothing is
    supervised; `supervisor_name` is its model's name. `examiner` is None without a post-test.

    `engines` are the vLLM engines by role, `apis` the API clients by role. The model in `reward` grades solutions;
    without one, `answers` compares their boxed answers with the reference.
    """

    teacher: Teacher
    teacher_sampling: Sampling
    student: ChatEngine
    student_sampling: Sampling
    judge: Judge | EmbeddedJudge | None
    engines: dict[str, Engine] = field(default_factory=dict)
    apis: dict[str, Api] = field(default_factory=dict)
    answers: AnswerChecker = field(default_factory=AnswerChecker)
    reward: RewardModel | None = None
    supervisor: Supervisor | None = None
    supervisor_name: str = ""
    examiner: Examiner | None = None

    async def grade(self, problem: Problem, solution: str) -> float:
        """The reward model's score of a solution; without a reward model 1 if the boxed answer is right, otherwise 0.

        Raises:
            EngineFailure: if the reward model's engine died, or no process that compares answers could start.
            ContextOverflow: if the solution is too long for the reward model.
        """
        if self.reward is None:
            return float(await self.answers.is_correct(solution, problem.answer))
        dialogue = [{"role": "user", "content": problem.text}, {"role": "assistant", "content": solution}]
        return await self.reward.score(dialogue)

    @property
    def teacher_has_tokens(self) -> bool:
        """Whether the teacher works on token ids; one behind an API, or a script, works on text."""
        return isinstance(self.teacher, TokenEngine)

    @classmethod
    def of(cls, config: Any, models: rollout_environment.Roles) -> "Roles":
        """The roles of a classroom with the models that were loaded for a configuration."""
        generation = config.generation
        return cls(
            teacher=models.models["teacher"],
            teacher_sampling=Sampling.of(config.teacher_model.vllm, generation.max_tokens_per_turn),
            student=models.models["student"],
            student_sampling=Sampling.of(config.student_model.vllm, generation.max_tokens_per_turn),
            judge=models.judge,
            engines=dict(models.engines),
            apis=dict(models.apis),
            answers=AnswerChecker(generation.answer_timeout_s),
            reward=models.models.get("reward"),
            supervisor=models.supervisor,
            supervisor_name="" if config.supervisor_model is None else config.supervisor_model.model_name_or_path,
            examiner=models.examiner,
        )

    @property
    def policy(self) -> Teacher:
        """The teacher."""
        return self.teacher

    def shutdown(self) -> None:
        """End the processes of all engines and those that compare answers, and close the ledgers."""
        super().shutdown()
        self.answers.shutdown()


def models_in_use(config: Any, reward_weights: Mapping[str, float]) -> dict[str, ModelConfig]:
    """The models to load or to connect to, by role, in the order of loading. A scripted teacher has none, nor has a
    judge that is embedded or has nothing to judge, or an embedded supervisor. A reward model is included only if it has
    solutions to grade."""
    generation, reward = config.generation, config.reward_model
    models: dict[str, ModelConfig] = {"teacher": config.teacher_model, "student": config.student_model}
    if is_script(config.teacher_model.model_name_or_path):
        del models["teacher"]
    if generation.judge_rules and config.judge_model.model_name_or_path not in EMBEDDED_JUDGES:
        models["judge"] = config.judge_model
    supervisor = config.supervisor_model
    if supervisor is not None and supervisor.model_name_or_path not in EMBEDDED_SUPERVISORS:
        models["supervisor"] = supervisor
    if reward.is_model and "end_rm" in reward_weights and generation.number_student_attempts > 0:
        models["reward"] = reward
    return models
