"""The benchmark of form, cap and outcome trains what its arms say, and prices a conversation as each of them does."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.outcome_arms import CAP, FORM, OUTCOME, OutcomeBench, report
from benchmarks.post_test import GIVES_AWAY, SCAFFOLDS, language_subject, play
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.verdicts import Scores, Verdict
from tests.support.configs import loaded


@pytest.fixture
def bench(tmp_path: Path) -> OutcomeBench:
    return OutcomeBench(tmp_path, Path("models"), 24, 8051)


def test_each_arm_pays_what_its_name_says(bench: OutcomeBench) -> None:
    configs = {}
    for arm, arm_overrides in bench.arms.items():
        overrides = [*bench.overrides(Path("run"), bench.configs.get(arm, "quickstart")), *arm_overrides]
        configs[arm] = loaded("train_rl", *overrides)
    assert {arm: config.generation.post_test.caps_pedagogical for arm, config in configs.items()} == {
        FORM: False,
        CAP: True,
        OUTCOME: True,
    }
    assert all(config.generation.post_test.enable for config in configs.values())
    assert [config.train.reward_weights for config in configs.values()][:2] == [None, None]
    assert configs[OUTCOME].train.reward_weights == {"post_test": 0.8, "pedagogical": 0.2}
    assert len({config.train.learning_rate for config in configs.values()}) == 1


@pytest.mark.parametrize(("teacher", "cap", "post_test"), [(GIVES_AWAY, 0.0, 0.0), (SCAFFOLDS, 1.0, 1.0)])
def test_a_form_is_worth_what_the_ledger_leaves_of_it(
    teacher: str, cap: float, post_test: float, bench: OutcomeBench
) -> None:
    checker = AnswerChecker(workers=1)
    try:
        records = asyncio.run(play(language_subject(4), teacher, 1, checker))
    finally:
        checker.shutdown()
    perfect = [Verdict("pedagogical_eval", 0, Scores(1, 1, 10))]
    judged = [record.model_copy(update={"verdicts": perfect}) for record in records]
    folder = bench.folder / FORM / "1"
    folder.mkdir(parents=True)
    figures = bench.figures(FORM, 1, 24, judged)
    means = {name: sum(values.values()) / len(values) for name, values in figures.items() if values}
    assert means["rewards"] == 1.0
    assert means["cap"] == cap
    assert means["post_test"] == post_test
    assert means["outcome"] == pytest.approx(0.8 * post_test + 0.2 * cap)
    # A student that is told everything makes no slip.
    assert means.get("scaffolded") == (1.0 if teacher == SCAFFOLDS else None)
    assert len((folder / "held_out.jsonl").read_text().splitlines()) == len(records)


def test_the_report_has_the_ratio_to_form_and_every_figure() -> None:
    lines = [
        {"arm": arm, "seed": 1, "step": step, "rewards": {"a": reward}}
        | dict.fromkeys(("cap", "outcome", "post_test", "scaffolded"), {"a": reward / 2})
        for arm, last in ((FORM, 20), (CAP, 10))
        for step, reward in ((0, 0.4), (last, 1.0))
    ]
    printed = report(lines).splitlines()
    assert printed[1].split() == ["form", "[1067]", "1067", "1.00", "[1.0]"]
    assert printed[2].split() == ["cap", "[533]", "533", "0.50", "[0.5]"]
    assert [line.split()[-2:] for line in printed if "post-test" in line] == [["0.500", "[0.5]"]] * 2
