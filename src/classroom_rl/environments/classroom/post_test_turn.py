"""The post-test of a finished dialogue. The student answers without the transcript; the ledger of the lesson says which
items it knows.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from classroom_rl.config.base import PostTestConfig
from classroom_rl.config.values import LEDGER, STUDENT
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.exams import Exam, exam_of
from classroom_rl.judges.post_test.records import ExamAnswer, LedgerEntry, PostTest
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text

_SEED_STEP = 1_000_003
"""Distance between the seeds of answers. It keeps them apart from the seeds of solutions, which are consecutive."""


async def take_post_test(
    config: PostTestConfig, roles: Roles, conversation: Conversation, sampling: Sampling
) -> PostTest:
    """The post-test of a conversation: the answers of the simulated student and, if configured, those of the student's
    model. `sampling` holds the options of the student's next answer.

    Raises:
        DataError: if there is no post-test for this kind of problem.
        RequestRefused, ContextOverflow, EngineFailure: from the student's model or the answer checker.
    """
    problem = conversation.problem
    exam = exam_of(problem, config.siblings)
    ledger = exam.ledger(conversation.turns)
    answers = await answers_from_ledger(exam, ledger, roles.answers)
    if config.ask_student:
        prompts = student_prompts(config.prompt_path, problem, conversation.setup.student_name, exam, ledger)
        sampling = replace(sampling, max_tokens=config.max_tokens_per_answer)
        answers += await answers_of_model(exam, roles.student, prompts, sampling, roles.answers)
    return PostTest(tuple(ledger), tuple(answers))


def student_prompts(
    path: str, problem: Problem, student_name: str | None, exam: Exam, ledger: Sequence[LedgerEntry]
) -> list[list[Message]]:
    """The chat messages that ask the student's model the questions of an exam, one list for each question. They show
    the ledger but not the dialogue. `path` is the prompt template."""
    variables = {
        "student_name": student_name,
        "problem": problem.text,
        "known": [{"item": entry.item, "cue": entry.cue} for entry in ledger if entry.known],
        "unknown": [{"cue": entry.cue} for entry in ledger if not entry.known],
    }
    return [
        [
            {"role": "system", "content": render(path, **variables, knows=ledger[question.item].known)},
            {"role": "user", "content": question.text},
        ]
        for question in exam.questions()
    ]


async def answers_of_model(
    exam: Exam, student: ChatEngine, prompts: Sequence[Sequence[Message]], sampling: Sampling, checker: AnswerChecker
) -> list[ExamAnswer]:
    """The graded answers of the student's model to its `student_prompts`. Raises as `take_post_test` does."""
    results = await asyncio.gather(
        *(student.chat(prompt, _sampling_of(sampling, index)) for index, prompt in enumerate(prompts)),
        return_exceptions=True,  # wait for all requests, so that none outlives the conversation
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return await _graded(STUDENT, exam, [visible_text(result.text) for result in results], checker)


def _sampling_of(base: Sampling, index: int) -> Sampling:
    seed = None if base.seed is None else (base.seed + _SEED_STEP * (index + 1)) % 2**32
    return replace(base, seed=seed, draw=(*base.draw, "post-test", index))


async def answers_from_ledger(exam: Exam, ledger: Sequence[LedgerEntry], checker: AnswerChecker) -> list[ExamAnswer]:
    """The graded answers of the simulated student, which knows the items that the ledger has evidence for."""
    texts = [exam.recall(question, ledger[question.item].known) for question in exam.questions()]
    return await _graded(LEDGER, exam, texts, checker)


async def _graded(student: str, exam: Exam, texts: Sequence[str], checker: AnswerChecker) -> list[ExamAnswer]:
    pairs = list(zip(exam.questions(), texts, strict=True))
    are_right = await asyncio.gather(*(exam.is_right(question, text, checker) for question, text in pairs))
    return [
        ExamAnswer(student, question.item, question.text, text, is_right)
        for (question, text), is_right in zip(pairs, are_right, strict=True)
    ]
