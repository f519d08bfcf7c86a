"""Who speaks in which role, and which models a configuration needs for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from config.base import ModelConfig
from config.values import EMBEDDED_JUDGES, is_script
from src.grading.checker import AnswerChecker
from src.rollout import seats as rollout_seats
from src.rollout.engines import (
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
from src.rollout.problem import Problem


@dataclass
class Seats(rollout_seats.LoadedModels):
    """Who speaks in which role, and how each is sampled. `judge` is None when nothing is judged.

    `engines` are the vLLM engines by seat name, `apis` what the seats behind an API are asked through. Solutions are
    graded by the model in `reward`, or else by `answers`, which compares their boxed answers with the reference.
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

    async def grade(self, problem: Problem, solution: str) -> float:
        """The reward model's score of a solution; without such a model 1 if its boxed answer is right, else 0.

        Raises:
            EngineFailure: if what grades it died.
            ContextOverflow: if it is too long for the reward model.
        """
        if self.reward is None:
            return float(await self.answers.is_correct(solution, problem.answer))
        dialogue = [{"role": "user", "content": problem.text}, {"role": "assistant", "content": solution}]
        return await self.reward.score(dialogue)

    @property
    def teacher_has_tokens(self) -> bool:
        """Whether the teacher takes and gives token ids; one behind an API, or a script, takes and gives text."""
        return isinstance(self.teacher, TokenEngine)

    @classmethod
    def of(cls, config: Any, models: rollout_seats.Seats) -> "Seats":
        """The seats of a classroom, with the models that were opened for a configuration."""
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
        )

    @property
    def policy(self) -> Teacher:
        """The teacher."""
        return self.teacher

    def shutdown(self) -> None:
        """End the processes of all engines and those that compare answers, and close what is open."""
        super().shutdown()
        self.answers.shutdown()


def models_in_use(config: Any, reward_weights: Mapping[str, float]) -> dict[str, ModelConfig]:
    """The models behind the seats, in the order in which they are loaded: no script, no judge where nothing is judged
    or the judge has no model, and a reward model only if there are solutions for it to grade."""
    generation, reward = config.generation, config.reward_model
    models: dict[str, ModelConfig] = {"teacher": config.teacher_model, "student": config.student_model}
    if is_script(config.teacher_model.model_name_or_path):
        del models["teacher"]
    if generation.judge_rules and config.judge_model.model_name_or_path not in EMBEDDED_JUDGES:
        models["judge"] = config.judge_model
    if reward.is_model and "end_rm" in reward_weights and generation.number_student_attempts > 0:
        models["reward"] = reward
    return models
