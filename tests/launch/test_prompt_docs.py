"""docs/prompts.md shows the language tutor's prompts as they are."""

import subprocess
import sys

from classroom_rl.launch.prompt_docs import PLAYED, ROOT, TEMPLATES, read_example_lessons
from classroom_rl.rollout.prompts import render

PAGE = ROOT / "docs/prompts.md"


def test_the_command_writes_the_page_that_is_there(tmp_path):
    command = [sys.executable, "-m", "classroom_rl.launch.prompt_docs", str(tmp_path / "page.md")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "page.md").read_bytes() == PAGE.read_bytes(), "run `make docs`"


def test_the_page_shows_the_prompts_of_every_role_for_three_lessons():
    page, lessons = PAGE.read_text(encoding="utf-8"), read_example_lessons()
    for lesson in lessons:
        variables = {"student_name": lesson.student_name, "problem": lesson.problem, "include_thinking": False}
        assert all(render(str(TEMPLATES / name), **variables) in page for name in PLAYED.values())
        judge = str(TEMPLATES / "judges/language_tutor_eval.txt")
        assert render(judge, problem=lesson.problem, conversation=lesson.conversation) in page
    assert page.count("<details>") == page.count("</details>") == len(lessons) * (len(PLAYED) + 1) == 15


def test_the_lessons_on_the_page_are_dialogues_that_the_teacher_opens_and_closes():
    for lesson in read_example_lessons():
        assert len(lesson.turns) % 2 == 1 and lesson.turns[-1].endswith("<end_of_conversation>")
