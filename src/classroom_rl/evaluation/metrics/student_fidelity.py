"""Checks that the simulated student follows its persona. If it does not, figures about the tutor mean nothing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from classroom_rl.config.values import ERROR_PERSONA
from classroom_rl.environments.toy_language.grammar import parse_question
from classroom_rl.judges.messages import ParsedPlan, own_words, read_message, sentences, spoken
from classroom_rl.rollout.text import normal

CORRECT_PERSONA = "correct_student"
MIN_FAITHFUL_SHARE = 0.8
"""At least this share of a persona's turns must do what the persona says."""

MAX_STRAYING_SHARE = 0.05
"""At most this share of the student's turns may speak as the teacher, and at most this share may repeat its words."""

_TEACHES = re.compile(
    r"\b(?:say (?:it|that) (?:again|once more)|repeat after|can you (?:say|repeat)|well done|good (?:job|try|work)|"
    r"very good|check the|your turn|let's (?:practise|practice|continue)|the correct (?:answer|form))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StudentTurn:
    """A student's turn: its persona, whether it holds an error (None if unknown), whether it speaks as the teacher
    (`flips`), and whether it repeats the teacher's words (`parrots`)."""

    persona: str | None
    error: bool | None
    flips: bool
    parrots: bool


def flips_role(text: str, teacher: str, plan: ParsedPlan) -> bool:
    """Whether the student speaks as the teacher: it praises, corrects or sets tasks in English, or (in the quickstart)
    asks a lesson question that does not repeat the teacher's words."""
    if _TEACHES.search(text):
        return True
    return plan.lesson is not None and parse_question(text) is not None and not parrots(text, teacher)


def parrots(text: str, teacher: str) -> bool:
    """Whether the student repeats the teacher's words: its task or, if the teacher set no task, anything it said."""
    own_sentences = [normal(sentence) for sentence in sentences(text)]
    message = read_message(teacher)
    teacher_sentences = {normal(sentence) for sentence in message.sentences}
    if not own_sentences or not all(own_sentences):
        return False
    if not message.tasks:
        return len(" ".join(own_sentences).split()) > 2 and " ".join(own_sentences) in normal(spoken(teacher))
    tasks = {
        normal(message.sentences[index])
        for task in message.tasks
        for index in task
        if _has_own_words(message.sentences[index])
    }
    return set(own_sentences) <= teacher_sentences and bool(set(own_sentences) & tasks)


def _has_own_words(sentence: str) -> bool:
    """Whether a sentence holds words outside of quotation marks."""
    return bool(normal(own_words(sentence).replace("Q", "")))


def student_fidelity(turns: Iterable[StudentTurn], labelled_by: str) -> dict[str, Any]:
    """Measure how faithful the student was to its personas.

    Args:
        labelled_by: what decided which turns hold an error: "rules", "judge", or "nobody".

    Returns:
        `error_persona` and `correct_persona`: {"share", "n"} of turns that do what the persona says; `role_flips` and
        `parroting`: {"share", "n"} of all turns; `trusted`: False if a share is beyond its threshold, None if no turn
        could be checked for errors; `warnings`: sentences.
    """
    all_turns = list(turns)
    fidelity: dict[str, Any] = {
        "labelled_by": labelled_by,
        "error_persona": _share(turn.error for turn in all_turns if turn.persona == ERROR_PERSONA),
        "correct_persona": _share(
            None if turn.error is None else not turn.error for turn in all_turns if turn.persona == CORRECT_PERSONA
        ),
        "role_flips": _share(turn.flips for turn in all_turns),
        "parroting": _share(turn.parrots for turn in all_turns),
    }
    warnings = list(_warnings(fidelity))
    shares = [fidelity[name]["share"] for name in ("error_persona", "correct_persona")]
    trusted = False if warnings else None if all(share is None for share in shares) else True
    return fidelity | {"trusted": trusted, "warnings": warnings}


def _share(hits: Iterable[bool | None]) -> dict[str, Any]:
    known = [bool(hit) for hit in hits if hit is not None]
    return {"share": fmean(known) if known else None, "n": len(known)}


def _warnings(fidelity: Mapping[str, Any]) -> Iterable[str]:
    expectations = {
        "error_persona": "turns asked to err hold an error",
        "correct_persona": "turns asked to be right hold none",
    }
    for name, meaning in expectations.items():
        share = fidelity[name]["share"]
        if share is not None and share < MIN_FAITHFUL_SHARE:
            yield f"only {share:.0%} of the {meaning} (at least {MIN_FAITHFUL_SHARE:.0%} should)"
    for name, meaning in {"role_flips": "speak as the teacher", "parroting": "say the teacher's words back"}.items():
        share = fidelity[name]["share"]
        if share is not None and share > MAX_STRAYING_SHARE:
            yield f"{share:.0%} of the student's turns {meaning} (at most {MAX_STRAYING_SHARE:.0%} may)"
