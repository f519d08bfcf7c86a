"""Every refusal of config/training_checks.py, with its words: supervision, and what PPO cannot be combined with."""

import re

import pytest

from classroom_rl.config.base import default_penalties
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.training_checks import check_supervision
from classroom_rl.errors import ConfigError
from tests.support.configs import training

RUBRIC = "supervisor_model.model_name_or_path=rubric"
MODEL = "supervisor_model.model_name_or_path=some/model"
PROMPT = "generation.supervisor.prompt_path=prompt_templates/supervisors/language_tutor.txt"
IMMEDIATE = "train.turn_credit.mode=immediate"


REFUSED = [
    ([RUBRIC, "generation.supervisor.penalties.leek=-2"], "penalties names leek, which rubric never finds; it knows "),
    ([RUBRIC, IMMEDIATE, "generation.supervisor.on_invalid=skip"], "on_invalid is skip; it must be one of observe, "),
    ([RUBRIC, "generation.supervisor.penalties.leak=2"], "penalties.leak is 2; a penalty is at most 0: write -2."),
    ([RUBRIC, "generation.supervisor.penalties.leak=-inf"], "penalties.leak is -inf; it must be a finite number."),
    ([RUBRIC, "generation.supervisor.penalties.leak=nan"], "penalties.leak is nan; it must be a finite number."),
    (
        ["generation.supervisor.on_invalid=retry", "train.turn_credit={mode: immediate, rewards: {length: 1}}"],
        "generation.supervisor.on_invalid is retry, but there is no supervisor: set supervisor_model.",
    ),
    ([MODEL], "supervisor_model is some/model, which needs a prompt: set generation.supervisor.prompt_path"),
    (
        [MODEL, PROMPT, "supervisor_model.vllm.dtype=fp16"],
        "supervisor_model.vllm.dtype is fp16; it must be one of auto",
    ),
    (
        [MODEL, PROMPT, "supervisor_model.use_openrouter=true", "supervisor_model.max_cost_usd=5"],
        "supervisor_model.max_cost_usd is 5.0; it needs supervisor_model.usd_per_million_prompt_tokens",
    ),
    (
        [MODEL, PROMPT, "supervisor_model.use_openrouter=true", "supervisor_model.deadline_s=3600"],
        "supervisor_model.deadline_s is 3600; it must be less than generation.sample_timeout_s",
    ),
    ([RUBRIC, "train.turn_credit.mode=sum"], "train.turn_credit.mode is sum; it must be one of none, immediate, to_go"),
    (
        [RUBRIC, "train.turn_credit={mode: immediate, rewards: {kindness: 1}}"],
        "train.turn_credit.rewards names kindness; there are: supervisor, ",
    ),
    (
        [RUBRIC, "train.turn_credit={mode: immediate, rewards: {supervisor: inf}}"],
        "train.turn_credit.rewards.supervisor is inf; it must be a finite number.",
    ),
    (
        [IMMEDIATE],
        "train.turn_credit.mode is immediate, which pays the supervisor's penalties, and there is no supervisor: set "
        "supervisor_model.model_name_or_path, or name turn rewards that need none in train.turn_credit.rewards (",
    ),
    (
        ["train.turn_credit={mode: to_go, rewards: {length: 1, supervisor: 1}}"],
        "train.turn_credit.mode is to_go, which pays the supervisor's penalties",
    ),
    ([RUBRIC, "train.corrections.mode=sft"], "train.corrections.mode is sft; it must be one of none, same_step, pass"),
    *(
        ([f"train.corrections.mode={mode}"], f"train.corrections.mode is {mode}, but nobody writes corrections: set ")
        for mode in ("same_step", "pass")
    ),
    *(
        (
            [RUBRIC, f"generation.supervisor.on_invalid={action}"],
            f"generation.supervisor.on_invalid is {action}, but nothing is learned from what the supervisor rejects",
        )
        for action in ("retry", "replace")
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_a_supervision_that_cannot_be_is_refused_with_the_fix(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        training(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [RUBRIC],
        [RUBRIC, "generation.supervisor.penalties.leak=0"],
        [MODEL, PROMPT, "generation.supervisor.penalties.rude=-1"],
        [RUBRIC, IMMEDIATE, "generation.supervisor.on_invalid=retry"],
        [RUBRIC, "train.corrections.mode=pass", "generation.supervisor.on_invalid=replace"],
        ["train.turn_credit={mode: progress, rewards: {length: 1, judge: 0.5}}"],
        [MODEL, PROMPT],
    ],
)
def test_a_supervision_that_can_be_loads(overrides: list[str]) -> None:
    training(*overrides)


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ([RUBRIC], {}),
        ([RUBRIC, IMMEDIATE], {"supervisor": 1.0}),
        ([RUBRIC, "train.turn_credit={mode: immediate, rewards: {length: 2}}"], {"length": 2.0}),
    ],
)
def test_turn_rewards_are_the_penalties_unless_others_are_named(overrides: list[str], weights: dict) -> None:
    assert training(*overrides).train.turn_credit.weights == weights


