"""MathTutorBench: what the tutor is asked, how its answers are read, and what its turns are compared with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from classroom_rl.config.benchmark import (
    MISTAKE_CORRECTION,
    MISTAKE_LOCATION,
    PEDAGOGY,
    PROBLEM_SOLVING,
    SCAFFOLDING,
    SOLUTION_CORRECTNESS,
)
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.mathtutorbench import f1, read_answer, read_tasks
from classroom_rl.evaluation.run import evaluate
from tests.evaluation.published.conftest import prompt_of
from tests.support.configs import loaded
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, fails, judge_endpoint, says
from tests.support.published_rows import bridged, solved, verified, write_json
from tests.support.tutor_messages import write_rows

# What is asked -----------------------------------------------------------------------------------------------------


def test_each_verified_problem_is_asked_about_with_a_mistake_and_without(tmp_path: Path):
    write_json(tmp_path / "stepverify.json", [verified(0)])
    wrong, right = read_tasks(MISTAKE_LOCATION, str(tmp_path), "")
    assert (wrong.expected, right.expected, wrong.has_mistake, right.has_mistake) == ("2", "0", True, False)
    assert wrong.variables["steps"] == ["One basket has 10.", "The other has 12.", "Together 22."]
    assert right.variables["steps"] == ["The other has 20.", "Together 30."]
    assert wrong.problem_id == right.problem_id
    told = [
        question.variables["conversation"][-1]["content"]
        for question in read_tasks(SOLUTION_CORRECTNESS, str(tmp_path), "")
    ]
    assert told == ["I added 2 and got 22.", "The other has 20, so there are 30."]
    assert {question.expected for question in read_tasks(MISTAKE_CORRECTION, str(tmp_path), "")} == {"30"}


def test_what_the_human_teacher_said_is_not_shown_to_the_tutor(tmp_path: Path):
    write_json(tmp_path / "mathdial_bridge.json", [bridged(0)])
    (question,) = read_tasks(SCAFFOLDING, str(tmp_path), "")
    assert question.expected == "What does twice as many mean?"
    assert "twice as many mean" not in json.dumps(question.variables["conversation"])


def test_a_number_with_a_comma_is_expected_without_it(tmp_path: Path):
    write_rows(tmp_path / "gsm8k_test.jsonl", [solved(4)])
    assert [question.expected for question in read_tasks(PROBLEM_SOLVING, str(tmp_path), "")] == ["1004"]


# How answers are read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "text", "answer"),
    [
        (SOLUTION_CORRECTNESS, "Step 2 is fine.\nVerdict: incorrect", "incorrect"),
        (SOLUTION_CORRECTNESS, "**Verdict:** Correct.", "correct"),
        (SOLUTION_CORRECTNESS, "Verdict: incorrect? No.\nVerdict: correct", "correct"),
        (SOLUTION_CORRECTNESS, "Incorrect.", "incorrect"),
        (SOLUTION_CORRECTNESS, "It is not correct.", None),
        (SOLUTION_CORRECTNESS, "Verdict: correctly done", None),
        (MISTAKE_LOCATION, "Step 1 is right, Step 2 is not.\nFirst wrong step: 2", "2"),
        (MISTAKE_LOCATION, "First wrong step: **0**", "0"),
        (MISTAKE_LOCATION, "Step 3.", "3"),
        (MISTAKE_LOCATION, "2", "2"),
        (MISTAKE_LOCATION, "Step 1 is right, Step 2 is not.", None),
        (MISTAKE_LOCATION, "", None),
        (PROBLEM_SOLVING, r"So \boxed{4} no, \boxed{5}", "5"),
        (MISTAKE_CORRECTION, "The answer is 5.", None),
    ],
)
def test_an_answer_is_read_or_is_none(task: str, text: str, answer: str | None):
    assert read_answer(task, text) == answer


def test_f1_worked_by_hand():
    # Two of three wrong ones found, and one right one called wrong: precision 2/3, recall 2/3.
    assert f1([True, True, True, False], [True, True, False, True]) == pytest.approx(2 / 3)
    assert f1([False], [False]) is None and f1([True], [False]) == 0


# Whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_json(folder / "stepverify.json", [verified(number) for number in range(3)])
    write_json(folder / "mathdial_bridge.json", [bridged(number) for number in range(3)])
    write_rows(folder / "gsm8k_test.jsonl", [solved(number) for number in range(1, 4)])
    return str(folder)


def on_tasks(folder: Path, path: str, endpoint: JudgeEndpoint, names: list[str], *overrides: str) -> EvalConfig:
    tutor = ("teacher_model.model_name_or_path=me/tutor-1", f"teacher_model.base_url={endpoint.url}")
    listed = f"benchmark.tasks=[{','.join(names)}]"
    arguments = [f"benchmark.path={path}", f"logging.save_dir={folder}", listed, *tutor, *overrides]
    return loaded("eval", "--config-name", "mathtutorbench", *arguments)


def answer_tasks(prompt: str) -> Behaviour:
    """Right in every task, except that it takes each solution for wrong and one sum for another."""
    if "Verdict:" in prompt:
        return says("Verdict: incorrect")
    if "First wrong step" in prompt:
        return says("First wrong step: 2" if "Step 2: The other has 12." in prompt else "I see nothing.")
    if "What is 1000 +" in prompt:
        number = int(prompt.split("1000 + ")[1].split("?")[0])
        return says(rf"It is \boxed{{1,00{number}}}" if number < 3 else r"\boxed{7}")
    if "Write your next turn" in prompt or "Write the turn alone" in prompt:
        return says("<think>…</think>What does twice mean to you?")
    eggs = int(prompt.split("A basket has ")[1].split(" ")[0])
    return says(rf"\boxed{{{3 * eggs}}}")


@pytest.fixture
def endpoint() -> Iterator[JudgeEndpoint]:
    with judge_endpoint(lambda body, _: answer_tasks(prompt_of(body))) as opened:
        yield opened


def test_the_tasks_with_a_right_answer(tmp_path: Path, tasks: str, endpoint: JudgeEndpoint, capsys):
    names = [PROBLEM_SOLVING, SOLUTION_CORRECTNESS, MISTAKE_LOCATION, MISTAKE_CORRECTION]
    figures = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, names))["tasks"]
    assert list(figures) == names and [task["answered"] for task in figures.values()] == [3, 6, 6, 6]
    assert figures[PROBLEM_SOLVING]["accuracy"]["mean"] == pytest.approx(2 / 3)
    correctness = figures[SOLUTION_CORRECTNESS]
    assert correctness["accuracy"]["mean"] == 0.5 and correctness["f1"] == pytest.approx(2 / 3)
    assert (correctness["accuracy_with_mistake"]["mean"], correctness["accuracy_without"]["mean"]) == (1, 0)
    location = figures[MISTAKE_LOCATION]
    assert location["accuracy_with_mistake"]["mean"] == pytest.approx(1 / 3) and location["unreadable"] == 5
    assert location["accuracy"]["n"] == 6, "what cannot be read is wrong, not left out"
    assert figures[MISTAKE_CORRECTION]["accuracy"]["mean"] == 1
    assert "mistake_location" in capsys.readouterr().out
    kept = [json.loads(line) for line in (tmp_path / f"run/replies-{PROBLEM_SOLVING}.jsonl").read_text().splitlines()]
    assert [line["expected"] for line in kept] == ["1001", "1002", "1003"]


class FakeScorer:
    """Scores the human teacher's question 1, the tutor's 2 in the first dialogue and 0 in the others."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    async def score(self, dialogue: list[dict[str, str]]) -> float:
        self.seen.append(dialogue)
        if "twice as many mean" in dialogue[-1]["content"]:
            return 1.0
        return 2.0 if "has 10 eggs" in dialogue[1]["content"] else 0.0

    def shutdown(self) -> None:
        """Nothing runs."""


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> FakeScorer:
    fake = FakeScorer()

    async def start(*_: Any) -> FakeScorer:
        return fake

    monkeypatch.setattr("classroom_rl.engines.vllm.reward_engine.RewardEngine.start", start)
    monkeypatch.setattr("classroom_rl.evaluation.published.mathtutorbench.check_scorer", lambda config: None)
    return fake


