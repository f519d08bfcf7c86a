"""PPO on scripted batches: its steps, its gradients, its critic, and what stops it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.rows import TrainingRow, rows_of
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.trainer.advantages import NO_STEP, estimate, token_rewards
from classroom_rl.trainer.batch import Batch
from classroom_rl.trainer.critic import HEAD_FILE
from classroom_rl.trainer.ppo import EpisodeTokens, critic_path
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model

PPO = ["train.algorithm=ppo", "train.beta=0", "train.mu=1", "judge_model.max_failed_share=1"]
PLAIN = ["train.ppo.lam=1.0", "train.ppo.whiten_advantages=false", "train.ppo.center_values=false"]
LORA = ["teacher_model.lora.enable=true", "teacher_model.lora.dropout=0"]


def lesson(index: int) -> Problem:
    return Problem.of(f"lesson {index}", "")


def lively(index: int, problem: Problem) -> ConversationRecord:
    """Conversations whose log-probs are about those of the tiny model, and whose rewards differ."""
    return conversation(index, problem, seed=1)


def unjudged(index: int, problem: Problem) -> ConversationRecord:
    """As `lively`; every third conversation has no verdict."""
    nothing = {"reward": None, "rewards": {"pedagogical": None}, "verdicts": []}
    return conversation(index, problem, seed=1, **(nothing if index % 3 == 0 else {}))


def cut(index: int, problem: Problem) -> ConversationRecord:
    """As `lively`; every other conversation was cut."""
    return conversation(index, problem, seed=1, overflow="the student's context is full" if index % 2 else None)


def equally_good(is_cut: Callable[[int], bool]) -> Any:
    """As `lively`, all with the reward 0.8; those at some places of the batch were cut."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        full = {"overflow": "the student's context is full"} if is_cut(index) else {}
        return conversation(index, problem, seed=1, reward=0.8, rewards={"pedagogical": 0.8}, **full)

    return play


class Framed:
    """Conversations in a chat template's frame, other ones in each batch, all with the reward 0.93. Every other one was
    cut behind its first or second message, in a state that is before no message."""

    reward = 0.93

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def __call__(self, index: int, problem: Problem) -> ConversationRecord:
        count = self._rng.choice([1, 3]) if index % 2 else 5
        record, full = conversation(index, problem, seed=1), {"overflow": "full"} if index % 2 else {}
        ids, mask, turns = [], [], []
        for turn in record.turns[:count]:
            is_sampled = turn.span is not None
            message_ids = [self._rng.randrange(20, 26) for _ in range(self._rng.randrange(3, 8))]
            start, framed = len(ids), [*message_ids, 5]
            ids += framed + [7] + ([11, 9] if is_sampled else [12, 9]) * (turn is not record.turns[count - 1])
            mask += [int(is_sampled)] * len(framed) + [0] * (len(ids) - start - len(framed))
            turns.append(replace(turn, span=(start, start + len(framed)) if is_sampled else None))
        fields = {"completion_ids": ids, "mask": mask, "logprobs": [-6.0 * bit for bit in mask], "turns": turns}
        rewards = {"reward": self.reward, "rewards": {"pedagogical": self.reward}}
        return record.model_copy(update=fields | rewards | full | {"prompt_ids": [7, 10, 9, 20, 21, 5, 7, 12, 9]})


@pytest.fixture
def trainer_of(world: Path, tmp_path: Path) -> Callable[..., Any]:
    model = save_tiny_model(tmp_path / "model", world / "blank")

    def made(*overrides: str, play: Any = lively, name: str = "run", checkpoint: Path | None = None) -> Any:
        return offline_trainer(tmp_path / name, model, [*PPO, *overrides], play, checkpoint=checkpoint)

    return made


def step(trainer: Any) -> dict[str, float]:
    """One optimizer step, of which a batch is played if it is due; returns what was logged of it."""
    if trainer.lr_scheduler is None:
        trainer.create_optimizer_and_scheduler(10)
    trainer._figures.clear()
    trainer.optimizer.zero_grad()
    trainer.training_step(trainer.model, {})
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    trainer.state.global_step += 1
    return {name.removeprefix("ppo/"): values[-1] for name, values in trainer._figures.items()}


