"""Tests whether the judge's verdicts depend on the conversation, from the verdicts of a training's own batches, without
further judge requests.

Two signs show that they do not. All conversations on a problem have the same verdict, for every problem: then the
rewards of a group are equal, and GRPO learns nothing. Or two attempts at one conversation agree no better than attempts
at two conversations on the same problem: then the rewards are noise.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import fmean, mode

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.verdicts import Verdict

LEAST_FOR_SAME = 128
LEAST_FOR_DEPENDENCE = 256
"""The least conversations for `share` to be meaningful. With 256 of them, in groups of 8 with two attempts each, a true
dependence of 0 is measured below 2 / √256 (0.125) in 98 of 100 cases, one of 0.3 in 1 of 200, one of 0.5 never
(simulated with normally distributed scores)."""
LEAST_THAT_DIFFER = 20
"""The least conversations whose verdict differs from their group's most common one. Fewer may be single slips."""


@dataclass(frozen=True)
class Dependence:
    """How far verdicts depend on the conversation.

    Attributes:
        conversations: the number of conversations that were examined.
        same: whether all conversations of each group had the same verdict.
        share: 1 − the mean squared difference of two attempts at one conversation ÷ that of attempts at two
            conversations of its group (the intraclass correlation, computed from pairs): 1 if verdicts depend on the
            conversation only, 0 if they do not depend on it. None without two attempts, and if no two conversations of
            a group differ.
        compared: the number of conversations that `share` is computed from.
        differing: the number of those whose verdict differs from their group's most common one.
    """

    conversations: int
    same: bool
    share: float | None
    compared: int
    differing: int = 0

    @property
    def warning(self) -> str | None:
        """A warning for the user; None if there is no reason for one."""
        if self.same and self.conversations >= LEAST_FOR_SAME:
            return (
                "The judge gave every conversation on a problem the same verdict, on every problem, in the last "
                f"{self.conversations} conversations. Either it does not see them (look at a prompt and a reply in "
                "judge_calls.sqlite, or at the verdicts on the page), or the tutor's conversations no longer differ in "
                "what it judges. Its verdicts teach nothing."
            )
        enough = self.compared >= LEAST_FOR_DEPENDENCE and self.differing >= LEAST_THAT_DIFFER
        if self.share is not None and enough and self.share < 2 / sqrt(self.compared):
            return (
                "The judge's verdicts do not depend on the conversation, as far as its own attempts tell: two attempts "
                f"at one conversation agree no better than attempts at two on the same problem (dependence "
                f"{self.share:.2f}, {self.compared} conversations). The rewards are noise. Look at what the judge is "
                "shown, lower judge_model.vllm.temperature, or take a better judge."
            )
        return None


class VerdictWatch:
    """Computes the dependence over the latest batches of a training, as many as give enough conversations."""

    def __init__(self) -> None:
        self._batches: deque[Sequence[ConversationRecord]] = deque()
        self._warned = False

    def update(self, records: Sequence[ConversationRecord]) -> Dependence | None:
        """Add a batch, and return the dependence over the latest conversations; None if they are too few."""
        self._batches.append([record for record in records if any(verdict.valid for verdict in record.verdicts)])
        while sum(map(len, self._batches)) - len(self._batches[0]) >= LEAST_FOR_DEPENDENCE:
            self._batches.popleft()
        latest = [record for batch in self._batches for record in batch]
        return dependence(latest) if len(latest) >= LEAST_FOR_SAME else None

    def new_warning(self, found: Dependence) -> str | None:
        """The warning, if the batch before had none."""
        warning = found.warning
        is_new, self._warned = warning is not None and not self._warned, warning is not None
        return warning if is_new else None


def dependence(records: Sequence[ConversationRecord]) -> Dependence:
    """The dependence of the verdicts of these conversations. A group is one problem at one step."""
    groups: dict[tuple[int, str], list[ConversationRecord]] = {}
    for record in records:
        groups.setdefault((record.step, record.problem_id), []).append(record)
    rules = sorted({verdict.rule for record in records for verdict in record.verdicts if verdict.valid})
    of_one: list[float] = []
    of_two: list[float] = []
    compared: set[str] = set()
    same, differing = True, 0
    for group in groups.values():
        for rule in rules:
            attempts = {
                record.id: [
                    each for each in record.verdicts if each.valid and each.rule == rule and each.group_size is None
                ]
                for record in group
            }
            same &= len({_said(each) for found in attempts.values() for each in found}) <= 1
            repeated = {name: list(map(_score, found)) for name, found in attempts.items() if len(found) > 1}
            if len(repeated) > 1:
                compared |= set(repeated)
                commonest = mode(score for scores in repeated.values() for score in scores)
                differing += sum(set(scores) != {commonest} for scores in repeated.values())
                of_one += _within(repeated.values())
                of_two += _between(list(repeated.values()))
    between = fmean(of_two) if of_two else 0.0
    share = 1 - fmean(of_one) / between if between > 0 else None
    return Dependence(len(records), same, share, len(compared), differing)


def _said(verdict: Verdict) -> object:
    return verdict.accepted if verdict.scores is None else verdict.scores


def _score(verdict: Verdict) -> float:
    return float(bool(verdict.accepted)) if verdict.scores is None else verdict.scores.final_reward


def _within(conversations: Iterable[list[float]]) -> Iterator[float]:
    for scores in conversations:
        yield from ((one - other) ** 2 for one, other in combinations(scores, 2))


def _between(conversations: Sequence[list[float]]) -> Iterator[float]:
    for these, those in combinations(conversations, 2):
        yield from ((one - other) ** 2 for one in these for other in those)
