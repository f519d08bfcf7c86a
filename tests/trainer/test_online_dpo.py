"""Online DPO on scripted batches: its gradients beside a plain float64 reference and TRL's trainer, its pairs, and
processes that share them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.config.load import load
from classroom_rl.config.train_preferences import TrainPreferencesConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.pairs import PairMaker, write_pairs
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.rows import rows_of
from classroom_rl.trainer.online_dpo import pairs_of
from classroom_rl.trainer.preferences import PairCollator, make_trainer, preference_arguments
from classroom_rl.trainer.preferences import rows_of as rows_of_pairs
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model
from tests.system.test_distributed import in_processes
from tests.trainer.test_ppo import in_rows, of_sampled, step

DPO = ["train.algorithm=online_dpo", "train.mu=1", "judge_model.max_failed_share=1", "train.online_dpo.beta=0.3"]
LORA = ["teacher_model.lora.enable=true", "teacher_model.lora.dropout=0"]
BETA, GROUP = 0.3, 4


def lively(index: int, problem: Problem) -> ConversationRecord:
    """Conversations from one prompt, with different rewards."""
    return conversation(index, problem, seed=1, prompt_ids=[21, 22, 23])


def flat_second(index: int, problem: Problem) -> ConversationRecord:
    """As `lively`; in the second group all rewards are equal, or missing."""
    equal_rewards = {"reward": 0.5 if index % 2 else None, "rewards": {"pedagogical": 0.5 if index % 2 else None}}
    return conversation(index, problem, seed=1, prompt_ids=[21, 22, 23], **(equal_rewards if index >= GROUP else {}))


def all_flat(index: int, problem: Problem) -> ConversationRecord:
    return conversation(index, problem, seed=1, reward=0.5, rewards={"pedagogical": 0.5})


@pytest.fixture(scope="module")
def start(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dpo") / "model", world / "blank")


@pytest.fixture
def trainer_of(start: Path, tmp_path: Path) -> Callable[..., Any]:
    def made(*overrides: str, play: Any = lively, moved: bool = True) -> Any:
        trainer = offline_trainer(tmp_path / "run", start, [*DPO, *overrides], play)
        if moved:  # away from the reference, where all pairs have the same weight
            move(trainer.model)
        return trainer

    return made


def move(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def best_and_worst(play: Any) -> list[tuple[ConversationRecord, ConversationRecord]]:
    """The pairs of a batch of two groups, found without the trainer."""
    records = [play(index, Problem.of(f"lesson {index}", "")) for index in range(2 * GROUP)]
    groups = [
        [record for record in records[first : first + GROUP] if record.reward is not None] for first in (0, GROUP)
    ]
    pairs = [tuple(extreme(group, key=lambda record: record.reward) for extreme in (max, min)) for group in groups]
    return [(best, worst) for best, worst in pairs if best.reward > worst.reward]


def plain_margins(start: Path, trainer: Any, play: Any) -> tuple[torch.Tensor, torch.nn.Module]:
    """β · (ln π/π_ref of the better − that of the worse), in float64 and one row after the other; and the model."""
    reference, model = (AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64) for _ in range(2))
    model.load_state_dict({name: weight.double() for name, weight in trainer.model.state_dict().items()})

    def ratio(record: ConversationRecord) -> torch.Tensor:
        summed = []
        for scored_model in (model, reference):
            rows = [(of_sampled(scored_model, row) * torch.tensor(row.mask)).sum() for row in rows_of(record)]
            summed.append(torch.stack(rows).sum())
        return summed[0] - summed[1].detach()

    return BETA * torch.stack([ratio(best) - ratio(worst) for best, worst in best_and_worst(play)]), model


def assert_same(found: dict[str, torch.Tensor], wanted: torch.nn.Module, within: float = 1e-6) -> None:
    gradients = {name: parameter.grad for name, parameter in wanted.named_parameters() if parameter.grad is not None}
    assert set(found) == set(gradients) and max(gradient.abs().max() for gradient in gradients.values()) > 1e-2
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() < within, name


# The loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("play", "overrides"),
    [
        (lively, ["train.per_device_train_batch_size=1"]),
        (lively, ["train.per_device_train_batch_size=4"]),
        (lively, ["train.max_tokens_per_micro_batch=80"]),
        (lively, ["train.padding_free=true", "train.attn_implementation=sdpa", "train.max_tokens_per_micro_batch=150"]),
        (lively, ["train.max_staleness=1"]),
        (flat_second, ["train.groups_without_variance=drop"]),
        (in_rows, ["train.per_device_train_batch_size=2"]),
    ],
    ids=["apart", "together", "by tokens", "padding-free", "stale", "a flat group", "many rows"],
)
def test_the_gradient_is_that_of_a_plain_reference_however_the_batch_is_divided(
    trainer_of: Any, start: Path, play: Any, overrides: list[str]
) -> None:
    trainer = trainer_of(*overrides, play=play)
    batch = trainer.batch()
    _, gradients = trainer.loss_and_gradients(batch)
    margins, model = plain_margins(start, trainer, play)
    loss = -logsigmoid(margins).mean()
    loss.backward()
    assert_same(gradients, model)
    logged = {name: values[-1] for name, values in trainer._figures.items()}
    assert logged["online_dpo/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert logged["online_dpo/reward_margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert logged["online_dpo/reward_accuracy"] == (margins > 0).double().mean()
    assert logged["online_dpo/groups_without_pair"] == 2 - len(margins)
    assert (len(batch) == 2 * len(margins)) or "train.per_device_train_batch_size=1" not in overrides


def test_the_gradient_is_that_of_trls_dpo_on_the_pairs_that_are_made_of_a_run(
    trainer_of: Any, start: Path, tmp_path: Path
) -> None:
    trainer, tokenizer = trainer_of(), AutoTokenizer.from_pretrained(start)
    _, gradients = trainer.loss_and_gradients(trainer.batch())
    records = [lively(index, Problem.of(f"lesson {index // GROUP}", "")) for index in range(2 * GROUP)]
    pairs = list(PairMaker({}, lambda text: [], lambda ids: "", least_margin=0).of_step(records))
    write_pairs(tmp_path / "pairs.parquet", pairs, tokenizer)
    options = [f"model.model_name_or_path={start}", f"dataset.pairs={tmp_path / 'pairs.parquet'}", "train.beta=0.3"]
    options += [f"logging.save_dir={tmp_path / 'trl'}", "dataset.held_out_share=0", "model.max_length=128"]
    options += ["train.dtype=float32", "train.gradient_checkpointing=false", "train.optimizer=adamw_torch"]
    config = load(TrainPreferencesConfig, "train_preferences", options)
    trl = make_trainer(config, preference_arguments(config, tmp_path / "trl"), tmp_path / "trl")
    trl.model.load_state_dict(trainer.model.state_dict())
    assert len(pairs) == 2
    trl.compute_loss(trl.model, PairCollator(tokenizer.pad_token_id)(rows_of_pairs(pairs))).backward()
    assert_same(gradients, trl.model, within=2e-6)  # both are float32


@pytest.mark.parametrize("more", [[], LORA], ids=["whole", "LoRA"])
def test_it_begins_at_the_reference_and_learns_what_is_better(trainer_of: Any, more: list[str]) -> None:
    trainer = trainer_of(*more, "train.learning_rate=3e-3", "train.lr_scheduler_type=constant", moved=False)
    figures = [step(trainer) for _ in range(6)]
    first, last = ({name: line[f"online_dpo/{name}"] for name in ("loss", "reward_margin", "reward_accuracy")}
                   for line in (figures[0], figures[-1]))  # fmt: skip
    assert first == {"loss": pytest.approx(0.693147, abs=1e-5), "reward_margin": 0, "reward_accuracy": 0.5}
    assert last["reward_accuracy"] == 1 and last["loss"] < 0.6 and last["reward_margin"] > 0.1


def test_a_batch_without_pairs_teaches_nothing(trainer_of: Any) -> None:
    trainer = trainer_of("train.groups_without_variance=keep", play=all_flat)
    _, gradients = trainer.loss_and_gradients(trainer.batch())
    assert trainer._figures["online_dpo/groups_without_pair"] == [2]
    assert "online_dpo/loss" not in trainer._figures and not any(gradient.any() for gradient in gradients.values())


def test_shuffled_rewards_make_other_pairs(trainer_of: Any) -> None:
    """The control: rewards are permuted over the batch."""
    ids = []
    for shuffle in ("false", "true"):
        batch = trainer_of(f"train.shuffle_rewards={shuffle}", "seed=3", moved=False).batch()
        signs = {}
        for micro in batch:
            for row, advantages in zip(micro.completion_ids_BT, micro.advantages_BT, strict=True):
                signs[tuple(row[:5].tolist())] = advantages.sum().sign().item()
        ids.append(signs)
        assert sorted(signs.values()) == [-1, -1, 1, 1]
    assert ids[0] != ids[1]


# Pairs ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=3, max_size=3), max_size=6))
def test_every_group_whose_rewards_differ_has_its_best_and_its_worst_in_one_pair(groups: list[list]) -> None:
    assignments = pairs_of([reward for group in groups for reward in group], 3)
    number = 0
    for index, group in enumerate(groups):
        of_group, rewards = assignments[3 * index : 3 * index + 3], [reward for reward in group if reward is not None]
        if len(set(rewards)) < 2:
            assert of_group == [(0, 0)] * 3
            continue
        sides = {side: (reward, pair) for reward, (pair, side) in zip(group, of_group, strict=True) if side}
        assert (
            sides == {1: (max(rewards), number), -1: (min(rewards), number)}
            and sum(side != 0 for _, side in of_group) == 2
        )
        number += 1


def test_processes_that_share_a_group_train_as_one_does(start: Path, tmp_path: Path) -> None:
    """Three groups of four: of two processes, each has a part of the second one. The second step depends on margins of
    both."""
    program = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from tests.support import offline_trainer as offline

def play(index, problem):
    return offline.conversation(PartialState().process_index * 6 + index, problem, seed=1)

options = ["train.number_of_problems_per_batch=3", "train.max_steps=2", "train.optimizer=sgd", "train.max_grad_norm=0"]
options += ["train.algorithm=online_dpo", "train.mu=1", "train.learning_rate=0.05"]
trainer = offline.offline_trainer(Path(sys.argv[1]), Path(sys.argv[2]), options, play)
trainer.train()
logged = [each["online_dpo/reward_margin"] for each in trainer.state.log_history if "online_dpo/loss" in each]
print(json.dumps([logged, *(each.double().flatten()[:50].tolist() for each in trainer.model.parameters())]))
"""
    (single,) = in_processes(program, 1, str(tmp_path / "one"), str(start))
    first, second = in_processes(program, 2, str(tmp_path / "two"), str(start))
    assert first == second and len(single) == len(first) and single[0][0] == 0 < single[0][1]
    for expected, actual in zip(single, first, strict=True):
        assert actual == pytest.approx(expected, abs=1e-5)
