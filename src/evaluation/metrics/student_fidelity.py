"""Does the simulated student do what its persona says? Without that, no figure about a tutor means anything."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from src.classroom.setup import ERROR_PERSONA
from src.message_rules.messages import own_words, read_message, sentences, spoken
from src.message_rules.plans import Plan
from src.rollout.text import normal
from src.toy_language.grammar import parse_question

CORRECT_PERSONA = "correct_student"
MIN_FAITHFUL_SHARE = 0.8
"""Share of a persona's turns that have to do what it says."""

MAX_STRAYING_SHARE = 0.05
"""Share of student turns that may speak as the teacher, or say its words back."""

_TEACHES = re.compile(
    r"\b(?:say (?:it|that) (?:again|once more)|repeat after|can you (?:say|repeat)|well done|good (?:job|try|work)|"
    r"very good|check the|your turn|let's (?:practise|practice|continue)|the correct (?:answer|form))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StudentTurn:
    """A student's turn: its persona, whether it holds an error (None: nobody can tell), whether it speaks as the
    teacher, whether it says the teacher's words back."""

    persona: str | None
    error: bool | None
    flips: bool
    parrots: bool


def flips_role(text: str, teacher: str, plan: Plan) -> bool:
    """Whether the student speaks as the teacher: praises, corrects or sets tasks in English; in the quickstart, asks a
    lesson's question that is not the teacher's own said back."""
    if _TEACHES.search(text):
        return True
    return plan.lesson is not None and parse_question(text) is not None and not parrots(text, teacher)


def parrots(text: str, teacher: str) -> bool:
    """Whether the student says the teacher's words back: its task, or, where it set none, anything it said."""
    said = [normal(each) for each in sentences(text)]
    message = read_message(teacher)
    heard = {normal(each) for each in message.sentences}
    if not said or not all(said):
        return False
    if not message.tasks:
        return len(" ".join(said).split()) > 2 and " ".join(said) in normal(spoken(teacher))
    tasks = {
        normal(message.sentences[place])
        for task in message.tasks
        for place in task
        if _is_own(message.sentences[place])
    }
    return set(said) <= heard and bool(set(said) & tasks)


def _is_own(sentence: str) -> bool:
    return bool(normal(own_words(sentence).replace("Q", "")))


def student_fidelity(turns: Iterable[StudentTurn], labelled_by: str) -> dict[str, Any]:
    """How faithful the student was.

    Args:
        labelled_by: who says which turns hold an error: "rules", "judge", or "nobody".

    Returns:
        `error_persona` and `correct_persona`: {"share", "n"} of turns that do what the persona says; `role_flips` and
        `parroting`: {"share", "n"} of all turns; `trusted`: False if one of them is beyond its threshold, None if
        errors could not be told; `warnings` in words.
    """
    found = list(turns)
    fidelity: dict[str, Any] = {
        "labelled_by": labelled_by,
        "error_persona": _share(turn.error for turn in found if turn.persona == ERROR_PERSONA),
        "correct_persona": _share(
            None if turn.error is None else not turn.error for turn in found if turn.persona == CORRECT_PERSONA
        ),
        "role_flips": _share(turn.flips for turn in found),
        "parroting": _share(turn.parrots for turn in found),
    }
    warnings = list(_warnings(fidelity))
    told = [fidelity[name]["share"] for name in ("error_persona", "correct_persona")]
    trusted = False if warnings else None if all(share is None for share in told) else True
    return fidelity | {"trusted": trusted, "warnings": warnings}


def _share(hits: Iterable[bool | None]) -> dict[str, Any]:
    told = [bool(hit) for hit in hits if hit is not None]
    return {"share": fmean(told) if told else None, "n": len(told)}


def _warnings(fidelity: Mapping[str, Any]) -> Iterable[str]:
    what = {"error_persona": "turns asked to err hold an error", "correct_persona": "turns asked to be right hold none"}
    for name, meaning in what.items():
        share = fidelity[name]["share"]
        if share is not None and share < MIN_FAITHFUL_SHARE:
            yield f"only {share:.0%} of the {meaning} (at least {MIN_FAITHFUL_SHARE:.0%} should)"
    for name, meaning in {"role_flips": "speak as the teacher", "parroting": "say the teacher's words back"}.items():
        share = fidelity[name]["share"]
        if share is not None and share > MAX_STRAYING_SHARE:
            yield f"{share:.0%} of the student's turns {meaning} (at most {MAX_STRAYING_SHARE:.0%} may)"
