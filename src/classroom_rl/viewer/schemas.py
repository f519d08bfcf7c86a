"""Request and response models of the viewer's routes."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.judges.post_test.records import PostTest
from classroom_rl.judges.verdicts import Verdict
from classroom_rl.results.corrections import ITSELF, CategoryPrecision, CorrectionDecision, Decision
from classroom_rl.rollout.requests import StrictModel
from classroom_rl.rollout.reviews import Review


class ChatAvailability(BaseModel):
    """Whether the page can chat with the current tutor, and if not, why."""

    on: bool
    why: str = ""


class RunInfo(BaseModel):
    """Response of `GET /api/run`: the content of the run folder.

    Attributes:
        live: whether this server plays conversations itself.
        supervised: whether the run has a supervisor.
        game: whether the run plays games instead of lessons.
        facts: the settings that the page shows, as (label, value).
        criteria: the highest score of each of the judge's criteria, by name.
    """

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
    with the data they stand for.

    Attributes:
        shelf: the stamp of the sets of conversations.
        metrics, journal: the stamps of the metrics and of the journal.
        playing, played: the number of unfinished and of finished conversations that are not in a file yet.
        spent_usd: the cost of all roles behind an API so far, in US dollars.
    """

    shelf: str
    metrics: str
    journal: str
    latest_step: int | None
    policy: str | None
    playing: int
    played: int
    spent_usd: float | None = None


class EvalMark(BaseModel):
    """The held-out reward of one evaluation with one kind of sampling: mean and 95 % interval; `step` only of an
    evaluation during the training."""

    name: str
    sampling: str
    mean: float
    low: float | None
    high: float | None
    step: int | None = None


class Metrics(BaseModel):
    """Response of `GET /api/metrics`: one column per metric over the steps, thinned to what a chart can show; null
    where a step lacks the metric. `last` holds the last number of each metric, `collapse` the signs of a collapse in
    the last evaluation during the training, `time_shares` the share of each phase in the time of the last steps, and
    `time_advice` a line about what would shorten them."""

    steps: list[int]
    series: dict[str, list[float | None]]
    last: dict[str, Any]
    marks: list[EvalMark]
    collapse: list[str] = Field(default_factory=list)
    max_steps: int | None
    time_shares: dict[str, float]
    time_advice: str | None


class Guards(BaseModel):
    """Response of `GET /api/guards`.

    Attributes:
        verdict, reasons, steps: whether the tutor learned, why, and in how many steps; verdict is None until the
            training has ended.
        checks: the number of checks of the judge that gave a score.
        failed: the number of checks that gave none.
        warnings: the warnings of the checks as (step, text), latest first.
    """

    verdict: str | None = None
    reasons: list[str] = Field(default_factory=list)
    steps: int | None = None
    checks: int = 0
    failed: int = 0
    warnings: list[tuple[int, str]] = Field(default_factory=list)


class Page(BaseModel):
    """Response of `GET /api/conversations`: one page of a list, as columns of equal length.

    Attributes:
        total, matching: the number of rows in the set, and of those that pass the filters.
        mean: the mean reward of the matching rows.
        histogram: counts of the matching rewards in equal bins between `edges`.
        edges: the edges of the bins; they enclose 0, 1 and all rewards of the set.
        personas, samplings, categories: the values in the whole set; the categories are those of invalid messages.
        reviewed: whether a supervisor reviewed any message of the set.
    """

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


@dataclass(frozen=True)
class ReviewView(Review):
    """A supervisor's review of a message. `refused_text` is the text of a correction that was not accepted, if the
    supervisor's answer contains one."""

    refused_text: str | None = None


class ToolCallView(BaseModel):
    """A tool call. `arguments` is JSON text, or the call as the model wrote it if it could not be parsed. `result` is
    the text that the teacher was given; `error` is one of `classroom_rl.rollout.tools.tool.ERRORS`."""

    name: str
    arguments: str
    result: str
    error: str | None
    seconds: float


class DraftView(BaseModel):
    """A message that the supervisor rejected and the student never saw, as (kind, text) parts, with its review."""

    parts: list[tuple[str, str]]
    tokens: int
    review: ReviewView
    tool_calls: list[ToolCallView] = Field(default_factory=list)


class TurnView(BaseModel):
    """One message, as (kind, text) parts. The model sampled `tokens` tokens, of which `trained` have mask 1 (None if no
    tokens of the conversation are stored). `score` is the pedagogical reward model's, if an evaluation used one.
    `review`, `drafts`, `replaced` and `tool_calls` are as in `classroom_rl.rollout.tokens.Turn`."""

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
    solutions before the dialogue, if an evaluation asked for them."""

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
    """Response of `GET /api/tokens`: the teacher's context after the `prompt`, as (text, mask, log-prob) pieces, with
    log-probs in nats. `trained` counts the tokens with mask 1. `why` says why there are no pieces."""

    prompt: str = ""
    pieces: list[tuple[str, int, float]] = Field(default_factory=list)
    trained: int = 0
    why: str = ""


class Group(BaseModel):
    """Response of `GET /api/group`: the first few of the `total` conversations of a set on one problem, and the mean
    and standard deviation of the rewards of all of them."""

    problem_id: str
    problem: str
    total: int
    mean: float | None
    std: float | None
    conversations: list[ConversationView]


class Comparison(BaseModel):
    """Response of `GET /api/compare`: the problems that two sets share, as columns, with their mean reward in each set.
    `mean_left` and `mean_right` are means over the `rewarded` problems, which have a reward in both sets."""

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


class CorrectionView(BaseModel):
    """A supervisor's correction for a person to decide on.

    Attributes:
        before: the messages before the corrected one.
        message: the message or draft that is corrected.
        review: the supervisor's review of it.
        heard: the message that the student received, if it is not `message` itself.
        decision: the last decision about the correction.
    """

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
    `total` corrections pass the filters, and `undecided` of `total` wait for a decision. `categories` counts all
    corrections by category. `precision` (per category) and `overall` are computed from all decisions of the run."""

    total: int
    undecided: int
    matching: int
    offset: int
    categories: dict[str, int]
    precision: list[CategoryPrecision]
    overall: CategoryPrecision
    corrections: list[CorrectionView]


class DecisionBody(Decision, StrictModel):
    """Body of `POST /api/corrections/decision`."""

    conversation: str = Field(min_length=1, max_length=300)
    draft: int = Field(ge=ITSELF)


class Decided(BaseModel):
    """Response of `POST /api/corrections/decision`: the recorded decision, and the figures of all decisions."""

    decision: CorrectionDecision
    undecided: int
    precision: list[CategoryPrecision]
    overall: CategoryPrecision
