"""Compares teachers by what the student still knows after the lesson, and by the outcome at once.

    gives_away   says every answer, and the student repeats it
    corrects     asks, and says the right answer after a slip
                 (in maths: tells every second step and asks for the others)
    scaffolds    asks, and hints

    python -m benchmarks.post_test [--lessons 40] [--student runs/quickstart/sft/model] [--seed 1]

Teachers are scripts, in the quickstart's language and in maths (data/maths_siblings). The students in the lessons are
scripts, too: in the language, one that errs when its persona says so; in maths, one that calculates what it is asked
for and cannot solve a problem by itself. `at once` is what an immediate outcome shows: in the language the share of the
plan that the student said right in the lesson, in maths end_rm, the share of right solutions with the transcript.
`before` is what the student knew before, `after` the post-test of the student that the program holds by its ledger.

With --student, a real model of the quickstart's language answers the same post-tests, with the ledger of each lesson in
its prompt; with an empty ledger and with a full one besides; and then it sits in the lessons itself.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.post_test_scripts import Arithmetic, ScriptedRole, language_student, maths_student, maths_teacher
from classroom_rl.config.base import DatasetSource, GenerationConfig, PostTestConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.maths_classroom import MATHS_CLASSROOM
from classroom_rl.config.values import LEDGER, STUDENT
from classroom_rl.environments.classroom.config import classroom_rules
from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.environments.classroom.environment import Classroom
from classroom_rl.environments.classroom.post_test_turn import answers_of_model, student_prompts
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.environments.toy_language.scripted_teacher import SCRIPTS
from classroom_rl.evaluation.metrics.compared import post_test_by_problem
from classroom_rl.evaluation.metrics.language import plan_progress
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.post_test.exams import exam_of
from classroom_rl.judges.post_test.records import MISSED, PRODUCED, LedgerEntry
from classroom_rl.results.statistics import differences
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import ChatEngine, Sampling
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.problem import Problem, material_of
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import Journal

GIVES_AWAY, CORRECTS, SCAFFOLDS = ARMS = ("gives_away", "corrects", "scaffolds")
LANGUAGE_SCRIPTS = {GIVES_AWAY: "gives_away", CORRECTS: "corrects", SCAFFOLDS: "ideal"}
MATHS_TELLS: dict[str, Callable[[int], bool]] = {
    GIVES_AWAY: lambda step: True,
    CORRECTS: lambda step: step % 2 == 0,
    SCAFFOLDS: lambda step: False,
}
ERROR_RATE = 0.5
"""Of the student's turns in the language. The quickstart's 0.2 leaves little that a student does not know before."""

LABELS = {
    "at_once": "at once",
    "knew": "before",
    LEDGER: "after",
    "learned": "learned",
    STUDENT: "model after",
}
ByProblem = dict[str, list[float]]
Figures = dict[str, ByProblem]
"""Figure → problem → values."""


@dataclass(frozen=True)
class Subject:
    """What is taught: its problems, the classroom's options, the teachers by arm, the student, and the outcome at once
    of a finished conversation."""

    problems: Sequence[Problem]
    generation: GenerationConfig
    teachers: Mapping[str, ScriptedRole]
    student: ChatEngine
    at_once: Callable[[ConversationRecord], float]
    reward_weights: Mapping[str, float]


def language_subject(lessons: int, student: ChatEngine | None = None) -> Subject:
    """Held-out lessons of the quickstart, with room for a hint after every answer.

    Args:
        student: the student in the lessons; None for the scripted one.
    """
    templates = "prompt_templates/quickstart"
    problems = [Problem.of(render_problem(lesson)) for lesson in make_lessons(42)[1][:lessons]]
    generation = GenerationConfig(
        teacher_prompt_path=str(ROOT / templates / "teacher.txt"),
        student_personas_prompts_paths={
            f"{name}_student": str(ROOT / templates / f"student_{name}.txt") for name in ("correct", "error")
        },
        student_error_rate=ERROR_RATE,
        forced_conversation_type="guided",
        student_names=[None],
        max_turns=41,
        max_tokens_per_turn=48,
        number_judge_attempts=0,
        number_student_attempts=0,
        post_test=_post_test("quickstart"),
    )
    error_prompt = render(
        generation.student_personas_prompts_paths["error_student"],
        student_name=None,
        problem="",
        include_thinking=False,
    )
    teachers = {arm: ScriptedRole(SCRIPTS[script]) for arm, script in LANGUAGE_SCRIPTS.items()}
    scripted = ScriptedRole(language_student(error_prompt))
    return Subject(problems, generation, teachers, student or scripted, _said_right, {"post_test": 1.0})


def _said_right(record: ConversationRecord) -> float:
    """The share of the plan's questions that the student answered right in the lesson, by itself or after the
    teacher."""
    plan = read_plan(record.problem)
    texts = [[turn.text for turn in record.turns if turn.role == role] for role in ("teacher", "student")]
    return plan_progress(plan, *texts)[1] / plan.items


def maths_subject(problems: int) -> Subject:
    """The test problems of data/maths_siblings, each template once before any comes again."""
    source = DatasetSource(
        str(ROOT / "data/maths_siblings/test.jsonl"), sibling_problems_column="sibling_problems", steps_column="steps"
    )
    test_problems = load_problems([source])[:problems]
    arithmetic = Arithmetic.of(test_problems)
    prompts = {name: _absolute(value) for name, value in MATHS_CLASSROOM.items()}
    generation = GenerationConfig(
        **prompts,
        forced_conversation_type="guided",
        student_names=[None],
        max_turns=41,
        number_judge_attempts=0,
        number_student_attempts=2,
        post_test=_post_test("maths"),
    )
    teachers = {arm: ScriptedRole(maths_teacher(arithmetic, tells)) for arm, tells in MATHS_TELLS.items()}
    student = ScriptedRole(maths_student(arithmetic))
    return Subject(
        test_problems,
        generation,
        teachers,
        student,
        lambda record: record.rewards["end_rm"],
        {"end_rm": 1.0, "post_test": 1.0},
    )


def _post_test(template: str) -> PostTestConfig:
    path = str(ROOT / f"prompt_templates/post_test/{template}.txt")
    return PostTestConfig(enable=True, ask_student=True, prompt_path=path, max_tokens_per_answer=48)


def _absolute(value: object) -> object:
    if isinstance(value, dict):
        return {name: _absolute(item) for name, item in value.items()}
    return str(ROOT / value)


async def play(subject: Subject, arm: str, seed: int, checker: AnswerChecker) -> list[ConversationRecord]:
    """One conversation of an arm on every problem."""
    generation = subject.generation
    roles = Roles(
        subject.teachers[arm],
        Sampling(1.0, max_tokens=generation.max_tokens_per_turn),
        subject.student,
        Sampling(1.0, max_tokens=generation.max_tokens_per_turn),
        None,
        answers=checker,
    )
    rules = classroom_rules(generation, subject.reward_weights, generation.max_tokens_in_conversation, graded=True)
    request = SampleRequest(
        problems=[problem.text for problem in subject.problems],
        answers=[problem.answer for problem in subject.problems],
        post_test_material=material_of(subject.problems),
        request_id=f"post-test-{arm}",
        seed=seed,
        step=0,
        fixed_seeds=True,
    )
    with tempfile.TemporaryDirectory(prefix="post-test-") as folder:
        journal = Journal(Path(folder))
        classroom = Classroom(generation, roles, journal, subject.reward_weights, rules)
        response = await Runner(classroom, journal, subject.reward_weights).sample(request)
    return response.conversations


def figures_of(subject: Subject, records: Sequence[ConversationRecord]) -> Figures:
    """The figures of an arm's conversations."""
    return {"at_once": {record.problem_id: [subject.at_once(record)] for record in records}} | post_test_by_problem(
        records
    )


