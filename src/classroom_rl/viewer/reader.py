"""Reads the conversations of a run folder for the page: lists, single ones, groups, and comparisons of sets."""

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
from classroom_rl.viewer.turn_views import RunTokenizer, UnknownTokenIds, pieces_of, turn_view, turns_of

LARGEST_GROUP = 16
_LIST_COLUMNS = (
    "id step index problem_id title student_name messages personas rewards reward rejected judge_failed failed "
    "sampling state categories without_review"
).split()
_MAX_BINS = 20
_OMITTED_COLUMNS = TOKEN_FIELDS - {"mask"}


class RunReader:
    """Reads a run folder while programs write to it."""

    def __init__(self, run_folder: Path):
        self.folder = run_folder
        self.index = ListIndex()
        self.tails = JournalTails(run_folder)
        self._tokenizer = RunTokenizer(run_folder)

    def sets(self) -> ConversationSets:
        """Return the sets of conversations that the folder holds now."""
        return find_conversation_sets(self.folder)

    def playing(self) -> list[ConversationRow]:
        """Return the rows of the conversations that are not in a file yet, finished ones included."""
        sets = self.sets()
        newest = sets.steps.get(sets.latest_step, []) if sets.latest_step is not None else []
        written = self.index.ids(newest)
        return [
            tail.row(conversation) for tail, conversation in self.tails.conversations(sets.settled_until(), written)
        ]

    def rows(self, where: str) -> list[ConversationRow]:
        """Return all rows of a set. Raises the errors of `ConversationSets.files`."""
        return self.playing() if where == NOW else self.index.rows(self.sets().files(where))

    def page(self, query: ListQuery) -> Page:
        """Return one page of a list."""
        rows = self.rows(query.where)
        matching = [row for row in rows if query.keeps(row) and self._matches_problem(row, query.problem)]
        page = ordered(matching, query.sort)[query.offset : query.offset + query.limit]
        rewards = [row.reward for row in matching if row.reward is not None]
        edges = _bin_edges([row.reward for row in rows if row.reward is not None])
        return Page(
            where=query.where,
            total=len(rows),
            matching=len(matching),
            offset=query.offset,
            mean=fmean(rewards) if rewards else None,
            histogram=np.histogram(rewards, edges)[0].tolist(),
            edges=edges,
            personas=sorted({persona for row in rows for persona in row.personas}),
            samplings=_samplings(rows),
            categories=sorted({category for row in rows for category in row.categories}),
            reviewed=any(row.reviewed for row in rows),
            columns={name: [getattr(row, name) for row in page] for name in _LIST_COLUMNS},
        )

    def conversation(self, where: str, conversation_id: str) -> ConversationView:
        """Return one conversation, without its tokens.

        Raises:
            UnknownConversation: if the set has no conversation with this id.
        """
        row = self._row(where, conversation_id)
        return _view(where, row, next(self.records([row])))

    def tokens(self, where: str, conversation_id: str) -> Tokens:
        """Return the teacher's context of a conversation as text. Raises the errors of `conversation`."""
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
        pieces, start = [], 0  # a piece of several tokens has the sum of their log-probs
        for text, mask, count in parts:
            pieces.append((text, mask, sum(record["logprobs"][start : start + count])))
            start += count
        return Tokens(prompt=prompt, pieces=pieces, trained=trained)

    def group(self, where: str, problem_id: str, sampling: str = "", limit: int = LARGEST_GROUP) -> Group:
        """Return the conversations of a set on one problem, in the order of the set.

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
        """Return the problems that are in both sets, with their mean rewards."""
        sides = [self.rows(left), self.rows(right)]
        means = [_mean_rewards(row for row in rows if sampling in ("", row.sampling)) for rows in sides]
        titles = {row.problem_id: row.title for row in sides[1]}
        common = [problem for problem in means[0] if problem in means[1]]
        entries = [(problem, titles[problem], means[0][problem], means[1][problem]) for problem in common]
        rewarded = [entry for entry in entries if None not in entry[2:]]
        if sort in ("risen", "fallen"):
            entries.sort(key=lambda entry: _increase(entry[2], entry[3]), reverse=sort == "risen")
        shown = entries[offset : offset + min(limit, LARGEST_PAGE)]
        columns = list(zip(*shown, strict=True)) or [(), (), (), ()]
        return Comparison(
            total=len(entries),
            offset=offset,
            rewarded=len(rewarded),
            mean_left=_mean(entry[2] for entry in rewarded),
            mean_right=_mean(entry[3] for entry in rewarded),
            samplings=[name for name in _samplings(sides[0]) if name in _samplings(sides[1])],
            columns=dict(zip(("problem_id", "title", "left", "right"), map(list, columns), strict=True)),
        )

    def lessons(self, where: str, text: str, limit: int) -> Lessons:
        """Return the problems of a set whose text contains `text`, in order of appearance."""
        rows = [row for row in self.rows(where) if row.problem_id and self._matches_problem(row, text)]
        titles = {row.problem_id: row.title for row in rows}
        shown = list(titles.items())[: min(limit, LARGEST_PAGE)]
        columns = {"problem_id": [problem for problem, _ in shown], "title": [title for _, title in shown]}
        return Lessons(total=len(titles), columns=columns)

    def problem(self, where: str, problem_id: str) -> str:
        """Return the text of a problem of a set. Raises the errors of `group`."""
        row = next((row for row in self.rows(where) if row.problem_id == problem_id), None)
        text = self.index.problem(problem_id) if row is not None else None
        return text if text is not None else self.group(where, problem_id, limit=1).problem

    def _matches_problem(self, row: ConversationRow, problem: str) -> bool:
        if not problem or problem == row.problem_id:
            return True
        return problem.casefold() in (self.index.problem(row.problem_id) or row.title).casefold()

    def _row(self, where: str, conversation_id: str) -> ConversationRow:
        row = next((row for row in self.rows(where) if row.id == conversation_id), None)
        if row is None:
            raise UnknownConversation(f"{where} has no conversation {conversation_id!r}.")
        return row

    def records(self, rows: Sequence[ConversationRow], tokens: bool = False) -> Iterable[dict[str, Any]]:
        """Yield the records of the rows as plain data, with masks, and with the other token columns if `tokens`."""
        for file, group in groupby(rows, key=lambda row: row.file):
            rows_of_file = list(group)
            if file is None:
                playing = {
                    conversation.id: (tail, conversation) for tail, conversation in self.tails.conversations(0.0, ())
                }
                for tail, conversation in (playing[row.id] for row in rows_of_file):
                    yield tail.record(conversation)
            else:
                yield from _read_records(file, [row.position for row in rows_of_file], tokens)


def _read_records(path: Path, positions: Sequence[int], tokens: bool) -> Iterable[dict[str, Any]]:
    """Yield the records at these positions of a file. Only the row groups that hold them are read."""
    with pq.ParquetFile(path) as file:
        omitted = frozenset() if tokens else _OMITTED_COLUMNS
        columns = [name for name in file.schema_arrow.names if name not in omitted]
        first, tables = 0, {}
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            positions_in_group = [position for position in positions if first <= position < first + count]
            if positions_in_group:
                table = file.read_row_group(group, columns=columns)
                tables |= {position: table.slice(position - first, 1) for position in positions_in_group}
            first += count
    for position in positions:
        record = tables[position].to_pylist()[0]
        initial = record.get("initial_solutions")
        yield plain_record(record) | ({} if initial is None else {"initial_solutions": from_json(initial)})


def _view(where: str, row: ConversationRow, record: dict[str, Any]) -> ConversationView:
    turns, mask, scores = turns_of(record), record["mask"], iter(record.get("message_scores") or ())
    # the scores are stored without positions: one for each message that the teacher sampled
    message_scores = [next(scores, None) if turn.role == "teacher" and not turn.given else None for turn in turns]
    return ConversationView(
        where=where,
        turns=[turn_view(turn, mask, score) for turn, score in zip(turns, message_scores, strict=True)],
        initial_solutions=record.get("initial_solutions", []),
        trained_tokens=sum(mask) if mask else None,
        context_tokens=len(mask) or None,
        sampling=row.sampling,
        failure=record.get("failure"),
        overflow=record.get("overflow"),
        **{name: record[name] for name in _VIEW_FIELDS},
    )


_VIEW_FIELDS = (
    "id step index problem_id problem answer type student_name state verdicts solutions post_test rewards reward "
    "rejected meta"
).split()


def _bin_edges(rewards: Sequence[float]) -> list[float]:
    """Return the edges of equal bins that hold all rewards: 20 bins from 0 to 1. Rewards below 0 or above 1 widen the
    range: the bins then have a round width (1, 2 or 5 × 10ⁿ) and one edge is 0."""
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    min_width = (high - low) / _MAX_BINS
    power = 10 ** math.floor(math.log10(min_width))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= min_width * (1 - 1e-9))
    # with tolerances, so that a rounding error in the division does not add a bin
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [float(f"{index * width:.12g}") for index in range(first, last + 1)]


def _samplings(rows: Iterable[ConversationRow]) -> list[str]:
    return list(dict.fromkeys(row.sampling for row in rows if row.sampling is not None))


def _mean_rewards(rows: Iterable[ConversationRow]) -> dict[str, float | None]:
    """Return problem id → mean reward, None without rewards. Problems are in order of appearance."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        rewards[row.problem_id] += [] if row.reward is None else [row.reward]
    return {problem: _mean(values) for problem, values in rewards.items() if problem}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _increase(left: float | None, right: float | None) -> float:
    return 0.0 if left is None or right is None else right - left
