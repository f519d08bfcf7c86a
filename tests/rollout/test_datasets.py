"""From files to problems: errors in a dataset are reported with the file and its columns."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.load import ROOT
from classroom_rl.errors import DataError
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.problem import PostTestMaterial, Problem, SiblingProblem, Step

ROWS = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]


@pytest.fixture
def jsonl(tmp_path):
    def write(rows: list, name: str = "problems.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def source(jsonl):
    return DatasetSource(name_or_path=jsonl(ROWS))


def csv_file(path: Path, rows: list[dict]) -> str:
    """Write rows into a CSV file; lists are written as JSON."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            )
    return str(path)


def in_all_formats(folder: Path, rows: list[dict]) -> list[str]:
    """Write rows as CSV, JSON and Parquet."""
    import datasets

    (folder / "p.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "p.parquet"))
    return [csv_file(folder / "p.csv", rows), str(folder / "p.json"), str(folder / "p.parquet")]


def test_an_id_is_a_hash_of_the_content(source):
    first = load_problems([source])[0]
    assert first == Problem.of("What is 0 + 1?", "1")
    assert first.id == "2e42e4b827aeb89b", "pinned: recorded runs find their problems by it"


@given(st.text(), st.text(), st.integers(0, 9))
def test_ids_are_equal_exactly_for_equal_content(text, answer, moved):
    """Text and answer do not run into each other."""
    joined = text + answer
    other = (joined[:moved], joined[moved:])
    assert (Problem.of(*other).id == Problem.of(text, answer).id) == (other == (text, answer))


def test_rows_come_in_their_order_without_a_seed(source):
    assert [problem.text for problem in load_problems([source])] == [row["problem"] for row in ROWS]


def test_a_seed_shuffles_and_the_same_seed_shuffles_alike(source):
    plain = load_problems([source])
    shuffled = load_problems([source], seed=1)
    assert shuffled != plain
    assert sorted(problem.id for problem in shuffled) == sorted(problem.id for problem in plain)
    assert load_problems([source], seed=1) == shuffled
    assert load_problems([source], seed=2) != shuffled


def test_the_order_survives_a_restart_with_another_hash_seed(source):
    script = (
        "import sys; from classroom_rl.config.base import DatasetSource\n"
        "from classroom_rl.rollout.datasets import load_problems\n"
        "source = DatasetSource(name_or_path=sys.argv[1], ratio=0.5)\n"
        "print(','.join(problem.id for problem in load_problems([source], limit=5, seed=3)))"
    )
    source.ratio = 0.5
    expected = ",".join(problem.id for problem in load_problems([source], limit=5, seed=3))
    command, environment = [sys.executable, "-c", script, source.name_or_path], os.environ | {"PYTHONHASHSEED": "5"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected


@pytest.mark.parametrize(("limit", "count"), [(-1, 20), (5, 5), (100, 20)])
def test_the_limit_cuts_after_the_shuffle(source, limit, count):
    assert load_problems([source], limit=limit, seed=1) == load_problems([source], seed=1)[:count]


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 20), (0.5, 10), (0.26, 5), (0.05, 1)])
def test_the_ratio_takes_that_share_of_a_source_without_repeats(source, ratio, count):
    source.ratio = ratio
    problems = load_problems([source], seed=1)
    assert len({problem.id for problem in problems}) == len(problems) == count


def test_ratios_count_for_each_source(jsonl, source):
    other = DatasetSource(
        name_or_path=jsonl([{"problem": f"p{i}", "answer": ""} for i in range(10)], "b.jsonl"), ratio=0.3
    )
    problems = load_problems([source, other])
    assert [problem.text.startswith("p") for problem in problems] == [False] * 20 + [True] * 3


def test_a_missing_column_names_the_file_the_column_and_those_there_are(jsonl):
    path = jsonl([{"question": "2 + 2", "answer": "4"}])
    with pytest.raises(DataError) as caught:
        load_problems([DatasetSource(name_or_path=path)])
    for part in (path, "no column problem", "question, answer", "problem_column"):
        assert part in str(caught.value)
    assert load_problems([DatasetSource(name_or_path=path, problem_column="question")])[0].text == "2 + 2"


@pytest.mark.parametrize("text", ["", "  \n", None])
def test_an_empty_problem_is_named_by_its_row(jsonl, text):
    path = jsonl([ROWS[0], {"problem": text, "answer": "1"}])
    with pytest.raises(DataError, match="row 2 has no text in column problem"):
        load_problems([DatasetSource(name_or_path=path)])


@pytest.mark.parametrize(
    ("ratio", "limit", "words"),
    [
        (1.0, 0, "Nothing is left of .*problems.jsonl"),
        (0.01, -1, "Nothing is left"),
        (0.0, -1, "ratio is 0.0"),
        (-0.5, -1, "ratio is -0.5"),
        (1.5, -1, "ratio is 1.5"),
    ],
)
def test_nothing_to_train_on_is_an_error(source, ratio, limit, words):
    source.ratio = ratio
    with pytest.raises(DataError, match=words):
        load_problems([source], limit=limit)


