"""Reads a run folder's conversations for the page: lists, single conversations, groups, and comparisons of sets."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic_core import from_json

from classroom_rl.errors import UnknownConversation
from classroom_rl.results.rollout_files import plain_record
from classroom_rl.rollout.trajectory import TOKEN_FIELDS
from classroom_rl.viewer.journal_tail import JournalTails
from classroom_rl.viewer.list_index import (
    LARGEST_PAGE,
    NOW,
    ConversationRow,
    ConversationSets,
    ListIndex,
    ListQuery,
    find_conversation_sets,
    ordered,
)
from classroom_rl.viewer.schemas import Comparison, ConversationView, Group, Lessons, Page, Tokens
from classroom_rl.viewer.turn_views import RunTokenizer, UnknownTokenIds, pieces_of, turn_view

LARGEST_GROUP = 16
_LISTED = (
    "id step index problem_id title student_name messages personas rewards reward rejected judge_failed failed "
    "sampling state categories without_review"
).split()
_MOST_BARS = 20
_LEFT_OUT = TOKEN_FIELDS - {"mask"}


class RunReader:
    """Reads a run folder while programs write to it."""

    def __init__(self, run_folder: Path):
        self.folder = run_folder
        self.index = ListIndex()
        self.tails = JournalTails(run_folder)
        self._tokenizer = RunTokenizer(run_folder)

    def sets(self) -> ConversationSets:
        return find_conversation_sets(self.folder)

    def playing(self) -> list[ConversationRow]:
        """The conversations that are not in a file yet, finished ones included."""
        sets = self.sets()
        newest = sets.steps.get(sets.latest_step, []) if sets.latest_step is not None else []
        written = self.index.ids(newest)
        return [tail.row(each) for tail, each in self.tails.conversations(sets.settled_until(), written)]

    def rows(self, where: str) -> list[ConversationRow]:
        """All rows of a set; raises the errors of `ConversationSets.files`."""
        return self.playing() if where == NOW else self.index.rows(self.sets().files(where))

    def page(self, query: ListQuery) -> Page:
        """One page of a list."""
        rows = self.rows(query.where)
        wanted = [row for row in rows if query.keeps(row) and self._is_about(row, query.problem)]
        shown = ordered(wanted, query.sort)[query.offset : query.offset + query.limit]
        rewards = [row.reward for row in wanted if row.reward is not None]
        edges = _bin_edges([row.reward for row in rows if row.reward is not None])
        return Page(
            where=query.where,
            total=len(rows),
            matching=len(wanted),
            offset=query.offset,
            mean=fmean(rewards) if rewards else None,
            histogram=np.histogram(rewards, edges)[0].tolist(),
            edges=edges,
            personas=sorted({persona for row in rows for persona in row.personas}),
            samplings=_samplings(rows),
            categories=sorted({category for row in rows for category in row.categories}),
            reviewed=any(row.reviewed for row in rows),
            columns={name: [getattr(row, name) for row in shown] for name in _LISTED},
        )

    def conversation(self, where: str, conversation_id: str) -> ConversationView:
        """One conversation, without its tokens.

        Raises:
            UnknownConversation: if the set has no conversation with this id.
        """
        row = self._row(where, conversation_id)
        return _view(where, row, next(self.records([row])))

    def tokens(self, where: str, conversation_id: str) -> Tokens:
        """The teacher's context of a conversation as text; raises the errors of `conversation`."""
        record = next(self.records([self._row(where, conversation_id)], tokens=True))
        trained = sum(record["mask"])
        if not record["completion_ids"]:
            return Tokens(why="No tokens are kept of this conversation.")
        decode = self._tokenizer.decoder()
        if decode is None:
            return Tokens(trained=trained, why=self._tokenizer.why)
        try:
            prompt = decode(record["prompt_ids"])
            parts = pieces_of(decode, record["completion_ids"], record["mask"])
        except UnknownTokenIds as error:
            return Tokens(trained=trained, why=str(error))
        pieces, start = [], 0
        for text, mask, count in parts:
            pieces.append((text, mask, sum(record["logprobs"][start : start + count])))
            start += count
        return Tokens(prompt=prompt, pieces=pieces, trained=trained)

    def group(self, where: str, problem_id: str, sampling: str = "", limit: int = LARGEST_GROUP) -> Group:
        """The conversations of a set on one problem, in the order of the set.

        Raises:
            UnknownConversation: if the set has no conversation on the problem.
        """
        rows = [row for row in self.rows(where) if row.problem_id == problem_id and sampling in ("", row.sampling)]
        if not rows:
            raise UnknownConversation(f"{where} has no conversation on the problem {problem_id!r}.")
        shown = rows[: min(limit, LARGEST_GROUP)]
        views = [_view(where, row, record) for row, record in zip(shown, self.records(shown), strict=True)]
        rewards = [row.reward for row in rows if row.reward is not None]
        return Group(
            problem_id=problem_id,
            problem=views[0].problem,
            total=len(rows),
            mean=fmean(rewards) if rewards else None,
            std=pstdev(rewards) if rewards else None,
            conversations=views,
        )

    def compare(self, left: str, right: str, sampling: str, sort: str, offset: int, limit: int) -> Comparison:
        """The problems that are in both sets, with their mean rewards."""
        sides = [self.rows(left), self.rows(right)]
        means = [_means(row for row in rows if sampling in ("", row.sampling)) for rows in sides]
        titles = {row.problem_id: row.title for row in sides[1]}
        common = [problem for problem in means[0] if problem in means[1]]
        entries = [(problem, titles[problem], means[0][problem], means[1][problem]) for problem in common]
        both = [entry for entry in entries if None not in entry[2:]]
        if sort in ("risen", "fallen"):
            entries.sort(key=lambda entry: _risen(entry[2], entry[3]), reverse=sort == "risen")
        shown = entries[offset : offset + min(limit, LARGEST_PAGE)]
        columns = list(zip(*shown, strict=True)) or [(), (), (), ()]
        return Comparison(
            total=len(entries),
            offset=offset,
            rewarded=len(both),
            mean_left=_mean(entry[2] for entry in both),
            mean_right=_mean(entry[3] for entry in both),
            samplings=[name for name in _samplings(sides[0]) if name in _samplings(sides[1])],
            columns=dict(zip(("problem_id", "title", "left", "right"), map(list, columns), strict=True)),
        )

    def lessons(self, where: str, text: str, limit: int) -> Lessons:
        """The problems of a set whose text contains `text`, in order of appearance."""
        rows = [row for row in self.rows(where) if row.problem_id and self._is_about(row, text)]
        titles = {row.problem_id: row.title for row in rows}
        shown = list(titles.items())[: min(limit, LARGEST_PAGE)]
        columns = {"problem_id": [problem for problem, _ in shown], "title": [title for _, title in shown]}
        return Lessons(total=len(titles), columns=columns)

    def problem(self, where: str, problem_id: str) -> str:
        """The text of a problem of a set; raises the errors of `group`."""
        row = next((row for row in self.rows(where) if row.problem_id == problem_id), None)
        text = self.index.problem(problem_id) if row is not None else None
        return text if text is not None else self.group(where, problem_id, limit=1).problem

    def _is_about(self, row: ConversationRow, wanted: str) -> bool:
        if not wanted or wanted == row.problem_id:
            return True
        return wanted.casefold() in (self.index.problem(row.problem_id) or row.title).casefold()

    def _row(self, where: str, conversation_id: str) -> ConversationRow:
        found = next((row for row in self.rows(where) if row.id == conversation_id), None)
        if found is None:
            raise UnknownConversation(f"{where} has no conversation {conversation_id!r}.")
        return found

    def records(self, rows: Sequence[ConversationRow], tokens: bool = False) -> Iterable[dict[str, Any]]:
        """The records of the rows as plain data, with masks, and with the other token columns if `tokens` is set."""
        for file, together in groupby(rows, key=lambda row: row.file):
            some = list(together)
            if file is None:
                playing = {each.id: (tail, each) for tail, each in self.tails.conversations(0.0, ())}
                for tail, each in (playing[row.id] for row in some):
                    yield tail.record(each)
            else:
                yield from _read_records(file, [row.position for row in some], tokens)


