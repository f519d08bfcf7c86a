"""What rules find in a student's message: whether it speaks as the teacher, or repeats its words."""

import re

from classroom_rl.environments.toy_language.grammar import parse_question
from classroom_rl.judges.messages import ParsedPlan, own_words, read_message, sentences, spoken
from classroom_rl.rollout.text import normal

_TEACHES = re.compile(
    r"\b(?:say (?:it|that) (?:again|once more)|repeat after|can you (?:say|repeat)|well done|good (?:job|try|work)|"
    r"very good|check the|your turn|let's (?:practise|practice|continue)|the correct (?:answer|form))\b",
    re.IGNORECASE,
)


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
