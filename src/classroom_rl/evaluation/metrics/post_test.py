"""Figures of post-tests: what the student knows after the lesson, without the transcript. Intervals are over
problems."""

from collections.abc import Sequence

from classroom_rl.environments.classroom.metrics import post_test_shares
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.rollout.intervals import Estimate, mean_with_ci

POST_TEST = "post_test"
"""The key of these figures in metrics.json."""

POST_TEST_LABELS: dict[str, tuple[str, int]] = {
    "knew": ("Post-test: known before the lesson (ledger)", 0),
    "ledger": ("Post-test: known after it (ledger)", 1),
    "learned": ("Of what was not known before, known after (ledger)", 1),
    "given": ("Of the items, given away by the teacher", -1),
    "student": ("Post-test: the student's model answers right", 1),
}
"""Figure → its label in tables, and whether higher is better (+1), worse (−1), or neither (0)."""


def post_test_by_problem(records: Sequence[ConversationRecord]) -> dict[str, dict[str, list[float]]]:
    """Figure → problem → one value for each conversation that has it; figures as in
    `classroom_rl.environments.classroom.metrics.post_test_metrics`."""
    values_of_figures: dict[str, dict[str, list[float]]] = {}
    for problem, group in group_by_problem(records).items():
        for test in (record.post_test for record in group if record.post_test is not None):
            for name, value in post_test_shares(test).items():
                values_of_figures.setdefault(name, {}).setdefault(problem, []).append(value)
    return values_of_figures


def post_test_figures(records: Sequence[ConversationRecord]) -> dict[str, Estimate]:
    """The part of metrics.json about post-tests: each figure's mean over conversations; {} without post-tests."""
    return {name: mean_with_ci(values) for name, values in post_test_by_problem(records).items()}