def without_advantages(trainer: Any) -> list[Batch]:
    """A batch in which only the critic, the entropy and the reference have a loss."""
    return [replace(micro, advantages_BT=torch.zeros_like(micro.advantages_BT)) for micro in trainer.batch()]


def assert_gradients(found: dict[str, torch.Tensor], trainer: Any, losses: list[torch.Tensor], least: float) -> None:
    """The trainer's gradients of the policy are those of losses that were computed without it."""
    trainer.model.zero_grad()
    torch.stack(losses).sum().backward()
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None and "value_head" not in name:
            assert torch.allclose(found[name], parameter.grad, rtol=0, atol=1e-6), name
            assert found[name].abs().max() > least, name


def scored(model: torch.nn.Module, row: ConversationRecord | TrainingRow) -> torch.Tensor:
    """The log-probs of all tokens behind each place of the completion, from the model's logits."""
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    return model(input_ids=ids).logits[0, :-1].log_softmax(-1)[-len(row.completion_ids) :]


def of_sampled(model: torch.nn.Module, row: ConversationRecord | TrainingRow) -> torch.Tensor:
    """The log-prob of every completion token."""
    return scored(model, row).gather(1, torch.tensor(row.completion_ids).unsqueeze(1)).squeeze(1)


def reinforce(model: torch.nn.Module, row: ConversationRecord | TrainingRow, reward: float) -> torch.Tensor:
    """−reward · ratio of engine and trainer · log π, summed over the sampled tokens."""
    logps = of_sampled(model, row)
    ratio = torch.exp(logps.detach() - torch.tensor(row.logprobs)).clamp(max=2.0)
    return -(torch.tensor(row.mask) * reward * ratio * logps).sum()


def weights(trainer: Any, of_head: bool) -> dict[str, torch.Tensor]:
    named = trainer.model.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in named if ("value_head" in name) is of_head}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Steps of episodes ---------------------------------------------------------------------------------------------------


def test_the_tokens_of_an_episode_follow_each_other_across_samples() -> None:
    """Two episodes: samples 0 and 1, and sample 2 alone."""
    tokens = EpisodeTokens(torch.arange(4) < torch.tensor([[2], [1], [4]]), [3, 4])
    joined = tokens.joined(torch.tensor([[1.0, 2, 9, 9], [6, 9, 9, 9], [3, 4, 5, 7]]))
    assert joined.tolist() == [[1, 2, 6, 0], [3, 4, 5, 7]]
    assert tokens.apart(joined).tolist() == [[1, 2, 0, 0], [6, 0, 0, 0], [3, 4, 5, 7]]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 1000))
def test_what_is_joined_comes_apart_again(lengths: list[list[int]], seed: int) -> None:
    by_sample = torch.tensor([length for episode in lengths for length in episode])
    mask = torch.arange(4) < by_sample.unsqueeze(1)
    tokens = EpisodeTokens(mask, list(map(sum, lengths)))
    values = torch.rand(len(by_sample), 4, generator=torch.Generator().manual_seed(seed))
    for tensor in (values, values > 0.5):
        joined = tokens.joined(tensor)
        assert joined.shape == (len(lengths), max(map(sum, lengths)))
        assert torch.equal(tokens.apart(joined), tensor * mask)


