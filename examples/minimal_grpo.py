"""GRPO in one file, to read and to change: play, compare the rollouts of each group, take a step.

    python examples/minimal_grpo.py

A chat model with random weights learns to guess a number between 1 and 9 in at most four messages, in about two minutes
on a laptop: first to write digits, then to use the answers. To train a real model, change the line that makes `folder`:
it may be a name on the Hub. What is left out here, such as clipping over several epochs, a KL penalty and several
processes, is in `train_rl.py`.
"""

import asyncio
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import classroom_rl as cr
from classroom_rl.models.random_model import write_tiny_chat_model

STEPS, GROUPS, GROUP_SIZE, GUESSES = 80, 8, 16, 4
LEARNING_RATE, MAX_GRAD_NORM, TEMPERATURE = 3e-3, 1.0, 1.0
PROMPT = "Guess my number between 1 and 9."


def guesses(rollout: cr.Rollout) -> list[int | None]:
    """What was guessed in each message; None for a message that does not begin with a digit from 1 to 9."""
    first = [step.content[:1] for step in rollout.steps]
    return [int(character) if character in set("123456789") else None for character in first]


def next_prompt(rollout: cr.Rollout, step: int) -> str | None:
    """The program's answer to the last guess; None ends the rollout."""
    guess, number = guesses(rollout)[-1], rollout.meta["number"]
    if guess == number or step >= GUESSES:
        return None
    return "One digit." if guess is None else "Higher." if guess < number else "Lower."


def reward(rollout: cr.Rollout) -> float:
    """1 for the number at the first guess and less for each further one; a little for messages that are guesses."""
    tried = guesses(rollout)
    if tried[-1] == rollout.meta["number"]:
        return 1.0 - 0.1 * (len(tried) - 1)
    return 0.2 * sum(guess is not None for guess in tried) / len(tried)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each rollout of a group was than the group, in standard deviations.

    Args:
        rewards: of shape (groups, rollouts of a group).

    Source: DeepSeekMath (arXiv 2402.03300), equation of outcome supervision in section 4.1.2.
    """
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)


def log_probs(model: torch.nn.Module, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """The log-prob of each token given those before it, of shape (batch, tokens - 1)."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / TEMPERATURE
    return logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]


def tensors(samples: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention and the mask of sampled tokens of samples of different lengths, padded on the right: three tensors
    of shape (batch, tokens)."""
    length = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
    ids, attention, sampled = (torch.zeros(len(samples), length, dtype=torch.long) for _ in range(3))
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample.prompt_ids + sample.completion_ids)
        ids[row, : len(tokens)], attention[row, : len(tokens)] = tokens, 1
        sampled[row, len(sample.prompt_ids) : len(tokens)] = torch.tensor(sample.mask)
    return ids, attention, sampled


def policy_loss(log_probs: torch.Tensor, advantages: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """GRPO's loss for the first step on a batch, where the policy ratio is 1: minus the mean of A·log π over all
    sampled tokens of the batch (DAPO's mean, arXiv 2503.14476, equation 12).

    Args:
        log_probs, sampled: of shape (batch, tokens).
        advantages: of shape (batch,).
    """
    return -(advantages[:, None] * log_probs * sampled).sum() / sampled.sum()


async def main() -> None:
    words = [f"{PROMPT} Higher. Lower. One digit. {digit}" for digit in "123456789"]
    folder = write_tiny_chat_model("runs/minimal_grpo_model", words, vocabulary=280, context=256)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = cr.HfEngine(model, tokenizer=tokenizer, batch_size=GROUPS * GROUP_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    chance = random.Random(0)
    for step in range(STEPS):
        # Play: every group has a number of its own, and each of its rollouts the same prompt.
        player = cr.Rollouts(
            engine, max_steps=GUESSES, max_tokens=2, temperature=TEMPERATURE, history="with_thinking", seed=step
        )
        problems = [{"prompt": PROMPT, "number": chance.randint(1, 9)} for _ in range(GROUPS)]
        played = await player.run(problems, next_prompt, reward=reward, copies=GROUP_SIZE, progress=False)

        # Compare: an advantage for each rollout, and so for each of its sampled tokens.
        rewards = torch.tensor([rollout.reward for rollout in played])
        advantages = group_advantages(rewards.view(GROUPS, GROUP_SIZE)).flatten()

        # Step: the model that the engine samples from is the one that is trained.
        ids, attention, sampled = tensors(played.rows())
        loss = policy_loss(log_probs(model, ids, attention), advantages, sampled[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        solved = sum(guesses(rollout)[-1] == rollout.meta["number"] for rollout in played)
        print(f"step {step + 1:3}  reward {rewards.mean():.3f}  found {solved / len(played):.0%}", flush=True)
    print(played[0].messages())


if __name__ == "__main__":
    asyncio.run(main())
