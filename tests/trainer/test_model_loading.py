"""The trained model is loaded as the configuration says."""

from pathlib import Path

import pytest

from classroom_rl.errors import ConfigError
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.model_loading import load_policy
from tests.support.configs import training


@pytest.mark.parametrize(("wanted", "loaded"), [("eager", "eager"), ("sdpa", "sdpa"), ("null", "sdpa")])
def test_attention_is_computed_as_configured(tiny_model: Path, tmp_path: Path, wanted: str, loaded: str) -> None:
    config = training(f"teacher_model.model_name_or_path={tiny_model}", f"train.attn_implementation={wanted}")
    policy = load_policy(config, training_arguments(config, tmp_path))
    assert policy.model.config._attn_implementation == loaded


@pytest.mark.parametrize("name", ["flash_attention_2", "no_such_attention"])
def test_attention_that_is_not_there_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    config = training(f"teacher_model.model_name_or_path={tiny_model}", f"train.attn_implementation={name}")
    with pytest.raises(ConfigError, match=f"cannot be loaded with train.attn_implementation={name}: "):
        load_policy(config, training_arguments(config, tmp_path))
