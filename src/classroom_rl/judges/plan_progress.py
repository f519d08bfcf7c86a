"""How far a conversation has come in its lesson plan: the memory of the rule judge."""

from dataclasses import dataclass, field
from itertools import pairwise

from classroom_rl.judges.feedback import nearest_phrase, offers_choice
from classroom_rl.judges.findings import STEPS_FOR_REVIEW, TurnFinding, steps_forward
from classroom_rl.judges.messages import MEANING, ParsedPlan, TeacherMessage, holds
from classroom_rl.judges.readings import MessageReaders


def shown_phrases(text: str, plan: ParsedPlan) -> set[str]:
    """The phrases of the plan that a text contains."""
    return {phrase.text for phrase in plan.phrases if holds(text, phrase.text)}


@dataclass
class PlanProgress:
    """How far a conversation has come in its plan.

    A step is a teacher message that sets a new task and introduces a phrase, or makes the student attempt one.

    Attributes:
        plan: the lesson plan.
        room: the number of steps that the conversation has room for, if no message reviews one.
        readers: trained move classifiers; None for rules alone.
        words: the words of the problem's text, normalised.
        covered: the phrases that the teacher introduced, or that the student attempted after a task.
        asked: the covered phrases that the student had to find: the teacher described them without showing them, let
            the student choose among several, or did not show them in the message before the student's attempt.
        order: the positions in the plan of the covered phrases, in the order in which they were covered.
        steps: the number of steps so far.
        last_is_step: whether the last teacher message was a step by its own text, before the student answered.
        on_show: the phrases that the last teacher message shows, unless it has the student choose among them.
        introduced: the phrases that came with a new task, each with whether the message showed it or only described it.
        said: the student's messages so far.
        tasks, hints: the teacher's tasks and its replies to errors so far, normalised.
        reviewed: the phrases that messages came back to, or whose meaning they asked for.
        ended_early: whether the last teacher message said goodbye before the due steps were taken.
        command: the words of the teacher's first order to whoever plays the student; "" if it gave none.
    """

    plan: ParsedPlan
    room: int
    readers: MessageReaders | None = None
    words: frozenset[str] = frozenset()
    covered: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    steps: int = 0
    last_is_step: bool = False
    on_show: set[str] = field(default_factory=set)
    introduced: set[tuple[str, bool]] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    tasks: set[str] = field(default_factory=set)
    hints: set[str] = field(default_factory=set)
    reviewed: list[str] = field(default_factory=list)
    ended_early: bool = False
    command: str = ""

    @property
    def due(self) -> int:
        """The number of steps that the lesson has to take."""
        return max(1, min(len(self.plan.phrases), self.room - len(self.reviewed)))

    @property
    def is_complete(self) -> bool:
        return self.taken >= self.due

    @property
    def taken(self) -> int:
        """The number of steps of the plan that count as taken: the number of covered phrases (1 if the lesson runs
        backwards through the plan; see `steps_forward`), but at most the number of steps, and at most twice the number
        of phrases that the student had to find."""
        backward = sum(current < previous for previous, current in pairwise(self.order))
        return min(steps_forward(len(self.covered), backward), self.steps, 2 * len(self.asked))

    def cover(self, phrases: set[str]) -> None:
        """Record phrases that a message introduced, or that the student attempted."""
        texts = [phrase.text for phrase in self.plan.phrases]
        self.order += sorted(texts.index(text) for text in phrases - self.covered)
        self.covered |= phrases

    def add_phrases(self, message: TeacherMessage, phrases: set[str], error: bool) -> None:
        """Record the phrases that a message with a new task introduces. The message is a step if it does not reply to
        an error, and if it is the first to show one of them, or the first to describe one without showing it."""
        self.cover(phrases)
        shown = shown_phrases(message.text, self.plan)
        self.asked |= phrases - shown
        self.on_show = set() if offers_choice(message.text, self.plan) else shown
        introduced = set() if error else {(phrase, phrase in shown) for phrase in phrases}
        self.last_is_step = not introduced <= self.introduced
        self.steps += self.last_is_step
        self.introduced |= introduced

    def add_answer(self, text: str, before: TurnFinding | None) -> None:
        """Record the student's answer to the teacher message `before`. If the answer attempts a phrase that was not
        covered yet, a message with a new task that introduced no phrase becomes a step."""
        self.said.append(text)
        target = nearest_phrase(text, self.plan) if before and not before.void else None
        if before is None or target is None:
            return
        if target not in self.on_show:
            self.asked.add(target)
        if target in self.covered:
            return
        self.cover({target})
        self.steps += before.new_step and before.student_error_kind is None and not self.last_is_step

    def produced(self, form: str) -> bool:
        """Whether the student has already said this."""
        return any(holds(message, form) for message in self.said)

    def reviews(self, message: TeacherMessage, described: set[str]) -> str:
        """The phrase that the message reviews; "" if it reviews none. Either the student has to find a phrase that it
        said before the last one, or the message asks what something means that the student said. There is time for one
        such message after every `STEPS_FOR_REVIEW` steps.

        Args:
            described: the phrases that the message shows or describes.
        """
        if self.taken < STEPS_FOR_REVIEW * (1 + len(self.reviewed)) or len(message.tasks) != 1:
            return ""
        meaning = MEANING.search(message.task_text)
        if meaning is not None:
            phrase = next(filter(None, meaning.groups()))
            return phrase if self.produced(phrase) and phrase not in self.reviewed else ""
        last = self.plan.phrases[self.order[-1]].text
        old = [text for text in described if self.produced(text) and text != last and text not in self.reviewed]
        return old[0] if len(old) == len(described) == 1 and not holds(message.text, old[0]) else ""
