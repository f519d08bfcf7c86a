"""Functions of one's own by name: what is found, and what a wrong name is answered."""

import sys
from pathlib import Path

import pytest

from classroom_rl.errors import ConfigError
from classroom_rl.system.functions import function_of
from tests.support.configs import own_file, training
from tests.support.own_rewards import brevity

OWN = "tests.support.own_rewards"


def test_a_function_is_found_by_its_name() -> None:
    assert function_of("key", f"{OWN}:brevity", ()) is brevity


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("brefity", "key names brefity; there are: length, and functions of your own as package.module:function."),
        ("lenght", "key names lenght; did you mean length?"),
        (f"{OWN}:brefity", f"did you mean brevity? {OWN} has: Conversation, brevity,"),
        (f"{OWN}:LONGEST", "which is no function, but a int"),
        ("tests.gone.rewards:brevity", "there is no module tests.gone: set PYTHONPATH"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        function_of("key", name, ["length"])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [("1 / 0", "division by zero"), ("import gone_library", "No module named 'gone_library'")],
)
def test_a_module_that_cannot_be_imported_says_why(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_broken_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"some_broken_rewards cannot be imported: .*{message}"):
        function_of("key", "some_broken_rewards:brevity", ())
    sys.modules.pop("some_broken_rewards", None)


WEIGHTS = {"pedagogical": 1.0, f"{OWN}:brevity": 0.5}
TURN_REWARDS = f"train.turn_credit.rewards={{{OWN}:brevity_of_messages: 1}}"


@pytest.mark.parametrize(
    ("overrides", "weights", "turn_weights"),
    [
        ([f"train.reward_weights={{pedagogical: 1.0, {OWN}:brevity: 0.5}}"], WEIGHTS, {}),
        ([f"train.reward_weights={{+pedagogical:1,+{OWN}:brevity:0.5}}"], WEIGHTS, {}),
        (["train.turn_credit.mode=immediate", TURN_REWARDS], None, {f"{OWN}:brevity_of_messages": 1.0}),
    ],
)
def test_a_command_line_names_it_in_a_mapping(overrides: list[str], weights, turn_weights) -> None:
    train = training(*overrides).train
    assert (train.reward_weights, train.turn_credit.rewards) == (weights, turn_weights)


@pytest.mark.parametrize("text", ["{{pedagogical: 1.0, {}: 0.5}}", "\n    pedagogical: 1.0\n    {}: 0.5"])
def test_a_file_names_it_with_or_without_braces(text: str, tmp_path: Path) -> None:
    weights = text.format(f"{OWN}:brevity")
    text = f"defaults: [quickstart, _self_]\ntrain:\n  reward_weights: {weights}\n"
    config = training(*own_file(tmp_path, text))
    assert config.train.reward_weights == WEIGHTS


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"train.reward_weights={{{OWN}:brefity: 1}}"], "train.reward_weights names .* did you mean brevity"),
        (["train.reward_weights={pedagogcal: 1}"], "train.reward_weights names pedagogcal; did you mean pedagogical"),
        (
            ["train.turn_credit.mode=immediate", f"train.turn_credit.rewards={{{OWN}:brefity: 1}}"],
            "train.turn_credit.rewards names .* did you mean brevity",
        ),
        ([f"train.loss_type={OWN}:brefity"], "train.loss_type names .* did you mean brevity"),
        (  # an environment that takes no functions
            ["--config-name=marooned", f"train.reward_weights={{{OWN}:brevity: 1}}"],
            "names tests.support.own_rewards:brevity; there are: return, ",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training(*overrides)