def test_advantages_of_messages_are_the_same_in_one_sample_and_in_three() -> None:
    """λ and γ cross samples: three messages of two tokens, in one sample with the environment's tokens between them,
    and each in one of its own."""
    values, outcome = torch.rand(6, generator=torch.Generator().manual_seed(3)), torch.tensor([0.8])
    one, positions, spread = torch.full((1, 10), NO_STEP), [0, 1, 4, 5, 8, 9], torch.zeros(1, 10)
    one[0, positions], spread[0, positions] = torch.tensor([0, 0, 1, 1, 2, 2]), values
    single = estimate(token_rewards(one, torch.zeros(1, 10), outcome), spread, one, torch.zeros(1), 0.9, 0.8, "turns")

    tokens = EpisodeTokens(torch.ones(3, 2, dtype=torch.bool), [6])
    numbers, joined = torch.tensor([[0, 0, 1, 1, 2, 2]]), tokens.joined(values.reshape(3, 2))
    rewards = token_rewards(numbers, torch.zeros(1, 6), outcome)
    split = estimate(rewards, joined, numbers, torch.zeros(1), 0.9, 0.8, "turns")
    assert torch.allclose(split.advantages[0], single.advantages[0, positions])
    assert torch.equal(tokens.apart(split.advantages)[1], split.advantages[0, 2:4])


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_with_a_critic_at_zero_and_lambda_1_it_is_reinforce(trainer_of, over: str) -> None:
    """The mean over all sampled tokens, computed without the trainer."""
    trainer = trainer_of(*PLAIN, f"train.ppo.gae_over={over}", "train.ppo.value_weight=0", play=unjudged)
    _, gradients = trainer.loss_and_gradients(trainer.batch())
    records = [record for record in (unjudged(i, lesson(i)) for i in range(8)) if record.reward is not None]
    tokens = sum(sum(record.mask) for record in records)
    assert {record.reward for record in records} > {records[0].reward}
    losses = [reinforce(trainer.model, record, record.reward) / tokens for record in records]
    assert_gradients(gradients, trainer, losses, 1e-4)


def in_rows(index: int, problem: Problem) -> ConversationRecord:
    """As `unjudged`, but each message stands behind a prompt of its own: the first is the row of the conversation."""
    record = unjudged(index, problem)
    end, branches = record.turns[0].span[1], []
    for turn_index in (2, 4):
        span = slice(*record.turns[turn_index].span)
        tokens = (tuple(record.completion_ids[span]), tuple(record.logprobs[span]))
        branches.append(AuxSample("policy", turn_index, 0, *tokens, prompt_ids=(30 + turn_index, 40 + index, 50)))
    turns = [replace(turn, span=turn.span if turn_index == 0 else None) for turn_index, turn in enumerate(record.turns)]
    first = {name: getattr(record, name)[:end] for name in ("completion_ids", "mask", "logprobs")}
    return record.model_copy(update=first | {"branches": branches, "turns": turns})


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_rows_of_their_own_are_the_steps_of_one_episode(trainer_of, over: str) -> None:
    """With a critic at zero and λ = 1 it is REINFORCE over the tokens of all rows; and with γ = 0.5 the steps before
    the last one have the outcome's share that is due to them, whichever row they stand in."""
    overrides = [*PLAIN, f"train.ppo.gae_over={over}", "train.ppo.value_weight=0"]
    trainer = trainer_of(*overrides, play=in_rows)
    _, gradients = trainer.loss_and_gradients(trainer.batch())
    records = [record for record in (in_rows(i, lesson(i)) for i in range(8)) if record.reward is not None]
    rows = [(record, row) for record in records for row in rows_of(record)]
    assert len(rows) == 3 * len(records)
    tokens = sum(sum(row.mask) for _, row in rows)
    losses = [reinforce(trainer.model, row, record.reward) / tokens for record, row in rows]
    assert_gradients(gradients, trainer, losses, 1e-4)

    trainer = trainer_of(*overrides, "train.ppo.gamma=0.5", play=in_rows, name="discounted")
    paid = {}
    for micro in trainer.batch():
        for ids, mask, advantages in zip(micro.completion_ids_BT, micro.mask_BT, micro.advantages_BT, strict=True):
            paid[tuple(ids[mask].tolist())] = advantages[mask].tolist()
    for record in records:
        later = 0
        for number, row in reversed(list(enumerate(rows_of(record)))):
            sampled = [token for token, is_sampled in zip(row.completion_ids, row.mask, strict=True) if is_sampled]
            count = len(sampled)
            steps = [2 - number] * count if over == "turns" else [later + count - 1 - i for i in range(count)]
            assert paid[tuple(sampled)] == pytest.approx([record.reward * 0.5**remaining for remaining in steps])
            later += count


