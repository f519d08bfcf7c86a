"""Turns episodes into training samples: `TrainingRow`s of a prompt, a completion, and masks for the losses.

Most episodes give one sample. Drafts that a supervisor rejected, messages that were written in another context, and
corrections are samples of their own. They begin with the episode's prompt, and the conversation before them is part of
the completion, with mask 0. So no sample of a batch is longer than a conversation, however the batch is padded.

In an environment with a new prompt for every message, such as a game, each message is a sample with its own prompt. The
first message is the episode's main sample, the others are auxiliary samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from classroom_rl.errors import DataError
from classroom_rl.rollout.step import WITH_THINKING, Rollout, Step
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.rollout.trajectory import Trajectory

POLICY, DRAFT, CORRECTION = "policy", "draft", "correction"
NO_MESSAGE = -1


@dataclass(frozen=True)
class TrainingRow:
    """One training sample. All lists after `prompt_ids` have one entry per completion token.

    Attributes:
        kind: `policy` (sampled, and part of the conversation), `draft` (sampled and rejected), or `correction` (a
            checked target that nobody sampled).
        message: the index of the policy's message that the sample is about; None for a whole conversation.
        mask: 1 for tokens that the policy sampled; only these get a policy gradient.
        target: 1 for tokens of a correction; only these get a gradient of the cross-entropy.
        logprobs: the engine's log-probs of sampled tokens, 0.0 for all others.
        messages: the index of the policy's message that each sampled token belongs to, `NO_MESSAGE` for all others.
        reward: the process reward of a draft, or of a message in another context; None for other samples of an episode.
            Samples of the library's rollouts have the reward of the step or of the rollout (`rows_of_rollout`).
        unchanged: for a correction, how many of its first target tokens the policy wrote itself.
    """

    conversation_id: str
    kind: str
    message: int | None
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    target: list[int]
    logprobs: list[float]
    messages: list[int]
    reward: float | None = None
    unchanged: int = 0


def rows_of(record: Trajectory) -> list[TrainingRow]:
    """The samples of an episode: first that of the whole conversation, then the auxiliary samples."""
    numbers = message_numbers(record)
    messages = [NO_MESSAGE] * len(record.completion_ids)
    for turn_index, number in numbers.items():
        if (span := record.turns[turn_index].span) is not None:
            # A span includes the results of tools, which the policy did not sample.
            messages[slice(*span)] = [number if bit else NO_MESSAGE for bit in record.mask[slice(*span)]]
    target = [0] * len(messages)
    tokens = (record.prompt_ids, record.completion_ids, record.mask, target, record.logprobs, messages)
    policy_row = TrainingRow(record.id, POLICY, None, *tokens)
    return [policy_row, *(_row_of(record, sample, numbers[sample.turn]) for sample in record.branches)]


def message_numbers(record: Trajectory) -> dict[int, int]:
    """Maps the index of a turn to the number of the policy's message in it, from 0. The turns of other roles, and
    messages from the prompt template, are left out."""
    policy = next((turn.role for turn in record.turns if turn.policy is not None), None)
    policy_turns = [index for index, turn in enumerate(record.turns) if turn.role == policy and not turn.given]
    return {turn_index: number for number, turn_index in enumerate(policy_turns)}


def _row_of(record: Trajectory, sample: AuxSample, number: int) -> TrainingRow:
    prompt, context = context_of(record, sample)
    length, context_length, sampled = len(sample.ids), len(context), int(sample.kind != CORRECTION)
    mask = list(sample.mask) or [sampled] * length  # a sample without a mask is all sampled, or all target
    return TrainingRow(
        record.id,
        sample.kind,
        number,
        prompt,
        [*context, *sample.ids],
        [0] * context_length + mask,
        [0] * context_length + [1 - sampled] * length,
        [0.0] * context_length + (list(sample.logprobs) if sampled else [0.0] * length),
        [NO_MESSAGE] * context_length + [number if bit else NO_MESSAGE for bit in mask],
        sample.reward,
        0 if sampled else unchanged_tokens(record, sample),
    )


def context_of(record: Trajectory, sample: AuxSample) -> tuple[list[int], list[int]]:
    """The prompt of an auxiliary sample, and the tokens between the prompt and the sample."""
    if sample.prompt_ids:
        return list(sample.prompt_ids), list(sample.hint_ids)
    return record.prompt_ids, [*record.completion_ids[: sample.start], *sample.hint_ids]


def sampled_tokens(record: Trajectory, sample: AuxSample) -> tuple[list[int], list[float]]:
    """The sampled tokens of the message that a correction is about, and their log-probs."""
    message = (sample.turn, sample.draft)
    for candidate in record.branches:
        if candidate.kind != CORRECTION and (candidate.turn, candidate.draft) == message:
            return list(candidate.ids), list(candidate.logprobs)
    span = record.turns[sample.turn].span or (0, 0)
    return record.completion_ids[slice(*span)], record.logprobs[slice(*span)]


def unchanged_tokens(record: Trajectory, sample: AuxSample) -> int:
    """How many of a correction's first tokens the policy wrote itself, after the same context; at least one token of a
    correction counts as changed."""
    sampled, thoughts = sampled_tokens(record, sample)[0], list(sample.hint_ids)
    after_thoughts = sampled[len(thoughts) :] if sampled[: len(thoughts)] == thoughts else []
    return min(equal_tokens(after_thoughts, sample.ids), len(sample.ids) - 1)


def equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    return len(commonprefix([list(left), list(right)]))


def rows_of_rollout(rollout: Rollout) -> list[TrainingRow]:
    """The samples of a rollout, in the order of its steps; none if it has no step.

    With the history `with_thinking` there is one sample for the whole rollout, otherwise one for each step. A step's
    sample has the reward of the step, or that of the rollout if its steps were not scored. The sample of a whole
    rollout has the rollout's reward. Both are None if it was not scored.

    Raises:
        DataError: if the engine gave no tokens.
    """
    for step in rollout.steps:
        if not step.ids and step.tokens:
            raise DataError(
                f"Rollout {rollout.id} has no token ids: {rollout.settings.engine} gives text alone. Rows to train on "
                "need an engine with tokens, such as HfEngine or vLLM."
            )
    if rollout.settings.history == WITH_THINKING:
        return [_whole_row(rollout)] if rollout.steps else []
    return [_step_row(rollout, step) for step in rollout.steps]


def _step_row(rollout: Rollout, step: Step) -> TrainingRow:
    reward = rollout.step_rewards[step.index] if rollout.step_rewards else rollout.reward
    return _row(rollout, step.index, step.prompt_ids, step.ids, step.mask, step.logprobs, _numbers(step), reward)


def _whole_row(rollout: Rollout) -> TrainingRow:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    numbers: list[int] = []
    prompt_ids = rollout.steps[0].prompt_ids
    for step in rollout.steps:
        between = step.prompt_ids[len(prompt_ids) + len(ids) :]
        if step.prompt_ids != (*prompt_ids, *ids, *between):
            raise DataError(
                f"The prompt of step {step.index} of rollout {rollout.id} does not continue the one before."
            )
        ids += [*between, *step.ids]
        mask += [*[0] * len(between), *step.mask]
        logprobs += [*[0.0] * len(between), *step.logprobs]
        numbers += [*[NO_MESSAGE] * len(between), *_numbers(step)]
    return _row(rollout, None, prompt_ids, ids, mask, logprobs, numbers, rollout.reward)


def _numbers(step: Step) -> list[int]:
    return [step.index if sampled else NO_MESSAGE for sampled in step.mask]


def _row(rollout: Rollout, message: int | None, prompt_ids, ids, mask, logprobs, numbers, reward) -> TrainingRow:
    return TrainingRow(
        conversation_id=rollout.id,
        kind=POLICY,
        message=message,
        prompt_ids=list(prompt_ids),
        completion_ids=list(ids),
        mask=list(mask),
        target=[0] * len(ids),
        logprobs=list(logprobs),
        messages=list(numbers),
        reward=reward,
    )
