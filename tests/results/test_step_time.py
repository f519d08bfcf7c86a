"""Where the time of steps goes, and the advice about it: on recorded figures, and for every shipped configuration."""

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.results.run_folder import look_up
from classroom_rl.results.step_time import PHASES, advise, record_placement, time_of, time_shares
from tests.conftest import ROOT

SHIPPED = sorted(path.stem for path in (ROOT / "config/train_rl").glob("*.yaml"))


@cache
def configured(name: str, *overrides: str) -> dict:
    """A configuration as a run folder records it."""
    return yaml.safe_load(to_yaml(load(TrainRLConfig, "train_rl", ["--config-name", name, *overrides], check_train_rl)))


def line(rollout: float, publish: float, train: float, judging: float = 0.0) -> dict[str, float]:
    return {
        "seconds/rollout": rollout,
        "seconds/publish": publish,
        "seconds/train": train,
        "seconds/judging": judging,
    }


def test_shares_are_of_the_last_steps_without_the_first_one():
    repeated = {"seconds/train": 2.0}  # a second step on the same batch
    shares = time_shares([line(500, 100, 100), line(4, 1, 3, judging=3), repeated])
    assert shares == {"play": 0.1, "judging": 0.3, "publish": 0.1, "train": 0.5}
    assert time_shares([line(3, 0, 1)])["play"] == 0.75, "the first step counts if there is no other"
    lines = [line(1, 0, 0)] * 60 + [line(0, 0, 1)] * 50
    assert time_shares(lines)["train"] == 1.0
    assert time_shares([]) == {} == time_shares([{"step": 1, "loss": 0.5}])


def test_steps_of_earlier_versions_have_no_judging():
    assert time_shares([{"seconds/rollout": 3.0, "seconds/publish": 0.5, "seconds/train": 0.5}])["judging"] == 0.0


REMOTE = ("judge_model.base_url=http://127.0.0.1:9", "judge_model.model_name_or_path=a-judge")
OVERLAP = ("quickstart", *REMOTE)


@pytest.mark.parametrize(
    ("config", "placement", "recorded", "text"),
    [
        # docs/measured.md: the quickstart on 2 cores; its judge is embedded, and both programs have the same cores
        (("quickstart",), "cpu", line(126, 3, 52), None),
        # one H100 for both, in the shape of Qwen3-0.6B: the engines sleep while the trainer steps
        (
            ("maths_small",),
            "shared",
            line(5.4, 2.4, 5.3),
            "The engines wait 59 % of a step: where there are more GPUs, give server and trainer their own "
            "(--server-gpus, --trainer-gpus), and set train.max_staleness=1.",
        ),
        # the same with GPUs of its own
        (
            ("maths_small",),
            "split",
            line(5.4, 2.4, 5.3),
            "The engines wait 59 % of a step: set train.max_staleness=1, which plays the next batch meanwhile.",
        ),
        # one H100, three steps of the quickstart
        (("quickstart",), "shared", line(2.7, 0.4, 0.1), None),
        # one H200, SmolLM2-135M
        (
            ("small_tutor",),
            "shared",
            line(5, 1.2, 1.5),
            "Publishing weights takes 16 % of a step: set train.publish_through=memory, if /dev/shm has room for them.",
        ),
        # benchmarks/overlap.py: a judge that answers after 2 s took a step from 5.06 s to 3.05 s
        (
            OVERLAP,
            "cpu",
            line(4.0, 0.1, 0.96, judging=2.0),
            "Judging takes 40 % of a step: set train.max_staleness=1, which plays the next batch meanwhile.",
        ),
    ],
)
def test_advice_on_recorded_steps(config, placement, recorded, text):
    advice = advise(time_shares([recorded]), configured(*config), placement)
    assert (advice and advice.text) == text


def judging(*overrides: str, placement: str = "split") -> str | None:
    """The advice where the judge takes 70 % of a step."""
    shares = {"play": 0.15, "judging": 0.7, "publish": 0.05, "train": 0.1}
    advice = advise(shares, configured("language_tutor", *overrides), placement)
    return advice and advice.text


