"""Which config keys may change when a training resumes, and the files that they name. Each either takes effect from the
checkpoint on, which is logged, or must stay as it was."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from classroom_rl.config.load import to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.problem import Problem
from classroom_rl.system.shipped import as_written
from classroom_rl.trainer.contents import (
    PROBLEMS,
    Contents,
    contents_of,
    differences,
    fingerprint_of,
    read_contents,
    refusal,
    unknown,
    write_contents,
)

MADE_WITH = "train_rl.yaml"
"""The file in a checkpoint's folder with the configuration that it was made with."""
_ORDER = "which problems a step takes follows from it"
_BATCH = "steps are counted in batches of this size"
_STATE = "the checkpoint holds a state for this one"
_WEIGHTS = "the checkpoint holds the weights of this one"
_DATA = "dataset.train_datasets"
_ENVIRONMENT = "the weights were trained in that environment"
FIXED = {
    "environment": _ENVIRONMENT,
    "generation.trained_role": "the weights are those of this role",
    "seed": _ORDER,
    "skip_first_samples": _ORDER,
    _DATA: _ORDER,
    "dataset.max_train_examples": _ORDER,
    "train.number_of_problems_per_batch": _BATCH,
    "train.num_samples_per_problem": _BATCH,
    "train.mu": _BATCH,
    "train.algorithm": _STATE,
    "train.ppo.head": _STATE,
    "train.optimizer": _STATE,
    "train.dtype": _STATE,
    "teacher_model.model_name_or_path": _WEIGHTS,
    "teacher_model.lora.enable": _WEIGHTS,
    "teacher_model.lora.rank": _WEIGHTS,
    "teacher_model.lora.alpha": _WEIGHTS,
    "teacher_model.lora.target_modules": _WEIGHTS,
    "teacher_model.lora.dropout": _WEIGHTS,
    "teacher_model.lora.bias": _WEIGHTS,
    "teacher_model.load_in_4bit": _WEIGHTS,
}
"""The keys that must keep their value, and why. Of a trained student also its model's name."""
TAKES_EFFECT = frozenset(
    f"train.{key}"
    for key in (
        "per_device_train_batch_size learning_rate lr_scheduler_type epochs max_steps beta epsilon epsilon_high "
        "max_tokens_per_micro_batch groups_without_variance resample_up_to max_staleness publish_through "
        "publish_to_disk_every loss_type scale_rewards normalise_per_criterion reward_step "
        "max_grad_norm gradient_checkpointing attn_implementation "
        "padding_free use_liger_kernel activation_offloading grad_accum_fp32 "
        "reward_weights shuffle_rewards importance_sampling_level importance_sampling_correction "
        "importance_sampling_mode importance_sampling_clip_max keep_published_policies gpu_memory_gib "
        "turn_credit.mode turn_credit.weight turn_credit.gamma turn_credit.rewards turn_credit.shuffle "
        "corrections.mode corrections.weight corrections.interval corrections.min_examples corrections.epochs "
        "corrections.learning_rate corrections.max_kl corrections.capacity corrections.replay "
        "corrections.rows_per_batch corrections.pass_batch_size corrections.targets ppo.gamma ppo.lam ppo.value_lam "
        "ppo.gae_over ppo.whiten_advantages ppo.bootstrap_truncated ppo.value_learning_rate ppo.value_weight "
        "ppo.center_values ppo.value_clip ppo.train_trunk ppo.value_warmup_steps ppo.entropy_weight ppo.target_kl "
        "online_dpo.beta distillation.model distillation.weight distillation.kl distillation.top_k "
        "distillation.prompt_path distillation.base_url distillation.api_key_env"
    ).split()
) | {"supervisor_model", "dataset.curriculum"}
"""The keys of `train`, of the data, and those at the top, that may change. So may all keys of playing, judging,
supervising and reporting: no checkpoint depends on them. What a checkpoint keeps of corrections, its cursor, is a
number of a step: it means the same in every mode and with every interval."""
_NOT_COMPARED = ("dry_run", "logging.save_dir")