def test_the_values_are_those_of_the_states_before_the_tokens(trainer_of) -> None:
    trainer = trainer_of("train.ppo.center_values=false")
    head = trainer.algorithm.value_head
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
        head.bias.fill_(0.25)
    for micro in trainer.batch():
        parts = (micro.prompt_ids_BP, micro.completion_ids_BT, micro.completion_mask_BT, micro.old_values_BT)
        for prompt, completion, mask, old_values in zip(*parts, strict=True):
            ids = torch.cat([prompt, completion[mask.bool()]]).unsqueeze(0)
            with torch.no_grad():
                hidden = trainer.model.model(input_ids=ids).last_hidden_state[0]
                values = hidden @ head.weight[0] + 0.25
            before = values[len(prompt) - 1 : -1]
            assert torch.allclose(old_values[: len(before)], before, atol=1e-4)


@pytest.mark.parametrize("more", [[], LORA], ids=["whole", "LoRA"])
@pytest.mark.parametrize("train_trunk", [True, False])
def test_the_head_learns_and_the_trunk_only_if_it_is_to(trainer_of, train_trunk: bool, more: list[str]) -> None:
    """Without advantages only the critic has a loss."""
    trainer = trainer_of(*more, f"train.ppo.train_trunk={str(train_trunk).lower()}")
    with torch.no_grad():
        trainer.algorithm.value_head.weight.fill_(0.1)
    _, gradients = trainer.loss_and_gradients(without_advantages(trainer))
    of_head = {name: gradient for name, gradient in gradients.items() if "value_head" in name}
    assert len(of_head) == 2 and all(gradient.abs().max() > 1e-4 for gradient in of_head.values())
    rest = max(gradient.abs().max().item() for name, gradient in gradients.items() if name not in of_head)
    assert rest > 1e-5 if train_trunk else rest == 0


def test_the_critic_s_loss_is_half_the_mean_squared_error_over_the_states(trainer_of) -> None:
    """The head is 0: its loss is the mean of return²/2, weighted with 0.5, its bias' gradient −0.5 · mean return."""
    trainer = trainer_of(*PLAIN, "train.ppo.value_clip=null")
    batch = without_advantages(trainer)
    returns = torch.cat([micro.returns_BT[micro.value_mask_BT] for micro in batch])
    loss, gradients = trainer.loss_and_gradients(batch)
    assert loss == pytest.approx(0.25 * returns.square().mean().item(), abs=1e-6)
    assert gradients["value_head.bias"].item() == pytest.approx(-0.5 * returns.mean().item(), abs=1e-6)


def test_entropy_is_that_of_what_is_sampled_and_raises_it(trainer_of) -> None:
    trainer = trainer_of("train.ppo.entropy_weight=0.5", "train.ppo.value_weight=0")
    batch, entropy, count = without_advantages(trainer), 0.0, 0
    for record in (lively(index, lesson(index)) for index in range(8)):
        with torch.no_grad():
            logps = scored(trainer.model, record)
        entropy += (-(logps.exp() * logps).sum(-1) * torch.tensor(record.mask)).sum().item()
        count += sum(record.mask)
    loss, _ = trainer.loss_and_gradients(batch)
    assert loss == pytest.approx(-0.5 * entropy / count, abs=1e-4)
    trainer.optimizer.step()
    trainer.loss_and_gradients(batch)
    before, after = trainer._figures["entropy"]
    assert before == pytest.approx(entropy / count, abs=1e-4) and after > before


