"""Defaults of the maths tutor's classroom, for configurations that name models only, as those of related trainers
do."""

import copy
import logging
import os
from typing import Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.fields import types_of
from classroom_rl.config.mappings import value_of
from classroom_rl.config.values import SCORING_RULES
from classroom_rl.errors import ConfigError

logger = logging.getLogger(__name__)

_PROMPTS = "prompt_templates"
MATHS_CLASSROOM: dict[str, Any] = {
    "teacher_prompt_path": f"{_PROMPTS}/teacher_prompt.txt",
    "student_personas_prompts_paths": {"simple_student": f"{_PROMPTS}/personas/maths_student.txt"},
    "student_initial_attempt_prompt_path": f"{_PROMPTS}/student_initial_attempt_prompt.txt",
    "initial_attempt_wrapper_prompt_path": f"{_PROMPTS}/initial_attempt_wrapper_prompt.txt",
    "student_final_prompt_path": f"{_PROMPTS}/student_final_prompt.txt",
    "student_attempt_prompt_path": f"{_PROMPTS}/student_attempt_prompt.txt",
    "judges_rules_prompts_paths": {
        rule: f"{_PROMPTS}/judges/{rule}.txt" for rule in ("does_not_leak_answer", "follows_pedagogical_values")
    },
}
"""The keys of `generation` that make a classroom that of the maths tutor."""
MATHS_DATASET = "rd211/Big-Math-RL-Verified-Filtered"
_NEEDED = ("teacher_prompt_path", "student_personas_prompts_paths", "judges_rules_prompts_paths")
_DATASETS = "dataset.train_datasets"


def fill_in(raw: dict[Any, Any], schema: type) -> None:
    """Give a training that sets no prompt, persona, judge rule and dataset those of the maths tutor, and log it.

    A key that is set to an empty value stays empty: `judges_rules_prompts_paths: {}` is a classroom without judges.

    Raises:
        ConfigError: if it sets some of these keys but not the others that it needs.
    """
    if not _is_training_with_students(schema):
        return
    configured = [f"generation.{name}" for name in MATHS_CLASSROOM if value_of(raw, f"generation.{name}")]
    configured += [_DATASETS] if value_of(raw, _DATASETS) else []
    if configured:
        _refuse_partial(raw, configured)
        return
    defaults = {f"generation.{name}": value for name, value in MATHS_CLASSROOM.items()}
    defaults[_DATASETS] = [{"name_or_path": MATHS_DATASET}]
    filled = {key: value for key, value in defaults.items() if value_of(raw, key) is None}
    for key, value in filled.items():
        group, _, name = key.rpartition(".")
        raw.setdefault(group, {})[name] = copy.deepcopy(value)
    log_filled_in(filled)


def log_filled_in(filled: dict[str, Any]) -> None:
    """Log what was filled in, on rank 0 only."""
    if filled and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "The configuration did not name these; they are those of the maths classroom: %s.",
            ", ".join(f"{key}={_written(value)}" for key, value in filled.items()),
        )


def _is_training_with_students(schema: type) -> bool:
    groups = types_of(schema)
    if "train_datasets" not in types_of(groups.get("dataset", GenerationConfig)):
        return False
    return issubclass(groups.get("generation", object), GenerationConfig)


def _refuse_partial(raw: dict[Any, Any], named: list[str]) -> None:
    missing = [f"generation.{name}" for name in _NEEDED if value_of(raw, f"generation.{name}") is None]
    if value_of(raw, "generation.number_judge_attempts") == 0:
        missing = [key for key in missing if not key.endswith("judges_rules_prompts_paths")]
    rules = value_of(raw, "generation.judges_rules_prompts_paths") or {}
    if value_of(raw, _DATASETS) is None and not SCORING_RULES & set(rules):
        missing.append(_DATASETS)
    if missing:
        raise ConfigError(
            f"The configuration names {', '.join(named)}, but not {', '.join(missing)}. Name the rest, too, or none of "
            "them: then all are those of the maths classroom. A classroom without judges has "
            "generation.number_judge_attempts=0."
        )


def _written(value: Any) -> str:
    return value if isinstance(value, str) else str(value).replace("'", "")
