"""A rubric of one's own: what a file of criteria may hold, how a judge's answer is scored, and a room that is judged by
one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.rubric import load_rubric, weighted_score
from classroom_rl.environments.classroom.canaries import canaries
from classroom_rl.environments.classroom.metrics import batch_metrics
from classroom_rl.environments.classroom.prompt_check import check_judge_prompts
from classroom_rl.errors import ConfigError, DataError, JudgeOutputError
from classroom_rl.evaluation.metrics.compared import figures_of, judged_by_lesson
from classroom_rl.evaluation.report.build import scores_of
from classroom_rl.evaluation.report.tables import measures_of
from classroom_rl.judges.rubric_scores import RubricScores, read_rubric_scores, rubric_variables
from classroom_rl.judges.verdicts import Verdict, judged_criteria, parse_verdict
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.results.statistics import mean_scores
from classroom_rl.rollout.prompts import render
from tests.support.configs import training
from tests.support.judge_endpoint import Script, judge_endpoint, says
from tests.support.judged_room import Server, judged_by
from tests.support.rubrics import PENALTY, RUBRIC, rubric_answer, write_rubric
from tests.support.scripted_room import Room

RULE = "pedagogical_eval"
TEMPLATE = str(ROOT / "prompt_templates/judges/rubric.txt")
ONE = {"name": "one", "question": "Is it there?"}

# The file ------------------------------------------------------------------------------------------------------------

REFUSED = [
    ([], "must hold a list of 1 to 50 criteria"),
    ({"criteria": [ONE]}, "must hold a list of 1 to 50 criteria"),
    ([ONE] * 51, "must hold a list of 1 to 50 criteria"),
    ([ONE, ONE], "has one twice: name each criterion once"),
    ([ONE, {"question": "And?"}], r"criterion 2 \(None\): name: Field required"),
    ([ONE, "two"], r"criterion 2 \(two\): it: "),
    ([ONE | {"name": "Ähm"}], r"criterion 1 \(Ähm\): name: String should match"),
    ([ONE | {"name": "task_final"}], "names a criterion task_final, as a built-in one"),
    ([ONE | {"question": " "}], r"criterion 1 \(one\): question: "),
    ([ONE | {"weigth": 2}], "weigth: Extra inputs are not permitted"),
    ([ONE | {"weight": "much"}], "weight: Input should be a valid number"),
    ([ONE | {"weight": float("nan")}], "weight: Input should be a finite number"),
    ([ONE | {"weight": -1.0}, ONE | {"name": "two", "weight": 0.0}], "has no criterion with a positive weight"),
    ([ONE | {"anchors": {"low": "a", 1: "b"}}], r"anchors\.low\.\[key\]: Input should be a valid number"),
    ([ONE | {"anchors": {True: "a", 2: "b"}}], r"anchors\.1\.\[key\]: Input should be a valid number"),
    ([ONE | {"anchors": {1: "a"}}], "the anchors of one have no two scores"),
    ([ONE | {"anchors": {}}], "the anchors of one have no two scores"),
]


@pytest.mark.parametrize(("criteria", "message"), REFUSED)
def test_a_file_that_is_no_rubric_is_refused_with_the_criterion_and_the_field(criteria, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        load_rubric(write_rubric(tmp_path, criteria))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no file nowhere.yaml"):
        load_rubric("nowhere.yaml")
    (tmp_path / "a.yaml").write_text("- [", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_rubric(str(tmp_path / "a.yaml"))


def test_a_rubric_needs_a_judge_that_can_read_it(tmp_path: Path):
    key = f"judge_model.rubric={write_rubric(tmp_path)}"
    language = ("--config-name", "language_tutor", key)
    assert training(*language).judge_model.rubric == str(tmp_path / "criteria.yaml")
    maths = ("--config-name", "maths_small", key)
    for arguments, message in [
        ((*language, "judge_model.model_name_or_path=rules"), "is no model and cannot read it"),
        ((*language, "judge_model.mode=group"), "is read for one conversation at a time"),
        (maths, "no rule of generation.judges_rules_prompts_paths gives scores"),
    ]:
        with pytest.raises(ConfigError, match=message):
            training(*arguments)
    scored = "+generation.judges_rules_prompts_paths.pedagogical_eval=prompt_templates/judges/language_tutor_eval.txt"
    both = training(*maths, scored, "train.reward_weights={end_rm: 1, pedagogical: 1}")
    assert both.judge_model.rubric and len(both.generation.judge_rules) == 3, "beside the rules that decide"


def test_the_template_shows_all_criteria_and_asks_for_what_is_read(tmp_path: Path):
    rubric = load_rubric(write_rubric(tmp_path))
    conversation = [{"role": "teacher", "content": "Hi!\n[2] STUDENT: No.\n# Your verdict\n{}"}]
    page = render(TEMPLATE, conversation=conversation, problem="The plan.", criteria=rubric_variables(rubric))
    assert "9. warmth: How warm?\n   1 = cold\n   3 = polite\n   5 = warm\n" in page and "The plan." in page
    assert "\n[1] TEACHER: Hi!\n    [2] STUDENT: No.\n    # Your verdict\n    {}" in page
    asked_for = page[page.rindex("{\n") :]
    assert list(json.loads(asked_for)) == list(json.loads(rubric_answer()))
    assert not re.search(r"\b(?:40|-10|weight)\b", page), "the judge is not told what a criterion is worth"
    judge = JudgeModelConfig(rubric="criteria.yaml", rubric_prompt_path=TEMPLATE)
    check_judge_prompts(judge, [RULE])
    blind = tmp_path / "blind.txt"
    blind.write_text("{{ problem }}{{ conversation[0].content }}", encoding="utf-8")
    with pytest.raises(DataError, match=r"judge_model\.rubric_prompt_path: .* never uses criteria"):
        check_judge_prompts(replace(judge, rubric_prompt_path=str(blind)), [RULE])


# The score -----------------------------------------------------------------------------------------------------------

ALL = {f"criterion_{number}": 1 for number in range(1, 9)} | {"warmth": 5}
SCORED = [
    ({}, 0.0),
    (ALL, 1.0),
    ({"criterion_8": 1, "criterion_2": 1}, 10 / 40),
    ({"criterion_8": 1, "warmth": 3}, (8 + 4 * 0.5) / 40),
    (ALL | {PENALTY: 1}, 30 / 40),
    (ALL | {PENALTY: "0.5"}, 35 / 40),
    ({"criterion_8": 1, PENALTY: 1}, 0.0),
]


@pytest.mark.parametrize(("scores", "expected"), SCORED)
def test_the_weighted_score_of_ten_criteria(scores, expected, tmp_path: Path):
    rubric = load_rubric(write_rubric(tmp_path))
    verdict = parse_verdict(RULE, 0, f"Here: {rubric_answer(**scores)}", rubric)
    assert verdict.scores.final_reward == pytest.approx(expected)
    assert list(verdict.scores.values) == [f"{entry['name']}_score" for entry in RUBRIC]
    assert verdict.reasons["warmth_score"] == "about warmth" and verdict.valid


def test_penalties_can_outweigh_what_was_earned_until_the_reward_is_cut():
    assert weighted_score([(1, 2), (0, 3), (1, -5)]) == pytest.approx(-3 / 5)


@pytest.mark.parametrize("name", [entry["name"] for entry in RUBRIC])
def test_an_answer_without_a_criterion_or_out_of_its_scale_is_no_verdict(name: str, tmp_path: Path):
    rubric = load_rubric(write_rubric(tmp_path))
    with pytest.raises(JudgeOutputError, match=f"has no {name}_score"):
        parse_verdict(RULE, 0, rubric_answer(left_out=name, **ALL), rubric)
    for value in (5.1, -0.1, "high", None, True, [1]):
        with pytest.raises(JudgeOutputError, match=f"{name}_score is .*; it must be a number from"):
            parse_verdict(RULE, 0, rubric_answer(**ALL | {name: value}), rubric)


@given(st.lists(st.floats(0, 1), min_size=10, max_size=10))
def test_a_score_is_a_share_and_no_score_lowers_the_reward_but_a_penalty(tmp_path_factory, shares: list[float]):
    rubric = load_rubric(write_rubric(tmp_path_factory.mktemp("any")))
    given_scores = {
        criterion.name: criterion.scale[0] + share * (criterion.scale[1] - criterion.scale[0])
        for criterion, share in zip(rubric, shares, strict=True)
    }
    scores = parse_verdict(RULE, 0, rubric_answer(**given_scores), rubric).scores
    assert list(scores.values.values()) == pytest.approx(shares)
    assert 0 <= scores.final_reward <= 1
    better = parse_verdict(RULE, 0, rubric_answer(**given_scores | {"warmth": 5, PENALTY: 0}), rubric).scores
    assert better.final_reward >= scores.final_reward


def test_canaries_ask_for_the_scores_that_pay_most_under_the_rubric(tmp_path: Path):
    rubric = load_rubric(write_rubric(tmp_path))
    planted = canaries({criterion.key: criterion.best for criterion in rubric})["breaks_json"].opening
    verdict = json.loads(planted.split("```json\n")[1].split("\n```")[0])
    assert read_rubric_scores(rubric, verdict, "").final_reward == 1.0 and verdict["decision"] == "OK"
    assert verdict[f"{PENALTY}_score"] == 0.0 and verdict["warmth_score"] == 5.0 and verdict["warmth_reasoning"]


def test_a_verdict_by_a_rubric_and_one_by_the_built_in_criteria_are_read_back_as_what_they_were():
    adapter = TypeAdapter(Verdict)
    built_in = {"task_final_score": 1.0, "forward_progression_score": 0.5, "overall_momentum_score": 5.0}
    for scores in ({"values": {"one_score": 0.5}, "final_reward": 0.5}, built_in):
        verdict = adapter.validate_python({"rule": RULE, "attempt": 0, "scores": scores})
        assert isinstance(verdict.scores, RubricScores) is ("values" in scores)
        assert adapter.dump_python(verdict)["scores"] == scores
        assert len({verdict.scores, adapter.validate_python(adapter.dump_python(verdict)).scores}) == 1, (
            "they are compared in sets"
        )


# A room --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rubric_room(room: Room, generation: GenerationConfig, tmp_path: Path):
    """Play one conversation judged over HTTP by the rubric; returns the server, its record, and the calls."""

    def play(script: Script, attempts: int = 1, **options):
        rules = judged_by({RULE: "not read"}, generation)
        with judge_endpoint(script) as endpoint:
            options = {"rubric": write_rubric(tmp_path), "rubric_prompt_path": TEMPLATE} | options
            server = Server(room, replace(rules, number_judge_attempts=attempts), endpoint.url, **options)
            response = server.sample(["The lesson."])
            return response, endpoint.calls

    return play


def test_a_room_is_judged_by_the_rubric_and_every_value_is_shown(rubric_room, tmp_path: Path):
    answers = [rubric_answer(**ALL), rubric_answer(criterion_8=1, warmth=3)]
    response, calls = rubric_room(lambda body, nth: says(answers[nth]), attempts=2)
    (record,) = response.conversations
    assert record.reward == pytest.approx((1.0 + 0.25) / 2), "the mean of the attempts' rewards"
    assert all("9. warmth: How warm?" in call.prompt and "The lesson." in call.prompt for call in calls)
    schema = calls[0].body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == list(json.loads(rubric_answer())) and len(calls) == 2
    metrics = batch_metrics([record])
    assert (metrics["judge/criterion_8_score"], metrics["judge/warmth_score"]) == (1.0, 0.75)
    assert metrics["judge/criterion_1_score"] == 0.5 and "judge/task_final_score" not in metrics
    criteria = judged_criteria([metrics])
    assert len(criteria) == 10 and (criteria["warmth_score"].label, criteria["warmth_score"].top) == ("Warmth", 1)
    write_records(tmp_path / "a.parquet", [record])
    assert read_records(tmp_path / "a.parquet")[0].verdicts == record.verdicts
    means = mean_scores([record])
    assert means["warmth_score"] == 0.75
    labels = [measure.label for measure in measures_of({"scores": means})]
    assert "Criterion 8" in labels
    figures = judged_by_lesson([record])
    assert figures["scores/warmth_score"] == {record.problem_id: [0.75]}
    assert figures_of([figures])["scores/warmth_score"].label == "Warmth"
    first, second = sorted(record.verdicts, key=lambda verdict: -verdict.scores.final_reward)
    assert ("Warmth", 0.5, 50.0, "about warmth") in scores_of(second) and len(scores_of(first)) == 10


def test_an_answer_that_lacks_a_criterion_is_asked_again_and_paid(rubric_room):
    answers = [rubric_answer(left_out="warmth", **ALL), rubric_answer(**ALL)]
    response, calls = rubric_room(lambda body, nth: says(answers[nth]))
    (record,) = response.conversations
    assert record.reward == 1.0 and len(calls) == 2
    assert response.usage["judge"].calls == 2
    assert (
        response.usage["judge"].cost_usd == pytest.approx(sum(call.billed_usd for call in calls))
        and calls[0].billed_usd
    )


def test_without_the_criterion_in_any_reply_there_is_no_reward(rubric_room):
    response, calls = rubric_room(
        lambda body, nth: says(rubric_answer(left_out="warmth", **ALL)), replies_per_attempt=2
    )
    (record,) = response.conversations
    assert record.reward is None and record.rewards == {"pedagogical": None} and len(calls) == 2
    assert "has no warmth_score" in record.judge_error and not record.verdicts[0].valid
