"""What cannot be judged again is refused. The verdicts themselves are tested with the judges."""

from pathlib import Path

import pytest

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.rejudge import main, rejudge
from classroom_rl.rollout.store.journal import JOURNAL_NAME
from tests.support.configs import loaded


def config_with(judge: str) -> TrainRLConfig:
    return loaded("train_rl", f"judge_model.model_name_or_path={judge}")


def test_the_folder_of_a_training_is_needed(tmp_path: Path, capsys):
    with pytest.raises(DataError, match="name the run folder of a training"):
        rejudge(tmp_path, config_with("rubric"))
    assert main([]) == 2 and "usage: python -m classroom_rl.evaluation.rejudge" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2 and "error: " in capsys.readouterr().err


def test_the_replies_of_an_engine_are_not_kept(tmp_path: Path):
    (tmp_path / JOURNAL_NAME).touch()
    assert rejudge(tmp_path, config_with("rubric")) == []
    with pytest.raises(ConfigError, match="The judge some/model is an engine"):
        rejudge(tmp_path, config_with("some/model"))
