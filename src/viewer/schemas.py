"""The wire models of the viewer's routes."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from src.classroom.conversation import Solution
from src.classroom.verdicts import Verdict


class ChatAvailability(BaseModel):
    """Whether the current tutor can be talked to here, and if not, why."""

    on: bool
    why: str = ""


class RunInfo(BaseModel):
    """Answer of `GET /api/run`: what is in the run folder. `live` tells whether this server plays conversations
    itself. `facts` are lines of the configuration worth showing: (label, value)."""

    name: str
    folder: str
    live: bool
    steps: list[int]
    evaluations: list[str]
    personas: list[str]
    facts: list[tuple[str, str]]
    chat: ChatAvailability


class Pulse(BaseModel):
    """Answer of `GET /api/pulse`, asked for every few seconds: what changed, as stamps to compare, and the figures of
    the moment. `playing` and `played` count the conversations that are not in a file yet; `spent_usd` is what the seats
    behind an API took so far."""

    shelf: str
    metrics: str
    journal: str
    latest_step: int | None
    policy: str | None
    playing: int
    played: int
    spent_usd: float | None = None


class EvalMark(BaseModel):
    """A held-out reward: mean with its 95 % interval, for one sampling of one evaluation."""

    name: str
    sampling: str
    mean: float
    low: float | None
    high: float | None


class Metrics(BaseModel):
    """Answer of `GET /api/metrics`: columns over steps, at most as many as a chart can show; null where a step has no
    such figure. `last` is the last step's line, whole."""

    steps: list[int]
    series: dict[str, list[float | None]]
    last: dict[str, Any]
    marks: list[EvalMark]
    max_steps: int | None


class Guards(BaseModel):
    """Answer of `GET /api/guards`: whether the tutor learned, with reasons, as far as a training has ended (`verdict`
    None: not yet) after `steps`; and what the `checks` of the judge warned of, as (step, text), the last first.
    `failed` is how many more were tried and brought no score."""

    verdict: str | None = None
    reasons: list[str] = Field(default_factory=list)
    steps: int | None = None
    checks: int = 0
    failed: int = 0
    warnings: list[tuple[int, str]] = Field(default_factory=list)


class Page(BaseModel):
    """Answer of `GET /api/conversations`: one page as columns of equal length, `matching` of `total` rows passing the
    filters. `personas` and `samplings` are those of the whole set; `histogram` counts the matching rewards in 20 equal
    parts from 0 to 1, lower and higher ones in the outermost."""

    where: str
    total: int
    matching: int
    offset: int
    mean: float | None
    histogram: list[int]
    personas: list[str]
    samplings: list[str]
    columns: dict[str, list[Any]]


class TurnView(BaseModel):
    """One message: (kind, text) parts; `tokens` the model sampled, of which `trained` have mask 1 (None: no tokens are
    kept of this conversation). `score` is the pedagogical reward model's, where an evaluation asked it."""

    role: str
    parts: list[tuple[str, str]]
    persona: str | None
    tokens: int
    trained: int | None
    ended: bool
    given: bool
    policy: str | None
    score: float | None = None


class ConversationView(BaseModel):
    """Answer of `GET /api/conversation`: everything but the tokens. `initial_solutions` are what the student wrote
    before the dialogue, where an evaluation asked for them."""

    where: str
    id: str
    step: int | None
    index: int
    problem_id: str
    problem: str
    answer: str
    type: str
    student_name: str | None
    state: str
    sampling: str | None
    turns: list[TurnView]
    verdicts: list[Verdict]
    solutions: list[Solution]
    initial_solutions: list[Solution] = Field(default_factory=list)
    rewards: dict[str, float | None]
    reward: float | None
    rejected: bool
    failure: str | None
    overflow: str | None
    trained_tokens: int | None
    context_tokens: int | None
    meta: dict[str, Any]


class Tokens(BaseModel):
    """Answer of `GET /api/tokens`: the teacher's context as (text, mask, log-prob) pieces; `prompt` is what stands
    before them. `why` says why there are none."""

    prompt: str = ""
    pieces: list[tuple[str, int, float]] = Field(default_factory=list)
    trained: int = 0
    why: str = ""


class Group(BaseModel):
    """Answer of `GET /api/group`: the conversations of a set on one problem, `total` of which are the first shown."""

    problem_id: str
    problem: str
    total: int
    mean: float | None
    std: float | None
    conversations: list[ConversationView]


class Comparison(BaseModel):
    """Answer of `GET /api/compare`: the problems that two sets have in common, as columns, with the mean reward of
    each; the means are over the `rewarded` ones, which have a reward on both sides."""

    total: int
    rewarded: int
    offset: int
    mean_left: float | None
    mean_right: float | None
    samplings: list[str]
    columns: dict[str, list[Any]]


class Lessons(BaseModel):
    """Answer of `GET /api/lessons`: the problems of a set, as columns."""

    total: int
    columns: dict[str, list[Any]]


class ChatMessage(BaseModel):
    """A message in the chat."""

    role: Literal["teacher", "student"]
    text: str = Field(max_length=100_000)


class ChatRequest(BaseModel):
    """Body of `POST /api/chat` and `POST /api/chat/opening`: the lesson, who the student is, and what was said."""

    problem: str = Field(min_length=1, max_length=200_000)
    student_name: str | None = Field(None, max_length=200)
    turns: list[ChatMessage] = Field(default_factory=list, max_length=1000)


class ChatOpening(BaseModel):
    """How a lesson begins: the teacher's system message, messages that its template opens with, and who speaks."""

    system: str
    turns: list[ChatMessage]
    next: Literal["teacher", "student"]


class ChatReply(BaseModel):
    """What the teacher said; `over` is true if it said goodbye."""

    text: str
    parts: list[tuple[str, str]]
    tokens: int
    ended: bool
    over: bool
    policy: str