def test_the_kl_pulls_back_by_how_far_each_token_s_log_prob_is_from_the_reference(trainer_of) -> None:
    """β/N · Σ (ln π − ln π_reference) · ∇ ln π, the gradient of KL(π ‖ reference), computed without the trainer; the
    reference is 0.7 nats away everywhere. k3 alone would pull by 1 − e^−0.7 = 0.503."""
    trainer = trainer_of("train.beta=0.5", "train.ppo.value_weight=0")
    batch = [replace(micro, ref_logps_BT=micro.old_logps_BT - 0.7) for micro in without_advantages(trainer)]
    _, gradients = trainer.loss_and_gradients(batch)
    records = [lively(index, lesson(index)) for index in range(8)]
    tokens = sum(sum(record.mask) for record in records)
    logps = [(torch.tensor(record.mask) * of_sampled(trainer.model, record)).sum() for record in records]
    assert_gradients(gradients, trainer, [0.5 * 0.7 * logp / tokens for logp in logps], 1e-5)


# The critic ----------------------------------------------------------------------------------------------------------


def test_a_centred_critic_begins_at_the_mean_return(trainer_of, tmp_path: Path) -> None:
    """Over all sampled tokens of conversations with a verdict. It explains nothing then, and no weight has moved; the
    checkpoint knows it."""
    trainer = trainer_of("train.ppo.lam=1.0", "train.ppo.whiten_advantages=false", play=unjudged)
    batch = trainer.batch()
    records = [record for record in (unjudged(i, lesson(i)) for i in range(8)) if record.reward is not None]
    counts = [sum(record.mask) for record in records]
    mean = sum(count * record.reward for count, record in zip(counts, records, strict=True)) / sum(counts)
    for micro in batch:
        assert micro.old_values_BT.flatten().tolist() == pytest.approx([mean] * micro.old_values_BT.numel(), abs=1e-6)
        expected = torch.where(micro.mask_BT, micro.returns_BT - mean, 0.0)
        assert torch.allclose(micro.advantages_BT, expected, atol=1e-6)
    assert trainer._figures["ppo/explained_variance"] == [pytest.approx(0, abs=1e-6)]
    trainer.save_model(str(tmp_path / "saved"))
    head = trainer_of(name="again", checkpoint=tmp_path / "saved").algorithm.value_head
    assert head.offset.item() == pytest.approx(mean) and not head.weight.any()


@pytest.mark.parametrize("is_cut", [lambda index: index % 2, lambda index: True], ids=["half", "all"])
def test_a_centred_critic_begins_where_it_would_without_the_cut_conversations(trainer_of, is_cut) -> None:
    """What a cut conversation would have got is unknown, and not 0: where all others have 0.8, nothing is better or
    worse. If every one was cut, the verdicts on what there is of them are all that is known."""
    trainer = trainer_of(play=equally_good(is_cut))
    batch = trainer.batch()
    assert trainer.algorithm.value_head.offset.item() == pytest.approx(0.8)
    advantages = torch.cat([micro.advantages_BT[micro.mask_BT] for micro in batch])
    assert len(advantages) > 8 and not advantages.any()


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_a_conversation_that_was_cut_goes_on_with_a_value_that_the_critic_has_learned(trainer_of, over: str) -> None:
    """All rewards are 0.93. The end of a cut conversation is a state that no ended one passes as a step, so the critic
    may say anything of it (down to 0.58 here, over messages)."""
    warm_up = ["train.ppo.value_warmup_steps=90", "train.max_steps=99", "train.lr_scheduler_type=constant"]
    learning = ["train.ppo.value_learning_rate=0.003", "train.ppo.value_clip=null", "train.ppo.lam=1"]
    trainer = trainer_of(*warm_up, *learning, f"train.ppo.gae_over={over}", play=Framed())
    for _ in range(20):
        step(trainer)
    returns = [micro.returns_BT[micro.value_mask_BT] for micro in trainer.batch()]
    assert torch.cat(returns).tolist() == pytest.approx([Framed.reward] * len(torch.cat(returns)), abs=0.05)


def test_during_the_warm_up_the_policy_stays_as_it_is(trainer_of) -> None:
    trainer = trainer_of("train.ppo.value_warmup_steps=2", "train.ppo.entropy_weight=0.1", "train.max_steps=9")
    policy, head = weights(trainer, of_head=False), weights(trainer, of_head=True)
    losses = [step(trainer)["value_loss"] for _ in range(2)]
    assert same(weights(trainer, of_head=False), policy) and not same(weights(trainer, of_head=True), head)
    assert losses[1] < losses[0]
    step(trainer)
    assert not same(weights(trainer, of_head=False), policy)


