"""The protocol of environments: how a server opens one, how the runner plays its episodes, and how they are recorded.

An environment is one package; a line in `ENVIRONMENTS`, below, gives it a short name. It defines the states of its
episodes, the model that each state calls, the journal's events, and the rewards. Requests, restarts, weights,
schedules, and the conversion of tokens to tensors are the same for all environments. docs/environments.md shows an
example.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Optional, Protocol, Self, TypeVar, cast

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.rollout.engine import (
    Api,
    EmbeddedJudge,
    Engine,
    EngineHealth,
    Judge,
    PolicyEngine,
    ReportsHealth,
    Sampling,
)
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.reviews import MessageToReview, Review, Supervisor
from classroom_rl.rollout.scheduler import PHASED, ConcurrentSchedule, Phase, Registration
from classroom_rl.rollout.tokens import TokenBuffer, Turn
from classroom_rl.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from classroom_rl.rollout.store.journal import Journal


POLICY_ROLE = "teacher"
"""The role of the policy in every environment: training updates `teacher_model`. The classroom can train its student
instead (`LoadedModels.policy_role`)."""


class LoadedModels:
    """The loaded models, as a server needs them for every environment.

    Attributes:
        engines: the vLLM engines of this server, by role.
        apis: the clients of the roles behind an API, by role.
        policy_role: the role of the model under training.
    """

    engines: Mapping[str, Engine]
    apis: Mapping[str, Api]
    policy_role = POLICY_ROLE

    @property
    def policy(self) -> PolicyEngine:
        """The model under training."""
        raise NotImplementedError

    @property
    def spent_usd(self) -> float | None:
        """US dollars that this run spent on all roles behind an API; None if there are no such roles."""
        return sum(api.ledger.spent_usd for api in self.apis.values()) if self.apis else None

    def health(self) -> dict[str, EngineHealth]:
        """The health of each role except an embedded judge. Raises an `EngineFailure` if an engine died."""
        remote = {
            role: EngineHealth(model=api.model, engine="api", engine_version=api.url, pids=[], trouble=api.trouble)
            for role, api in self.apis.items()
        }
        # A script that plays the policy is in neither of the two mappings, but reports its health, too.
        policy_role = self.policy_role
        policy = {} if policy_role in self.apis else {policy_role: cast(ReportsHealth, self.policy).health()}
        return policy | {role: engine.health() for role, engine in self.engines.items()} | remote

    def check_alive(self) -> None:
        """Raise an `EngineFailure` if an engine died."""
        for engine in self.engines.values():
            engine.check_alive()

    def shutdown(self) -> None:
        """End the processes of all engines in parallel, because each takes seconds; close the ledgers of the APIs."""
        with ThreadPoolExecutor(max(1, len(self.engines))) as pool:
            for _ in pool.map(lambda engine: engine.shutdown(), self.engines.values()):
                pass  # iterating raises an engine's error
        for api in self.apis.values():
            api.ledger.close()


@dataclass
class Roles(LoadedModels):
    """The models that a server loads and hands to the environment.

    Attributes:
        models: engines, models behind an API, or a script, by role; without the judge.
        judge: the judge; None if nothing is judged.
        supervisor: the supervisor; None if nothing is supervised.
    """

    models: Mapping[str, Any]
    engines: Mapping[str, Engine] = field(default_factory=dict)
    apis: Mapping[str, Api] = field(default_factory=dict)
    judge: Optional[Judge | EmbeddedJudge] = None
    supervisor: Optional[Supervisor] = None

    @property
    def policy(self) -> PolicyEngine:
        """The model under training."""
        policy: PolicyEngine = self.models[POLICY_ROLE]
        return policy


class Episode(Protocol):
    """One episode of an environment, such as a conversation or a game.

    Attributes:
        turns: its messages.
        buffer: the policy's context; None before the policy's first turn.
        rewards: the value of each reward; None for an episode that cannot be scored.
        rejected, failure, overflow: as in `Trajectory`.
    """

    id: str
    problem: Problem
    turns: Sequence[Turn]
    buffer: TokenBuffer | None
    rewards: Mapping[str, float | None]
    rejected: bool
    failure: str | None
    overflow: str | None

    @property
    def state(self) -> Hashable:
        """The current state: one of those in the environment's phases, unless the episode is finished."""

    @property
    def finished(self) -> bool:
        """Whether the episode has ended."""

    @property
    def answers(self) -> int:
        """The number of the models' answers so far."""


