"""Judge calls through a misbehaving endpoint: no verdict that nobody gave, nothing paid twice, nothing over the cap."""

from tests.chaos.judge_calls import JudgeCalls, wrong_in
from tests.chaos.judge_faults import FAULTS


def test_300_calls_through_a_misbehaving_endpoint(tokenizer, tmp_path):
    tally = JudgeCalls(tokenizer, tmp_path, 300, seed=3, speed=None).play()
    assert wrong_in(tally) == []
    assert tally.calls.total() >= 300 and 0.2 < tally.faults / tally.calls.total() < 0.4
    assert set(FAULTS) <= set(tally.calls), "each kind of fault was met"
    assert tally.stops["the cap is reached"] and tally.stops["redirect"]
