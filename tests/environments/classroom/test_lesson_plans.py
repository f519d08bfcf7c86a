"""The shipped lesson plans pass all checks, and the checker reports each kind of fault."""

import json
import re
import subprocess
import sys

import pytest

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.lesson_plans import (
    LessonPlan,
    find_faults,
    measure,
    normal,
    read_goals,
    read_plans,
    read_shipped,
)
from classroom_rl.errors import DataError
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.prompts import render

SHIPPED = read_shipped()
GOALS = read_goals()
EVERYTHING = [plan for split in SHIPPED.values() for plan in split]


def test_the_shipped_plans_have_no_faults():
    assert find_faults(SHIPPED, GOALS) == []


def test_every_goal_has_plans_in_its_split():
    assert {plan.goal: split for split, plans in SHIPPED.items() for plan in plans} == GOALS


@pytest.mark.parametrize("split", SHIPPED)
def test_a_shipped_plan_becomes_a_problem_with_all_that_is_in_it(split):
    path = str(ROOT / f"data/lesson_plans/{split}.jsonl")
    template = str(ROOT / "prompt_templates/lesson_plan.txt")
    problems = load_problems([DatasetSource(path, problem_template=template, answer_column=None)])
    assert [problem.text for problem in problems] == [render(template, **plan.model_dump()) for plan in SHIPPED[split]]
    assert len({problem.id for problem in problems}) == len(problems)
    for plan, problem in zip(SHIPPED[split], problems, strict=True):
        texts = [plan.target_language, plan.level, plan.lesson_aim, *plan.next_lessons]
        texts += [text for chunk in plan.chunks for text in (chunk.phrase, chunk.meaning, chunk.use)]
        assert all(text in problem.text for text in texts)


def test_the_command_prints_the_figures():
    result = check()
    assert (result.returncode, result.stderr.strip()) == (0, "")
    figures = measure(SHIPPED)
    counted = (len(EVERYTHING), figures.chunks, *figures.languages, *figures.plans.values(), *figures.goals.values())
    assert all(str(figure) in result.stdout for figure in counted)


def check() -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "classroom_rl.environments.classroom.lesson_plans", "check"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# Every fault is found -------------------------------------------------------------------------------------------------


FEW = [plan for plan in SHIPPED["train"] if plan.goal in ("cafe-order", "greet-introduce")]


def plan_of(language: str) -> LessonPlan:
    return next(plan for plan in FEW if plan.language_code == language)


def faults_with(plan: LessonPlan, chunk: dict | None = None, **changes) -> list[str]:
    """What the checker says of a few shipped plans if this one, or its first chunk, is changed."""
    if chunk:
        changes["chunks"] = (plan.chunks[0].model_copy(update=chunk), *plan.chunks[1:])
    changed = plan.model_copy(update=changes)
    return find_faults({"train": [changed if p is plan else p for p in FEW], "test": []}, GOALS)


@pytest.mark.parametrize(
    ("language", "phrase", "fault"),
    [
        ("es", "¿Me pone un кофе?", "another script: е к о ф"),
        ("ru", "Можно кофe?", "another script: e"),
        ("ja", "커피 주세요", "another script: 세 요 주 커 피"),
        ("zh", "コーヒーください", "another script: い く さ だ コ ヒ ー"),
        ("ko", "コーヒー", "another script"),
        ("es", "¿…?", "has no letters"),
        ("es", "un café con leche y con azúcar y con hielo", "10 words, more than 9"),
        ("ja", "あ" * 31, "31 characters, more than 30"),
        ("es", "Cafe\u0301 solo", "composed form"),
    ],
)
def test_a_phrase_that_cannot_be_one_is_found(language, phrase, fault):
    faults = faults_with(plan_of(language), {"phrase": phrase})
    assert any(fault in text and plan_of(language).id in text for text in faults), faults


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        ({"use": "when ordering"}, "use of .* has 2 words, not 4 to 20"),
        ({"use": "word " * 21}, "use of .* has 21 words"),
        ({"meaning": "word " * 17}, "meaning of .* has 17 words, not 1 to 16"),
        ({"phrase": "café solo", "meaning": "Café solo!"}, "is its own meaning"),
    ],
)
def test_a_gloss_that_cannot_be_one_is_found(chunk, fault):
    faults = faults_with(plan_of("es"), chunk)
    assert any(re.search(f"es-a1-cafe-order: .*{fault}", text) for text in faults), faults


