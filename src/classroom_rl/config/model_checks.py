"""Checks of how the models of the roles are loaded, reached and paid."""

import re
from collections.abc import Sequence

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.config.models import (
    ApiAccessConfig,
    ApiModelConfig,
    JudgeModelConfig,
    LoraConfig,
    TeacherModelConfig,
    VllmConfig,
)
from classroom_rl.config.rubric import load_rubric
from classroom_rl.config.values import (
    ABSOLUTE,
    EMBEDDED_JUDGES,
    GROUP,
    LEAK_RULE,
    PHASED,
    RULES,
    SCORING_RULES,
    SERVED_RANKS,
    check_between,
    check_url,
)
from classroom_rl.errors import ConfigError
from classroom_rl.system.keys import is_variable_name

_CORES = re.compile(r"auto|nobind|[0-9]+(-[0-9]+)?([,|][0-9]+(-[0-9]+)?)*")


def check_vllm(key_of_block: str, options: VllmConfig) -> None:
    """Check a `vllm` block for values that vLLM would refuse or read as something else."""
    if options.cpu_cores is not None and not _CORES.fullmatch(options.cpu_cores):
        raise ConfigError(
            f'{key_of_block}.cpu_cores is {options.cpu_cores!r}; it is a list of cores such as "0" or "0-3".'
        )


def check_lora(name: str, lora: LoraConfig) -> None:
    """Check a `lora` block for values that PEFT would refuse or read as something else."""
    modules = lora.target_modules
    is_list_of_names = (
        isinstance(modules, list) and modules and all(isinstance(module, str) and module for module in modules)
    )
    if modules != "all-linear" and not is_list_of_names:
        raise ConfigError(
            f"{name}.target_modules is {modules!r}; it is all-linear, or a list of module names such as "
            "[q_proj, v_proj]."
        )


def check_served_lora(teacher: TeacherModelConfig, generation: EnvironmentConfig) -> None:
    """Refuse what PEFT supports and vLLM does not, and a base of 4 bits where it could not be trained or served."""
    check_between("teacher_model.lora.rank", teacher.lora.rank, 1, SERVED_RANKS[-1])
    if teacher.lora.bias != "none":
        raise ConfigError(
            f"teacher_model.lora.bias is {teacher.lora.bias}; vLLM serves no adapters with biases, so it must be none."
        )
    if teacher.load_in_4bit and teacher.adapter is None:
        raise ConfigError(
            "teacher_model.load_in_4bit is true, but weights of 4 bits cannot be trained themselves: set "
            "teacher_model.lora.enable=true, too."
        )
    if teacher.load_in_4bit and len(generation.server_urls or []) > 1:
        raise ConfigError(
            "teacher_model.load_in_4bit is true, for which one server writes the engine's weights, but "
            "generation.server_urls names several: name one, or set it to false."
        )


def check_judge(
    judge: JudgeModelConfig, generation: EnvironmentConfig, name: str = "judge_model", of_training: bool = False
) -> None:
    """Check how a judge is reached, that an embedded one can judge by all rules, and that only the judge of a training
    judges groups."""
    check_model(name, judge, generation)
    if judge.mode == GROUP:
        _check_group_judge(judge, generation, name, of_training)
    if judge.rubric is not None:
        _check_rubric(judge, generation, name)
    supported = SCORING_RULES | ({LEAK_RULE} if judge.model_name_or_path == RULES else set())
    unknown = [rule for rule in generation.judge_rules if rule not in supported]
    if judge.model_name_or_path in EMBEDDED_JUDGES and unknown:
        raise ConfigError(
            f"{name} is {judge.model_name_or_path}, which judges by {', '.join(sorted(supported))} alone, and "
            f"generation.judges_rules_prompts_paths has {', '.join(unknown)}: name a judge model, or leave that out."
        )


def _check_rubric(judge: JudgeModelConfig, generation: EnvironmentConfig, name: str) -> None:
    load_rubric(judge.rubric)
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        raise ConfigError(
            f"{name}.rubric is set, but {judge.model_name_or_path} is no model and cannot read it: name a judge "
            "model, or leave the rubric out."
        )
    if judge.mode == GROUP:
        raise ConfigError(f"{name}.rubric is read for one conversation at a time: set {name}.mode={ABSOLUTE}.")
    if not SCORING_RULES.intersection(generation.judge_rules):
        raise ConfigError(
            f"{name}.rubric is set, but no rule of generation.judges_rules_prompts_paths gives scores: name "
            f"{', '.join(sorted(SCORING_RULES))} there with a judge's template, in whose place "
            f"{name}.rubric_prompt_path is read."
        )


