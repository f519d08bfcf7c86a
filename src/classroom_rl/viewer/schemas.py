"""The request and response models of the viewer's routes."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.judges.verdicts import Verdict
from classroom_rl.results.corrections import LONGEST_TEXT, CategoryPrecision, CorrectionDecision, refuse_contradictions
from classroom_rl.rollout.post_test import PostTest
from classroom_rl.rollout.requests import StrictModel


class ChatAvailability(BaseModel):
    """Whether the page can chat with the current tutor, and if not, why."""

    on: bool
    why: str = ""


class RunInfo(BaseModel):
    """Response of `GET /api/run`: what is in the run folder. `live` is true if this server plays conversations itself.
    `facts` are the settings that the page shows: (label, value). `criteria` are the judge's criteria: the highest score
    by name. `supervised` says whether the run has a supervisor, `game` whether games are played in place of lessons."""

    name: str
    folder: str
    live: bool
    supervised: bool
    game: bool
    steps: list[int]
    evaluations: list[str]
    personas: list[str]
    facts: list[tuple[str, str]]
    criteria: dict[str, float]
    chat: ChatAvailability


class Pulse(BaseModel):
    """Response of `GET /api/pulse`, which the page polls every few seconds: current figures, and stamps that change
    with the sets of conversations (`shelf`), the `metrics` and the `journal`. `playing` and `played` count the
    unfinished and the finished conversations that are not in a file yet; `spent_usd` is the cost of all roles behind
    an API so far."""

    shelf: str
    metrics: str
    journal: str
    latest_step: int | None
    policy: str | None
    playing: int
    played: int
    spent_usd: float | None = None


class EvalMark(BaseModel):
    """The held-out reward of one sampling of one evaluation: mean and 95 % interval."""

    name: str
    sampling: str
    mean: float
    low: float | None
    high: float | None


class Metrics(BaseModel):
    """Response of `GET /api/metrics`: columns over steps, thinned to what a chart can show; null where a step lacks the
    metric. `last` holds the last number of each metric."""

    steps: list[int]
    series: dict[str, list[float | None]]
    last: dict[str, Any]
    marks: list[EvalMark]
    max_steps: int | None


class Guards(BaseModel):
    """Response of `GET /api/guards`.

    Attributes:
        verdict, reasons, steps: whether the tutor learned, why, and in how many steps; verdict is None until the
            training has ended.
        checks: the number of checks of the judge that brought a score.
        failed: the number of checks that brought none.
        warnings: the warnings of the checks as (step, text), latest first.
    """

    verdict: str | None = None
    reasons: list[str] = Field(default_factory=list)
    steps: int | None = None
    checks: int = 0
    failed: int = 0
    warnings: list[tuple[int, str]] = Field(default_factory=list)


class Page(BaseModel):
    """Response of `GET /api/conversations`: one page of a list, as columns of equal length. `matching` of `total` rows
    pass the filters. `personas`, `samplings` and `categories` (those of invalid messages) are those of the whole set;
    `reviewed` says whether a supervisor read any of its messages. `histogram` counts the matching rewards in equal
    bins between `edges`, which enclose 0, 1 and all rewards of the set."""

    where: str
    total: int
    matching: int
    offset: int
    mean: float | None
    histogram: list[int]
    edges: list[float]
    personas: list[str]
    samplings: list[str]
    categories: list[str]
    reviewed: bool
    columns: dict[str, list[Any]]


class ReviewView(BaseModel):
    """A supervisor's review of a message. `refused_text` is a correction that was not accepted, as far as the
    supervisor's answer shows it."""

    valid: bool | None
    category: str
    penalty: float | None
    critique: str
    correction: str | None
    refused_correction: str | None
    refused_text: str | None
    source: str
    error: str | None
    raw: str


class ToolCallView(BaseModel):
    """A call of a tool. `arguments` are JSON text, or the call as it was written if it could not be read; `result` is
    what the teacher was shown; `error` is one of `classroom_rl.rollout.tools.tool.ERRORS`."""

    name: str
    arguments: str
    result: str
    error: str | None
    seconds: float


class DraftView(BaseModel):
    """A message that the supervisor rejected and nobody heard, as (kind, text) parts, with its review."""

    parts: list[tuple[str, str]]
    tokens: int
    review: ReviewView
    tool_calls: list[ToolCallView] = Field(default_factory=list)


class TurnView(BaseModel):
    """One message, as (kind, text) parts. The model sampled `tokens` tokens, of which `trained` have mask 1 (None if no
    tokens of the conversation are stored). `score` is that of the pedagogical reward model, if an evaluation used
    one. `review`, `drafts`, `replaced` and `tool_calls` are as in `classroom_rl.rollout.tokens.Turn`."""

    role: str
    parts: list[tuple[str, str]]
    persona: str | None
    tokens: int
    trained: int | None
    ended: bool
    given: bool
    policy: str | None
    score: float | None = None
    review: ReviewView | None = None
    drafts: list[DraftView] = Field(default_factory=list)
    replaced: bool = False
    tool_calls: list[ToolCallView] = Field(default_factory=list)


class ConversationView(BaseModel):
    """Response of `GET /api/conversation`: a conversation without its tokens. `initial_solutions` are the student's
    solutions before the dialogue, if an evaluation had them written."""

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
    post_test: PostTest | None = None
    rewards: dict[str, float | None]
    reward: float | None
    rejected: bool
    failure: str | None
    overflow: str | None
    trained_tokens: int | None
    context_tokens: int | None
    meta: dict[str, Any]


