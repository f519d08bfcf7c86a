"""Uploads the trained model to the Hugging Face Hub, with a model card that holds its configuration and results."""

import json
import logging
import math
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from classroom_rl.config.base import HuggingFaceConfig
from classroom_rl.config.load import TEACHER_PROMPT_NAME, teacher_prompt, to_yaml
from classroom_rl.errors import ConfigError

logger = logging.getLogger(__name__)
_CONVERSATIONS_WITH_STUDENT = "the scores of its conversations with a student model"
_PAIRS = "pairs of a better and a worse text of a tutor"
METHODS = {
    "grpo": _CONVERSATIONS_WITH_STUDENT,
    "ppo": _CONVERSATIONS_WITH_STUDENT,
    "online_dpo": _CONVERSATIONS_WITH_STUDENT,
    "sft": "conversations of tutors",
    "dpo": _PAIRS,
    "kto": _PAIRS,
}
"""Training method → the training data, in the words of the model card."""
_RESULT_METRICS = ("reward", "eval_loss", "loss")
_CLASSROOM = "classroom"


def check_push(target: HuggingFaceConfig) -> None:
    """Before a training or an export, refuse a push that would fail after it. Makes no request. Raises `ConfigError` if
    the model is to be pushed, and the Hub's client is offline or has no token."""
    if not target.push_to_hub:
        return
    offline = constants.is_offline_mode()
    if offline or get_token() is None:
        missing = "HF_HUB_OFFLINE is set" if offline else "there is no token for the Hub"
        fix = "unset it" if offline else "set HF_TOKEN, or log in with: hf auth login"
        raise ConfigError(
            f"The trained model is to be pushed, but {missing}, so it could not get to {target.name}: {fix}. Or set "
            "huggingface.push_to_hub=false, and push it later with: python -m classroom_rl.export RUN --to hub"
        )


def push_to_hub(folder: Path, target: HuggingFaceConfig) -> None:
    """Upload a model folder with its card. Raises `ConfigError` if the upload fails, for whatever reason; the folder
    stays as it is."""
    api = HfApi()
    try:
        repository = api.create_repo(target.name, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained teacher")
    except Exception as error:  # the client's errors have no common base class: its own, httpx's, ValueError for a card
        raise ConfigError(
            f"The training is complete and its model is in {folder}, but the Hub did not take it as {target.name}: "
            f"{str(error) or repr(error)}\nIs HF_TOKEN set, and may it write there? Push the model later with: "
            f"hf upload {target.name} {shlex.quote(str(folder))}"
        ) from error
    logger.info("the model is on the Hub as %s", repository)


def hub_id(model: str) -> str | None:
    """Return a model's id on the Hub; None for a local folder, which the Hub refuses as the `base_model` of a card."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return None
    return None if Path(model).exists() else model


def release(folder: Path, config: Any, base_model: str, method: str, metrics: dict[str, float]) -> None:
    """Write the card of a trained model, and upload the folder if `huggingface.push_to_hub` is set. Raises
    `ConfigError` as in `push_to_hub`."""
    write_card(folder, config, base_model, method, metrics)
    logger.info("the trained model is in %s", folder)
    if config.huggingface.push_to_hub:
        push_to_hub(folder, config.huggingface)


def write_card(folder: Path, config: Any, base_model: str, method: str, metrics: dict[str, float]) -> None:
    """Write README.md into a model folder: the base model, the method, the tutor's prompt template, the last metrics
    and the configuration; and the template as a file. Its title is the name of the repository, else that of the run
    folder.

    Args:
        folder: a folder in a run folder.
        method: a key of `METHODS`.
        metrics: the metrics of the last logged step.
    """
    title = config.huggingface.name.rpartition("/")[2] if config.huggingface.name else folder.resolve().parent.name
    base_id = hub_id(base_model)
    results = [
        EvalResult("text-generation", "dialogue", "training", key, metrics[key], metric_name=key)
        for key in _RESULT_METRICS
        if isinstance(metrics.get(key), int | float) and math.isfinite(metrics[key])
    ]
    data = ModelCardData(
        base_model=base_id,
        tags=["tutor", method, "trl"],
        model_name=title if results else None,
        eval_results=results or None,
    )
    origin = f"`{base_id}`" if base_id else f"a model in a local folder, `{Path(base_model).name}`,"
    template, prompt = teacher_prompt(config), ""
    if template is not None:
        (folder / TEACHER_PROMPT_NAME).write_text(template, encoding="utf-8")
        prompt = f"## Its prompt, a Jinja template ({TEACHER_PROMPT_NAME})\n\n````\n{template.rstrip()}\n````\n\n"
    body = (
        f"# {title}\n\n{_describe_model(config, origin, method)}\n\n{prompt}"
        f"## Last step\n\n```json\n{json.dumps(metrics, indent=2)}\n```\n\n"
        f"## Configuration\n\n```yaml\n{to_yaml(config)}```\n"
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(folder / "README.md")


def _describe_model(config: Any, origin: str, method: str) -> str:
    environment = getattr(config, "environment", _CLASSROOM)
    if environment == _CLASSROOM:
        return f"A tutor trained from {origin} on {METHODS[method]}."
    return f"A model trained from {origin} on the rewards of what it played in the environment `{environment}`."