E = TypeVar("E", bound=Episode)
R = TypeVar("R")


@dataclass(eq=False)
class Group:
    """The episodes of one request on the same problem, in order. Groups are not shared between requests.

    Attributes:
        meeting: for an environment's own use: state that the group's episodes share.
    """

    episodes: list[Any] = field(default_factory=list)
    meeting: Any = None


@dataclass(frozen=True)
class Play(Generic[E, R]):
    """One episode of a request, while it is played.

    Attributes:
        index: its index in the request.
        sample_index: its index among the request's episodes on the same problem.
        weights: a fingerprint of the policy's weights when the request began.
        replayed: what `Environment.replay` returned for it.
        registration: its registration with the schedule, which decides when it may go on.
        group: the request's episodes on its problem, including itself.
    """

    episode: E
    request: SampleRequest
    index: int
    sample_index: int
    weights: str
    replayed: R
    registration: Registration = field(default_factory=ConcurrentSchedule)
    group: Group = field(default_factory=Group)

    def sampled_with(self, sampling: Sampling) -> Sampling:
        """The sampling of the episode's next answer: with its own `draw`, and with its own seed if the request fixes
        seeds."""
        answers = self.episode.answers
        sampling = replace(sampling, draw=(self.episode.id, answers))
        if not self.request.fixed_seeds:
            return sampling
        parts = (self.request.seed, self.episode.problem.id, self.request.step, self.sample_index, answers)
        digest = sha256("|".join(map(str, parts)).encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))

    def common_fields(self, reward: float | None) -> dict[str, Any]:
        """The fields of the episode's trajectory that every environment has. `reward` is the weighted sum of its
        rewards."""
        episode, request, buffer = self.episode, self.request, self.episode.buffer
        return {
            "id": episode.id,
            "request_id": request.request_id,
            "step": request.step,
            "index": self.index,
            "problem_id": episode.problem.id,
            "problem": episode.problem.text,
            "answer": episode.problem.answer,
            "rewards": dict(episode.rewards),
            "reward": reward,
            "turns": episode.turns,
            "state": str(episode.state),
            "rejected": episode.rejected,
            "failure": episode.failure,
            "overflow": episode.overflow,
            "prompt_ids": buffer.prompt_ids if buffer else [],
            "completion_ids": buffer.completion_ids if buffer else [],
            "mask": buffer.mask if buffer else [],
            "logprobs": buffer.logprobs if buffer else [],
            "branches": buffer.branches if buffer else [],
            "meta": request.meta[self.index] if request.meta is not None else {},
        }


