"""The scripted judge of groups errs as its name says."""

import json
import random
from pathlib import Path
from statistics import fmean, stdev

import pytest

from benchmarks.group_judge_noise import JUDGES, RULE, Errors, NoiseBench, report, verdict_of
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.environments.toy_language.scripts import play
from classroom_rl.judges.verdicts import Scores, answer_schema, group_schema, parse_group, parse_verdict
from tests.support.configs import loaded
from tests.support.scripted_teachers import SCRIPTED_TEACHERS


def judged(errors: Errors, problem: str, conversations: list, in_group: bool, call: int = 0) -> list[Scores]:
    """The scores that the scripted judge gives in a call, read as the classroom reads them."""
    schema = group_schema(len(conversations)) if in_group else answer_schema(RULE)
    prompt = json.dumps({"problem": problem, "conversations": conversations})
    body = {
        "model": errors.model,
        "messages": [{"role": "user", "content": prompt}],
        "response_format": {"json_schema": {"schema": schema}},
    }
    text = verdict_of(body, random.Random(call))
    if not in_group:
        return [parse_verdict(RULE, 0, text).scores]
    return [verdict.scores for verdict in parse_group(RULE, 0, text, len(conversations))]


@pytest.fixture
def group(lessons) -> tuple[str, list]:
    """A lesson, and eight conversations on it with teachers of all kinds."""
    problem, personas = lessons[0], ["correct_student", "error_student"] * 2
    names = ("ideal", "ignores_errors", "hints_every_turn", "hands_answer_over")
    return problem, [
        play(SCRIPTED_TEACHERS[name], parse_problem(problem), personas[: 2 + extra], random.Random(extra))
        for name in names
        for extra in range(2)
    ]


def test_without_errors_the_judge_is_the_rubric_alone_and_in_groups(group):
    problem, conversations = group
    alone = [judged(Errors(0, 0), problem, [conversation], in_group=False)[0] for conversation in conversations]
    assert judged(Errors(0, 0), problem, conversations, in_group=True) == alone
    assert len({scores.final_reward for scores in alone}) > 2


def test_an_error_of_the_level_is_shared_in_a_group_and_not_between_calls(group):
    problem, conversations = group
    errors = Errors(level=0.05, own=0)
    exact = judged(Errors(0, 0), problem, conversations, in_group=True)

    def off(found: list[Scores]) -> list[float]:
        """The error of the criterion that is furthest from its ends, where nothing is cut off."""
        middle = [abs(scores.overall_momentum_score - 5) < 4 for scores in exact]
        assert sum(middle) > 2
        pairs = zip(found, exact, middle, strict=True)
        return [
            scores.overall_momentum_score - right.overall_momentum_score for scores, right, inside in pairs if inside
        ]

    together = off(judged(errors, problem, conversations, in_group=True))
    calls = enumerate(conversations)
    apart = off([judged(errors, problem, [conversation], in_group=False, call=nth)[0] for nth, conversation in calls])
    assert max(together) - min(together) < 1e-9 and abs(together[0]) > 0
    assert max(apart) - min(apart) > 0.1


def test_the_errors_have_the_size_that_the_name_says(group):
    problem, conversations = group
    right = judged(Errors(0, 0), problem, [conversations[1]], in_group=False)[0].overall_momentum_score
    for errors in (Errors(0.05, 0), Errors(0, 0.05)):
        scores = [
            judged(errors, problem, [conversations[1]], in_group=False, call=nth)[0].overall_momentum_score
            for nth in range(300)
        ]
        off = [(score - right) / 10 for score in scores if 0 < score < 10]
        assert len(off) > 250 and abs(fmean(off)) < 0.01 and 0.04 < stdev(off) < 0.06


def test_each_arm_asks_its_judge_and_nothing_else_differs(tmp_path):
    bench = NoiseBench(tmp_path, Path("models"), 24, 8053)
    configs = {}
    for arm, (errors, in_groups) in JUDGES.items():
        overrides = [*bench.overrides(Path("run")), *bench.judged_at("http://127.0.0.1:1/v1", errors, in_groups)]
        config = configs[arm] = loaded("train_rl", *overrides)
        assert Errors.of(config.judge_model.model_name_or_path) == errors
        assert (config.judge_model.mode == "group") == in_groups and config.train == configs["exact"].train


def test_the_report_has_a_line_for_each_arm_and_its_anchors():
    lines = [
        {"arm": arm, "seed": 1, "step": step, "conversations": 64 * step, "rewards": {"a": reward}, "anchors": anchors}
        for arm, anchors in (("exact", {}), ("level_group", {"judge/anchor_gap": -0.25}))
        for step, reward in ((0, 0.5), (3, 1.0))
    ]
    printed = report(lines).splitlines()
    assert printed[1].split() == ["exact", "0.00", "0.00", "154", "1.000", "1.000", "[1]"]
    assert printed[2].split()[:4] == ["level_group", "0.20", "0.10", "154"]
    assert printed[3].split() == ["judge/anchor_gap", "-0.25"]
