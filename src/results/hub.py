"""Uploads the trained model to the Hugging Face Hub, with a card that holds its configuration and results."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from config.base import HuggingFaceConfig
from config.load import to_yaml
from src.errors import ConfigError

logger = logging.getLogger(__name__)
_PLAYED = "the scores of its conversations with a student model"
METHODS = {"grpo": _PLAYED, "ppo": _PLAYED, "sft": "conversations of tutors"}
"""Training method → what the model was trained on, as the card says it."""
_RESULTS = ("reward", "eval_loss", "loss")


def push_to_hub(folder: Path, target: HuggingFaceConfig) -> None:
    """Upload a model folder with its card.

    Raises:
        ConfigError: if the upload fails; the folder stays as it is.
    """
    api = HfApi()
    try:
        repository = api.create_repo(target.name, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained teacher")
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"The Hub did not take {folder} as {target.name}: {error} The model is in that folder. Is HF_TOKEN set, "
            f"and may it write there? Try again with: hf upload {target.name} {folder}"
        ) from error
    logger.info("the model is on the Hub as %s", repository)


def release(folder: Path, config: Any, base_model: str, method: str, metrics: dict[str, float]) -> None:
    """Write the card of a trained model, and upload the folder if `huggingface.push_to_hub` is set.

    Raises:
        ConfigError: as in `push_to_hub`.
    """
    write_card(folder, config, base_model, method, metrics)
    logger.info("the trained model is in %s", folder)
    if config.huggingface.push_to_hub:
        push_to_hub(folder, config.huggingface)


def write_card(folder: Path, config: Any, base_model: str, method: str, metrics: dict[str, float]) -> None:
    """Write README.md into a model folder: the base model, the method, the last metrics and the configuration.

    Args:
        method: a key of `METHODS`.
        metrics: the metrics of the last logged step.
    """
    name = config.huggingface.name or folder.name
    results = [
        EvalResult("text-generation", "dialogue", "training", key, metrics[key], metric_name=key)
        for key in _RESULTS
        if isinstance(metrics.get(key), int | float) and math.isfinite(metrics[key])
    ]
    data = ModelCardData(
        base_model=base_model,
        tags=["tutor", method, "trl"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    body = (
        f"# {name}\n\nA tutor trained from `{base_model}` on {METHODS[method]}.\n\n"
        f"## Last step\n\n```json\n{json.dumps(metrics, indent=2)}\n```\n\n"
        f"## Configuration\n\n```yaml\n{to_yaml(config)}```\n"
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}").save(folder / "README.md")