def test_turns_are_scored_against_the_human_teachers(
    tmp_path: Path, tasks: str, endpoint: JudgeEndpoint, scorer: FakeScorer
):
    metrics = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, [SCAFFOLDING, PEDAGOGY]))
    assert metrics["tasks"][SCAFFOLDING]["win_rate"]["mean"] == pytest.approx(1 / 3)
    assert len(scorer.seen) == 12
    system, about, *dialogue = scorer.seen[0]
    assert system["role"] == "system" and about["content"].startswith("Problem: A basket has 10 eggs")
    assert "Reference Solution: The other has 20." in about["content"]
    assert [message["role"] for message in dialogue] == ["assistant", "user", "assistant"]
    assert dialogue[-1]["content"] == "What does twice mean to you?", "without its thoughts"
    written = json.loads((tmp_path / f"run/generations-tutor_1-{SCAFFOLDING}.json").read_text("utf-8"))
    assert written[0] == {
        "problem": bridged(0)["problem"],
        "reference_solution": bridged(0)["reference_solution"],
        "dialog_history": bridged(0)["dialog_history"][:-1],
        "dialog_formatted": "Teacher: How did you do it?\nStudent: I added 2 and got 22.",
        "ground_truth_response": bridged(0)["dialog_history"][-1],
        "generated_teacher_utterance": "What does twice mean to you?",
    }


def test_without_the_reward_model_turns_are_written_and_not_scored(
    tmp_path: Path, tasks: str, endpoint: JudgeEndpoint, scorer: FakeScorer
):
    unscored = ("score_using_pedagogical_reward=false",)
    metrics = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, [SCAFFOLDING], *unscored))
    assert metrics["tasks"][SCAFFOLDING]["win_rate"] is None and not scorer.seen


def test_a_task_without_a_reply_is_left_out_of_the_win_rate(tmp_path: Path, tasks: str, scorer: FakeScorer):
    def script(body: dict, nth: int) -> Behaviour:
        refused = "has 11 eggs" in prompt_of(body)
        return fails(400, {"message": "flagged by moderation"}) if refused else answer_tasks(prompt_of(body))

    with judge_endpoint(script) as endpoint:
        figures = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, [SCAFFOLDING]))["tasks"][SCAFFOLDING]
    assert figures["failures"] == {"content refused": 1} and figures["win_rate"]["n"] == 2
    assert figures["win_rate"]["mean"] == 0.5


def test_the_file_of_a_task_that_is_not_there_is_named(tmp_path: Path, tasks: str, endpoint: JudgeEndpoint):
    config = on_tasks(tmp_path / "run", tasks, endpoint, ["scaffolding_generation_hard"])
    with pytest.raises(DataError, match=r"There is no file .*mathdial_bridge_hard\.json"):
        evaluate(config)
    assert not endpoint.calls
