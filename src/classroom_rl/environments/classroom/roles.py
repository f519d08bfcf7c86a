"""The classroom's roles: the model of each role, and the models that a configuration needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from classroom_rl.config.models import ModelConfig
from classroom_rl.config.values import (
    EMBEDDED_JUDGES,
    EMBEDDED_SUPERVISORS,
    TRAINS_STUDENT,
    TRAINS_TEACHER,
    is_script,
)
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.rollout import environment as rollout_environment
from classroom_rl.rollout.engine import (
    Api,
    ChatEngine,
    EmbeddedJudge,
    Engine,
    Judge,
    PolicyEngine,
    RewardModel,
    Sampling,
    TokenEngine,
)
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Supervisor


@dataclass
class Roles(rollout_environment.LoadedModels):
    """The model of each role and its sampling options.

    Attributes:
        judge: None if nothing is judged.
        engines: the vLLM engines by role.
        apis: the API clients by role.
        answers: compares boxed answers with the reference, if there is no reward model.
        reward: the reward model that grades solutions; None if there is none.
        supervisor: None if nothing is supervised.
        supervisor_name: the name of the supervisor's model.
        policy_role: the role of the model under training.
    """

    teacher: PolicyEngine
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
    policy_role: str = TRAINS_TEACHER

    async def grade(self, problem: Problem, solution: str) -> float:
        """The reward model's score of a solution. Without a reward model: 1 if the boxed answer is right, otherwise 0.

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
        """Whether the teacher works on token ids. A teacher behind an API, a scripted one, and one that is not trained
        work on text."""
        return not self.trains_student and isinstance(self.teacher, TokenEngine)

    @property
    def trains_student(self) -> bool:
        """Whether the student is the model under training."""
        return self.policy_role == TRAINS_STUDENT

    @classmethod
    def of(cls, config: Any, models: rollout_environment.Roles) -> "Roles":
        """The classroom's roles, from the models that were loaded for a configuration."""
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
            policy_role=generation.trained_role,
        )

    @property
    def policy(self) -> PolicyEngine:
        """The model under training."""
        return cast(PolicyEngine, self.student) if self.trains_student else self.teacher

    def shutdown(self) -> None:
        """Stop the processes of all engines and of the answer checker, and close the ledgers."""
        super().shutdown()
        self.answers.shutdown()


def models_in_use(config: Any, reward_weights: Mapping[str, float]) -> dict[str, ModelConfig]:
    """The models to load or connect to, by role, in loading order.

    Scripted teachers, embedded judges and embedded supervisors need no model, nor does a judge without rules. A reward
    model is included only if there are solutions to grade.
    """
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
