"""Writes docs/prompts.md, which shows the language tutor's prompts, each rendered for three lessons:

python -m classroom_rl.launch.prompt_docs docs/prompts.md
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import yaml

from classroom_rl.environments.classroom.lesson_plans import read_shipped
from classroom_rl.rollout.prompts import render
from classroom_rl.system.shipped import ROOT

TEMPLATES = ROOT / "prompt_templates"
PLAYED = {
    "Teacher": "teacher_language_prompt.txt",
    "Correct student": "personas/language_student_correct.txt",
    "Error student": "personas/language_student_error.txt",
    "Only student": "personas/simple_student.txt",
}
"""Each role that speaks in a lesson → its prompt template."""


@dataclass(frozen=True)
class ExampleLesson:
    """A lesson from docs/conversations.yaml: its rendered plan, and its messages, beginning with the teacher's."""

    title: str
    about: str
    student_name: str | None
    problem: str
    turns: tuple[str, ...]

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages in the format of the judge's prompt."""
        roles = ("teacher", "student")
        return [{"role": roles[index % 2], "content": text} for index, text in enumerate(self.turns)]


def read_example_lessons() -> list[ExampleLesson]:
    """Read the lessons from docs/conversations.yaml, with their plans."""
    plans = {plan.id: plan for split in read_shipped().values() for plan in split}
    entries = yaml.safe_load((ROOT / "docs/conversations.yaml").read_text(encoding="utf-8"))
    return [
        ExampleLesson(
            title=f"{entry['plan']}, student {entry['student_name'] or 'without a name'}",
            about=entry["about"],
            student_name=entry["student_name"],
            problem=render(str(TEMPLATES / "lesson_plan.txt"), **plans[entry["plan"]].model_dump()),
            turns=tuple(entry["turns"]),
        )
        for entry in entries
    ]


def render_page() -> str:
    """Render the page about the prompts."""
    lessons = read_example_lessons()
    kinds = {role: {lesson.title: _role_prompt(path, lesson) for lesson in lessons} for role, path in PLAYED.items()}
    kinds["Judge"] = {f"{lesson.title}. {lesson.about}": _judge_prompt(lesson) for lesson in lessons}
    return render(str(ROOT / "docs/prompts.md.j2"), lessons=lessons, kinds=kinds) + "\n"


def _role_prompt(path: str, lesson: ExampleLesson) -> str:
    return render(
        str(TEMPLATES / path), student_name=lesson.student_name, problem=lesson.problem, include_thinking=False
    )


def _judge_prompt(lesson: ExampleLesson) -> str:
    path = TEMPLATES / "judges/language_tutor_eval.txt"
    return render(str(path), conversation=lesson.conversation, problem=lesson.problem)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m classroom_rl.launch.prompt_docs", description=render_page.__doc__)
    parser.add_argument("page", type=Path, help="where to write it")
    parser.parse_args().page.write_text(render_page(), encoding="utf-8")
