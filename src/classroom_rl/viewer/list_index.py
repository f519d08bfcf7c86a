"""Lists of conversations for the page: the sets of conversations in a run folder, their rows, filters and order. Each
file is read once, without its tokens.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from classroom_rl.errors import UnknownConversation
from classroom_rl.results.corrections import ITSELF
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME
from classroom_rl.results.rollout_files import plain_record

TRAINING, NOW, EVALUATION = "training", "now", "evaluation"
_ROLLOUT = re.compile(r"step_(\d+)-(\d+)(?:-(\d+))?\.parquet")


@dataclass(frozen=True)
class ConversationSets:
    """The files of a run folder that hold conversations.

    Attributes:
        steps: step → its files, in order of rank; each rank's main file comes before those of further problems.
        evaluations: name ("before", "after", …) → its file.
    """

    steps: dict[int, list[Path]]
    evaluations: dict[str, Path]

    def files(self, where: str) -> list[Path]:
        """Return the files of a set: `step-12`, `training` (every step), or `eval-before`.

        Raises:
            UnknownConversation: if there is no such set.
        """
        if where == TRAINING:
            return [path for step in sorted(self.steps) for path in self.steps[step]]
        kind, _, name = where.partition("-")
        if kind == "step" and name.isdecimal() and int(name) in self.steps:
            return self.steps[int(name)]
        if kind == "eval" and name in self.evaluations:
            return [self.evaluations[name]]
        available = [f"step-{step}" for step in sorted(self.steps)][-3:] + [f"eval-{name}" for name in self.evaluations]
        raise UnknownConversation(f"This run folder has no set of conversations {where!r}. There are: {available}.")

    @property
    def latest_step(self) -> int | None:
        """The last step that has a file; None without one."""
        return max(self.steps, default=None)

    def settled_until(self) -> float:
        """Return when the last file was written, in seconds since 1970. Files of the latest step do not count, because
        some of its ranks may still be playing."""
        earlier = [path for step, files in self.steps.items() if step != self.latest_step for path in files]
        return max((path.stat().st_mtime for path in [*earlier, *self.evaluations.values()]), default=0.0)


def find_conversation_sets(run_folder: Path) -> ConversationSets:
    """Find the sets of conversations that the folder holds now, without reading a file."""
    steps: dict[int, list[tuple[int, int, Path]]] = defaultdict(list)
    for path in (run_folder / "rollouts").glob("step_*.parquet"):
        if match := _ROLLOUT.fullmatch(path.name):
            steps[int(match[1])].append((int(match[2]), int(match[3] or 0), path))
    evaluations = {path.parent.name: path for path in sorted((run_folder / "eval").glob(f"*/{CONVERSATIONS_NAME}"))}
    # "before" and "after" come first, in this order; the others follow in alphabetical order
    evaluations = {name: evaluations.pop(name) for name in ("before", "after") if name in evaluations} | evaluations
    if (run_folder / CONVERSATIONS_NAME).is_file():
        evaluations[EVALUATION] = run_folder / CONVERSATIONS_NAME
    return ConversationSets(
        {step: [path for *_, path in sorted(files)] for step, files in sorted(steps.items())}, evaluations
    )


_COLUMNS = (
    "id step index problem_id problem type student_name state turns verdicts rewards reward rejected failure".split()
)
_PLAYED_BY = ("tutor", "sampling")
LONGEST_TITLE = 110


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One conversation in a list.

    Attributes:
        personas: the number of student turns of each persona.
        judge_failed: whether a judge attempt gave no verdict.
        failed: whether an error ended the conversation.
        sampling: "sampled" or "greedy" in an evaluation, after the tutor's name if several were compared; else None.
        reviewed: whether a supervisor reviewed one of its messages.
        without_review: the number of messages and drafts that a supervisor gave no verdict on.
        categories: the number of invalid messages and drafts of each category.
        corrections: (message, draft, category) of each correction, as in `classroom_rl.results.corrections.Place`.
        file, position: its file and its row there; None for a conversation that is only in the journal.
    """

    id: str
    step: int | None
    index: int
    problem_id: str
    title: str
    type: str
    student_name: str | None
    state: str
    messages: int
    personas: dict[str, int]
    rewards: dict[str, float | None]
    reward: float | None
    rejected: bool
    judge_failed: bool
    failed: bool = False
    sampling: str | None = None
    reviewed: bool = False
    without_review: int = 0
    categories: Mapping[str, int] = field(default_factory=dict)
    corrections: tuple[tuple[int, int, str], ...] = ()
    file: Path | None = None
    position: int | None = None


def title_of(problem: str) -> str:
    """Return a problem as one line: its first lines, cut at `LONGEST_TITLE` characters."""
    line = " · ".join(part.strip() for part in problem[: 4 * LONGEST_TITLE].splitlines() if part.strip())
    return line if len(line) <= LONGEST_TITLE else f"{line[: LONGEST_TITLE - 1]}…"


