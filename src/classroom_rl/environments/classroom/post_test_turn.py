"""The post-test of a finished dialogue: the student answers without the transcript, held by the ledger."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from classroom_rl.config.base import PostTestConfig
from classroom_rl.config.values import LEDGER, STUDENT
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Sampling
from classroom_rl.rollout.post_test import Exam, ExamAnswer, Examiner, ExamQuestion, LedgerEntry, PostTest
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text

_SEED_STEP = 1_000_003
"""Keeps the seeds of answers apart from those of solutions, which are consecutive."""


class PostTestTurn:
    """Asks the questions of a post-test of the student that the program holds and, if configured, of its model.

    Args:
        config: the post-test's options.
        student: the student's model; None if nothing asks it.
        answers: compares maths answers.
        examiner: knows the post-test on every problem.
    """

    def __init__(
        self, config: PostTestConfig, student: ChatEngine | None, answers: AnswerChecker, examiner: Examiner
    ) -> None:
        self._config = config
        self._student = student
        self._answers = answers
        self._examiner = examiner

    async def take(self, conversation: Conversation, sampling: Sampling) -> PostTest:
        """The post-test of a conversation.

        Args:
            sampling: that of the student's next answer.

        Raises:
            DataError: if no program can ask about the problem.
            RequestRefused, ContextOverflow, EngineFailure: as the student's model does, and the answer checker.
        """
        exam = self._examiner.exam(conversation.problem)
        ledger = exam.ledger(conversation.turns)
        answers = await answers_from_ledger(exam, ledger, self._answers)
        if self._config.ask_student:
            said = await self.ask(conversation.problem, conversation.setup.student_name, exam, ledger, sampling)
            answers += said
        return PostTest(tuple(ledger), tuple(answers))

    async def ask(
        self, problem: Problem, name: str | None, exam: Exam, ledger: Sequence[LedgerEntry], sampling: Sampling
    ) -> list[ExamAnswer]:
        """The answers of the student's model, which sees the ledger and not the dialogue. Raises as `take` does."""
        questions = exam.questions()
        prompts = [self._prompt(problem, name, ledger, question) for question in questions]
        said = await asyncio.gather(
            *(self._student.chat(prompt, self._sampled(sampling, i)) for i, prompt in enumerate(prompts)),
            return_exceptions=True,  # waits for all requests, so none runs on after the conversation has ended
        )
        for failure in said:
            if isinstance(failure, BaseException):
                raise failure
        texts = [visible_text(each.text) for each in said]
        return await _graded(STUDENT, exam, questions, texts, self._answers)

    def _prompt(
        self, problem: Problem, name: str | None, ledger: Sequence[LedgerEntry], question: ExamQuestion
    ) -> list[Message]:
        asked = ledger[question.item]
        told = render(
            self._config.prompt_path,
            student_name=name,
            problem=problem.text,
            known=[{"item": entry.item, "cue": entry.cue} for entry in ledger if entry.known],
            unknown=[{"cue": entry.cue} for entry in ledger if not entry.known],
            knows=asked.known,
        )
        return [{"role": "system", "content": told}, {"role": "user", "content": question.text}]

    def _sampled(self, base: Sampling, number: int) -> Sampling:
        seed = None if base.seed is None else (base.seed + _SEED_STEP * (number + 1)) % 2**32
        return replace(
            base, max_tokens=self._config.max_tokens_per_answer, seed=seed, draw=(*base.draw, "post-test", number)
        )


async def answers_from_ledger(exam: Exam, ledger: Sequence[LedgerEntry], checker: AnswerChecker) -> list[ExamAnswer]:
    """The answers of the student that the program holds: it knows what the ledger has evidence for. They are graded as
    any others."""
    questions = exam.questions()
    texts = [exam.recall(question, ledger[question.item].known) for question in questions]
    return await _graded(LEDGER, exam, questions, texts, checker)


async def _graded(
    student: str, exam: Exam, questions: Sequence[ExamQuestion], texts: Sequence[str], checker: AnswerChecker
) -> list[ExamAnswer]:
    pairs = list(zip(questions, texts, strict=True))
    right = await asyncio.gather(*(exam.is_right(question, text, checker) for question, text in pairs))
    return [
        ExamAnswer(student, question.item, question.text, text, found)
        for (question, text), found in zip(pairs, right, strict=True)
    ]