def _read_records(path: Path, positions: Sequence[int], tokens: bool) -> Iterable[dict[str, Any]]:
    """The records at these positions of a file. Only the row groups that hold them are read."""
    with pq.ParquetFile(path) as file:
        left_out = frozenset() if tokens else _LEFT_OUT
        columns = [name for name in file.schema_arrow.names if name not in left_out]
        first, tables = 0, {}
        for number in range(file.num_row_groups):
            count = file.metadata.row_group(number).num_rows
            wanted = [position for position in positions if first <= position < first + count]
            if wanted:
                table = file.read_row_group(number, columns=columns)
                tables |= {position: table.slice(position - first, 1) for position in wanted}
            first += count
    for position in positions:
        record = tables[position].to_pylist()[0]
        initial = record.get("initial_solutions")
        yield plain_record(record) | ({} if initial is None else {"initial_solutions": from_json(initial)})


def _view(where: str, row: ConversationRow, record: dict[str, Any]) -> ConversationView:
    mask, scores = record["mask"], iter(record.get("message_scores") or ())
    scored = [
        next(scores, None) if turn["role"] == "teacher" and not turn.get("given") else None for turn in record["turns"]
    ]
    return ConversationView(
        where=where,
        turns=[turn_view(turn, mask, score) for turn, score in zip(record["turns"], scored, strict=True)],
        initial_solutions=record.get("initial_solutions", []),
        trained_tokens=sum(mask) if mask else None,
        context_tokens=len(mask) or None,
        sampling=row.sampling,
        failure=record.get("failure"),
        overflow=record.get("overflow"),
        **{name: record[name] for name in _SHOWN},
    )


_SHOWN = (
    "id step index problem_id problem answer type student_name state verdicts solutions post_test rewards reward "
    "rejected meta"
).split()


def _bin_edges(rewards: Sequence[float]) -> list[float]:
    """The edges of equal bins that hold all rewards: 20 from 0 to 1, or as many of a round width as rewards below 0
    or above 1 need, with an edge at 0."""
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    least = (high - low) / _MOST_BARS
    power = 10 ** math.floor(math.log10(least))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [float(f"{place * width:.12g}") for place in range(first, last + 1)]


def _samplings(rows: Iterable[ConversationRow]) -> list[str]:
    return list(dict.fromkeys(row.sampling for row in rows if row.sampling is not None))


def _means(rows: Iterable[ConversationRow]) -> dict[str, float | None]:
    """Problem id → its mean reward, None without rewards; problems are in order of appearance."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        rewards[row.problem_id] += [] if row.reward is None else [row.reward]
    return {problem: _mean(found) for problem, found in rewards.items() if problem}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _risen(left: float | None, right: float | None) -> float:
    return 0.0 if left is None or right is None else right - left