def test_a_file_that_leaves_out_penalties_keeps_their_default_and_a_program_must_name_all() -> None:
    config = training(RUBRIC, "generation.supervisor.penalties={leak: -9}")
    assert config.generation.supervisor.penalties == default_penalties() | {"leak": -9.0}
    del config.generation.supervisor.penalties["leak"]
    with pytest.raises(ConfigError, match=r"penalties lacks leak: give each a number, 0 for one that costs nothing\."):
        check_train_rl(config)


@pytest.mark.parametrize("base", ["quickstart", "language_tutor"])
def test_the_shipped_supervised_files_change_nothing_but_the_supervision(base: str) -> None:
    plain = training(f"--config-name={base}")
    supervised = f"--config-name={base}_supervised"
    assert training(supervised).logging.save_dir == f"{plain.logging.save_dir}_supervised", "its own run"
    shipped = training(supervised, f"logging.save_dir={plain.logging.save_dir}")
    assert shipped.supervisor_model is not None and plain.supervisor_model is None
    shipped.supervisor_model = None
    for name in ("turn_credit", "corrections"):
        setattr(shipped.train, name, getattr(plain.train, name))
    shipped.generation.supervisor = plain.generation.supervisor
    shipped.logging.wandb_run_name = plain.logging.wandb_run_name
    # The quickstart needs fewer steps when it is supervised; its rate stays the one that docs/supervision.md measured.
    for name in ("max_steps", "learning_rate", "lr_scheduler_type") if base == "quickstart" else ():
        setattr(shipped.train, name, getattr(plain.train, name))
    assert shipped == plain


def test_the_supervised_language_tutor_has_a_cap_that_can_be_kept() -> None:
    config = training("--config-name=language_tutor_supervised")
    model, supervision, train = config.supervisor_model, config.generation.supervisor, config.train
    assert model.is_remote and model.max_cost_usd > 0
    assert model.usd_per_million_prompt_tokens > 0 and model.usd_per_million_completion_tokens > 0
    assert supervision.on_invalid == "observe" and supervision.prompt_path.endswith("supervisors/language_tutor.txt")
    assert train.turn_credit.mode == "immediate"
    corrections = train.corrections
    assert (corrections.mode, corrections.interval, corrections.min_examples) == ("pass", 25, 10)
    assert (corrections.epochs, corrections.learning_rate) == (1, 1e-5)


def test_an_environment_that_asks_no_supervisor_gets_none() -> None:
    config = training(RUBRIC)
    config.environment = "tests.support.guessing"
    with pytest.raises(ConfigError, match="environment tests.support.guessing asks no supervisor: leave supervisor_mo"):
        check_supervision(config)