async def solved_alone(subject: Subject, checker: AnswerChecker) -> ByProblem:
    """Whether the maths student solves each problem before any dialogue."""
    solved: ByProblem = {}
    for problem in subject.problems:
        prompt = render(subject.generation.student_attempt_prompt_path, problem=problem.text)
        solution = Solution((await subject.student.chat([{"role": "user", "content": prompt}], Sampling(0.0))).text)
        solved[problem.id] = [float(await checker.is_correct(solution.text, problem.answer))]
    return solved


async def answered_by(
    student: ChatEngine,
    subject: Subject,
    records: Sequence[ConversationRecord],
    checker: AnswerChecker,
    told: Callable[[LedgerEntry], LedgerEntry] = lambda entry: entry,
) -> ByProblem:
    """The share of right answers of a model that is asked the post-tests of finished lessons.

    Args:
        told: what its prompt says of an entry of the ledger.
    """
    config = subject.generation.post_test
    problems = {problem.id: problem for problem in subject.problems}

    async def score(number: int, record: ConversationRecord) -> float:
        problem = problems[record.problem_id]
        ledger = [told(entry) for entry in record.post_test.ledger]
        exam = exam_of(problem, config.siblings)
        prompts = student_prompts(config.prompt_path, problem, record.student_name, exam, ledger)
        sampling = Sampling(1.0, max_tokens=config.max_tokens_per_answer, seed=number)
        answers = await answers_of_model(exam, student, prompts, sampling, checker)
        return sum(answer.right for answer in answers) / len(answers)

    scores = await asyncio.gather(*(score(number, record) for number, record in enumerate(records)))
    return {record.problem_id: [score] for record, score in zip(records, scores, strict=True)}