def test_target_kl_stops_the_updates_on_this_batch_alone(trainer_of) -> None:
    constant = ("train.learning_rate=1e-2", "train.lr_scheduler_type=constant")
    trainer = trainer_of("train.mu=4", *constant, "train.ppo.target_kl=1e-3")
    first = step(trainer)
    assert first["approx_kl"] == pytest.approx(0, abs=1e-6) and first["stopped"] == 0
    moved = weights(trainer, of_head=False), weights(trainer, of_head=True)
    for _ in range(3):
        later = step(trainer)
        assert later["approx_kl"] > 1e-3 and later["stopped"] == 1
        assert same(weights(trainer, of_head=False), moved[0]) and same(weights(trainer, of_head=True), moved[1])
    anew = step(trainer)  # the first pass over the next batch
    assert anew["stopped"] == 0 and not same(weights(trainer, of_head=False), moved[0])
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-2, 1e-2, 1e-4]


def test_later_passes_keep_the_old_values_and_log_probs(trainer_of) -> None:
    trainer = trainer_of("train.mu=2", "train.learning_rate=1e-2", "train.ppo.value_learning_rate=0.1")
    first = step(trainer)
    names = ("old_values_BT", "old_logps_BT", "returns_BT", "advantages_BT")
    old = [[getattr(micro, name).clone() for name in names] for micro in trainer.micro_batches]
    second = step(trainer)
    for micro, old_tensors in zip(trainer.micro_batches, old, strict=True):
        assert all(torch.equal(getattr(micro, name), tensor) for name, tensor in zip(names, old_tensors, strict=True))
    assert first["clip_fraction"] == first["value_clip_fraction"] == 0
    assert second["approx_kl"] > 0 and second["clip_fraction"] > 0 and second["value_clip_fraction"] > 0


def test_a_conversation_without_a_verdict_trains_nobody_and_is_in_no_figure(trainer_of) -> None:
    """Its tokens may be anything: neither gradients nor figures change."""

    def other(index: int, problem: Problem) -> ConversationRecord:
        record = unjudged(index, problem)
        if record.reward is None:
            ids = [7 if sampled else token for token, sampled in zip(record.completion_ids, record.mask, strict=True)]
            record = record.model_copy(update={"completion_ids": ids, "logprobs": [-9.0 * m for m in record.mask]})
        return record

    results = []
    for name, play in (("one", unjudged), ("two", other)):
        trainer = trainer_of(play=play, name=name)
        with torch.no_grad():
            trainer.algorithm.value_head.weight.fill_(0.1)
        batch = trainer.batch()
        logged = {key: values for key, values in trainer._figures.items() if key.startswith("ppo/")}
        masked = sum(micro.mask_BT.sum().item() for micro in batch)
        assert masked == sum(sum(lively(i, lesson(i)).mask) for i in range(8) if i % 3)
        results.append((trainer.loss_and_gradients(batch), logged))
    ((loss, gradients), logged), ((other_loss, other_gradients), other_logged) = results
    assert loss == pytest.approx(other_loss, abs=1e-6) and len(logged) == 5
    assert all(logged[key] == pytest.approx(other_logged[key], abs=1e-6) for key in logged)
    assert all(torch.allclose(gradients[key], other_gradients[key], atol=1e-6) for key in gradients)


def test_whole_batches_without_a_verdict_leave_everything_as_it_is(trainer_of) -> None:
    trainer = trainer_of(play=lambda _, problem: unjudged(0, problem))
    loss, gradients = trainer.loss_and_gradients(trainer.batch())
    assert loss == 0 and not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("bootstrap", [True, False])
