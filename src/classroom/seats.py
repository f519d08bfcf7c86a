"""Who speaks in which role, and which of the roles a configuration needs engines for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from config.base import ApiModelConfig, GenerationConfig, JudgeModelConfig, ModelConfig
from config.train_rl_model import RewardModelConfig
from config.values import EMBEDDED_JUDGES, is_script
from src.grading.checker import AnswerChecker
from src.rollout.datasets import Problem
from src.rollout.engines import (
    Api,
    ChatEngine,
    EmbeddedJudge,
    Engine,
    EngineHealth,
    Judge,
    RewardModel,
    Sampling,
    Teacher,
    TokenEngine,
)


@dataclass
class Seats:
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

    def health(self) -> dict[str, EngineHealth]:
        """What is in each seat but an embedded judge.

        Raises:
            EngineFailure: if an engine died.
        """
        remote = {
            seat: EngineHealth(model=api.model, engine="api", engine_version=api.url, pids=[])
            for seat, api in self.apis.items()
        }
        own = {} if "teacher" in self.apis else {"teacher": self.teacher.health()}  # an engine's, or a script's
        return own | {seat: engine.health() for seat, engine in self.engines.items()} | remote

    def check_alive(self) -> None:
        """Raises:
        EngineFailure: if an engine died.
        """
        for engine in self.engines.values():
            engine.check_alive()

    def shutdown(self) -> None:
        """End the processes of all engines and those that compare answers, and close what is open."""
        for engine in self.engines.values():
            engine.shutdown()
        self.answers.shutdown()
        for api in self.apis.values():
            api.ledger.close()


def engine_seats(
    teacher: ApiModelConfig,
    student: ApiModelConfig,
    judge: JudgeModelConfig,
    generation: GenerationConfig,
    reward: ModelConfig | None = None,
) -> dict[str, ModelConfig]:
    """The seats whose models are loaded into engines of this server."""
    models = models_in_use(teacher, student, judge, generation)
    wanted: dict[str, ModelConfig] = {seat: model for seat, model in models.items() if not model.is_remote}
    if reward is not None:
        wanted["reward"] = reward
    return wanted


def needed_reward_model(
    reward: RewardModelConfig, generation: GenerationConfig, reward_weights: Mapping[str, float]
) -> RewardModelConfig | None:
    """The reward model, if it is one and there are solutions for it to grade."""
    needed = "end_rm" in reward_weights and generation.number_student_attempts > 0
    return reward if reward.is_model and needed else None


def models_in_use(
    teacher: ApiModelConfig, student: ApiModelConfig, judge: JudgeModelConfig, generation: GenerationConfig
) -> dict[str, ApiModelConfig]:
    """The models behind the seats: no script, and no judge where nothing is judged or the judge has no model."""
    models = {"teacher": teacher, "student": student}
    if is_script(teacher.model_name_or_path):
        del models["teacher"]
    if generation.judge_rules and judge.model_name_or_path not in EMBEDDED_JUDGES:
        models["judge"] = judge
    return models