PPO = "train.algorithm=ppo"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.loss_type=cispo"], r"train\.loss_type is cispo, which says which loss GRPO has; .* set it to dapo"),
        (["train.scale_rewards=none"], r"train\.scale_rewards is none, .*compares the conversations of a group"),
        (["train.normalise_per_criterion=true"], r"criterion is True, .*compares the conversations of a group"),
        (["train.reward_step=0.1"], r"train\.reward_step is 0\.1, .*compares the conversations of a group"),
        ([RUBRIC, "train.corrections.mode=same_step"], r"corrections\.mode is same_step, which .*ppo cannot"),
        (
            [RUBRIC, IMMEDIATE, "generation.supervisor.on_invalid=retry"],
            r"on_invalid is retry, but train\.algorithm=ppo does not train on rejected drafts: .*on_invalid=observe",
        ),
        ([RUBRIC, "train.turn_credit.mode=to_go"], r"turn_credit\.mode is to_go; .* none or immediate"),
        (["train.mu=1", "train.ppo.target_kl=0.02"], r"target_kl is 0\.02, but train\.mu is 1: .*Set train\.mu to 2"),
        (["train.max_steps=5", "train.ppo.value_warmup_steps=5"], r"warmup_steps is 5 and train\.max_steps 5"),
    ],
)
def test_what_does_not_go_with_ppo_is_refused_and_goes_with_grpo(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training(PPO, *overrides)
    assert training(*overrides).train.algorithm == "grpo"


def test_a_scale_that_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="scale_rewards is batch, which has no effect on train.normalise_per_crit"):
        training("train.normalise_per_criterion=true", "train.scale_rewards=batch")


def test_what_goes_with_ppo() -> None:
    limits = ["train.ppo.target_kl=0.02", "train.ppo.value_warmup_steps=5"]
    config = training(PPO, "train.mu=2", "train.max_steps=6", *limits)
    assert config.train.ppo.target_kl == 0.02 and config.train.ppo.value_warmup_steps == 5
    priced = training(PPO, RUBRIC, IMMEDIATE)
    assert priced.train.turn_credit.mode == "immediate"
    assert training("--config-name=quickstart_ppo").train.algorithm == "ppo"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.mu=2"], r"train\.mu is 2; with train\.algorithm=online_dpo it is 1, .*: set train\.mu=1"),
        (["train.loss_type=cispo"], r"train\.loss_type is cispo, .* set it to dapo"),
        (["train.scale_rewards=none"], r"train\.scale_rewards is none, .*algorithm=online_dpo has no use for it"),
        (["train.normalise_per_criterion=true"], r"train\.normalise_per_criterion is True, "),
        (["train.epsilon=0.1"], r"train\.epsilon is 0\.1, which says how far ratios of probabilities may move"),
        (["train.importance_sampling_mode=token_mask"], r"sampling_mode is token_mask, which says how ratios"),
        (["train.ppo.target_kl=0.1", "train.mu=1"], r"train\.ppo\.target_kl is 0\.1, which says something of PPO"),
        (["train.ppo.train_trunk=false"], r"train\.ppo\.train_trunk is False, which says something of PPO alone"),
        (["train.distillation.model=strong"], r"distillation\.model is strong, which says whose log-probs are added"),
        (["train.beta=0.05"], r"train\.beta is 0\.05, which says how much the KL .*beside a loss"),
        ([RUBRIC, IMMEDIATE], r"turn_credit\.mode is immediate, which says what single messages are credited with"),
        ([RUBRIC, "train.corrections.mode=pass"], r"mode is pass, which train\.algorithm=online_dpo cannot"),
    ],
)
def test_what_does_not_go_with_online_dpo_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training("train.algorithm=online_dpo", *overrides)


def test_what_goes_with_online_dpo() -> None:
    options = ["judge_model.mode=absolute", "train.reward_step=0.1", "train.groups_without_variance=resample"]
    config = training("--config-name=quickstart_online_dpo", *options, "train.shuffle_rewards=true")
    assert config.train.algorithm == "online_dpo" and config.train.has_reference and config.train.beta == 0
    plain = training("--config-name=quickstart")
    assert not plain.train.has_reference
    assert training("train.algorithm=online_dpo", "train.beta=0.001").train.online_dpo.beta == 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.distillation.kl=jsd"], r"distillation\.kl is jsd, but there is no strong tutor to compare the model"),
        (["train.distillation.top_k=5"], r"distillation\.top_k is 5, but there is no strong tutor to compare"),
        (["train.distillation.top_k=0"], r"distillation\.top_k is 0; it must be at least 1"),
        (["train.distillation.weight=0"], r"distillation\.weight is 0.*; it must be above 0"),
        ([], r"prompt_path is more\.txt, but there is no strong tutor to read it"),
        (["train.distillation.model=strong", "--config-name=marooned"], "environment marooned has no prompt in"),
        (["train.distillation.model=strong", "train.groups_without_variance=drop"], "learns from the strong"),
    ],
)
def test_what_does_not_go_with_distillation_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training("train.distillation.prompt_path=more.txt", *overrides)