class Tokens(BaseModel):
    """Response of `GET /api/tokens`: the teacher's context as (text, mask, log-prob) pieces after the `prompt`; `why`
    says why there are none."""

    prompt: str = ""
    pieces: list[tuple[str, int, float]] = Field(default_factory=list)
    trained: int = 0
    why: str = ""


class Group(BaseModel):
    """Response of `GET /api/group`: the first of the `total` conversations of a set on one problem, and the mean and
    standard deviation of all their rewards."""

    problem_id: str
    problem: str
    total: int
    mean: float | None
    std: float | None
    conversations: list[ConversationView]


class Comparison(BaseModel):
    """Response of `GET /api/compare`: the problems that two sets share, as columns, with their mean rewards in each.
    `mean_left` and `mean_right` are over the `rewarded` problems, which have a reward in both sets."""

    total: int
    rewarded: int
    offset: int
    mean_left: float | None
    mean_right: float | None
    samplings: list[str]
    columns: dict[str, list[Any]]


class Lessons(BaseModel):
    """Response of `GET /api/lessons`: the problems of a set, as columns."""

    total: int
    columns: dict[str, list[Any]]


class ChatMessage(BaseModel):
    """A message in the chat."""

    role: Literal["teacher", "student"]
    text: str = Field(max_length=100_000)


class ChatBody(BaseModel):
    """Body of `POST /api/chat` and `POST /api/chat/opening`: the lesson, the student's name, the messages so far."""

    problem: str = Field(min_length=1, max_length=200_000)
    student_name: str | None = Field(None, max_length=200)
    turns: list[ChatMessage] = Field(default_factory=list, max_length=1000)


class ChatOpening(BaseModel):
    """The beginning of a lesson: the teacher's system message, the opening template's messages, and who speaks next."""

    system: str
    turns: list[ChatMessage]
    next: Literal["teacher", "student"]


class ChatReply(BaseModel):
    """The teacher's message. `over` is true if it ends the conversation."""

    text: str
    parts: list[tuple[str, str]]
    tokens: int
    ended: bool
    over: bool
    policy: str


class GameBody(BaseModel):
    """Body of `POST /api/game`: the game, such as `island 17, seat 3` with the model's seat; the person's seat; the
    messages of both so far, in the order of play; and what the person does now, if it is the person's turn."""

    problem: str = Field(min_length=1, max_length=200)
    seat: int = Field(ge=1, le=9)
    said: list[Annotated[str, Field(max_length=100_000)]] = Field(default_factory=list, max_length=20_000)
    action: str = Field("", max_length=2_000)


class GameMoment(BaseModel):
    """Response of `POST /api/game`. `said` are the new messages, the person's and the model's; `fault` says why the
    person's action was not done, which costs no turn. `shown` is what the
    person's sailor sees, and the whole island once the game is over. `possible` are actions that the person can do,
    `due` whose decision is next, `role` and `rules` the person's."""

    said: list[str]
    fault: str
    shown: str
    possible: list[str]
    due: Literal["person", "model", "nobody"]
    role: str
    rules: str
    outcome: str
    policy: str


class CorrectionView(BaseModel):
    """A supervisor's correction, to be decided on. `before` are the messages before it, `message` is the one that it
    corrects, `review` what the supervisor says about that one, and `heard` the message that the student got, if it is
    another one. `decision` is the last decision about it."""

    where: str
    conversation: str
    step: int | None
    index: int
    turn: int
    draft: int
    student_name: str | None
    problem: str
    before: list[TurnView]
    message: list[tuple[str, str]]
    review: ReviewView
    heard: list[tuple[str, str]] | None
    replaced: bool
    decision: CorrectionDecision | None


class Desk(BaseModel):
    """Response of `GET /api/corrections`: one page of the supervisor's corrections, latest step first. `matching` of
    `total` corrections pass the filters, and `undecided` of `total` wait for a decision. `categories` counts all of
    them. `precision` is by all decisions of the run, `overall` over all categories."""

    total: int
    undecided: int
    matching: int
    offset: int
    categories: dict[str, int]
    precision: list[CategoryPrecision]
    overall: CategoryPrecision
    corrections: list[CorrectionView]


class DecisionBody(StrictModel):
    """Body of `POST /api/corrections/decision`: which correction, and what a person decides about it, as in
    `CorrectionDecision`."""

    conversation: str = Field(min_length=1, max_length=300)
    turn: int = Field(ge=0)
    draft: int = Field(ge=-1)
    decision: Literal["accept", "edit", "reject"]
    text: str = Field("", max_length=LONGEST_TEXT)
    message_was_fine: bool = False
    correction: str | None = Field(None, max_length=LONGEST_TEXT)

    @model_validator(mode="after")
    def _parts_agree(self) -> "DecisionBody":
        refuse_contradictions(self.decision, self.text, self.message_was_fine)
        return self


class Decided(BaseModel):
    """Response of `POST /api/corrections/decision`: what was written, and the figures of all decisions."""

    decision: CorrectionDecision
    undecided: int
    precision: list[CategoryPrecision]
    overall: CategoryPrecision
