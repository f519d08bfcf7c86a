"""How an environment is found, and what it adds to a configuration and a request."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.dialogue import DialogueEpisode
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import ENVIRONMENTS, Play, environment_of
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.tokens import Turn

GUESSING = ("--config-dir", str(ROOT / "tests/support/guessing"), "--config-name", "guessing")


def test_an_environment_s_own_keys_and_checks_count() -> None:
    assert load(TrainRLConfig, "train_rl", [*GUESSING, "generation.largest=3"]).generation.largest == 3
    for key in ("smallest", "student_names"):
        with pytest.raises(ConfigError, match=f"no config key generation.{key}"):
            load(TrainRLConfig, "train_rl", [*GUESSING, f"generation.{key}=[]"])


def test_an_environment_is_found_by_its_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is .guessing.; there are classroom, marooned, agent, and every package"):
        load(TrainRLConfig, "train_rl", [*GUESSING, "environment=guessing"])
    monkeypatch.setitem(ENVIRONMENTS, "guessing", "tests.support.guessing")
    config = load(TrainRLConfig, "train_rl", [*GUESSING, "environment=guessing"])
    assert environment_of(config).__module__ == "tests.support.guessing.environment"


@pytest.mark.parametrize("program", ["train", "server"])
def test_its_dry_run_works(program: str, world: Path, tmp_path: Path, capsys) -> None:
    problems = tmp_path / "numbers.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"game {n}", "answer": f"{n}"}) + "\n" for n in range(8)))
    files = (
        f"teacher_model.model_name_or_path={world / 'blank'}",
        f"dataset.train_datasets=[{{name_or_path: {problems}}}]",
    )
    config = load(TrainRLConfig, "train_rl", [*GUESSING, *files], check_train_rl)
    import_module(f"classroom_rl.launch.{program}").more_of_dry_run(config)
    assert "8 × 16 = 128" in capsys.readouterr().out


def test_an_evaluation_of_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("environment: tests.support.guessing", encoding="utf-8")
    with pytest.raises(ConfigError, match="environment is tests.support.guessing, but eval.py measures the tutors"):
        load(EvalConfig, "eval", ["--config-dir", str(tmp_path), "--config-name", "mine"], check_eval)


# Seeds of a request --------------------------------------------------------------------------------------------------


def sampling_of(sample_index: int, answers: int, **changes) -> Sampling:
    """The sampling of the next answer of an episode, in a request with these changes."""
    request = SampleRequest(
        **{"problems": ["p"], "answers": [""], "request_id": "r", "seed": 1, "step": 2, "fixed_seeds": True} | changes
    )
    episode = DialogueEpisode("r-0000", Problem.of("p"), turns=[Turn("teacher", "Hi.")] * answers)
    return Play(episode, request, 0, sample_index, "", False).sampled_with(Sampling(1.0))


def test_a_fixed_seed_depends_on_seed_step_sample_and_answers_so_far() -> None:
    first = sampling_of(0, 0)
    assert first.draw == ("r-0000", 0) and sampling_of(0, 0) == first
    others = [sampling_of(1, 0), sampling_of(0, 1), sampling_of(0, 0, seed=3), sampling_of(0, 0, step=3)]
    assert len({sampling.seed for sampling in [first, *others]}) == 5
    assert sampling_of(0, 0, fixed_seeds=False).seed is None
