"""Config keys and values of related trainers: they load, and a warning says what replaces each."""

import logging
from typing import Any

from classroom_rl.config.mappings import value_of

logger = logging.getLogger(__name__)

_SLEEP = "generation.colocate decides whether engines sleep while the trainer steps"
REPLACED = {
    "*.vllm.use_v0": "vLLM has one engine today, and it is used",
    "*.vllm.from_0": "CUDA_VISIBLE_DEVICES says which GPUs a program may use",
    "*.vllm.bits_and_bytes": "name a quantised model (AWQ, GPTQ, FP8): its own config.json says how it is to be read",
    "*.vllm.load_and_unload": _SLEEP,
    "*.vllm.enable_sleep_mode": _SLEEP,
    "*.vllm.max_number_of_instances": "each role has one engine, spread over vllm.number_of_gpus_per_instance GPUs",
    "train.deepspeed_config_path": "accelerate launch --config_file config/deepspeed/… chooses DeepSpeed's stage",
    "train.batch_size_ref_model": "the reference model sees the same micro-batches as the training",
    "train.save_policy_to_disk_every_n": "every batch's weights are published; see train.publish_to_disk_every",
    "generation.use_experimental_shared_memory": "train.publish_through=memory publishes weights through shared memory",
    "generation.tokenizer_to_use": "each model's own tokenizer counts its tokens",
}
"""Maps a key without an effect here (`*` stands for any model) to what replaces it."""

RENAMED_VALUES = {"train.optimizer": {"adamw_hf": "adamw_torch"}}
"""Maps a key to its outdated values, and these to their names today."""

RENAMED_KEYS = {"generation.ignore_penalty_for_rejected_judges": "generation.ignore_rejected_judge"}
"""Maps a key of related trainers to the key of the same meaning here."""

_MODELS = ("teacher_model", "student_model", "judge_model", "reward_model", "model")


def drop_keys_without_effect(raw: dict[Any, Any]) -> None:
    """Remove the keys in `REPLACED` from a raw configuration, with a warning for each."""
    for pattern, replacement in REPLACED.items():
        for key in (pattern.replace("*", model) for model in _MODELS) if "*" in pattern else (pattern,):
            group, _, name = key.rpartition(".")
            parent = value_of(raw, group)
            if isinstance(parent, dict) and name in parent:
                del parent[name]
                logger.warning("Config key %s has no effect here: %s.", key, replacement)


def rename_keys(raw: dict[Any, Any]) -> None:
    """Rename the keys in `RENAMED_KEYS`, with a warning for each. If both names are set, the one known here counts."""
    for key, new_key in RENAMED_KEYS.items():
        group, _, name = key.rpartition(".")
        parent, new_name = value_of(raw, group), new_key.rpartition(".")[2]
        if isinstance(parent, dict) and name in parent:
            value = parent.pop(name)
            parent.setdefault(new_name, value)
            logger.warning("%s is taken as %s=%s.", key, new_key, parent[new_name])


def rename_values(raw: dict[Any, Any]) -> None:
    """Replace the values in `RENAMED_VALUES` by their names today, with a warning for each."""
    for key, names in RENAMED_VALUES.items():
        group, _, name = key.rpartition(".")
        value = value_of(raw, key)
        if isinstance(value, str) and value in names:
            value_of(raw, group)[name] = names[value]
            logger.warning("%s=%s is called %s today, which is taken.", key, value, names[value])