async def measure(subject: Subject, seed: int, checker: AnswerChecker) -> tuple[dict[str, Figures], dict[str, list]]:
    """The figures, and the conversations, of every arm."""
    records = {arm: await play(subject, arm, seed, checker) for arm in ARMS}
    return {arm: figures_of(subject, arm_records) for arm, arm_records in records.items()}, records


def table(figures: Mapping[str, Figures]) -> str:
    """Means with 95 % intervals over problems, and the difference of the scaffolding teacher to the one that gives
    everything away, on the same problems."""
    names = [name for name in LABELS if any(name in arm_figures for arm_figures in figures.values())]
    rows = [["", *(LABELS[name] for name in names)]]
    rows += [
        [arm, *(_shown(mean_with_ci(arm_figures.get(name, {}))) for name in names)]
        for arm, arm_figures in figures.items()
    ]
    rows.append([f"{SCAFFOLDS} − {GIVES_AWAY}", *(_shown(difference(figures, name)) for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def difference(figures: Mapping[str, Figures], name: str) -> dict:
    """The scaffolding teacher's figure minus that of the one that gives everything away, over the problems."""
    pair = {arm: figures[arm].get(name, {}) for arm in (GIVES_AWAY, SCAFFOLDS)}
    estimate = differences(pair)[0]
    sign = 1 if estimate.tutor == SCAFFOLDS else -1
    if estimate.mean is None:
        return {"mean": None, "ci95": None, "n": 0}
    ends = None if estimate.ci95 is None else sorted(sign * end for end in estimate.ci95)
    return {"mean": sign * estimate.mean, "ci95": ends, "n": estimate.lessons, "p": estimate.p}


def _shown(estimate: Mapping) -> str:
    if estimate["mean"] is None:
        return "–"
    ends = "" if estimate["ci95"] is None else " [{:.3f}, {:.3f}]".format(*estimate["ci95"])
    return f"{estimate['mean']:.3f}{ends}"


async def report_language(lessons: int, seed: int, student: ChatEngine | None, checker: AnswerChecker) -> None:
    """Print the tables of the language."""
    subject = language_subject(lessons)
    figures, records = await measure(subject, seed, checker)
    print(f"The quickstart's language, {lessons} lessons, scripted student; model after: the scripted student\n")
    print(table(figures))
    if student is None:
        return
    tellings = {
        "the lesson's ledger": lambda entry: entry,
        "an empty ledger": lambda entry: replace(entry, outcome=MISSED),
        "a full ledger": lambda entry: replace(entry, outcome=PRODUCED),
    }
    print("\nThe same lessons' post-tests, answered by the student's model\n")
    for name, telling in tellings.items():
        for arm in ARMS if name == "the lesson's ledger" else ARMS[:1]:
            shares = await answered_by(student, subject, records[arm], checker, telling)
            print(f"{name:22}{arm if len(name) > 15 else '':14}{_shown(mean_with_ci(shares))}")
    figures, _ = await measure(language_subject(lessons, student), seed, checker)
    print("\nThe student's model in the lessons, too\n")
    print(table(figures))


async def report_maths(problems: int, seed: int, checker: AnswerChecker) -> None:
    """Print the table of maths."""
    subject = maths_subject(problems)
    figures, _ = await measure(subject, seed, checker)
    alone = mean_with_ci(await solved_alone(subject, checker))
    print(f"\nMaths, {len(subject.problems)} problems, scripted student; solved before the dialogue: {_shown(alone)}\n")
    print(table(figures))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.post_test", description=__doc__.split("\n")[0])
    parser.add_argument("--lessons", type=int, default=40, help="lessons of the language (at most 116)")
    parser.add_argument("--problems", type=int, default=24, help="maths problems (at most 24)")
    parser.add_argument("--student", type=Path, default=None, help="a model folder of the quickstart")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    async def run() -> None:
        checker = AnswerChecker()
        student = None
        if arguments.student is not None:
            from classroom_rl.engines.hf_engine import HfEngine

            student = HfEngine(arguments.student, device="cpu")
        try:
            await report_language(arguments.lessons, arguments.seed, student, checker)
            await report_maths(arguments.problems, arguments.seed, checker)
        finally:
            checker.shutdown()

    asyncio.run(run())


if __name__ == "__main__":
    main()
