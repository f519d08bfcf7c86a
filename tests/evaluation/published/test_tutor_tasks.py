"""Tutors on MathDial and MathTutorBench: what they are asked, how their answers are read, and what is compared."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.benchmark import (
    MISTAKE_CORRECTION,
    MISTAKE_LOCATION,
    PEDAGOGY,
    PROBLEM_SOLVING,
    SCAFFOLDING,
    SOLUTION_CORRECTNESS,
)
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.errors import DataError, PolicyMismatch, ProviderFailure
from classroom_rl.evaluation.published.mathdial import compare_turns, read_mathdial
from classroom_rl.evaluation.published.tutor_tasks import f1, read_answer
from classroom_rl.evaluation.run import evaluate
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.server.client import ClassroomClient
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, Script, cut_off, fails, judge_endpoint, says
from tests.support.published_rows import bridged, mathdial_flat, solved, verified, write_json
from tests.support.tutor_messages import write_rows

DIALOGUES = 4
ASKS = "What could you add here?"


@pytest.fixture
def mathdial(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "mathdial.jsonl", [mathdial_flat(number) for number in range(DIALOGUES)]))


def on_mathdial(folder: Path, path: str, endpoint: JudgeEndpoint, *overrides: str) -> EvalConfig:
    tutor = ("teacher_model.model_name_or_path=tutor", f"teacher_model.base_url={endpoint.url}")
    arguments = [f"benchmark.path={path}", f"logging.save_dir={folder}", *tutor, *overrides]
    return load(EvalConfig, "eval", ["--config-name", "mathdial", *arguments], check_eval)


def judged_by(endpoint: JudgeEndpoint) -> str:
    return f"judges=[{{model_name_or_path: judge, base_url: '{endpoint.url}'}}]"


def prompt_of(body: dict) -> str:
    (message,) = body["messages"]
    return message["content"]


def labels(telling: str, reveals: str = "no") -> Behaviour:
    return says(json.dumps({"reasoning": "…", "telling": telling, "reveals_answer": reveals}))


def tutor_and_judge(tutor: Callable[[str], Behaviour], judge: Callable[[str], Behaviour]) -> Script:
    return lambda body, _: (tutor if body["model"] == "tutor" else judge)(prompt_of(body))


# MathDial ----------------------------------------------------------------------------------------------------------


def test_the_tutor_sees_what_the_teacher_saw_and_not_what_the_teacher_said(tmp_path: Path, mathdial: str):
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint))
    prompts = [prompt_of(call.body) for call in endpoint.calls]
    assert len(prompts) == 3 * DIALOGUES
    assert all("for you alone: 2" in prompt and "The student's first solution: She has" in prompt for prompt in prompts)
    first = [prompt for prompt in prompts if "Does she get apples" not in prompt]
    assert len(first) == DIALOGUES and all("Student: I took 15 away." in prompt for prompt in first)


def test_telling_of_tutor_and_teacher_by_the_rules(tmp_path: Path, mathdial: str, capsys):
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        metrics = evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint))
    assert metrics["turns"] == metrics["answered"] == 12 and metrics["dialogues"] == DIALOGUES
    assert metrics["telling_by_the_teachers_own_label"]["mean"] == pytest.approx(1 / 3)
    (rules,) = metrics["labellers"].values()
    telling = rules["shares"]["telling"]
    assert (telling["tutor"]["mean"], telling["teacher"]["mean"]) == (0, pytest.approx(1 / 3))
    assert telling["difference"]["mean"] == pytest.approx(-1 / 3) and telling["difference"]["n"] == 12
    assert rules["agreement_on_telling"]["kappa"] == 1.0
    assert rules["shares"]["reveals_answer"]["teacher"]["mean"] == pytest.approx(1 / 3)
    assert metrics["words"]["tutor"] == 5
    assert "tutor − teacher" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run/turns.jsonl").read_text("utf-8").splitlines()]
    assert [line["move"] for line in lines[:3]] == ["focus", "telling", "generic"] and lines[0]["tutor"] == ASKS
    assert lines[1]["labels"]["rules"]["teacher"] == {"telling": True, "reveals_answer": True}


def test_a_judge_labels_both_sides_and_its_failures_leave_pairs_out(tmp_path: Path, mathdial: str):
    def judge(prompt: str) -> Behaviour:
        turn = prompt.split("# The teacher's next turn\n")[1].split("# Your answer")[0]
        if "See you tomorrow" in turn:
            return says("hard to say")
        return labels("yes", "yes") if "the answer is" in turn else labels("no")

    with judge_endpoint(tutor_and_judge(lambda prompt: says("Add: the answer is 99."), judge)) as endpoint:
        metrics = evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint, judged_by(endpoint)))
    found = metrics["labellers"]["judge"]
    assert (found["asked"], found["answered"], found["failures"]) == (24, 20, {"unreadable": 4})
    assert found["turns_compared"] == 8, "the four turns that it did not label on one side are left out on both"
    telling = found["shares"]["telling"]
    assert (telling["tutor"]["mean"], telling["teacher"]["mean"], telling["difference"]["mean"]) == (1, 0.5, 0.5)
    assert found["agreement_on_telling"]["messages"] == 8 and found["agreement_on_telling"]["kappa"] == 1
    assert found["paid"]["cost_usd"] > 0


def test_a_turn_without_a_reply_is_counted_and_compared_with_nothing(tmp_path: Path, mathdial: str):
    def tutor(prompt: str) -> Behaviour:
        if "Ann has 20 apples" in prompt:
            return fails(400, {"message": "flagged by moderation"})
        if "Ann has 21 apples" in prompt:
            return fails(400, {"message": "This model's maximum context length is 100 tokens"})
        if "Ann has 22 apples" in prompt:
            return says("<think>I never come to an end")
        return cut_off("Tell me, what did you do first, and what then?")

    with judge_endpoint(tutor_and_judge(tutor, lambda prompt: labels("no"))) as endpoint:
        metrics = evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint, judged_by(endpoint)))
    assert metrics["failures"] == {"content refused": 3, "too long": 3, "empty": 3}
    assert metrics["answered"] == metrics["cut"] == 3
    assert {each["turns_compared"] for each in metrics["labellers"].values()} == {3}
    assert metrics["labellers"]["judge"]["asked"] == 12 + 3


def test_the_same_command_again_pays_for_nothing_twice(tmp_path: Path, mathdial: str):
    with judge_endpoint(tutor_and_judge(lambda _: says(ASKS), lambda _: labels("no"))) as endpoint:
        config = on_mathdial(tmp_path / "run", mathdial, endpoint, judged_by(endpoint))
        first = evaluate(config)
        assert len(endpoint.calls) == 36, "12 replies, and each of 12 turns of the teacher and of its own is judged"
        second = evaluate(config)
        assert len(endpoint.calls) == 36
    for found in (first, second):
        paid = [found.pop("paid"), found["labellers"]["judge"].pop("paid")]
        assert sum(each["cost_usd"] for each in paid) == pytest.approx(endpoint.billed_usd)
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_a_tutor_that_cannot_be_asked_stops_the_run(tmp_path: Path, mathdial: str):
    with judge_endpoint(lambda body, _: fails(401, "no such key")) as endpoint, pytest.raises(ProviderFailure):
        evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint))
    assert not (tmp_path / "run/metrics.json").exists()


def test_a_missing_prompt_is_found_before_anything_is_asked(tmp_path: Path, mathdial: str):
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        config = on_mathdial(tmp_path / "run", mathdial, endpoint, "benchmark.prompts_paths.judge=nowhere.txt")
        with pytest.raises(DataError, match=r"There is no prompt template nowhere\.txt in "):
            evaluate(config)
        assert not endpoint.calls


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from([True, False, None])), min_size=3))
def test_the_difference_is_that_of_the_shares_for_any_labels(tmp_path_factory, pairs: list[tuple]):
    path = tmp_path_factory.mktemp("any") / "mathdial.jsonl"
    turns = read_mathdial(str(write_rows(path, [mathdial_flat(number) for number in range(len(pairs))])), "")

    def side(place: int) -> list[dict | None]:
        values = [pair[place] for pair in pairs for _ in range(3)]
        return [None if value is None else {"telling": value, "reveals_answer": value} for value in values]

    found = compare_turns(turns, side(0), side(1))
    shares, both = found["shares"]["telling"], [pair for pair in pairs if None not in pair]
    assert found["turns_compared"] == 3 * len(both)
    if both:
        assert shares["difference"]["mean"] == pytest.approx(shares["tutor"]["mean"] - shares["teacher"]["mean"])
    else:
        assert shares["difference"]["mean"] is None


# The tutor of a running server --------------------------------------------------------------------------------------


def on_server(folder: Path, path: str, endpoint: JudgeEndpoint, monkeypatch, policies: list[int]) -> EvalConfig:
    versions = iter(policies)
    health = lambda self: SimpleNamespace(policy=PolicyVersion("run", next(versions)))  # noqa: E731
    monkeypatch.setattr(ClassroomClient, "health", health)
    arguments = [f"benchmark.path={path}", f"logging.save_dir={folder}"]
    arguments.append(f"server_url={endpoint.url.removesuffix('/v1')}")
    return load(EvalConfig, "eval", ["--config-name", "mathdial", *arguments], check_eval)


def test_a_servers_answers_are_kept_by_its_policy(tmp_path: Path, mathdial: str, monkeypatch):
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        for asked_in_all, policy in ((12, 1), (12, 1), (24, 2)):
            metrics = evaluate(on_server(tmp_path / "run", mathdial, endpoint, monkeypatch, [policy, policy]))
            assert len(endpoint.calls) == asked_in_all and metrics["policy"].endswith(str(policy))
    assert {call.body["model"] for call in endpoint.calls} == {"teacher"}


def test_the_token_of_the_server_is_sent(tmp_path: Path, mathdial: str, monkeypatch):
    monkeypatch.setenv("CLASSROOM_TOKEN", "a-token-of-forty-characters-0123456789ab")
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        evaluate(on_server(tmp_path / "run", mathdial, endpoint, monkeypatch, [1, 1]))
    assert {call.key for call in endpoint.calls} == {"a-token-of-forty-characters-0123456789ab"}


def test_a_tutor_that_changes_meanwhile_is_an_error(tmp_path: Path, mathdial: str, monkeypatch):
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        config = on_server(tmp_path / "run", mathdial, endpoint, monkeypatch, [1, 2])
        with pytest.raises(PolicyMismatch, match="changed while it was measured"):
            evaluate(config)


# MathTutorBench ------------------------------------------------------------------------------------------------------


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
    return load(EvalConfig, "eval", ["--config-name", "mathtutorbench", *arguments], check_eval)


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


@given(st.text(max_size=60), st.sampled_from([SOLUTION_CORRECTNESS, MISTAKE_LOCATION, PROBLEM_SOLVING]))
def test_any_text_can_be_read(text: str, task: str):
    found = read_answer(task, text)
    assert found is None or isinstance(found, str)
    if task == MISTAKE_LOCATION and found is not None:
        assert int(found) >= 0


def test_f1_worked_by_hand():
    # Two of three wrong ones found, and one right one called wrong: precision 2/3, recall 2/3.
    assert f1([True, True, True, False], [True, True, False, True]) == pytest.approx(2 / 3)
    assert f1([False], [False]) is None and f1([True], [False]) == 0


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


def test_the_tasks_with_a_right_answer(tmp_path: Path, tasks: str, capsys):
    names = [PROBLEM_SOLVING, SOLUTION_CORRECTNESS, MISTAKE_LOCATION, MISTAKE_CORRECTION]
    with judge_endpoint(lambda body, _: answer_tasks(prompt_of(body))) as endpoint:
        metrics = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, names))
    found = metrics["tasks"]
    assert list(found) == names and [each["answered"] for each in found.values()] == [3, 6, 6, 6]
    assert found[PROBLEM_SOLVING]["accuracy"]["mean"] == pytest.approx(2 / 3)
    correctness = found[SOLUTION_CORRECTNESS]
    assert correctness["accuracy"]["mean"] == 0.5 and correctness["f1"] == pytest.approx(2 / 3)
    assert (correctness["accuracy_with_mistake"]["mean"], correctness["accuracy_without"]["mean"]) == (1, 0)
    location = found[MISTAKE_LOCATION]
    assert location["accuracy_with_mistake"]["mean"] == pytest.approx(1 / 3) and location["unreadable"] == 5
    assert location["accuracy"]["n"] == 6, "what cannot be read is wrong, not left out"
    assert found[MISTAKE_CORRECTION]["accuracy"]["mean"] == 1
    assert "mistake_location" in capsys.readouterr().out
    kept = [json.loads(line) for line in (tmp_path / f"run/replies-{PROBLEM_SOLVING}.jsonl").read_text().splitlines()]
    assert [each["expected"] for each in kept] == ["1001", "1002", "1003"]


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
    monkeypatch.setattr("classroom_rl.evaluation.published.tutor_tasks.check_scorer", lambda config: None)
    return fake


def test_turns_are_scored_against_the_human_teachers(tmp_path: Path, tasks: str, scorer: FakeScorer):
    with judge_endpoint(lambda body, _: answer_tasks(prompt_of(body))) as endpoint:
        metrics = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, [SCAFFOLDING, PEDAGOGY]))
    assert metrics["tasks"][SCAFFOLDING]["win_rate"]["mean"] == pytest.approx(1 / 3)
    assert len(scorer.seen) == 12
    system, about, *dialogue = scorer.seen[0]
    assert system["role"] == "system" and about["content"].startswith("Problem: A basket has 10 eggs")
    assert "Reference Solution: The other has 20." in about["content"]
    assert [each["role"] for each in dialogue] == ["assistant", "user", "assistant"]
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


def test_without_the_reward_model_turns_are_written_and_not_scored(tmp_path: Path, tasks: str, scorer: FakeScorer):
    with judge_endpoint(lambda body, _: answer_tasks(prompt_of(body))) as endpoint:
        unscored = ("score_using_pedagogical_reward=false",)
        metrics = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, [SCAFFOLDING], *unscored))
    assert metrics["tasks"][SCAFFOLDING]["win_rate"] is None and not scorer.seen


def test_a_task_without_a_reply_is_left_out_of_the_win_rate(tmp_path: Path, tasks: str, scorer: FakeScorer):
    def script(body: dict, nth: int) -> Behaviour:
        refused = "has 11 eggs" in prompt_of(body)
        return fails(400, {"message": "flagged by moderation"}) if refused else answer_tasks(prompt_of(body))

    with judge_endpoint(script) as endpoint:
        found = evaluate(on_tasks(tmp_path / "run", tasks, endpoint, [SCAFFOLDING]))["tasks"][SCAFFOLDING]
    assert found["failures"] == {"content refused": 1} and found["win_rate"]["n"] == 2
    assert found["win_rate"]["mean"] == 0.5


def test_the_file_of_a_task_that_is_not_there_is_named(tmp_path: Path, tasks: str):
    with judge_endpoint(lambda body, _: says("…")) as endpoint:
        config = on_tasks(tmp_path / "run", tasks, endpoint, ["scaffolding_generation_hard"])
        with pytest.raises(DataError, match=r"There is no file .*mathdial_bridge_hard\.json"):
            evaluate(config)
        assert not endpoint.calls
