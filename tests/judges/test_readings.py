"""What is known of trained readers, and which configurations may name them."""

import json
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.moves.stored import load_readers
from classroom_rl.judges.readings import Trust
from classroom_rl.server.open_models import embedded_judge, open_readers
from tests.support.configs import loaded
from tests.support.scripted_readers import TRUST


@pytest.mark.parametrize("trust", [TRUST, Trust(0.5, None, 0.25, 100, 20, "a set", "rules")])
def test_trust_survives_json(trust: Trust):
    assert Trust.of_json(json.loads(json.dumps(trust.as_json()))) == trust
    assert str(trust).startswith("κ 0.50") and ("[0.40, 0.60]" in str(trust)) == (trust.ci95 is not None)


def test_a_configuration_opens_the_readers_of_a_folder(folder: Path):
    readers = open_readers(GenerationConfig(readers_path=str(folder)))
    assert readers.version == load_readers(folder).version and set(readers.trust) == set(RULES)
    assert embedded_judge("rules", readers)
    assert open_readers(GenerationConfig()) is None


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="name the folder that python -m classroom_rl.judges.moves.train wrote"):
        open_readers(GenerationConfig(readers_path=str(tmp_path)))


def test_without_readers_a_batch_is_what_it_was():
    assert "readers_path" not in GenerationConfig().identity()
    assert GenerationConfig(readers_path="mine").identity()["readers_path"] == "mine"


@pytest.mark.parametrize(
    "overrides",
    [
        ("judge_model.model_name_or_path=rules",),
        ("supervisor_model.model_name_or_path=rules",),
        ("guards.held_out_judge_model.model_name_or_path=rules", "guards.judge_check_every_n_steps=2"),
    ],
)
def test_a_training_that_reads_by_rules_takes_readers(overrides: tuple[str, ...]):
    loaded("train_rl", "generation.readers_path=mine", *overrides)


@pytest.mark.parametrize("overrides", [(), ("supervisor_model.model_name_or_path=rubric",)])
def test_a_training_in_which_nobody_reads_by_rules_refuses_them(overrides: tuple[str, ...]):
    with pytest.raises(ConfigError, match="generation.readers_path is mine, but nobody here reads by rules"):
        loaded("train_rl", "generation.readers_path=mine", *overrides)
