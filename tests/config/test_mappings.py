"""Mappings of names replace those below them, and a plus adds."""

from pathlib import Path

import pytest

from classroom_rl.errors import ConfigError
from tests.support.configs import BASE, loaded_text, own_file, training

RULES, PERSONAS = "generation.judges_rules_prompts_paths", "generation.student_personas_prompts_paths"
GROUP_TEMPLATES = "judge_model.group_prompts_paths"
SHIPPED_RULES = ["does_not_leak_answer", "follows_pedagogical_values"]


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        ([RULES + "={one_hint: a.txt}"], ["one_hint"]),
        (["+generation={judges_rules_prompts_paths: {one_hint: a.txt}}"], ["one_hint"]),
        ([RULES + "={+one_hint: a.txt}"], [*SHIPPED_RULES, "one_hint"]),
        ([RULES + ".one_hint=a.txt"], [*SHIPPED_RULES, "one_hint"]),
        ([f"~{RULES}.does_not_leak_answer", RULES + ".one_hint=a.txt"], [SHIPPED_RULES[1], "one_hint"]),
        ([RULES + "={one: a.txt}", RULES + ".two=b.txt", RULES + "={+three: c.txt}"], ["one", "two", "three"]),
        ([RULES + ".two=b.txt", RULES + "={one: a.txt}"], ["one"]),
    ],
)
@pytest.mark.parametrize("name", ["7b", "maths_small"])
def test_a_mapping_replaces_the_one_below_it_and_a_plus_adds(overrides: list[str], rules: list[str], name: str):
    assert list(training(f"--config-name={name}", *overrides).generation.judge_rules) == rules


@pytest.mark.parametrize(
    ("overrides", "templates"),
    [
        ([GROUP_TEMPLATES + "={mine: a.txt}"], ["mine"]),
        ([GROUP_TEMPLATES + "={+mine: a.txt}"], ["pedagogical_eval", "mine"]),
        ([GROUP_TEMPLATES + ".mine=a.txt"], ["pedagogical_eval", "mine"]),
        ([GROUP_TEMPLATES + "={gone: a.txt}", f"~{GROUP_TEMPLATES}"], ["pedagogical_eval"]),
    ],
)
def test_a_mapping_replaces_the_default_of_the_schema_too(overrides: list[str], templates: list[str]):
    assert list(training(*overrides).judge_model.group_prompts_paths) == templates


def test_a_file_replaces_the_mappings_of_the_file_that_it_builds_on(tmp_path: Path):
    """Personas, their weights (a key of any type) and rewards, over one more file of the user's own."""
    first = (
        "defaults: [language_tutor, _self_]\n"
        "train: {reward_weights: {pedagogical: 1.0}}\n"
        "generation: {student_error_rate: {correct_student: 1, error_student: 1}}\n"
    )
    second = (
        "defaults: [first, _self_]\n"
        "train: {reward_weights: {+length: 0.5}}\n"
        "generation:\n  student_personas_prompts_paths: {shy: prompt_templates/personas/simple_student.txt}\n"
        "  student_error_rate: {shy: 1}\n"
    )
    own_file(tmp_path, first, "first")
    arguments = own_file(tmp_path, second, "second")
    config = training(*arguments)
    assert list(config.generation.student_personas_prompts_paths) == ["shy"]
    assert config.generation.student_error_rate == {"shy": 1}
    assert config.train.reward_weights == {"pedagogical": 1.0, "length": 0.5}
    assert training(*arguments, "train.reward_weights={length: 1.0}").train.reward_weights == {"length": 1.0}


def test_names_with_and_without_a_plus_are_not_mixed():
    with pytest.raises(ConfigError, match=rf"{RULES} has \+a, b: names with a plus add .* Give all of them a plus"):
        training(RULES + "={+a: x, b: y}")


def test_a_mapping_that_stands_for_another_one_stays_as_hydra_makes_it(tmp_path: Path):
    same = "judge_model: {group_prompts_paths: '${generation.judges_rules_prompts_paths}'}\n"
    config = loaded_text(tmp_path, BASE + same)
    assert config.judge_model.group_prompts_paths == config.generation.judges_rules_prompts_paths
