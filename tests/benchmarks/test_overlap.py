"""The benchmark of playing ahead: what its arms differ in, that its judge takes its time, what its report compares."""

import json
import time
from pathlib import Path

from benchmarks.group_judge_noise import RULE, Errors
from benchmarks.overlap import OverlapBench, answers_after, ceilings, played_and_judged, report
from classroom_rl.judges.verdicts import answer_schema
from classroom_rl.results.run_folder import METRICS_NAME
from classroom_rl.rollout.store.journal import Journal
from tests.support.configs import loaded
from tests.support.judge_endpoint import Call, Exchange


def test_arms_differ_in_nothing_but_staleness(tmp_path: Path) -> None:
    bench = OverlapBench(tmp_path, Path("models"), 24, 8057)
    judge = bench.judged_at("http://127.0.0.1:1/v1", Errors(0, 0), in_groups=False)
    configs = {
        arm: loaded("train_rl", *bench.overrides(Path("run")), *arm_overrides, *judge)
        for arm, arm_overrides in bench.arms.items()
    }
    assert {arm: config.train.max_staleness for arm, config in configs.items()} == {
        "waits_2": 0,
        "overlaps_2": 1,
        "waits_0.5": 0,
        "overlaps_0.5": 1,
    }
    for config in configs.values():
        config.train.max_staleness = 0
    assert len({repr(config) for config in configs.values()}) == 1


def test_the_judge_answers_after_its_delay_and_not_before(lessons: list[str]) -> None:
    prompt = json.dumps({"problem": lessons[0], "conversations": [[{"role": "teacher", "content": "Hello."}]]})
    body = {
        "model": Errors(0, 0).model,
        "messages": [{"role": "user", "content": prompt}],
        "response_format": {"json_schema": {"schema": answer_schema(RULE)}},
    }
    sent_at: list[float] = []
    exchange = Exchange(None, Call(0.0, body, None), None)
    exchange.send = lambda status, reply: sent_at.append(time.monotonic())
    began = time.monotonic()
    answers_after(0.3)(body, 0)(exchange)
    assert sent_at[0] - began >= 0.3 and exchange.call.behaviour == "says"


def test_a_steps_time_is_that_between_lines_without_the_first_ones(tmp_path: Path) -> None:
    bench = OverlapBench(tmp_path, Path("models"), 24, 8057)
    folder = tmp_path / "waits_2" / "1"
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "reward": 0.5, "time": seconds, "seconds/rollout": 4.0 + step, "seconds/train": 1.0}
        for step, seconds in enumerate((0.0, 50.0, 90.0, 96.0, 102.0, 108.0), start=1)
    ]
    (folder / METRICS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = Journal(folder)
    for batch in range(3):
        journal.append("batch", request=f"r{batch}")
        for event in ("turn", "conversation"):
            journal.append(event, conversation=f"r{batch}-0000")
    figures = bench.figures("waits_2", 1, 6, [])
    assert (figures["seconds"], figures["rollout"], figures["train"]) == (6.0, 8.5, 1.0)


def test_playing_ends_with_the_last_message_and_judging_with_the_last_conversation(tmp_path: Path) -> None:
    lines = [
        {"event": "batch", "time": 10.0, "request": "r"},
        {"event": "turn", "time": 11.0, "conversation": "r-0000"},
        {"event": "turn", "time": 12.5, "conversation": "r-0001"},
        {"event": "conversation", "time": 12.0, "conversation": "r-0000"},
        {"event": "batch", "time": 13.0, "request": "next"},
        {"event": "turn", "time": 13.5, "conversation": "next-0000"},
        {"event": "conversation", "time": 14.5, "conversation": "r-0001"},
    ]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert played_and_judged(path) == [(2.5, 2.0)], "a batch that was not finished does not count"


def test_ceilings_of_a_step_by_hand() -> None:
    assert ceilings(6.0, 3.0, 2.0) == (1.5, 2.0)
    assert ceilings(6.0, 1.0, 4.0) == (2.0, 2.0), "no batch is older than one"
    assert ceilings(6.0, 4.0, 1.0) == (1.2, 1.5)


def test_the_report_has_the_ratio_its_ceiling_and_the_difference_in_reward() -> None:
    arms = {"waits_2": (8.0, 0.9), "overlaps_2": (5.0, 0.8)}
    lines = [
        {
            "arm": arm,
            "seed": seed,
            "step": step,
            "seconds": seconds,
            "play": 4.0,
            "judge": 2.0,
            "rewards": {"a": reward, "b": reward + 0.1},
        }
        for arm, (seconds, reward) in arms.items()
        for seed in (1, 2)
        for step in (0, 24)
    ]
    printed = report(lines)
    assert (
        "1.60 x as fast (at most 1.33 on shared cores, 2.00 on cores of their own: 4.00 s" in printed
        and "reward -0.100 (n = 4)" in printed
    )
    assert "waits    8.00, 8.00 s; held-out reward after 24 steps 0.950" in printed
    assert report(lines[:4]) == "", "without both arms of a seed there is nothing to compare"
