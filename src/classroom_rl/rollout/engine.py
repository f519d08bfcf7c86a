"""The interfaces of the models in an environment's roles, for engines and APIs alike."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol, runtime_checkable

from pydantic import BaseModel, Field

from classroom_rl.models.policy_version import PolicyVersion

BATCH: ContextVar[str] = ContextVar("batch", default="")
"""The id of the batch or check that API requests belong to, for the metrics of a step; set where one is started."""


@dataclass
class Usage:
    """A batch's usage of one role's API.

    Attributes:
        calls, retries: requests sent, and those of them that repeated a failed one.
        unusable: replies that were paid for but cannot be used, such as a judge's without a verdict.
        failures: failures by kind.
        prompt_tokens, completion_tokens, cost_usd: by the provider's count.
        reserved_usd: US dollars reserved for requests that may or may not have been billed.
        run_cost_usd: the spending of the whole run so far.
    """

    calls: int = 0
    retries: int = 0
    unusable: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    reserved_usd: float = 0.0
    run_cost_usd: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """How one answer is sampled.

    Attributes:
        max_tokens: the token limit; an engine lowers it to what fits into its context.
        seed: None for no fixed seed.
        draw: identifies this answer among others to the same prompt, for APIs whose replies are stored.
        schema: a JSON schema; an engine of the server then samples only JSON of this form.
        stop: texts that end the answer, on vLLM's engines and APIs alone. An engine's answer may hold the first of them
            and what its token holds beyond.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 1024
    seed: Optional[int] = None
    draw: tuple[str | int, ...] = ()
    # Not in the repr: a batch in the journal is recognised by it, and batches of earlier versions must stay valid.
    schema: Optional[dict[str, Any]] = field(default=None, repr=False)
    stop: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, options: Any, max_tokens: int) -> "Sampling":
        """The sampling that a model's `vllm` block configures."""
        return cls(options.temperature, options.top_p, options.top_k, max_tokens)


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        ids: the token ids; empty for a model behind an API.
        logprobs: for a `TokenEngine`, the log-prob of each token under the distribution that was sampled from; optional
            for a `ChatEngine`.
        text: the text, with special tokens but without the end token.
        ended: whether the model ended it itself.
        policy: the policy version that sampled it.
        counted: for a model behind an API, the number of tokens by the provider's count.
        weights: a fingerprint of the weights that sampled it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ended: bool
    policy: Optional[PolicyVersion] = None
    counted: Optional[int] = None
    weights: Optional[str] = None

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return len(self.ids) if self.counted is None else self.counted


@runtime_checkable
class TokenEngine(Protocol):
    """A model that can be trained: token ids in, token ids out."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion: ...


class ChatEngine(Protocol):
    """A model that is not trained: messages in, text out."""

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion: ...


class Engine(Protocol):
    """A loaded model: reports its health, raises if its process died, sleeps, wakes up, and shuts down."""

    def health(self) -> "EngineHealth": ...
    def check_alive(self) -> None: ...
    def shutdown(self) -> None: ...
    async def sleep(self, timeout_s: float) -> None: ...
    async def wake_up(self) -> None: ...


class PolicyEngine(Protocol):
    """The model under training: a `TokenEngine` or a `ChatEngine`. `policy` is its policy version, and `weights` a
    fingerprint of its weights."""

    policy: Optional[PolicyVersion]
    weights: str


class ReportsHealth(Protocol):
    """A model of this server: an engine, or a script. The client of an API has no `health`."""

    def health(self) -> "EngineHealth": ...


class RewardModel(Protocol):
    """Grades a dialogue of {"role": "user" | "assistant", "content"} with one number."""

    model_name: str

    async def score(self, dialogue: Sequence[dict[str, str]]) -> float: ...


class CallAccounts(Protocol):
    """The usage and the cost of requests to an API. `spent_usd` is the cost so far, in US dollars."""

    @property
    def spent_usd(self) -> float: ...
    def usage(self, batch: str) -> Usage: ...
    def close(self) -> None: ...


class Api(Protocol):
    """The client of a role behind an API. `trouble` says for how long it has had no answer, and why; None while it
    gets answers. `drain` waits for requests in flight."""

    model: str
    url: str
    trouble: Optional[str]
    ledger: CallAccounts

    async def drain(self) -> None: ...


class Judge(Protocol):
    """Judges a transcript of {"role": "teacher" | "student", "content"} by one rule, and answers with JSON text.

    `problem` is the problem's text; `attempt` counts from 0 within a panel. `judge_group` compares all `conversations`
    of a group (on one problem) in one call.
    """

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str: ...
    async def judge_group(
        self, rule: str, conversations: Sequence[list[dict[str, str]]], problem: str, attempt: int
    ) -> str: ...


@dataclass(frozen=True)
class ConversationFacts:
    """What the program knows for certain about a conversation. Embedded judges may use it; judge models never see it.

    Attributes:
        personas: the persona drawn for each message; None for messages without one. () if unknown.
        max_turns: the number of messages after which the teacher closes, as in `config.base.GenerationConfig`; None if
            unknown.
        answer: the reference answer of the problem; None if there is none.
    """

    personas: tuple[Optional[str], ...] = ()
    max_turns: Optional[int] = None
    answer: Optional[str] = None

    def teacher_messages(self, conversation: Sequence[dict[str, str]]) -> Optional[int]:
        """The most messages that the teacher can have in a conversation that began like this one; None if unknown."""
        if self.max_turns is None:
            return None
        student_opens = bool(conversation) and conversation[0]["role"] == "student"
        return (self.max_turns + 1) // 2 if student_opens else self.max_turns // 2 + 1


NO_FACTS = ConversationFacts()


class EmbeddedJudge(ABC):
    """A judge without a model; besides the messages, it gets the facts of the conversation."""

    @abstractmethod
    async def judge(
        self,
        rule: str,
        conversation: list[dict[str, str]],
        problem: str,
        attempt: int,
        facts: ConversationFacts = NO_FACTS,
    ) -> str:
        """As `Judge.judge`."""


def ask_judge(
    judge: Judge | EmbeddedJudge,
    rule: str,
    conversation: list[dict[str, str]],
    problem: str,
    attempt: int,
    facts: ConversationFacts,
) -> Awaitable[str]:
    """A judge's answer; only an embedded judge gets the facts."""
    if isinstance(judge, EmbeddedJudge):
        return judge.judge(rule, conversation, problem, attempt, facts)
    return judge.judge(rule, conversation, problem, attempt)


class EngineHealth(BaseModel):
    """The health of one role: its model, its engine and version, the process ids of the workers and their GPUs, whether
    the engine has a sleep mode, and whether it sleeps now. For a role behind an API, the version is the API's address,
    and `trouble` says for how long and why it has had no answer (null while it gets answers). For the policy,
    `receivers` is how many workers would receive weights from a trainer's memory, and `weight_group` the id of the
    group in which they did last (empty: in none)."""

    model: str
    engine: str
    engine_version: str
    pids: list[int]
    gpus: list[str] = Field(default_factory=list)
    can_sleep: bool = False
    asleep: bool = False
    trouble: Optional[str] = None
    receivers: int = 0
    weight_group: str = ""