def check_further_judges(
    key: str, judges: Sequence[JudgeModelConfig], generation: EnvironmentConfig, allowed: str
) -> None:
    """Check a list of judges that have no engine: that each can judge, is `allowed`, and is named once."""
    names = [judge.model_name_or_path for judge in judges]
    for judge, name in zip(judges, names, strict=True):
        check_judge(judge, generation, key)
        if name not in EMBEDDED_JUDGES and not judge.is_remote:
            raise ConfigError(f"{key} has {name}, a model for an engine; each must be {allowed}.")
        if names.count(name) > 1:
            raise ConfigError(f"{key} has {name} twice: name each judge once.")


def _check_group_judge(judge: JudgeModelConfig, generation: EnvironmentConfig, name: str, of_training: bool) -> None:
    if not of_training:
        raise ConfigError(
            f"{name}.mode is {GROUP}, which compares the samples of a training's groups; what is measured is judged "
            f"one by one: set {name}.mode={ABSOLUTE}."
        )
    if generation.schedule == PHASED:
        raise ConfigError(
            f"{name}.mode is {GROUP}, for which conversations wait for those of their group, but with "
            f"generation.schedule={PHASED} they wait for those of all groups: set {name}.mode={ABSOLUTE}, or "
            "generation.schedule=concurrent."
        )
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        raise ConfigError(
            f"{name}.mode is {GROUP}, but {judge.model_name_or_path} is no model: it costs nothing and reads each "
            f"conversation by itself. Set {name}.mode={ABSOLUTE}."
        )
    scoring = [rule for rule in generation.judge_rules if rule in SCORING_RULES]
    if not scoring:
        raise ConfigError(
            f"{name}.mode is {GROUP}, but no rule of generation.judges_rules_prompts_paths gives scores "
            f"({', '.join(sorted(SCORING_RULES))}): set {name}.mode={ABSOLUTE}."
        )
    missing = [rule for rule in scoring if rule not in judge.group_prompts_paths]
    if missing:
        raise ConfigError(
            f"{name}.mode is {GROUP}, but {name}.group_prompts_paths has no template for {', '.join(missing)}: name "
            "one, such as prompt_templates/judges/language_tutor_group.txt."
        )


def check_model(name: str, model: ApiModelConfig, generation: EnvironmentConfig) -> None:
    """Check how the model of a role is loaded, or how its API is reached and paid."""
    check_vllm(f"{name}.vllm", model.vllm)
    check_access(model, before=f"{name}.")
    _check_cap(name, model)
    if model.is_remote and model.deadline_s >= generation.sample_timeout_s:
        raise ConfigError(
            f"{name}.deadline_s is {model.deadline_s:g}; it must be less than generation.sample_timeout_s "
            f"({generation.sample_timeout_s:g}), or the batch is given up before the model is."
        )


def check_key_variable(key: str, variable: str | None) -> None:
    """Raise a `ConfigError`, which does not repeat the value, if it may be a key in place of a variable's name."""
    if variable is not None and not is_variable_name(variable):
        raise ConfigError(
            f"{key} is not the name of an environment variable: capitals, digits and underscores, such as MY_API_KEY. "
            "If it is a key itself, put that into the environment, and the variable's name here."
        )


def check_access(access: ApiAccessConfig, before: str = "", after: str = "") -> None:
    """Check how an API is reached. Messages name a key with these texts before and after it."""
    if access.base_url is not None:
        check_url(f"{before}base_url{after}", access.base_url)
    check_key_variable(f"{before}api_key_env{after}", access.api_key_env)
    if access.use_openrouter and access.use_gemini:
        raise ConfigError(f"{before}use_openrouter{after} and {before}use_gemini{after} are both set: choose one.")


def _check_cap(name: str, model: ApiModelConfig) -> None:
    for key in ("usd_per_million_prompt_tokens", "usd_per_million_completion_tokens"):
        if model.max_cost_usd is not None and getattr(model, key) == 0:
            raise ConfigError(
                f"{name}.max_cost_usd is {model.max_cost_usd}; it needs {name}.{key}, because each request "
                "is held to its worst case before it is sent."
            )
