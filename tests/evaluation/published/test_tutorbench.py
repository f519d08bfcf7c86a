"""TutorBench: which rows are read, what tutor and judge are asked, and the weighted score."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.published.tutorbench import TutoringRow, read_tutorbench, score_replies
from classroom_rl.evaluation.run import evaluate
from tests.evaluation.published.conftest import prompt_of
from tests.support.configs import loaded
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, fails, judge_endpoint, says
from tests.support.rubrics import write_rubric
from tests.support.tutor_messages import write_rows

TEN = [(f"It says {number}.", "critical" if number <= 4 else "not_critical") for number in range(1, 10)]
TEN += [("It gives the answer away.", "critical_negative")]
"""Four criteria of weight 5, five of weight 1, and one of weight −5."""
POSITIVE = 4 * 5 + 5 * 1


def rubrics(criteria: list[tuple[str, str]]) -> str:
    return json.dumps([{"criteria": text, "attributes": {"severity": severity}} for text, severity in criteria])


def row(number: int, use_case: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "TASK_ID": f"task{number}",
        "BATCH": f"USE_CASE_{use_case}_TEXT",
        "SUBJECT": "Physics",
        "PROMPT": f"Question {number}: why is the sky blue?",
        "UC1_INITIAL_EXPLANATION": "Light is scattered." if use_case == 1 else "",
        "FOLLOW_UP_PROMPT": f"What does student {number} not see?",
        "IMAGE_URL": "",
        "Image": None,
        "RUBRICS": rubrics(TEN),
        "bloom_taxonomy": "Apply",
    } | changes


def answer(met: set[int] = frozenset(), criteria: int = 10, without: int | None = None) -> Behaviour:
    values = {f"criterion_{number}": "yes" if number in met else "no" for number in range(1, criteria + 1)}
    values.pop(f"criterion_{without}", None)
    return says(json.dumps({"reasoning": "…", **values}))


def run(folder: Path, rows: list[dict], judge: Callable[[str], Behaviour], tutor: Behaviour | None = None, *more: str):
    """The metrics, and the endpoint that tutor and judge were asked at."""
    path = write_rows(folder / "rows.jsonl", rows)

    def script(body: dict, _: int) -> Behaviour:
        return (tutor or says("My reply.")) if body["model"] == "tutor" else judge(prompt_of(body))

    with judge_endpoint(script) as endpoint:
        overrides = [f"benchmark.path={path}", f"logging.save_dir={folder / 'run'}"]
        overrides += ["teacher_model.model_name_or_path=tutor", f"teacher_model.base_url={endpoint.url}"]
        overrides += [f"judges=[{{model_name_or_path: judge, base_url: '{endpoint.url}', replies_per_attempt: 2}}]"]
        return evaluate(loaded("eval", "--config-name", "tutorbench", *overrides, *more)), endpoint


def calls_of(endpoint: JudgeEndpoint, model: str) -> list:
    return [call for call in endpoint.calls if call.body["model"] == model]


# What is read --------------------------------------------------------------------------------------------------------


def test_rows_with_images_and_without_anything_to_earn_are_counted_and_left_out(tmp_path: Path):
    image = {"bytes": b"\x89PNG", "path": "1.png"}
    rows = [row(0), row(1, Image=image), row(2, IMAGE_URL="https://x/2.png"), row(3, BATCH="USE_CASE_2_MULTIMODAL")]
    rows += [row(4, RUBRICS=rubrics(TEN[-1:]))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    kept_rows, left_out = read_tutorbench(str(tmp_path / "train.parquet"), "train")
    assert [item.id for item in kept_rows] == ["task0"]
    assert left_out == {"with an image": 3, "without a positive weight": 1}
    assert kept_rows[0].weights == (5, 5, 5, 5, 1, 1, 1, 1, 1, -5) and kept_rows[0].use_case == "adaptive_explanation"


REFUSED = [
    ({"RUBRICS": "[{"}, "line 1: RUBRICS is not JSON"),
    ({"RUBRICS": "{}"}, "RUBRICS is no list of criteria"),
    ({"RUBRICS": '[{"weight": 1}]'}, "RUBRICS 1: field criteria: Field required"),
    (
        {"RUBRICS": '[{"criteria": "It is.", "attributes": {"severity": "mild"}}]'},
        "severity 'mild'; there are critical",
    ),
    ({"RUBRICS": '[{"criteria": "It is."}]'}, "no weight and the severity ''"),
    ({"BATCH": "USE_CASE_9_TEXT"}, "BATCH is 'USE_CASE_9_TEXT'"),
    ({"PROMPT": 3}, "field PROMPT"),
    ({"IMAGE_URL": "x"}, r"holds no row without an image and with criteria \(left out: {'with an image': 1}\)"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_row_that_cannot_be_read_is_refused_with_its_place(changes: dict, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        read_tutorbench(str(write_rows(tmp_path / "a.jsonl", [row(0, **changes)])), "")


def test_only_a_model_can_judge(tmp_path: Path):
    for judges in ("[]", "[{model_name_or_path: rules}]"):
        with pytest.raises(ConfigError, match="only models can judge tutorbench's criteria"):
            loaded("eval", "--config-name", "tutorbench", f"judges={judges}")
    with pytest.raises(ConfigError, match="judges has a rubric for m, but a benchmark asks its own questions"):
        judges = f"[{{model_name_or_path: m, use_openrouter: true, rubric: {write_rubric(tmp_path)}}}]"
        loaded("eval", "--config-name", "mrbench", "benchmark.path=a.jsonl", f"judges={judges}")


# The score -----------------------------------------------------------------------------------------------------------


def made(weights: list[float]) -> TutoringRow:
    return TutoringRow("id", "assessment", "p", "", "", tuple(map(str, weights)), tuple(weights))


@given(st.lists(st.tuples(st.sampled_from([5.0, 1.0, -5.0]), st.booleans()), max_size=39))
def test_the_score_is_the_papers_weighted_average(criteria: list[tuple[float, bool]]):
    criteria = [(5.0, True), *criteria]
    of_row = made([weight for weight, _ in criteria])
    given_answer = dict(zip(of_row.choices, ["yes" if met else "no" for _, met in criteria], strict=True))
    positive = sum(weight for weight, _ in criteria if weight > 0)
    score = of_row.score(given_answer)
    assert score == pytest.approx(sum(weight for weight, met in criteria if met) / positive)
    assert of_row.lowest <= score <= 1
    assert score_replies([of_row], [given_answer])["all"]["score"]["mean"] == pytest.approx(score)


def test_replies_are_scored_criterion_by_criterion_in_all_and_by_use_case(tmp_path: Path, capsys):
    rows = [row(0, 1), row(1, 2), row(2, 3), row(3, 3), row(4, Image={"path": "x"})]
    criteria_met = {0: set(range(1, 10)), 1: {1, 5, 10}, 2: {10}, 3: set()}

    def judge(prompt: str) -> Behaviour:
        return answer(next(criteria for number, criteria in criteria_met.items() if f"Question {number}:" in prompt))

    metrics, endpoint = run(tmp_path, rows, judge)
    scores = metrics["judges"]["judge"]["scores"]
    expected = [1.0, (5 + 1 - 5) / POSITIVE, -5 / POSITIVE, 0.0]
    assert scores["all"]["score"]["mean"] == pytest.approx(sum(expected) / 4) and scores["all"]["score"]["n"] == 4
    assert scores["adaptive_explanation"]["score"]["mean"] == 1
    assert scores["assessment"]["score"]["mean"] == pytest.approx(expected[1])
    assert scores["active_learning"]["score"]["mean"] == pytest.approx(expected[2] / 2)
    assert scores["all"]["met"]["mean"] == pytest.approx((9 + 2) / 36), "the penalty is none of those to be met"
    assert metrics["rows"] == metrics["answered"] == 4 and metrics["left_out"] == {"with an image": 1}
    tutors = [call.prompt for call in calls_of(endpoint, "tutor")]
    assert len(tutors) == 4 and not any("It says 1." in prompt for prompt in tutors), "the tutor sees no criterion"
    by_use_case = {
        use_case: next(prompt for prompt in tutors if f"Question {use_case - 1}:" in prompt) for use_case in (1, 2, 3)
    }
    assert (
        "Light is scattered." in by_use_case[1]
        and "what is wrong" in by_use_case[2]
        and "Do not give the solution" in by_use_case[3]
    )
    judged = calls_of(endpoint, "judge")
    assert len(judged) == 4, "one request asks all criteria of a row"
    assert all(
        "- criterion_10: It gives the answer away." in call.prompt and "My reply." in call.prompt for call in judged
    )
    lines = [json.loads(line) for line in (tmp_path / "run/replies.jsonl").read_text("utf-8").splitlines()]
    assert [line["score"] for line in lines] == pytest.approx(expected) and lines[1]["answer"]["criterion_5"] == "yes"
    printed = capsys.readouterr().out
    assert "Left out: 1 with an image" in printed and "active_learning" in printed


def test_a_missing_criterion_is_asked_again_then_counted_and_all_is_paid(tmp_path: Path):
    seen: dict[str, int] = {}

    def judge(prompt: str) -> Behaviour:
        seen[prompt] = seen.get(prompt, 0) + 1
        if "Question 0:" in prompt:
            return fails(400, {"message": "flagged by moderation"})
        mended = "Question 2:" in prompt and seen[prompt] == 2
        return answer({1}) if mended else answer({1}, without=7)

    metrics, endpoint = run(tmp_path, [row(number) for number in range(3)], judge)
    judged = metrics["judges"]["judge"]
    assert (judged["asked"], judged["answered"]) == (3, 1)
    assert judged["failures"] == {"content refused": 1, "unreadable": 1}
    assert judged["scores"]["all"]["score"]["n"] == 1 and judged["scores"]["all"]["score"]["mean"] == 5 / POSITIVE
    calls = calls_of(endpoint, "judge")
    billed = sum(call.billed_usd for call in calls if call.stated)
    assert judged["paid"]["cost_usd"] == pytest.approx(billed) and billed > 0
    assert len([call for call in calls if call.stated]) == 4, "two rows, each asked twice"


def test_a_reply_that_did_not_come_is_counted_and_meets_nothing(tmp_path: Path):
    metrics, endpoint = run(tmp_path, [row(0)], lambda _: answer(), says("<think>without an end"))
    assert metrics["failures"] == {"empty": 1} and not calls_of(endpoint, "judge")
    scores = metrics["judges"]["judge"]["scores"]["all"]
    assert (scores["score"]["mean"], scores["met"]["mean"], scores["score"]["n"]) == (0.0, 0.0, 1)