def _fixed(config: TrainRLConfig) -> Mapping[str, str]:
    trains_student = config.policy_model is not config.teacher_model
    return FIXED | ({"student_model.model_name_or_path": _WEIGHTS} if trains_student else {})


def contents_at_start(config: TrainRLConfig, problems: Sequence[Problem]) -> Contents:
    """What a training that begins now is made from: its problems, and the files that its configuration names."""
    return contents_of(yaml.safe_load(to_yaml(config))) | {PROBLEMS: {_DATA: {"": fingerprint_of(problems)}}}


def write_config(checkpoint: Path, config: TrainRLConfig, contents: Contents) -> None:
    """Write the configuration, and what the files that it names held, into a checkpoint's folder."""
    (checkpoint / MADE_WITH).write_text(to_yaml(config), encoding="utf-8")
    write_contents(checkpoint, contents)


def check_resume(run_folder: Path, config: TrainRLConfig) -> list[str]:
    """Compare a configuration with that of the last checkpoint.

    Returns:
        Descriptions of the changes, which take effect from the checkpoint on, also of those in the files that it names;
        empty without a checkpoint.

    Raises:
        ConfigError: if a key in `FIXED` differs, or what its files hold; with the reason and what to do. If the
            checkpoint has made more steps than are configured.
        DataError: if problems that have changed cannot be read.
    """
    last_checkpoint = _last_checkpoint(run_folder)
    if last_checkpoint is None:
        return []
    checkpoint, step = last_checkpoint
    max_steps = config.train.max_steps
    if 0 < max_steps < step:
        raise ConfigError(
            f"{checkpoint} has made {step} steps already, and train.max_steps is {max_steps}: raise it, or give a new "
            "run another folder, logging.save_dir=…"
        )
    if not (checkpoint / MADE_WITH).is_file():
        return [f"{checkpoint} does not say what it was made with ({MADE_WITH}): what has changed since is not noticed"]
    made_with = yaml.safe_load((checkpoint / MADE_WITH).read_text(encoding="utf-8"))
    changes = _changes(made_with, yaml.safe_load(to_yaml(config)))
    fixed = _fixed(config)
    wrong = [f"{key} was {old} and is {new} now ({fixed[key]})" for key, old, new in changes if key in fixed]
    if wrong:
        raise ConfigError(refusal(checkpoint, wrong))
    descriptions = [f"{key} changes from {old} to {new} after step {step}" for key, old, new in changes]
    return [*descriptions, *_changed_contents(checkpoint, step, config)]


def check_problems(run_folder: Path, problems: Sequence[Problem]) -> None:
    """Check that a training resumes on the problems that it began with, wherever they come from.

    Raises:
        ConfigError: if the last checkpoint was made with others.
    """
    last_checkpoint = _last_checkpoint(run_folder)
    recorded = read_contents(last_checkpoint[0]).get(PROBLEMS) if last_checkpoint is not None else None
    if recorded is not None and recorded != {_DATA: {"": fingerprint_of(problems)}}:
        raise ConfigError(refusal(last_checkpoint[0], [_other_problems(recorded, problems)]))


def _changed_contents(checkpoint: Path, step: int, config: TrainRLConfig) -> Iterator[str]:
    """Descriptions of the files that have changed since a training began, where that is allowed."""
    before = read_contents(checkpoint)
    fixed = _fixed(config)
    if not before:
        yield unknown(checkpoint)
    changed = list(differences(before, contents_of(yaml.safe_load(to_yaml(config)))))
    wrong = [
        f"{path} is not what it was ({key}: {fixed[key]})" for key, path in changed if key in fixed and key != _DATA
    ]
    data = ", ".join(path for key, path in changed if key == _DATA)
    if data:
        from classroom_rl.trainer.run_length import load_training_problems  # imports more than a launcher needs

        problems = load_training_problems(config)
        if before[PROBLEMS] == {_DATA: {"": fingerprint_of(problems)}}:
            yield f"{data} has changed since the training began, but gives the same problems"
        else:
            wrong.append(f"{data} has changed: {_other_problems(before[PROBLEMS], problems)}")
    if wrong:
        raise ConfigError(refusal(checkpoint, wrong))
    for key, path in changed:
        if key not in fixed:
            yield f"{path} ({key}) has changed since the training began, and takes effect after step {step}"


