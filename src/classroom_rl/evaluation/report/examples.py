"""Chooses the conversations that a report shows, by fixed rules, and annotates their turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.grammar import Slip
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import Exchange, lacks_verdict, read_exchanges
from classroom_rl.rollout.tokens import Turn

SHOWN_AT_EACH_END = 2
SHOWN_WITH_TROUBLE = 2
LONGEST_TITLE = 100


@dataclass(frozen=True)
class Pair:
    """The same conversation before and after training: equal lesson, seed and error schedule. `label` says why it is
    shown; a side that was not measured is None."""

    label: str
    before: Optional[ConversationRecord]
    after: Optional[ConversationRecord]

    @property
    def title(self) -> str:
        """The first line of the lesson's text, cut at `LONGEST_TITLE` characters."""
        line = self._lines[0]
        return line if len(line) <= LONGEST_TITLE else f"{line[:LONGEST_TITLE]} …"

    @property
    def plan(self) -> str:
        """The lesson's text without its first line; the whole text if the title is cut."""
        return "\n".join(self._lines if len(self._lines[0]) > LONGEST_TITLE else self._lines[1:])

    @property
    def _lines(self) -> list[str]:
        return _either(self).problem.strip().splitlines() or [""]

    @property
    def change(self) -> Optional[float]:
        """The reward after training minus the reward before; None unless both have one."""
        rewards = [side.reward for side in (self.before, self.after) if side is not None]
        return rewards[1] - rewards[0] if len(rewards) == 2 and None not in rewards else None


def _either(pair: Pair) -> ConversationRecord:
    return pair.after or pair.before


def choose_pairs(before: Sequence[ConversationRecord], after: Sequence[ConversationRecord]) -> list[Pair]:
    """Choose the pairs with the largest, the median and the smallest change of the reward, then pairs that were
    rejected after training or lack a verdict on one side. No lesson is chosen twice.

    Ties are broken by the number of student turns with an error, then by lesson id, so that the same files always show
    the same lessons. If only one side was measured, pairs are ranked by its reward.
    """
    pairs = _match(before, after)
    ranked = sorted((pair for pair in pairs if _rank(pair) is not None), key=_order)
    one_sided = not (before and after)
    names = ("highest reward", "median", "lowest reward") if one_sided else ("most gained", "median", "least gained")
    chosen: list[Pair] = []
    _take(chosen, ranked, SHOWN_AT_EACH_END, names[0])
    _take(chosen, ranked[len(ranked) // 2 :], 1, names[1])
    _take(chosen, ranked[::-1], SHOWN_AT_EACH_END, names[2])
    _take(chosen, [pair for pair in pairs if _has_trouble(pair)], SHOWN_WITH_TROUBLE, "rejected or without a verdict")
    return chosen


def _match(before: Sequence[ConversationRecord], after: Sequence[ConversationRecord]) -> list[Pair]:
    """Pair the conversations that have the same lesson and the same index among the lesson's conversations."""
    sides = [_by_index(before), _by_index(after)]
    return [Pair("", sides[0].get(key), sides[1].get(key)) for key in sorted({**sides[0], **sides[1]})]


def _by_index(records: Sequence[ConversationRecord]) -> dict[tuple[str, int], ConversationRecord]:
    groups = group_by_problem(records)
    return {(problem, index): record for problem, group in groups.items() for index, record in enumerate(group)}


def _rank(pair: Pair) -> Optional[float]:
    return pair.change if pair.before and pair.after else _either(pair).reward


def _order(pair: Pair) -> tuple[float, int, str]:
    """The sort key of `choose_pairs`. The rank is rounded, so that rounding errors do not decide between equal ones."""
    exchanges = read_exchanges(_either(pair)) or []
    return -round(_rank(pair), 6), -sum(bool(exchange.errors) for exchange in exchanges), _either(pair).problem_id


def _has_trouble(pair: Pair) -> bool:
    last = pair.after or pair.before
    return last.rejected or any(lacks_verdict(side) for side in (pair.before, pair.after) if side is not None)


def _take(chosen: list[Pair], candidates: Sequence[Pair], count: int, label: str) -> None:
    """Add the first `count` candidates whose lesson is not shown yet."""
    lessons = {_either(pair).problem_id for pair in chosen}
    for pair in candidates:
        if count == 0:
            return
        if _either(pair).problem_id not in lessons:
            chosen.append(Pair(label, pair.before, pair.after))
            lessons.add(_either(pair).problem_id)
            count -= 1


@dataclass(frozen=True)
class Note:
    """A note on a turn. `kind` ("good", "bad", "plain") decides its colour."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class ShownTurn:
    """A turn with its notes; `comment` is the toy judge's comment on a teacher's reply."""

    turn: Turn
    notes: tuple[Note, ...]
    comment: str = ""


@dataclass(frozen=True)
class ShownConversation:
    """A conversation as the report shows it. `status` is "accepted", "rejected" or "no verdict"."""

    record: ConversationRecord
    status: str
    turns: list[ShownTurn]


PERSONAS = {"error_student": "asked to err", "correct_student": "asked to be right"}


def show(record: Optional[ConversationRecord]) -> Optional[ShownConversation]:
    """Annotate the turns of a conversation; None for None."""
    if record is None:
        return None
    exchanges = read_exchanges(record)
    exchange_of_student = {exchange.student_turn: exchange for exchange in exchanges or []}
    exchange_of_teacher = {exchange.teacher_turn: exchange for exchange in exchanges or []}
    turns = []
    for position, turn in enumerate(record.turns):
        if turn.role == "student":
            turns.append(ShownTurn(turn, _student_notes(turn, exchange_of_student.get(position))))
        else:
            exchange = exchange_of_teacher.get(position)
            turns.append(ShownTurn(turn, _teacher_notes(turn, exchange), exchange.comment if exchange else ""))
    status = "no verdict" if lacks_verdict(record) else "rejected" if record.rejected else "accepted"
    return ShownConversation(record, status, turns)


def describe_slip(slip: Slip) -> str:
    """Describe a slip in a few words: "tense: go → went", "article: an egg"."""
    if slip.kind == "article":
        return f"article: {slip.fix} {slip.word}"
    return f"{slip.kind}: {slip.word} → {slip.fix}"


def _student_notes(turn: Turn, exchange: Optional[Exchange]) -> tuple[Note, ...]:
    notes = []
    if turn.persona is not None:
        notes.append(Note(PERSONAS.get(turn.persona, turn.persona)))
    if exchange is not None:
        notes += [Note(describe_slip(slip), "bad") for slip in exchange.errors]
        notes += [] if exchange.errors else [Note("no error", "good")]
    return tuple(notes + _cut(turn))


def _teacher_notes(turn: Turn, exchange: Optional[Exchange]) -> tuple[Note, ...]:
    notes = []
    if exchange is not None and exchange.errors:
        notes.append(Note("scaffolded", "good") if exchange.scaffolded else Note("not scaffolded", "bad"))
    elif exchange is not None and exchange.corrected:
        notes.append(Note("falsely corrected", "bad"))
    return tuple(notes + _cut(turn))


def _cut(turn: Turn) -> list[Note]:
    return [] if turn.ended else [Note("cut at its token limit", "bad")]
