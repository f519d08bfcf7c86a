"""The wire models of the server's HTTP API, used by the routes, the client and the journal."""

import hashlib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from src.classroom.conversation import ClassroomRules, Conversation, Solution, State
from src.classroom.setup import ConversationType, Setup
from src.classroom.verdicts import Verdict
from src.inference_providers.call_ledger import Usage
from src.rollout.datasets import Problem
from src.rollout.text import nests_deeper
from src.rollout.tokens import PolicyVersion, Turn

LARGEST_BATCH = 4096
"""Conversations that one request may ask for: all of them are held at once."""
LARGEST_BODY = 64 * 1024**2
"""Bytes that the body of a request may have: 16 KiB for each conversation of the largest batch."""

_LEVELS_OF_META = 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SampleRequest(_Strict):
    """Body of `POST /sample_conversations`: one entry of `problems` per conversation, a group's entries repeated.

    `request_id` names this piece of work: sent again with the same body it gives the same answer and is not run
    again. `run_id` and `policy_version` null accept whatever weights are loaded (evaluation). `greedy` samples the
    teacher at temperature 0. `fixed_seeds` derives every sampling seed from (seed, problem, step, position), so that
    tutors can be compared; training leaves it off. `meta` (one mapping per conversation, of at most 20
    levels) is kept with the record.
    `judge_again` makes judge attempts that brought no verdict once more, in a request that was answered before.
    """

    problems: list[str] = Field(min_length=1)
    answers: list[str]
    meta: list[dict[str, Any]] | None = None
    request_id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int
    step: int
    run_id: str | None = None
    policy_version: int | None = None
    greedy: bool = False
    fixed_seeds: bool = False
    judge_again: bool = False

    @field_validator("meta")
    @classmethod
    def _meta_is_flat_enough(cls, meta: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for place, each in enumerate(meta or ()):
            if nests_deeper(each, _LEVELS_OF_META):
                raise ValueError(f"entry {place} holds values within values on more than {_LEVELS_OF_META} levels")
        return meta

    @model_validator(mode="after")
    def _lengths_agree(self) -> "SampleRequest":
        counts = {"problems": len(self.problems), "answers": len(self.answers)}
        if self.meta is not None:
            counts["meta"] = len(self.meta)
        if len(set(counts.values())) > 1:
            raise ValueError(f"problems, answers and meta must have one entry per conversation, but hold {counts}")
        if (self.run_id is None) != (self.policy_version is None):
            raise ValueError("run_id and policy_version come together: give both, or neither")
        return self

    @property
    def digest(self) -> str:
        """Stands for what is asked for: two requests with one digest are the same piece of work."""
        return hashlib.sha256(self.model_dump_json(exclude={"judge_again"}).encode()).hexdigest()

    @property
    def wanted_policy(self) -> PolicyVersion | None:
        if self.run_id is None or self.policy_version is None:
            return None
        return PolicyVersion(self.run_id, self.policy_version)


TOKEN_FIELDS = frozenset({"prompt_ids", "completion_ids", "mask", "logprobs"})
"""What makes up most of a record; the journal keeps them with the turns."""


class ConversationRecord(BaseModel):
    """A finished conversation, whole: what the trainer learns from, the journal keeps and the reports show.

    `prompt_ids` is the teacher's first prompt; `completion_ids`, `mask` and `logprobs` have equal lengths, mask 1
    marking what the policy sampled; all four are empty for a teacher behind an API. `rewards` holds each reward's
    value, `reward` their weighted sum; both are null for a conversation without a verdict, and for one with a
    `failure`: it could not go on because a model refused to answer, or because a context was full. `overflow` says
    which, also of a conversation whose dialogue ended for that and was judged as it was. `max_turns` is that of the
    server that played it; null in records from before it was kept.
    """

    id: str
    request_id: str
    step: int
    index: int
    problem_id: str
    problem: str
    answer: str
    type: str
    student_name: str | None
    state: str
    turns: list[Turn]
    verdicts: list[Verdict]
    solutions: list[Solution]
    rewards: dict[str, float | None]
    reward: float | None
    rejected: bool
    failure: str | None = None
    overflow: str | None = None
    max_turns: int | None = None
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    meta: dict[str, Any]

    @classmethod
    def of(
        cls, conversation: Conversation, request: SampleRequest, index: int, reward: float | None
    ) -> "ConversationRecord":
        buffer = conversation.buffer
        return cls(
            id=conversation.id,
            request_id=request.request_id,
            step=request.step,
            index=index,
            problem_id=conversation.problem.id,
            problem=conversation.problem.text,
            answer=conversation.problem.answer,
            type=conversation.setup.type.value,
            student_name=conversation.setup.student_name,
            state=conversation.state.value,
            turns=conversation.turns,
            verdicts=conversation.verdicts,
            solutions=conversation.solutions,
            rewards=conversation.rewards,
            reward=reward,
            rejected=conversation.rejected,
            failure=conversation.failure,
            overflow=conversation.overflow,
            max_turns=conversation.rules.max_turns,
            prompt_ids=buffer.prompt_ids if buffer else [],
            completion_ids=buffer.completion_ids if buffer else [],
            mask=buffer.mask if buffer else [],
            logprobs=buffer.logprobs if buffer else [],
            meta=request.meta[index] if request.meta is not None else {},
        )

    def conversation(self, rules: ClassroomRules) -> Conversation:
        """The finished conversation itself, its tokens left out: what rewards are computed from."""
        return Conversation(
            id=self.id,
            problem=Problem(self.problem_id, self.problem, self.answer),
            setup=Setup(ConversationType(self.type), self.student_name, ()),
            rules=rules,
            turns=self.turns,
            verdicts=self.verdicts,
            solutions=self.solutions,
            rewards=self.rewards,
            failure=self.failure,
            overflow=self.overflow,
            state=State(self.state),
        )


class SampleResponse(BaseModel):
    """Answer of `/sample_conversations` and `/wait_batch`: one record per entry of the request, in its order.

    `judge`, `student` and `teacher` are what it took of those seats that are behind an API.
    """

    request_id: str
    policy: PolicyVersion
    conversations: list[ConversationRecord]
    judge: Usage | None = None
    student: Usage | None = None
    teacher: Usage | None = None


class RewardRequest(_Strict):
    """Body of `POST /get_{name}_reward`: conversation ids."""

    conversations: list[str] = Field(min_length=1)


class RewardResponse(BaseModel):
    """One reward per id, null for a conversation without a verdict."""

    rewards: list[float | None]


class JudgeCheckRequest(_Strict):
    """Body of `POST /check_judge`: finished conversations that the held-out judge is to judge, too. With `canaries`,
    the training's judge judges planted conversations on the first one's problem.

    `request_id` names this check: sent again it gives the same answer.
    """

    request_id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")
    step: int
    conversations: list[str] = Field(min_length=1, max_length=LARGEST_BATCH)
    canaries: bool = True


class SecondOpinion(BaseModel):
    """What the training's judge and the held-out one give a conversation, in [0, 1]; null where one has no verdict.
    `verdicts` are the held-out judge's."""

    conversation: str
    problem_id: str
    training: float | None
    held_out: float | None
    verdicts: list[Verdict]


class CanaryVerdict(BaseModel):
    """What the training's judge gives a planted conversation, in [0, 1]; null without a verdict."""

    canary: str
    problem_id: str
    score: float | None
    verdicts: list[Verdict]


class JudgeCheckResponse(BaseModel):
    """Answer of `/check_judge`. `second_opinions` is empty without a held-out judge; `held_out` is what asking it took,
    where it is behind an API."""

    request_id: str
    second_opinions: list[SecondOpinion]
    canaries: list[CanaryVerdict]
    held_out: Usage | None = None


class LoadWeightsRequest(_Strict):
    """Body of `POST /load_weights`: a folder inside the run folder that holds a complete published policy."""

    run_id: str = Field(min_length=1)
    version: int = Field(ge=0)
    path: str


class LoadWeightsResponse(BaseModel):
    """What is loaded now, and how long waiting for turns in flight and loading took, in seconds."""

    policy: PolicyVersion
    seconds: float


class ProcessId(_Strict):
    """A process on a machine; `started` (seconds since 1970) tells it from a later one with the same number."""

    host: str
    pid: int
    started: float


class SleepRequest(_Strict):
    """Body of `POST /sleep`: the processes for whose sake the engines sleep. When all are gone, the engines wake."""

    borrowers: list[ProcessId] = Field(min_length=1)


class RestResponse(BaseModel):
    """Answer of `/sleep` and `/wake_up`: whether each seat's engine sleeps now, and how long it took, in seconds."""

    asleep: dict[str, bool]
    seconds: float


class EngineHealth(BaseModel):
    """One seat: which model, whose engine, the process ids of its workers and the GPUs they have; whether the engine
    can give its GPU's memory back, and whether it sleeps at present."""

    model: str
    engine: str
    engine_version: str
    pids: list[int]
    gpus: list[str] = Field(default_factory=list)
    can_sleep: bool = False
    asleep: bool = False


class Health(BaseModel):
    """Answer of `GET /health`. `server_index` is the server's place among those of the run."""

    status: str
    seats: dict[str, EngineHealth]
    policy: PolicyVersion
    run_folder: str
    server_index: int = 0
    running_requests: list[str]
    running_conversations: int
    finished_conversations: int