class Environment(ABC, Generic[E, R]):
    """Plays episodes, one state at a time.

    In all methods, `config` is the whole configuration of the program: a `TrainRLConfig` or an `EvalConfig`.

    Attributes:
        Record: the class of a finished episode's record; a subclass of `Trajectory` with the environment's own fields.
        phases: the phases of an episode under `generation.schedule: phased`.
        takes_own_rewards: whether its rewards may also be functions of one's own, named as `package.module:function`.
        review_by_rules: the supervisor `rules` of this environment, as a static method; None for the classroom's.
        roles: the models in the roles.
    """

    Record: ClassVar[type[Trajectory]] = Trajectory
    phases: ClassVar[Sequence[Phase]]
    takes_own_rewards: ClassVar[bool] = False
    review_by_rules: ClassVar[Callable[[MessageToReview], Review] | None] = None
    roles: LoadedModels

    # Opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def models(cls, config: Any, reward_weights: Mapping[str, float]) -> dict[str, Any]:
        """The models that the roles need with this configuration, by role, in the order of loading."""
        return {POLICY_ROLE: config.teacher_model}

    @classmethod
    def check(cls, config: Any, judge_reads_templates: bool) -> None:
        """Check what an episode needs besides models, before any model is loaded.

        Args:
            judge_reads_templates: whether the judge is a model, which is prompted with templates.

        Raises:
            DataError: if a prompt template is missing or wrong.
        """

    @classmethod
    @abstractmethod
    def open_with(cls, config: Any, roles: Roles, journal: "Journal", reward_weights: Mapping[str, float]) -> Self:
        """Open the environment of a configuration, with the models that `models` named."""

    @classmethod
    def check_problems(
        cls, config: Any, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase", limit: int
    ) -> None:
        """Check the problems of a training before its first step.

        Args:
            limit: the length of the policy's context, in tokens.

        Raises:
            DataError: if a problem does not fit.
        """

    # Playing -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def identity(self) -> tuple[Any, ...]:
        """Everything that an episode depends on besides its request. If its `repr` changes, a batch is played again
        from the start."""

    @abstractmethod
    def open(self, id: str, problem: Problem, request: SampleRequest) -> E:
        """Create an episode, in its first state."""

    @abstractmethod
    def replay(self, episode: E, events: Iterable[dict[str, Any]], judge_again: bool) -> R:
        """Replay the journal's events of an episode, and return what else these hold (`Play.replayed`)."""

    @abstractmethod
    def is_recorded(self, replayed: R) -> bool:
        """Whether the journal holds the finished episode."""

    def needs_policy(self, episode: E) -> bool:
        """Whether the policy may still be called in an episode. Once this is False, it stays False, and other weights
        may be loaded while the rest of the episode goes on."""
        return not episode.finished

    @abstractmethod
    async def advance(self, play: Play[E, R]) -> None:
        """Play the episode's current state: call its model, write the result to the journal, and go to the next
        state."""

    @abstractmethod
    def trajectory(self, play: Play[E, R], reward: float | None) -> Trajectory:
        """The record of a finished episode; `reward` is the weighted sum of its rewards."""

    # Finished episodes -------------------------------------------------------------------------------------------

    def reward_of(self, name: str, record: Trajectory) -> float | None:
        """One of the environment's rewards of a finished episode; it may be one without a weight in the configuration.
        Raises a `DataError` if the episode lacks what the reward is computed from."""
        if name not in record.rewards:
            raise DataError(
                f"The reward {name} was not computed for {record.id}: train.reward_weights does not name it."
            )
        return record.rewards[name]

    @classmethod
    def batch_metrics(cls, records: Sequence[Trajectory]) -> dict[str, float]:
        """The environment's own metrics of a batch, as means over its episodes."""
        return {}


ENVIRONMENTS = {
    "classroom": "classroom_rl.environments.classroom",
    "marooned": "classroom_rl.environments.marooned",
    "agent": "classroom_rl.environments.agent",
}
"""Maps a name to the environment's package. A package's dotted name can also be used directly."""


def module_of(environment: str, module: str) -> ModuleType:
    """Import a module of an environment's package, or the environment's only module, which holds the names of all.
    Raises a `ConfigError` if there is no such environment."""
    package, name, cause = ENVIRONMENTS.get(environment, environment), "", None
    try:
        name = module_name(package, module)
    except (ImportError, ValueError) as error:
        cause = error
    if not name:
        raise ConfigError(
            f"environment is {environment!r}; there are {', '.join(ENVIRONMENTS)}, and every package with the modules "
            "that docs/environments.md names, or single file with all that they hold, by its dotted name. PYTHONPATH "
            "must name the folder of one of your own."
        ) from cause
    return import_module(name)


def module_name(package: str, module: str) -> str:
    """The name of a module of an environment's package, or of the package if it is a single file; "" if there is none.
    Raises `ImportError` or `ValueError` if there is no such package."""
    spec = find_spec(package)
    if spec is not None and spec.submodule_search_locations is None:
        return package
    return f"{package}.{module}" if find_spec(f"{package}.{module}") is not None else ""


def most_rows(config: Any) -> int | None:
    """The most training samples of an episode, if each of its messages has its own prompt and so is its own sample;
    None if a whole episode is one sample.

    An environment's package defines it as `rows_per_episode(generation)` in its module `config`; raises as `module_of`
    does.
    """
    count = getattr(module_of(config.environment, "config"), "rows_per_episode", None)
    return None if count is None else count(config.generation)


def environment_of(config: Any) -> type[Environment[Any, Any]]:
    """The environment that a configuration names; raises as `module_of` does."""
    environment: type[Environment[Any, Any]] = module_of(config.environment, "environment").Environment
    return environment


def phases_of(config: Any) -> Sequence[Phase]:
    """The phases of the configured environment; empty with `generation.schedule: concurrent`."""
    return environment_of(config).phases if config.generation.schedule == PHASED else ()


def models_on_engines(config: Any, reward_weights: Mapping[str, float]) -> dict[str, Any]:
    """The models that the server loads into engines, by role, in the order of loading."""
    models = environment_of(config).models(config, reward_weights)
    return {role: model for role, model in models.items() if not model.is_remote}