def test_a_dataset_that_is_neither_file_nor_on_the_hub_is_named(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for sources, words in (
        ([DatasetSource(name_or_path="nobody/nothing")], "nobody/nothing"),
        ([DatasetSource()], "name_or_path is empty"),
        ([], "No dataset is configured"),
    ):
        with pytest.raises(DataError, match=words):
            load_problems(sources)


def test_a_dataset_that_brings_a_script_is_refused_and_the_script_not_run(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError, match="mine .*scripts are no longer supported"):
        load_problems([DatasetSource(name_or_path=str(folder))])
    assert not (tmp_path / "ran").exists()


# Problems that a template makes of a row ----------------------------------------------------------------------------

PLANS = [
    {
        "target_language": "Dutch",
        "level": level,
        "goal": "cafe-order",
        "lesson_aim": f"Order {drink}.",
        "chunks": [{"phrase": "Dat was het, hè?", "meaning": "That's all", "use": "ending"}] * 2,
        "next_lessons": ["Paying", "Lunch"],
    }
    for level, drink in (("A1", "tea"), ("B1", "coffee"))
]
LESSON_PLAN = str(ROOT / "prompt_templates/lesson_plan.txt")
RENDERED = """Language: Dutch
Level: A1
Topic: cafe order
Aim of this lesson: Order tea.

Chunks of this lesson:
1. Dat was het, hè? | meaning: That's all | use: ending
2. Dat was het, hè? | meaning: That's all | use: ending

Lessons that follow, not part of this one: Paying; Lunch"""


def plans_in(path: str, **options) -> DatasetSource:
    return DatasetSource(name_or_path=path, problem_template=LESSON_PLAN, answer_column=None, **options)


def test_a_template_makes_problems_of_rows_whatever_file_they_are_in(tmp_path, jsonl):
    expected = [Problem.of(RENDERED), Problem.of(RENDERED.replace("tea", "coffee").replace("A1", "B1"))]
    for path in (jsonl(PLANS, "p.jsonl"), *in_all_formats(tmp_path, PLANS)):
        assert load_problems([plans_in(path)]) == expected, path


def test_columns_of_another_name_are_mapped(jsonl):
    path = jsonl([{("ziel" if key == "lesson_aim" else key): value for key, value in plan.items()} for plan in PLANS])
    assert load_problems([plans_in(path, columns={"lesson_aim": "ziel"})])[0].text == RENDERED
    with pytest.raises(DataError) as caught:
        load_problems([plans_in(path)])
    for part in (path, "no column lesson_aim", "level, goal, ziel, chunks", "columns={variable: column}"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"columns maps aim, but .*lesson_plan.txt uses: chunks, goal, lesson_aim"):
        load_problems([plans_in(path, columns={"aim": "ziel"})])


def test_a_template_may_go_with_an_answer(jsonl, tmp_path):
    (tmp_path / "t.txt").write_text("{{ question }}\nHint: {{ hint }}")
    rows = [{"question": "2 + 2", "hint": "[even", "solution": 4}]
    source = DatasetSource(jsonl(rows), problem_template=str(tmp_path / "t.txt"), answer_column="solution")
    assert load_problems([source]) == [Problem.of("2 + 2\nHint: [even", "4")]
    source.answer_column = "answer"
    with pytest.raises(DataError, match=r"no column answer\. It has: question, hint, solution\. .*answer_column"):
        load_problems([source])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lesson_aim": ""}, "row 2 has nothing in column lesson_aim"),
        ({"lesson_aim": None, "chunks": []}, "row 2 has nothing in column chunks, lesson_aim"),
        ({"chunks": [{"phrase": "Dag!", "meaning": None, "use": "x"}]}, "row 2: .*lesson_plan.txt, line 9: .* null"),
    ],
)
def test_a_row_that_does_not_fill_its_template_is_named(jsonl, change, message):
    with pytest.raises(DataError, match=message):
        load_problems([plans_in(jsonl([PLANS[0], PLANS[1] | change]))])


def test_a_cell_that_is_no_list_is_no_lesson_plan(tmp_path):
    (tmp_path / "p.csv").write_text("target_language,level,goal,lesson_aim,chunks,next_lessons\na,b,c,d,[e,f\n")
    with pytest.raises(DataError, match=r"p\.csv: row 1: .*lesson_plan\.txt, line 9: .*phrase"):
        load_problems([plans_in(str(tmp_path / "p.csv"))])


# What post-tests need ----------------------------------------------------------------------------------------------

SIBLINGS = [{"problem": "3 + 4?", "answer": 7, "steps": [{"name": "the sum", "value": "7"}]}]


def with_siblings(tmp_path: Path, suffix: str, **row) -> DatasetSource:
    row = {"problem": "1 + 2?", "answer": "3", "kin": SIBLINGS, "parts": [{"name": "the sum", "value": 3}]} | row
    path = tmp_path / f"problems.{suffix}"
    if suffix == "csv":
        csv_file(path, [row])
    else:
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return DatasetSource(str(path), sibling_problems_column="kin", steps_column="parts")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_siblings_and_steps_are_read_from_the_columns_that_are_named(tmp_path: Path, suffix: str):
    problem = load_problems([with_siblings(tmp_path, suffix)])[0]
    assert problem.material == PostTestMaterial(
        (Step("the sum", "3"),), (SiblingProblem("3 + 4?", "7", (Step("the sum", "7"),)),)
    )
    assert problem == Problem.of("1 + 2?", "3"), "they change no id"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"kin": [{"problem": "3 + 4?"}]}, r"row 1: siblings\.0\.answer: .*sibling_problems_column holds lists of"),
        ({"kin": "none"}, "row 1: siblings"),
        ({"parts": [{"name": "the product", "value": "2"}]}, "row 1: .*has the steps"),
        ({"kin": [SIBLINGS[0] | {"hint": "add"}]}, r"row 1: siblings\.0\.hint"),
    ],
)
def test_siblings_that_cannot_be_used_are_refused_with_their_row(tmp_path: Path, row: dict, words: str):
    with pytest.raises(DataError, match=words):
        load_problems([with_siblings(tmp_path, "jsonl", **row)])


def test_a_column_that_is_not_there_is_refused(tmp_path: Path):
    source = with_siblings(tmp_path, "jsonl")
    source.steps_column = "stages"
    with pytest.raises(DataError, match="has no column stages"):
        load_problems([source])
