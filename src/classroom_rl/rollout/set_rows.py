"""Training rows of recorded rollouts: one for the whole rollout if the model kept its thoughts, else one for each step,
because each step had a prompt of its own."""

from classroom_rl.errors import DataError
from classroom_rl.rollout.rows import NO_MESSAGE, POLICY, TrainingRow
from classroom_rl.rollout.step import WITH_THINKING, Rollout, Step


def rows_of_rollout(rollout: Rollout) -> list[TrainingRow]:
    """The rows of a rollout, in the order of its steps; none if it has no step.

    The reward of a row for a step is the step's, or the rollout's if its steps were not scored. The reward of a row for
    a whole rollout is the rollout's. Both are None if it was not scored.

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
