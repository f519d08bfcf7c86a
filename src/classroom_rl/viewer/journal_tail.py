"""Reads from the end of the journal the conversations that are not in a Parquet file yet."""

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from classroom_rl.results.rollout_files import OPTIONAL
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.store.journal import HEAD_LENGTH, JOURNAL_NAME, head_of, request_of
from classroom_rl.rollout.store.journal_segments import JournalStream
from classroom_rl.rollout.tokens import replay_tokens
from classroom_rl.rollout.trajectory import TOKEN_FIELDS
from classroom_rl.viewer.list_index import ConversationRow, row_of, title_of

_LONGEST_TAIL = 64 * 1024**2
_CONVERSATION_EVENTS = frozenset(
    "turn cut_short verdict post_test solutions grades failure rewards conversation".split()
)
_PERSONA = re.compile(rb'"persona": "([^"]+)"')  # inside a message the quotes would be escaped


@dataclass(frozen=True)
class StartedBatch:
    """A batch in the journal's tail. `kind` identifies its weights and its request's body; a batch with the same id and
    another kind is a new one. `problem_of` maps each conversation to its place in `problems`."""

    time: float
    step: int
    kind: tuple[str, str]
    problems: tuple[Problem, ...]
    problem_of: Sequence[int]

    def problem(self, index: int) -> Problem | None:
        """The problem of the conversation with this index; None if the journal does not name it."""
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
    """The journals of all servers of a run: the first server's is in the run folder, those of others in `server1`, …"""

    def __init__(self, run_folder: Path):
        self._folder = run_folder
        self._tails: dict[Path, JournalTail] = {}

    def conversations(self, since: float, written: Collection[str]) -> list[tuple["JournalTail", JournalConversation]]:
        """The result of `JournalTail.conversations` for all journals, each conversation with its journal."""
        found = [self._folder / JOURNAL_NAME, *sorted(self._folder.glob(f"server*/{JOURNAL_NAME}"))]
        for path in found:
            if path not in self._tails and path.is_file():
                self._tails[path] = JournalTail(path)
        return [(tail, each) for tail in self._tails.values() for each in tail.conversations(since, written)]

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
        """The conversations that began after `since` (seconds since 1970), without those whose ids are in `written`."""
        with self._lock:
            self._follow(since)
            self._conversations = {each.id: each for each in self._conversations.values() if each.began > since}
            self._batches = {request: started for request, started in self._batches.items() if started.time > since}
            return [each for each in self._conversations.values() if each.id not in written]

    @property
    def policy(self) -> str | None:
        """The last weights that were loaded; None if the tail does not say."""
        return self._policy

    def row(self, conversation: JournalConversation) -> ConversationRow:
        """The conversation's row in a list; for an unfinished one, what is known so far."""
        if conversation.row is not None:
            return conversation.row
        started, problem, index = self._about(conversation)
        return ConversationRow(
            id=conversation.id,
            step=started.step if started else None,
            index=index,
            problem_id=problem.id if problem else "",
            title=title_of(problem.text) if problem else "still playing",
            type="",
            student_name=None,
            state="PLAYING",
            messages=conversation.messages,
            personas=dict(conversation.personas),
            rewards={},
            reward=None,
            rejected=False,
            judge_failed=False,
        )

    def record(self, conversation: JournalConversation) -> dict[str, Any]:
        """The conversation's record as plain data, with tokens; for an unfinished one, what is known so far."""
        with JournalStream(self.path) as stream:
            events = [json.loads(line) for line in stream.lines_at(conversation.positions)]
        buffer = replay_tokens(events)
        tokens = {name: getattr(buffer, name) if buffer else [] for name in TOKEN_FIELDS}
        finished = [event["record"] for event in events if event["event"] == "conversation"]
        if finished:
            return OPTIONAL | finished[-1] | tokens
        row, problem = self.row(conversation), self._about(conversation)[1]
        said = {
            "turns": [event["turn"] for event in events if event["event"] == "turn"],
            "verdicts": [event["verdict"] for event in events if event["event"] == "verdict"],
            "solutions": [each for event in events if event["event"] == "solutions" for each in event["solutions"]],
            "post_test": next(
                (event["post_test"] for event in reversed(events) if event["event"] == "post_test"), None
            ),
        }
        failures = [event["reason"] for event in events if event["event"] == "failure"]
        about = {"problem": problem.text if problem else "", "answer": problem.answer if problem else ""}
        cuts = [event["reason"] for event in events if event["event"] == "cut_short"]
        rest = {"failure": failures[-1] if failures else None, "overflow": cuts[-1] if cuts else None, "meta": {}}
        return {name: getattr(row, name) for name in _ROW_FIELDS} | said | about | rest | tokens

    def _about(self, conversation: JournalConversation) -> tuple[StartedBatch | None, Problem | None, int]:
        """The batch of a conversation, its problem, and its index in the batch."""
        started, index = self._batches.get(request_of(conversation.id)), int(conversation.id.rpartition("-")[2])
        return started, started.problem(index) if started else None, index

    def _follow(self, since: float) -> None:
        try:
            stream = JournalStream(self.path)
        except FileNotFoundError:  # it was deleted
            self._position, self._batches, self._conversations = None, {}, {}
            return
        with stream:
            if self._position is not None and stream.end < self._position:  # it was replaced
                self._position, self._batches, self._conversations = None, {}, {}
            for position, line in stream.lines(self._start(stream) if self._position is None else self._position):
                self._note(line, position, since)
                self._position = position + len(line)

    def _start(self, stream: JournalStream) -> int:
        """The position of the first line to read, at most 64 MiB before the end."""
        position = max(stream.begin, stream.end - _LONGEST_TAIL)
        if position > stream.begin:
            position += len(next(stream.lines(position), (0, b""))[1])  # the rest of a line
        return position

    def _note(self, line: bytes, position: int, since: float) -> None:
        head = head_of(line[:HEAD_LENGTH])
        if head is None:
            return
        event, time, subject = head
        if event == "weights":
            self._policy = json.loads(line)["policy"]
        elif event == "batch":
            self._note_batch(time, subject, json.loads(line))
        elif event in _CONVERSATION_EVENTS and (time > since or subject in self._conversations):
            self._note_of_conversation(event, time, subject, line, position)

    def _note_batch(self, time: float, request: str, batch: dict[str, Any]) -> None:
        """Note a batch. If it restarts an earlier one, that one's conversations are dropped, as in `Journal`."""
        problems = tuple(Problem.of(*each) for each in batch.get("problems", ()))
        kind = (str(batch.get("weights")), str(batch.get("body")))
        before = self._batches.get(request)
        if before is not None and before.kind != kind:
            self._conversations = {
                name: each for name, each in self._conversations.items() if request_of(name) != request
            }
        self._batches[request] = StartedBatch(time, batch["step"], kind, problems, batch.get("problem_of", ()))

    def _note_of_conversation(self, event: str, time: float, subject: str, line: bytes, position: int) -> None:
        conversation = self._conversations.setdefault(subject, JournalConversation(subject, time))
        conversation.positions.append(position)
        if event == "turn":
            conversation.messages += 1
            conversation.personas.update(name.decode() for name in _PERSONA.findall(line)[:1])
        if event == "conversation":
            conversation.row = row_of(OPTIONAL | json.loads(line)["record"])


_ROW_FIELDS = "id step index problem_id type student_name state rewards reward rejected".split()
