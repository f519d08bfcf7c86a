"""A run's corrections as people decided about them at the teacher's desk: what is trained on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from classroom_rl.results.correction_decisions import CorrectionDecision, Place
from classroom_rl.results.correction_file import Correction
from classroom_rl.rollout.rows import equal_tokens

HUMAN = "human"


def decided(
    corrections: Sequence[Correction],
    decisions: Mapping[Place, CorrectionDecision],
    encode: Callable[[str], list[int]],
) -> list[Correction]:
    """The corrections without those that were rejected, and with edited texts in place of the supervisor's. A decision
    about other words in the same place (the conversation was played again) does not count.

    Args:
        encode: the ids of a text and of the end of a message.
    """
    found = (_decided(each, decisions.get((each.conversation, each.turn, each.draft)), encode) for each in corrections)
    return [each for each in found if each is not None]


def _decided(
    correction: Correction, decision: CorrectionDecision | None, encode: Callable[[str], list[int]]
) -> Correction | None:
    if decision is None or decision.correction not in (None, correction.target_text):
        return correction
    if decision.decision == "reject":
        return None
    if decision.decision == "accept":
        return correction
    ids = encode(decision.text)
    unchanged = min(equal_tokens(correction.target_ids[: correction.unchanged], ids), len(ids) - 1)
    return replace(correction, target_text=decision.text, target_ids=ids, source=HUMAN, unchanged=unchanged)
