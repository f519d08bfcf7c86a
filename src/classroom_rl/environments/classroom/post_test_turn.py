"""The post-test of a finished dialogue. The student answers without the transcript; the ledger of the lesson says which
items it knows.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from classroom_rl.config.base import PostTestConfig
from classroom_rl.config.values import LEDGER, STUDENT
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.records import Exam, ExamAnswer, Examiner, ExamQuestion, LedgerEntry, PostTest
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text

_SEED_STEP = 1_000_003
"""Distance between the seeds of answers. It keeps them apart from the seeds of solutions, which are consecutive."""


class PostTestTurn:
    """Puts the questions of a post-test to the simulated student and, if configured, to the student's model (None if it
    is not asked)."""

    def __init__(
        self, config: PostTestConfig, student: ChatEngine | None, answers: AnswerChecker, examiner: Examiner
    ) -> None:
        self._config = config
        self._student = student
        self._answers = answers
        self._examiner = examiner

    async def take(self, conversation: Conversation, sampling: Sampling) -> PostTest:
        """The post-test of a conversation; `sampling` holds the options of the student's next answer.

        Raises:
            DataError: if there is no post-test for this kind of problem.
            RequestRefused, ContextOverflow, EngineFailure: from the student's model or the answer checker.
        """
        exam = self._examiner.exam(conversation.problem)
        ledger = exam.ledger(conversation.turns)
        answers = await answers_from_ledger(exam, ledger, self._answers)
        if self._config.ask_student:
            name = conversation.setup.student_name
            answers += await self.ask(conversation.problem, name, exam, ledger, sampling)
        return PostTest(tuple(ledger), tuple(answers))

    async def ask(
        self, problem: Problem, name: str | None, exam: Exam, ledger: Sequence[LedgerEntry], sampling: Sampling
    ) -> list[ExamAnswer]:
        """The answers of the student's model, which is shown the ledger but not the dialogue. Raises as `take` does."""
        questions = exam.questions()
        prompts = [self._prompt(problem, name, ledger, question) for question in questions]
        results = await asyncio.gather(
            *(self._student.chat(prompt, self._sampling_of(sampling, index)) for index, prompt in enumerate(prompts)),
            return_exceptions=True,  # wait for all requests, so that none outlives the conversation
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        texts = [visible_text(result.text) for result in results]
        return await _graded(STUDENT, exam, questions, texts, self._answers)

    def _prompt(
        self, problem: Problem, name: str | None, ledger: Sequence[LedgerEntry], question: ExamQuestion
    ) -> list[Message]:
        entry_asked = ledger[question.item]
        system_prompt = render(
            self._config.prompt_path,
            student_name=name,
            problem=problem.text,
            known=[{"item": entry.item, "cue": entry.cue} for entry in ledger if entry.known],
            unknown=[{"cue": entry.cue} for entry in ledger if not entry.known],
            knows=entry_asked.known,
        )
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question.text}]

    def _sampling_of(self, base: Sampling, index: int) -> Sampling:
        seed = None if base.seed is None else (base.seed + _SEED_STEP * (index + 1)) % 2**32
        return replace(
            base, max_tokens=self._config.max_tokens_per_answer, seed=seed, draw=(*base.draw, "post-test", index)
        )


async def answers_from_ledger(exam: Exam, ledger: Sequence[LedgerEntry], checker: AnswerChecker) -> list[ExamAnswer]:
    """The graded answers of the simulated student, which knows the items that the ledger has evidence for."""
    questions = exam.questions()
    texts = [exam.recall(question, ledger[question.item].known) for question in questions]
    return await _graded(LEDGER, exam, questions, texts, checker)


async def _graded(
    student: str, exam: Exam, questions: Sequence[ExamQuestion], texts: Sequence[str], checker: AnswerChecker
) -> list[ExamAnswer]:
    pairs = list(zip(questions, texts, strict=True))
    are_right = await asyncio.gather(*(exam.is_right(question, text, checker) for question, text in pairs))
    return [
        ExamAnswer(student, question.item, question.text, text, is_right)
        for (question, text), is_right in zip(pairs, are_right, strict=True)
    ]
