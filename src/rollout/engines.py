"""What an environment asks of the models in its seats, whether an engine or an API serves them."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol, runtime_checkable

from pydantic import BaseModel, Field

from src.models.policy_version import PolicyVersion
from src.rollout.usage import Usage


@dataclass(frozen=True)
class Sampling:
    """How one answer is sampled. `seed` None draws freely; `max_tokens` is cut to what the context has room for. `draw`
    names this one answer among others to the same prompt, for engines that keep what they answered."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 1024
    seed: Optional[int] = None
    draw: tuple[str | int, ...] = ()

    @classmethod
    def of(cls, options: Any, max_tokens: int) -> "Sampling":
        """The sampling that a model's `vllm` block asks for."""
        return cls(options.temperature, options.top_p, options.top_k, max_tokens)


@dataclass(frozen=True)
class Completion:
    """What an engine sampled: ids with one log-prob each (of the distribution that was sampled from), the text with
    special tokens in it but without the end token, and whether the model ended it itself. A model behind an API gives
    no ids; `counted` is then how many tokens its provider counted. `policy` names the weights that sampled it, and
    `weights` stands for their content."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ended: bool
    policy: Optional[PolicyVersion] = None
    counted: Optional[int] = None
    weights: Optional[str] = None

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.ids) if self.counted is None else self.counted


@runtime_checkable
class TokenEngine(Protocol):
    """A trainable seat: token ids in, token ids out."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion: ...


class ChatEngine(Protocol):
    """A seat that is only talked to: messages in, text out."""

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion: ...


class Engine(Protocol):
    """A model that is loaded: it says what it is, may die, sleeps, and is ended."""

    def health(self) -> "EngineHealth": ...
    def check_alive(self) -> None: ...
    def shutdown(self) -> None: ...
    async def sleep(self, timeout_s: float) -> None: ...
    async def wake_up(self) -> None: ...


class Teacher(Protocol):
    """The seat under training: a `TokenEngine` or a `ChatEngine`. `policy` names the weights that answer, and `weights`
    stands for their content."""

    policy: Optional[PolicyVersion]
    weights: str


class RewardModel(Protocol):
    """Grades a dialogue of {"role": "user" | "assistant", "content"} with one number."""

    model_name: str

    async def score(self, dialogue: Sequence[dict[str, str]]) -> float: ...


class CallAccounts(Protocol):
    """What requests to an API cost."""

    def usage(self, batch: str) -> Usage: ...
    def close(self) -> None: ...


class Api(Protocol):
    """What a seat behind an API is asked through. `drain` waits for requests in flight."""

    model: str
    url: str
    ledger: CallAccounts

    async def drain(self) -> None: ...


class Judge(Protocol):
    """Judges a transcript of {"role": "teacher" | "student", "content"} by one rule and answers with JSON text.

    `problem` is the problem's text; `attempt` counts from 0 within a panel.
    """

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str: ...


@dataclass(frozen=True)
class ConversationFacts:
    """What the program knows for certain about a conversation. Embedded judges may use it; judge models never see it.

    Attributes:
        personas: the persona drawn for each message; None for messages without one. () if unknown.
        max_turns: the number of messages after which the teacher closes, as in `config.base.GenerationConfig`; None if
            unknown.
    """

    personas: tuple[Optional[str], ...] = ()
    max_turns: Optional[int] = None

    def teacher_messages(self, conversation: Sequence[dict[str, str]]) -> Optional[int]:
        """The most messages that the teacher can have in a conversation that began like this one; None if unknown."""
        if self.max_turns is None:
            return None
        student_opens = bool(conversation) and conversation[0]["role"] == "student"
        return (self.max_turns + 1) // 2 if student_opens else self.max_turns // 2 + 1


NO_FACTS = ConversationFacts()


class EmbeddedJudge(ABC):
    """A judge without a model, which reads the facts of a conversation besides its messages."""

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
    """One seat: which model, whose engine, the process ids of its workers and the GPUs they have; whether the engine
    can give its GPU's memory back, and whether it sleeps at present."""

    model: str
    engine: str
    engine_version: str
    pids: list[int]
    gpus: list[str] = Field(default_factory=list)
    can_sleep: bool = False
    asleep: bool = False
