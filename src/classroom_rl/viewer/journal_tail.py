"""Reads the conversations that are not in a Parquet file yet from the end of the journal."""

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from classroom_rl.results.rollout_files import OPTIONAL
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.store.journal import HEAD_LENGTH, JOURNAL_NAME, head_of, request_of
from classroom_rl.rollout.store.journal_segments import JournalStream
from classroom_rl.rollout.tokens import replay_tokens
from classroom_rl.rollout.trajectory import TOKEN_FIELDS
from classroom_rl.viewer.list_index import ConversationRow, row_of

_LONGEST_TAIL = 64 * 1024**2
_CONVERSATION_EVENTS = frozenset(
    "turn cut_short verdict post_test solutions grades failure rewards conversation".split()
)
_PERSONA = re.compile(rb'"persona": "([^"]+)"')  # cannot match the text of a message, where quotes are escaped


@dataclass(frozen=True)
class StartedBatch:
    """A batch in the journal's tail. `kind` identifies its weights and the body of its request; a batch with the same
    id and another kind replaces the earlier one. `problem_of` maps a conversation's index to one in `problems`."""

    time: float
    step: int
    kind: tuple[str, str]
    problems: tuple[Problem, ...]
    problem_of: Sequence[int]

    def problem(self, index: int) -> Problem | None:
        """Return the problem of the conversation with this index; None if the journal does not name it."""
        return self.problems[self.problem_of[index]] if index < len(self.problem_of) else None


@dataclass
class JournalConversation:
    """A conversation in the journal's tail: the file positions of its events, and its row once it has ended."""

    id: str
    began: float
    positions: list[int] = field(default_factory=list)
    messages: int = 0
    personas: Counter[str] = field(default_factory=Counter)
    row: ConversationRow | None = None


class JournalTails:
    """The journals of all servers of a run. The first server writes to the run folder, the others to `server1`, …"""

    def __init__(self, run_folder: Path):
        self._folder = run_folder
        self._tails: dict[Path, JournalTail] = {}

    def conversations(self, since: float, written: Collection[str]) -> list[tuple["JournalTail", JournalConversation]]:
        """Return `JournalTail.conversations` of all journals, each conversation with its journal: the one in which it
        began last, if it was moved from a lost server to another."""
        for path in (self._folder / JOURNAL_NAME, *sorted(self._folder.glob(f"server*/{JOURNAL_NAME}"))):
            if path not in self._tails and path.is_file():
                self._tails[path] = JournalTail(path)
        latest: dict[str, tuple[JournalTail, JournalConversation]] = {}
        for tail in self._tails.values():
            for conversation in tail.conversations(since, written):
                if conversation.id not in latest or latest[conversation.id][1].began < conversation.began:
                    latest[conversation.id] = tail, conversation
        return list(latest.values())

    @property
    def policy(self) -> str | None:
        """The last weights that a server loaded, from the first journal whose tail says so."""
        return next((tail.policy for tail in self._tails.values() if tail.policy is not None), None)

    def stamp(self) -> str:
        """A string that changes with every message and verdict."""
        return " ".join(str(path.stat().st_size) for path in self._tails if path.is_file())