PLAN, OTHER = FEW[:2]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"id": "es-a1-other"}, f"its id should be {PLAN.id}"),
        ({"id": OTHER.id}, f"{OTHER.id!r} is the id of 2 plans"),
        ({"goal": "no-such-goal"}, "has no goal"),
        ({"goal": "hotel-checkin"}, "its goal belongs to test"),
        ({"goal": OTHER.goal}, "several plans for"),
        ({"target_language": "X"}, f"language code {PLAN.language_code} has several names"),
        ({"language_code": "xx"}, "SCRIPTS does not say"),
        ({"lesson_aim": OTHER.lesson_aim + "!"}, "several plans have the aim"),
        ({"chunks": (PLAN.chunks[1], *PLAN.chunks[1:])}, "twice"),
        ({"lesson_aim": f"Say {PLAN.chunks[0].phrase.upper()} to somebody."}, "away"),
    ],
)
def test_what_does_not_go_together_is_found(changes, fault):
    faults = "\n".join(faults_with(PLAN, **changes))
    assert fault in faults and fault not in "\n".join(faults_with(PLAN))


def test_too_few_too_similar_and_badly_split_plans_are_found():
    few = {split: [plan for plan in plans if plan.language_code in ("es", "fr")] for split, plans in SHIPPED.items()}
    assert [fault for fault in find_faults(few, GOALS) if "fewer than" in fault] == [
        f"there are {sum(map(len, few.values()))} plans, fewer than 400",
        "there are 2 languages, fewer than 12",
    ]
    assert "0.0% of the plans are for testing" in find_faults(SHIPPED | {"test": []}, GOALS)[-1]
    easy = {split: [plan for plan in plans if plan.level != "B1"] for split, plans in SHIPPED.items()}
    assert "no plan is of level B1" in find_faults(easy, GOALS)


def test_phrases_shared_between_goals_are_counted():
    before = measure(SHIPPED).shared
    first, second, third = [plan for plan in SHIPPED["train"] if plan.language_code == "es"][:3]
    shout = first.chunks[0].model_copy(update={"phrase": second.chunks[0].phrase.upper() + "!!"})
    changed = first.model_copy(update={"chunks": (shout, *first.chunks[1:])})
    plans = SHIPPED | {"train": [changed if plan is first else plan for plan in SHIPPED["train"]]}
    assert measure(plans).shared == before + 2, "both of the two chunks are shared now"
    stolen = [plan.model_copy(update={"chunks": third.chunks}) for plan in SHIPPED["train"][:60]]
    faults = find_faults(SHIPPED | {"train": stolen + SHIPPED["train"][60:]}, GOALS)
    assert any("of the phrases are shared between goals, more than 2%" in fault for fault in faults)


@pytest.mark.parametrize(
    ("field", "language", "frame", "words"),
    [
        ("phrase", "es", "Quisiera {} por favor", ["té", "agua", "pan"]),
        ("phrase", "ja", "{}をください", ["水", "お茶", "りんご"]),
        ("use", "es", "when you want to order {} in a bar", ["tea", "water", "bread"]),
    ],
)
def test_texts_that_differ_in_one_word_are_a_frame(field, language, frame, words):
    plans = [plan for plan in SHIPPED["train"] if plan.language_code == language][:3]
    chunks = [plan.chunks[0].model_copy(update={field: frame.format(w)}) for plan, w in zip(plans, words, strict=True)]
    changed = {p.id: p.model_copy(update={"chunks": (c, *p.chunks[1:])}) for p, c in zip(plans, chunks, strict=True)}
    before = measure(SHIPPED)
    after = measure(SHIPPED | {"train": [changed.get(plan.id, plan) for plan in SHIPPED["train"]]})
    assert after.framed[field][0] == pytest.approx(before.framed[field][0] + 3 / after.chunks)
    assert after.framed[field][1] == max(3, before.framed[field][1])


def test_many_filled_in_frames_are_a_fault():
    def framed(plan: LessonPlan) -> LessonPlan:
        return plan.model_copy(update={"lesson_aim": f"Talk about {plan.id} with a friend."})

    faults = find_faults({split: [framed(plan) for plan in plans] for split, plans in SHIPPED.items()}, GOALS)
    assert any("of the texts in lesson_aim look like filled-in frames" in fault for fault in faults), faults


# What is no lesson plan -----------------------------------------------------------------------------------------------

ROW = json.loads(EVERYTHING[0].model_dump_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "C1"}, "level"),
        ({"chunks": ROW["chunks"][:3]}, "chunks"),
        ({"chunks": ROW["chunks"][:1] * 9}, "chunks"),
        ({"chunks": [*ROW["chunks"][:4], {"phrase": "a", "meaning": "b"}]}, "use"),
        ({"lesson_aim": " padded"}, "lesson_aim"),
        ({"lesson_aim": None}, "lesson_aim"),
        ({"next_lessons": []}, "next_lessons"),
        ({"author": "me"}, "author"),
    ],
)
def test_a_line_that_is_no_lesson_plan_is_named(tmp_path, change, message):
    path = tmp_path / "plans.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"(?s)plans\.jsonl: line 2 is no lesson plan: .*{message}"):
        read_plans(path)


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "plans.jsonl"
    path.write_text('{"id": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"plans\.jsonl: line 1 is no lesson plan"):
        read_plans(path)


def test_texts_are_compared_without_case_and_punctuation():
    assert normal("¿Qué tal, Ana?") == normal("qué TAL  ana") != normal("que tal ana")
