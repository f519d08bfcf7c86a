"""Training on pairs with TRL's trainers for DPO and KTO. The loss counts the tutor's tokens only.

TRL tokenizes texts itself and counts all that follows the prompt. The pairs hold tokens and masks, so the trainers are
made with a pair of single letters, and are then given the real ones as `train_dataset`, with collators that put their
masks into the batch.
"""

import hashlib
import json
import logging
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from classroom_rl.config.train_preferences import KTO, PairsConfig, TrainPreferencesConfig
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.lora import peft_config
from classroom_rl.results.corrections import refuse_other_tokenizer
from classroom_rl.results.pairs import PAIRS_NAME, PreferencePair, read_pairs
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.system.storage import storage_errors
from classroom_rl.trainer.callbacks import MetricsCallback
from classroom_rl.trainer.fine_tuning import (
    SECONDS_BETWEEN_LINES,
    common_arguments,
    fine_tune,
    load_model,
    load_tokenizer,
)
from classroom_rl.trainer.log_probs import without_dropout
from classroom_rl.trainer.trainer_hooks import ResumedTrainer

logger = logging.getLogger(__name__)
FIGURES_NAME = "preferences.json"
_FIXED = ("dataset.pairs", "model.model_name_or_path", "model.tokenizer_name_or_path")
_MASKED = -100

Batch = dict[str, Tensor]


def train(config: TrainPreferencesConfig) -> Path:
    """Train and save a model, as `fine_tune` does. `preferences.json` in the run folder holds the figures on the
    held-out pairs, before and after.

    Returns:
        The folder of the model, with tokenizer and chat template.

    Raises:
        ConfigError: as `fine_tune`.
        DataError: if there are no pairs to learn from, or they are of another tokenizer.
    """
    path = Path(config.dataset.pairs or "")
    file = path / PAIRS_NAME if path.is_dir() else path
    config = replace(config, dataset=replace(config.dataset, pairs=str(file)))
    return fine_tune(config, "train_preferences", config.train.loss, preference_arguments, make_trainer, _FIXED)


class _DPOTrainer(ResumedTrainer, DPOTrainer):
    """TRL's `DPOTrainer`, except that a resumed run uses the configured learning rate."""


class _KTOTrainer(ResumedTrainer, KTOTrainer):
    """The same of TRL's `KTOTrainer`."""


def preference_arguments(config: TrainPreferencesConfig, run_folder: Path) -> DPOConfig | KTOConfig:
    """TRL's arguments for this run. Creating them sets up the process group."""
    make: Any = KTOConfig if config.train.loss == KTO else DPOConfig
    return make(
        **common_arguments(config, run_folder), beta=config.train.beta, max_length=None, remove_unused_columns=False
    )


def make_trainer(
    config: TrainPreferencesConfig, arguments: DPOConfig | KTOConfig, run_folder: Path
) -> _DPOTrainer | _KTOTrainer:
    """The trainer with its model, its reference and its pairs. With an adapter, the reference is the model without
    it."""
    tokenizer, lora = load_tokenizer(config.model), config.model.lora
    pairs = read_short_pairs(config.dataset, tokenizer, config.model.max_length)
    learned, held_out = split(pairs, config.dataset.held_out_share, config.seed)
    if config.dataset.shuffle_pairs:
        learned = with_swapped(learned, config.dataset.shuffle_seed)
    is_kto, pad_id = config.train.loss == KTO, tokenizer.pad_token_id or 0
    make: Any = _KTOTrainer if is_kto else _DPOTrainer
    trainer = make(
        model=load_model(config, tokenizer),
        ref_model=None if lora.enable else load_model(config, tokenizer),
        args=arguments,
        data_collator=SingleCollator(pad_id, config.model.max_length) if is_kto else PairCollator(pad_id),
        train_dataset=datasets.Dataset.from_list([{"prompt": "", "chosen": "a", "rejected": "b"}]),
        processing_class=tokenizer,
        callbacks=[MetricsCallback(run_folder, SECONDS_BETWEEN_LINES)],
        peft_config=peft_config(lora) if lora.enable else None,
    )
    trainer.train_dataset = datasets.Dataset.from_list(singles(learned, config.seed) if is_kto else rows_of(learned))
    trainer.remove_callback(PrinterCallback)
    if held_out:
        trainer.add_callback(MeasureHeldOut(trainer, held_out, PairCollator(pad_id), run_folder / FIGURES_NAME))
    elif trainer.accelerator.is_main_process:
        (run_folder / FIGURES_NAME).unlink(missing_ok=True)  # an earlier run's, of another model
    logger.info("%d pairs are trained on, %d are held out", len(learned), len(held_out))
    return trainer