def _other_problems(was: dict[str, dict[str, str]], problems: Sequence[Problem]) -> str:
    count = was[_DATA][""].partition(",")[0]
    return f"{_DATA} gave {count}, and gives {len(problems)} now, which are not the same ({_ORDER})"


def _last_checkpoint(run_folder: Path) -> tuple[Path, int] | None:
    """The last checkpoint and its step."""
    checkpoints = (run_folder / "checkpoints").glob("checkpoint-*")
    steps = {int(path.name.rpartition("-")[2]): path for path in checkpoints if re.search(r"-\d+$", path.name)}
    return (steps[max(steps)], max(steps)) if steps else None


def check_launch(checkpoint: Path, environment: Mapping[str, str]) -> None:
    """Check that a training was launched as the one that saved a checkpoint: each kind finds only its own optimizer
    states, and transformers goes on with new ones where there are none.

    Args:
        environment: of a process that `accelerate launch` started.

    Raises:
        ConfigError: if one has DeepSpeed, or FSDP, and the other has not.
    """
    saved = next((kind for name, kind in _OPTIMIZER_STATES.items() if (checkpoint / name).is_file()), None)
    now = next((kind for kind in _KINDS if environment.get(f"ACCELERATE_USE_{kind.upper()}") == "true"), None)
    if saved != now:
        raise ConfigError(
            f"{checkpoint} was saved {_how(saved)}, and this training was launched {_how(now)}: it would begin with a "
            f"new state of the optimizer. Give accelerate the --config_file that the run began with{_FILES[saved]}, or "
            "give a new run another folder, logging.save_dir=…"
        )


_KINDS = ("DeepSpeed", "FSDP")
_OPTIMIZER_STATES = {"latest": "DeepSpeed", "optimizer.bin": "FSDP"}
"""The file in a checkpoint that only this kind of training writes."""
_FILES = {
    "DeepSpeed": " (for one process on the CPU, config/deepspeed/1CPU.yaml)",
    "FSDP": " (one of config/fsdp)",
    None: " (for one process on the CPU, config/accelerate/1CPU.yaml)",
}


def _how(kind: str | None) -> str:
    return f"with {kind}" if kind else "without DeepSpeed and FSDP"


def keys_of(schema: type, prefix: str = "") -> list[str]:
    """The dotted keys of a schema that hold a value: no groups, and no keys inside lists or groups that may be null."""
    keys: list[str] = []
    for item in fields(schema):
        name = prefix + item.name
        keys += keys_of(item.type, f"{name}.") if is_dataclass(item.type) else [name]
    return keys


def _changes(made_with: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, str, str]]:
    changes = []
    for key in keys_of(TrainRLConfig):
        try:
            old_value = _value(made_with, key)
        except KeyError:  # the checkpoint is older than the key
            continue
        old, new = _text(made_with, old_value), _text(config, _without_new_keys(_value(config, key), old_value))
        if old != new and key not in _NOT_COMPARED:
            changes.append((key, old, new))
    return changes


def _value(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[part]
    return value


def _without_new_keys(value: Any, was: Any) -> Any:
    """A list of mappings, such as of datasets, without the keys that are younger than the checkpoint."""
    if not isinstance(value, list) or not isinstance(was, list) or len(value) != len(was):
        return value
    pairs = list(zip(value, was, strict=True))
    if not all(isinstance(item, dict) for pair in pairs for item in pair):
        return value
    return [{name: now[name] for name in now if name in before} for now, before in pairs]


def _text(config: dict[str, Any], value: Any) -> str:
    """A value as text. In paths inside the run folder, `…/` replaces the run folder, which may have been moved; shipped
    files have their short name, wherever the program was started."""
    folder = str(config["logging"]["save_dir"]).rstrip("/")
    text = json.dumps(value, ensure_ascii=False).replace(f'"{folder}/', '"…/')
    return re.sub(r'"(/[^"]*)"', lambda path: f'"{as_written(path[1])}"', text)