class JournalTail:
    """Follows one journal. Each call reads only what was appended since the last call; the first call reads at most the
    last 64 MiB."""

    def __init__(self, path: Path):
        self.path = path
        self._position: int | None = None
        self._batches: dict[str, StartedBatch] = {}
        self._policy: str | None = None
        self._conversations: dict[str, JournalConversation] = {}
        self._lock = Lock()

    def conversations(self, since: float, written: Collection[str]) -> list[JournalConversation]:
        """Return the conversations that began after `since` (seconds since 1970) and whose ids are not in `written`."""
        with self._lock:
            self._follow(since)
            self._conversations = {
                name: conversation for name, conversation in self._conversations.items() if conversation.began > since
            }
            self._batches = {request: batch for request, batch in self._batches.items() if batch.time > since}
            return [conversation for conversation in self._conversations.values() if conversation.id not in written]

    @property
    def policy(self) -> str | None:
        """The last weights that were loaded; None if the tail does not say."""
        return self._policy

    def row(self, conversation: JournalConversation) -> ConversationRow:
        """Return the conversation's row in a list; for an unfinished one, what is known so far."""
        if conversation.row is not None:
            return conversation.row
        row = row_of(self._begun(conversation))
        title = row.title if row.problem_id else "still playing"
        return replace(row, title=title, messages=conversation.messages, personas=dict(conversation.personas))

    def record(self, conversation: JournalConversation) -> dict[str, Any]:
        """Return the conversation's record as plain data, with tokens; for an unfinished one, what is known so far."""
        with JournalStream(self.path) as stream:
            events = [json.loads(line) for line in stream.lines_at(conversation.positions)]
        buffer = replay_tokens(events)
        tokens = {name: getattr(buffer, name) if buffer else [] for name in TOKEN_FIELDS}
        latest = {event["event"]: event for event in events}
        if "conversation" in latest:
            return OPTIONAL | latest["conversation"]["record"] | tokens
        played = {
            "turns": [event["turn"] for event in events if event["event"] == "turn"],
            "verdicts": [event["verdict"] for event in events if event["event"] == "verdict"],
            "solutions": [
                solution for event in events if event["event"] == "solutions" for solution in event["solutions"]
            ],
            "post_test": latest["post_test"]["post_test"] if "post_test" in latest else None,
            "failure": latest["failure"]["reason"] if "failure" in latest else None,
            "overflow": latest["cut_short"]["reason"] if "cut_short" in latest else None,
        }
        return self._begun(conversation) | played | tokens

    def _begun(self, conversation: JournalConversation) -> dict[str, Any]:
        """Return the record of a conversation in which nothing has been said yet, as plain data without tokens."""
        batch, index = self._batches.get(request_of(conversation.id)), int(conversation.id.rpartition("-")[2])
        problem = batch.problem(index) if batch else None
        return OPTIONAL | {
            "id": conversation.id,
            "step": batch.step if batch else None,
            "index": index,
            "problem_id": problem.id if problem else "",
            "problem": problem.text if problem else "",
            "answer": problem.answer if problem else "",
            "state": "PLAYING",
            "rewards": {},
            "reward": None,
            "meta": {},
        }

    def _follow(self, since: float) -> None:
        try:
            stream = JournalStream(self.path)
        except FileNotFoundError:  # the journal was deleted
            self._position, self._batches, self._conversations = None, {}, {}
            return
        with stream:
            if self._position is not None and stream.end < self._position:  # the journal was replaced
                self._position, self._batches, self._conversations = None, {}, {}
            for position, line in stream.lines(self._start(stream) if self._position is None else self._position):
                self._process_line(line, position, since)
                self._position = position + len(line)

    def _start(self, stream: JournalStream) -> int:
        """Return the position of the first line to read, at most 64 MiB before the end."""
        position = max(stream.begin, stream.end - _LONGEST_TAIL)
        if position > stream.begin:
            position += len(next(stream.lines(position), (0, b""))[1])  # skip the rest of a line that begins earlier
        return position

    def _process_line(self, line: bytes, position: int, since: float) -> None:
        head = head_of(line[:HEAD_LENGTH])
        if head is None:
            return
        event, time, subject = head
        if event == "weights":
            self._policy = json.loads(line)["policy"]
        elif event == "batch":
            self._process_batch(time, subject, json.loads(line))
        elif event in _CONVERSATION_EVENTS and (time > since or subject in self._conversations):
            self._process_conversation_event(event, time, subject, line, position)

    def _process_batch(self, time: float, request: str, batch: dict[str, Any]) -> None:
        """Record a batch. If it has the id of an earlier one but another kind, the conversations of the earlier one are
        dropped, as in `Journal`."""
        problems = tuple(Problem.of(*problem) for problem in batch.get("problems", ()))
        kind = (str(batch.get("weights")), str(batch.get("body")))
        earlier = self._batches.get(request)
        if earlier is not None and earlier.kind != kind:
            self._conversations = {
                name: conversation for name, conversation in self._conversations.items() if request_of(name) != request
            }
        self._batches[request] = StartedBatch(time, batch["step"], kind, problems, batch.get("problem_of", ()))

    def _process_conversation_event(self, event: str, time: float, subject: str, line: bytes, position: int) -> None:
        conversation = self._conversations.setdefault(subject, JournalConversation(subject, time))
        conversation.positions.append(position)
        if event == "turn":
            conversation.messages += 1
            conversation.personas.update(name.decode() for name in _PERSONA.findall(line)[:1])
        if event == "conversation":
            conversation.row = row_of(OPTIONAL | json.loads(line)["record"])