def read_short_pairs(options: PairsConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[PreferencePair]:
    """The pairs of the wanted sources. Those longer than `max_length` tokens are left out with a warning.

    Raises:
        DataError: if the file cannot be read or holds ids of another tokenizer, or if no pair is left.
    """
    name = options.pairs or ""
    pairs, fingerprint = read_pairs(Path(name))
    refuse_other_tokenizer(name, fingerprint, tokenizer)
    selected = [pair for pair in pairs if pair.source in options.sources]
    short = [
        pair
        for pair in selected
        if len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) <= max_length
    ]
    if not short:
        raise DataError(
            f"{name} holds {len(pairs)} pairs, {len(selected)} of them of the sources {', '.join(options.sources)} "
            f"(dataset.sources), and none of these has at most {max_length} tokens (model.max_length)."
        )
    if len(short) < len(selected):
        left_out = len(selected) - len(short)
        logger.warning("%d of %d pairs have more than %d tokens (model.max_length) and are left out", left_out,
                       len(selected), max_length)  # fmt: skip
    return short


def split(
    pairs: Sequence[PreferencePair], share: float, seed: int
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """The pairs to train on, and those of the problems that are held out: a share of the problems, at least one.

    Raises:
        DataError: if all problems would be held out.
    """
    problems = sorted({pair.problem_id for pair in pairs})
    random.Random(f"{seed}|held out").shuffle(problems)
    count = max(1, round(share * len(problems))) if share else 0
    if count == len(problems):
        raise DataError(
            f"All pairs are on {count} problem{'s' * (count > 1)}, which dataset.held_out_share={share:g} holds out: "
            "make pairs of more problems, or set it to 0 to measure nothing."
        )
    held_out = set(problems[:count])
    return (
        [pair for pair in pairs if pair.problem_id not in held_out],
        [pair for pair in pairs if pair.problem_id in held_out],
    )


def with_swapped(pairs: Sequence[PreferencePair], seed: int) -> list[PreferencePair]:
    """The pairs, half of them with the worse text as the better one: a model that learns from these learns nothing
    about what is better.

    The order by source and by how many more tokens of the tutor the better text has makes couples of neighbours; the
    seed decides which one of each is swapped. DPO's gradient is a sum over tokens, so pairs pull towards longer or
    shorter texts, the more their lengths differ. Between the two of a couple that cancels; if half of all pairs were
    drawn, what is left of it by chance would be learned like a preference, one way or the other.
    """

    def likeness(index: int) -> tuple[str, int]:
        return pairs[index].source, sum(pairs[index].chosen_mask) - sum(pairs[index].rejected_mask)

    rng, order = random.Random(f"{seed}|swapped"), sorted(range(len(pairs)), key=likeness)
    if len(order) % 2:
        del order[len(order) // 2]  # the one that is left over is no extreme one
    swapped = {rng.choice(couple) for couple in zip(order[::2], order[1::2], strict=True)}
    return [
        replace(
            pair,
            chosen_ids=pair.rejected_ids,
            chosen_mask=pair.rejected_mask,
            rejected_ids=pair.chosen_ids,
            rejected_mask=pair.chosen_mask,
        )
        if index in swapped
        else pair
        for index, pair in enumerate(pairs)
    ]


def rows_of(pairs: Sequence[PreferencePair]) -> list[dict[str, Any]]:
    """The tokens and masks of pairs, as `PairCollator` takes them."""
    names = ("prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")
    return [{name: getattr(pair, name) for name in names} for pair in pairs]


def singles(pairs: Sequence[PreferencePair], seed: int) -> list[dict[str, Any]]:
    """The texts of all pairs in the order in which KTO takes them: shuffled, good and bad ones in turn, those of a pair
    half the data apart, so that the next text of a micro-batch is that of another prompt."""
    order = random.Random(f"{seed}|order").sample(pairs, len(pairs))
    others = order[len(order) // 2 :] + order[: len(order) // 2]
    return [
        {"prompt_ids": prompt, "completion_ids": ids, "mask": mask, "label": label}
        for good, bad in zip(order, others, strict=True)
        for prompt, ids, mask, label in (
            (good.prompt_ids, good.chosen_ids, good.chosen_mask, True),
            (bad.prompt_ids, bad.rejected_ids, bad.rejected_mask, False),
        )
    ]


def padded(texts: Sequence[tuple[list[int], list[int], list[int]]], pad_id: int, most: int | None = None) -> Batch:
    """Texts as (prompt, ids, mask) as a batch, padded on the right, of shape (B, T).

    Args:
        most: the number of tokens after which a text is cut.
    """

    def tensor(rows: Sequence[list[int]], padding: int) -> Tensor:
        return pad_sequence([torch.tensor(row[:most]) for row in rows], batch_first=True, padding_value=padding)

    return {
        "input_ids": tensor([[*prompt, *ids] for prompt, ids, _ in texts], pad_id),
        "attention_mask": tensor([[1] * (len(prompt) + len(ids)) for prompt, ids, _ in texts], 0),
        "completion_mask": tensor([[0] * len(prompt) + mask for prompt, _, mask in texts], 0),
    }


@dataclass(frozen=True)
class PairCollator:
    """Makes the batch of TRL's DPO: first all better texts, then all worse ones."""

    pad_id: int

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Batch:
        sides = [(side, example) for side in ("chosen", "rejected") for example in examples]
        texts = [(example["prompt_ids"], example[f"{side}_ids"], example[f"{side}_mask"]) for side, example in sides]
        return padded(texts, self.pad_id)


@dataclass(frozen=True)
class SingleCollator:
    """Makes the batch of TRL's KTO: single texts, and for its estimate of the KL each prompt once more with the text
    before it in the micro-batch, cut at `max_length` tokens."""

    pad_id: int
    max_length: int

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Batch:
        prompts = [example["prompt_ids"] for example in examples]
        texts = [(example["completion_ids"], example["mask"]) for example in examples]
        matched = [(prompt, *text) for prompt, text in zip(prompts, texts, strict=True)]
        mismatched = [(prompt, *text) for prompt, text in zip(prompts, [*texts[-1:], *texts[:-1]], strict=True)]
        kl = padded(mismatched, self.pad_id, self.max_length)
        labels = torch.tensor([example["label"] for example in examples])
        return padded(matched, self.pad_id) | {f"KL_{name}": value for name, value in kl.items()} | {"label": labels}


class MeasureHeldOut(TrainerCallback):
    """Writes the figures on the held-out pairs before the first step and after the last one. All processes measure
    together."""

    def __init__(self, trainer: Any, pairs: Sequence[PreferencePair], collate: PairCollator, path: Path):
        self._trainer, self._pairs, self._path = trainer, pairs, path
        held_out = sorted((pair.problem_id, pair.chosen_ids, pair.rejected_ids) for pair in pairs)
        self._held_out = hashlib.sha256(json.dumps(held_out).encode()).hexdigest()
        loader = DataLoader(
            rows_of(pairs),  # type: ignore[arg-type]
            batch_size=trainer.args.per_device_eval_batch_size,
            collate_fn=collate,
            generator=torch.Generator(),  # that of the training stays as it was
        )
        self._loader = trainer.accelerator.prepare(loader)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 0:
            self._measure("before")
        elif self._path.is_file() and json.loads(self._path.read_text(encoding="utf-8"))["held_out"] != self._held_out:
            raise ConfigError(
                f"Other pairs are held out now than when the training in {self._path.parent} began, so it has learned "
                "some of them: set seed, dataset.held_out_share, dataset.sources and model.max_length as they were, or "
                "begin anew in another logging.save_dir."
            )

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._measure("after")

    @torch.no_grad()
    def _measure(self, when: str) -> None:
        trainer, log_probs = self._trainer, []
        model, adapted = trainer.model_wrapped, trainer.accelerator.unwrap_model(trainer.model)
        with without_dropout(model):
            for batch in self._loader:
                policy = self._log_probs(model, batch)
                with adapted.disable_adapter() if isinstance(adapted, PeftModel) else nullcontext():
                    reference = self._log_probs(trainer.ref_model or model, batch)
                log_probs.append(trainer.accelerator.gather_for_metrics(torch.cat([policy, reference], dim=1)).cpu())
        figures = figures_of(torch.cat(log_probs), self._pairs, trainer.beta)
        if trainer.accelerator.is_main_process:
            is_first = when == "before" or not self._path.is_file()
            earlier = {"held_out": self._held_out} if is_first else json.loads(self._path.read_text(encoding="utf-8"))
            unfinished = self._path.with_suffix(".unfinished")
            with storage_errors(self._path):
                unfinished.write_text(json.dumps(earlier | {when: figures}, indent=2) + "\n", encoding="utf-8")
                unfinished.replace(self._path)  # at once: whoever is killed here leaves the earlier file whole
            logger.info("%s: the better of two held-out texts is the likelier one in %.1f %% of %d pairs", when,
                        100 * figures["all"]["accuracy"]["mean"], len(self._pairs))  # fmt: skip

    def _log_probs(self, model: Any, batch: Batch) -> Tensor:
        """The summed log-probs of the tutor's tokens, of shape (pairs, 2): of the better and of the worse text."""
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, _MASKED)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with self._trainer.accelerator.autocast():
            summed = model(**inputs, labels=labels, fused_lm_head=True, use_cache=False).log_probs.sum(dim=1)
        return torch.stack(summed.float().chunk(2), dim=1)


def figures_of(log_probs: Tensor, pairs: Sequence[PreferencePair], beta: float) -> dict[str, Any]:
    """Figures for all pairs, and for those of each source:

    - `accuracy`: the share of pairs whose better text is the likelier one; equal ones count half.
    - `margin`: the mean difference of their log-probs, in nats.
    - `reward_accuracy`, `reward_margin`: the same of DPO's implicit rewards, β · ln(π / reference).

    Args:
        log_probs: of shape (pairs, 4): better and worse text under the policy, and under the reference.
    """
    better, worse, reference_better, reference_worse = log_probs.double().unbind(dim=1)
    margins, rewards = better - worse, beta * ((better - reference_better) - (worse - reference_worse))
    figures: dict[str, Any] = {}
    for source in ("all", *sorted({pair.source for pair in pairs})):
        pair_indices = [index for index, pair in enumerate(pairs) if source in ("all", pair.source)]
        by_problem: dict[str, list[int]] = {}
        for index in pair_indices:
            by_problem.setdefault(pairs[index].problem_id, []).append(index)
        figures[source] = {"pairs": len(pair_indices), "problems": len(by_problem)}
        for name, values in (("", margins), ("reward_", rewards)):
            shares = (values > 0).double() + 0.5 * (values == 0)
            shares_by_problem = {problem: shares[indices].tolist() for problem, indices in by_problem.items()}
            figures[source][f"{name}accuracy"] = mean_with_ci(shares_by_problem, (0.0, 1.0))
            figures[source][f"{name}margin"] = fmean(values[pair_indices].tolist())
    return figures