def reviews_of(turn: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the reviews of a message as plain data, each with the position of its draft, or `ITSELF`. A message with
    which the supervisor replaced a draft has no review of its own."""
    drafts = turn.get("drafts") or ()
    for position, draft in enumerate(drafts):
        yield position, draft["review"]
    if turn.get("review") is not None and not (turn.get("replaced") and drafts):
        yield ITSELF, turn["review"]


def row_of(record: dict[str, Any], **more: Any) -> ConversationRow:
    """Make a row from a record, given as plain data whose nested columns are parsed."""
    turns = record["turns"]
    personas = Counter(turn["persona"] for turn in turns if turn["persona"] is not None)
    reviews = [(index, draft, review) for index, turn in enumerate(turns) for draft, review in reviews_of(turn)]
    invalid = [(turn, draft, review) for turn, draft, review in reviews if review.get("valid") is False]
    return ConversationRow(
        title=title_of(record["problem"]),
        messages=len(turns),
        personas=dict(personas),
        judge_failed=any(
            verdict["scores"] is None and verdict["accepted"] is None and not verdict.get("anchor")
            for verdict in record["verdicts"]
        ),
        failed=record.get("failure") is not None,
        reviewed=bool(reviews),
        without_review=sum(review.get("valid") is None for _, _, review in reviews),
        categories=dict(Counter(review.get("category", "") for _, _, review in invalid)),
        corrections=tuple(
            (turn, draft, review.get("category", ""))
            for turn, draft, review in invalid
            if review.get("correction") is not None
        ),
        **{name: record[name] for name in _COPIED_FIELDS},
        **more,
    )


_COPIED_FIELDS = "id step index problem_id type student_name state rewards reward rejected".split()


class ListIndex:
    """Caches the rows and problems of Parquet files. A file is read again only when it has changed."""

    def __init__(self) -> None:
        self._rows: dict[Path, tuple[tuple[int, int], list[ConversationRow]]] = {}
        self._problems: dict[str, str] = {}
        self._cached_ids: tuple[object, frozenset[str]] = (None, frozenset())
        self._lock = Lock()

    def rows(self, files: Sequence[Path]) -> list[ConversationRow]:
        """Return all rows of these files, in order."""
        return [row for path in files for row in self._rows_of(path)]

    def ids(self, files: Sequence[Path]) -> frozenset[str]:
        """Return the ids of the conversations in these files. Only the last result is cached. The page keeps asking for
        the newest step; caching the rows of every step instead would fill the memory."""
        stamp = [(path, *_stamp(path)) for path in files]
        with self._lock:
            if self._cached_ids[0] != stamp:
                ids_by_file = (pq.read_table(path, columns=["id"])["id"].to_pylist() for path in files)
                self._cached_ids = stamp, frozenset(conversation_id for ids in ids_by_file for conversation_id in ids)
            return self._cached_ids[1]

    def problem(self, problem_id: str) -> str | None:
        """Return the text of a problem; None if no file that was read so far holds it."""
        return self._problems.get(problem_id)

    def _rows_of(self, path: Path) -> list[ConversationRow]:
        stamp = _stamp(path)
        with self._lock:
            if path not in self._rows or self._rows[path][0] != stamp:
                self._rows[path] = (stamp, self._read(path))
            return self._rows[path][1]

    def _read(self, path: Path) -> list[ConversationRow]:
        with pq.ParquetFile(path) as file:
            columns = [name for name in (*_COLUMNS, *_PLAYED_BY) if name in file.schema_arrow.names]
            rows: list[ConversationRow] = []
            for batch in file.iter_batches(columns=columns):
                for record in batch.to_pylist():
                    self._problems[record["problem_id"]] = record["problem"]
                    played_by = ", ".join(record[name] for name in _PLAYED_BY if record.get(name))
                    fields = {"sampling": played_by or None, "file": path, "position": len(rows)}
                    rows.append(row_of(plain_record(record), **fields))
        return rows


def _stamp(path: Path) -> tuple[int, int]:
    """Return a value that changes when the file is written again."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


LARGEST_PAGE = 200


class ListQuery(BaseModel):
    """The query of `GET /api/conversations`.

    Attributes:
        where: the set, as in `ConversationSets.files`, or `now`.
        low, high: inclusive bounds of the reward. With a bound, conversations without a reward are left out.
        problem: a part of the problem's text, or its id.
        persona: keeps the conversations in which this persona spoke.
        judge: "failed" keeps the conversations in which a judge attempt gave no verdict, "unrewarded" those without a
            reward, "rejected" those that the judge rejected.
        review: "invalid" keeps the conversations with a message or draft that the supervisor called invalid, "none"
            those with one on which it gave no verdict.
        category: keeps the conversations with an invalid message or draft of this category.
    """

    where: str
    low: float | None = None
    high: float | None = None
    problem: str = Field("", max_length=1000)
    persona: str = ""
    judge: Literal["", "failed", "unrewarded", "rejected"] = ""
    review: Literal["", "invalid", "none"] = ""
    category: str = Field("", max_length=200)
    sampling: str = ""
    sort: Literal["played", "best", "worst", "longest"] = "played"
    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=1, le=LARGEST_PAGE)

    def keeps(self, row: ConversationRow) -> bool:
        """Whether a row passes all filters except `problem`."""
        if self.low is not None and (row.reward is None or row.reward < self.low):
            return False
        if self.high is not None and (row.reward is None or row.reward > self.high):
            return False
        if self.persona and self.persona not in row.personas:
            return False
        if self.category and self.category not in row.categories:
            return False
        if (self.review == "invalid" and not row.categories) or (self.review == "none" and not row.without_review):
            return False
        if self.sampling and row.sampling != self.sampling:
            return False
        return {"": True, "failed": row.judge_failed, "unrewarded": row.reward is None, "rejected": row.rejected}[
            self.judge
        ]


def ordered(rows: Sequence[ConversationRow], sort: str) -> list[ConversationRow]:
    """Sort the rows. If they are sorted by reward, rows without a reward come last."""
    if sort == "longest":
        return sorted(rows, key=lambda row: -row.messages)
    if sort == "played":
        return list(rows)
    sign = -1 if sort == "best" else 1
    return sorted(rows, key=lambda row: (row.reward is None, sign * (row.reward or 0.0)))
