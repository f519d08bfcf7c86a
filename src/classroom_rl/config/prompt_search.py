"""Schema of `prompt_search` in `eval.py`: a better prompt for the teacher, as a control for training."""

from dataclasses import field
from typing import Any

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.fields import Count, FilePath, Tokens, config_group
from classroom_rl.config.model_checks import check_model
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.config.values import PHASED, SUPERVISED
from classroom_rl.errors import ConfigError


@config_group
class PromptSearchConfig:
    """A search for a better `generation.teacher_prompt_path` (GEPA: Agrawal et al., 2025; pip install gepa==0.1.4). A
    model reads judged conversations on training lessons and proposes another template. One that does better on the same
    lessons is kept; the best of those kept is measured beside the first on the held-out lessons of `dataset`."""

    train_datasets: list[DatasetSource] = field(default_factory=list)
    """The lessons to search on; none may be among `dataset.eval_datasets`. Empty: the shipped training plans, with a
    judge rule that scores."""
    conversations: Count = 500
    """The budget: how many conversations the search may play, for a fair comparison as many as a training does. Those
    on held-out lessons come on top."""
    selection_lessons: Count = 16
    """How many of the training lessons only choose among prompts: every prompt that is kept is played on all of
    them."""
    minibatch_lessons: Count = 4
    """How many of the other training lessons a proposal is made from, and tried on first."""
    max_rounds: Count = 200
    """The search also ends after so many rounds, if they cost fewer conversations than the budget allows."""
    replies_per_proposal: Count = 3
    """How many replies a round may use until one holds a template that can be filled in for every lesson. The reason
    against one is in the next request."""
    reflection_model: ApiModelConfig | None = None
    """The model that proposes prompts, behind an API. Null: `teacher_model` proposes its own."""
    reflection_prompt_path: FilePath = "prompt_templates/reflection.txt"
    """The template that asks for a proposal."""
    max_tokens: Tokens = 8192
    """The most tokens of its reply."""


def check_prompt_search(config: Any) -> None:
    """Check the search of an evaluation (`EvalConfig`). Raises a `ConfigError` naming the key, the rule and the fix."""
    search = config.prompt_search
    conflicts = [key for key in ("server_url", "tutors", "students", "extra_judges") if getattr(config, key)]
    conflicts += ["counterfactuals.forks"] if config.counterfactuals.forks else []
    if conflicts:
        raise ConfigError(
            f"{conflicts[0]} is set beside prompt_search, which plays one tutor with many prompts in this process: "
            "leave it out (server_url=null, tutors=[])."
        )
    if SUPERVISED in config.samplings:
        raise ConfigError("samplings names supervised, but a prompt is measured without a supervisor: leave it out.")
    least = 2 * (search.selection_lessons + search.minibatch_lessons)
    if search.conversations < least:
        raise ConfigError(
            f"prompt_search.conversations is {search.conversations}; the first proposal alone may cost {least}, 2 × "
            "(selection_lessons + minibatch_lessons): raise it, or lower these."
        )
    model = search.reflection_model
    if model is None and config.generation.schedule == PHASED:
        raise ConfigError(
            f"generation.schedule is {PHASED}, so the teacher may be asleep when it should propose a prompt: set "
            "prompt_search.reflection_model to a model behind an API, or generation.schedule=concurrent."
        )
    if model is not None:
        check_model("prompt_search.reflection_model", model, config.generation)
        if not model.is_remote:
            raise ConfigError(
                f"prompt_search.reflection_model is {model.model_name_or_path}, a model for an engine: it must be "
                "behind an API (use_openrouter, use_gemini or base_url). With null, teacher_model proposes."
            )