def test_a_judge_that_gets_few_requests_at_a_time_gets_more():
    text = "Judging takes 70 % of a step, 64 requests at a time for 128 conversations: set judge_model.max_concurrent"
    assert judging("judge_model.max_concurrent_requests=64").startswith(f"{text}_requests=128.")
    assert "16 conversations" in judging("judge_model.max_concurrent_requests=8", "judge_model.mode=group")
    assert "for 64 conv" in judging(
        "judge_model.max_concurrent_requests=8", "generation.server_urls=[http://127.0.0.1:1,http://127.0.0.1:2]"
    )


def test_a_judge_that_gets_enough_at_a_time_reads_while_the_next_batch_is_played():
    ahead = "Judging takes 70 % of a step: set train.max_staleness=1, which plays the next batch meanwhile."
    enough = "judge_model.max_concurrent_requests=128"
    assert judging(enough) == ahead
    few = "judge_model.max_concurrent_requests=64"
    assert judging(few, "judge_model.requests_per_minute=60") == ahead, "the provider takes no more"
    assert judging(enough, "dataset.curriculum=true") is None, "the next batch waits for the verdicts"
    assert judging(enough, "generation.schedule=phased") is None
    assert judging(enough, "train.importance_sampling_correction=false") is None
    assert judging(enough, placement="shared").startswith("Judging takes 70 % of a step: where there are more GPUs")


def test_a_trainer_that_waits_for_a_batch_begun_ahead_needs_more_engines():
    config = configured("maths_small", "train.max_staleness=1", "generation.colocate=false")
    advice = advise({"play": 0.5, "judging": 0.0, "publish": 0.1, "train": 0.4}, config, "split")
    assert advice.text.startswith("The trainer waits 50 % of a step") and not advice.overrides
    assert advise({"play": 0.1, "judging": 0.0, "publish": 0.1, "train": 0.8}, config, "split") is None


def test_weights_for_servers_elsewhere_stay_on_disk():
    shares = {"play": 0.5, "judging": 0.0, "publish": 0.4, "train": 0.1}
    remote_servers = "generation.server_urls=[http://10.0.0.2:8005]"
    assert advise(shares, configured("maths_small"), "split").overrides == ("train.publish_through=memory",)
    assert advise(shares, configured("maths_small", remote_servers), "split") is None
    assert advise(shares, configured("maths_small", "train.publish_through=memory"), "split") is None


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_advised_is_new_and_accepted(name):
    """For each shipped configuration, and where any phase takes most of the time."""
    config, overrides = configured(name), set()
    for placement in ("cpu", "shared", "split"):
        for largest in PHASES:
            for second in PHASES:
                shares = dict.fromkeys(PHASES, 0.05) | {second: 0.35} | {largest: 0.5}
                advice = advise(shares, config, placement)
                overrides |= set(advice.overrides) if advice is not None else set()
    for override in overrides:
        key, _, value = override.partition("=")
        assert str(look_up(config, *key.split("."))) != value
        assert str(look_up(configured(name, override), *key.split("."))) == value
    assert overrides


def test_a_run_folder_says_where_its_trainer_ran(tmp_path: Path):
    (tmp_path / "config").mkdir()
    environment = tmp_path / "config/train_rl.environment.json"
    environment.write_text('{"git_commit": "abc"}')
    lines, config = [line(5.4, 2.4, 5.3)], configured("maths_small")
    assert time_of(lines, config, tmp_path)[1] is None, "an earlier version did not record it"
    record_placement(tmp_path, "split")
    assert json.loads(environment.read_text()) == {"git_commit": "abc", "placement": "split"}
    shares, text = time_of(lines, config, tmp_path)
    assert shares["judging"] == 0.0 and "train.max_staleness=1" in text
    assert time_of(lines, {}, tmp_path)[1] is None, "nor a configuration"
