"""A classroom with a scripted supervisor, and a teacher whose drafts differ."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from classroom_rl.config.base import GenerationConfig, SupervisionConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.rows import TrainingRow, rows_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room

VALID = Review(valid=True, critique="Fine.")
CORRECTION = "Try it yourself."
LEAK = Review(valid=False, category="leak", critique="It tells all.", correction=CORRECTION, source="model")
NO_VERDICT = Review(error="JudgeOutputError: no JSON", source="model")


def finds_leaks(about: MessageToReview) -> Review:
    """A message with the word `wrong` leaks, all others are valid."""
    return LEAK if "wrong" in about.message else VALID


class ScriptedSupervisor:
    """A supervisor whose reviews come from a function, which may raise. `asked` keeps what it was shown."""

    def __init__(self, answer: Callable[[MessageToReview], Review] = finds_leaks):
        self._answer = answer
        self.asked: list[MessageToReview] = []

    async def review(self, about: MessageToReview) -> Review:
        await asyncio.sleep(0)
        self.asked.append(about)
        return self._answer(about)


Line = str | list[str]
"""What a teacher writes as one message; a list has the parts before and after its tool calls."""


def line_of(lines: Sequence[Line], sampling: Sampling) -> str:
    """The line after as many answers as the sampling is drawn for; the last line stands for all that follow."""
    line = lines[min(sampling.draw[1], len(lines) - 1)]
    if isinstance(line, str):
        return line
    part = sampling.draw[3] if len(sampling.draw) > 2 else 0
    return line[min(part, len(line) - 1)]


class DrawnTeacher(ScriptedEngine):
    """A teacher whose lines depend on the number of answers before, so that a second draft differs from the first."""

    def __init__(self, tokenizer, lines: Sequence[Line]):
        super().__init__(tokenizer, lambda _: "")
        self.lines = lines

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        clone = copy.copy(self)
        clone._script = lambda _: line_of(self.lines, sampling)
        return await ScriptedEngine.generate(clone, prompt_ids, sampling)


class TextTeacher:
    """A teacher without tokens; `lines` are as those of `DrawnTeacher`. `calls` keeps every chat and its sampling."""

    def __init__(self, lines: Sequence[Line]):
        self.lines = lines
        self.policy, self.weights = PolicyVersion(), "text"
        self.calls: list[tuple[list[dict[str, str]], Sampling]] = []

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        self.calls.append((list(messages), sampling))
        line = line_of(self.lines, sampling)
        return Completion((), (), line, True, self.policy, counted=5, weights=self.weights)


def supervising(generation: GenerationConfig, **changes) -> GenerationConfig:
    """The rules with these changes of `generation.supervisor`."""
    return replace(generation, supervisor=SupervisionConfig(**changes))


def play(room: Room, generation: GenerationConfig, *lines: Line, **request) -> ConversationRecord:
    """One supervised conversation in which the teacher says these lines."""
    room.teacher = DrawnTeacher(room.tokenizer, lines)
    room.supervisor = room.supervisor or ScriptedSupervisor()
    return room.play(generation, **({"supervised": True} | request))[0]


def rows_by_kind(record: ConversationRecord) -> dict[str, list[TrainingRow]]:
    """The rows beside the conversation, by kind."""
    rows: dict[str, list[TrainingRow]] = {}
    for row in rows_of(record)[1:]:
        rows.setdefault(row.kind, []).append(row)
    return rows