def test_a_conversation_that_was_cut_has_the_value_of_its_end_in_place_of_its_reward(trainer_of, bootstrap) -> None:
    trainer = trainer_of(*PLAIN, f"train.ppo.bootstrap_truncated={str(bootstrap).lower()}", play=cut)
    with torch.no_grad():
        trainer.algorithm.value_head.bias.fill_(0.875)  # of every state
    returns = [row.max().item() for micro in trainer.batch() for row in micro.returns_BT]
    rewards = [cut(i, lesson(i)).reward for i in range(8)]
    expected = [0.875 if bootstrap and index % 2 else reward for index, reward in enumerate(rewards)]
    assert returns == pytest.approx(expected, abs=1e-4) and len(set(rewards)) > 4
    assert trainer._figures["ppo/truncated_share"] == [0.5 if bootstrap else 0]


def test_turn_rewards_are_paid_at_their_message_s_last_token_as_a_mean(trainer_of) -> None:
    """Three messages with 1, none and −0.5: mean (1 − 0.5) / 2, of which each message is paid its part."""

    def priced(index: int, problem: Problem) -> ConversationRecord:
        return conversation(index, problem, seed=1, turn_rewards={"length": [1.0, None, -0.5]})

    credit = [f"train.turn_credit.{option}" for option in ("mode=immediate", "weight=0.4", "rewards={length: 1}")]
    trainer = trainer_of(*PLAIN, *credit, play=priced)
    rows = [pair for micro in trainer.batch() for pair in zip(micro.mask_BT, micro.returns_BT, strict=True)]
    for index, (mask, returns) in enumerate(rows):
        record = priced(index, lesson(index))
        for turn, later in ((0, 0.4 * 0.5 / 2), (2, 0.4 * -0.5 / 2), (4, 0.4 * -0.5 / 2)):
            span = slice(*record.turns[turn].span)
            assert mask[span].all() and not mask[span.stop], "the frame of the template is no step"
            assert returns[span].tolist() == pytest.approx([record.reward + later] * len(returns[span]))


def test_shuffled_rewards_are_those_of_other_conversations(trainer_of) -> None:
    def returns(*more: str) -> list[float]:
        batch = trainer_of(*PLAIN, *more, name=f"run{len(more)}").batch()
        return [row.max().item() for micro in batch for row in micro.returns_BT]

    real, shuffled = returns(), returns("train.shuffle_rewards=true")
    assert sorted(real) == pytest.approx(sorted(shuffled)) and real != pytest.approx(shuffled)


@pytest.mark.parametrize("more", [[], LORA], ids=["whole", "LoRA"])
def test_what_is_published_and_released_is_what_grpo_publishes(
    trainer_of, world: Path, tmp_path: Path, more: list[str]
) -> None:
    """The same files with the same names of tensors, from a trainer of either algorithm."""

    def saved(trainer: Any, folder: Path) -> dict[str, list[str]]:
        save_together(trainer, lambda save: save(folder / "model"))
        if trainer.has_adapter:
            save_adapter_together(trainer, lambda save: save(folder / "adapter"))
        tensor_names = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            is_weights = path.suffix == ".safetensors"
            tensor_names[str(path.relative_to(folder))] = sorted(load_file(path)) if is_weights else []
        return tensor_names

    ppo = saved(trainer_of(*more, name="ppo"), tmp_path / "of_ppo")
    grpo = offline_trainer(tmp_path / "grpo", tmp_path / "model", ["train.beta=0", *more])
    assert ppo == saved(grpo, tmp_path / "of_grpo")
    assert not any("value" in name for names in ppo.values() for name in names) and any(ppo.values())


@pytest.mark.parametrize("more", [[], LORA], ids=["whole", "LoRA"])
def test_a_checkpoint_has_the_head_and_a_resumed_trainer_its_values(trainer_of, tmp_path: Path, more) -> None:
    trainer = trainer_of(*more)
    step(trainer)
    trainer.state.max_steps = 10
    trainer.save_progress()
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-1"
    assert (checkpoint / HEAD_FILE).is_file() and trainer.algorithm.value_head.weight.any()
    again = trainer_of(*more, name="again", checkpoint=checkpoint)
    assert same(weights(again, of_head=True), weights(trainer, of_head=True))
    assert critic_path(tmp_path / "run", 0).is_file(), "and the one that the batch was sampled with"
