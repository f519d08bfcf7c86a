"""Gives recorded batches the reviews, drafts and corrections that a supervisor would have left in them."""

import random
from dataclasses import replace

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.tokens import AuxSample
from tests.support.replay_server import Batches


def with_supervision(batches: Batches) -> Batches:
    """The batches with branches of uneven number: the second half of a batch, which the second of two processes plays,
    has three times as many as the first."""
    return [
        [_supervised(record, 3 if index >= len(batch) // 2 else index % 2) for index, record in enumerate(batch)]
        for batch in batches
    ]


def _supervised(record: ConversationRecord, corrections: int) -> ConversationRecord:
    rng = random.Random(record.id)
    turns, branches, penalties = list(record.turns), [], []
    indices = [index for index, turn in enumerate(turns) if turn.role == "teacher"]
    for number, index in enumerate(indices):
        start, end = turns[index].span
        sampled = tuple(record.completion_ids[start:end])
        wrong = Review(False, "task", -0.5, "No task.", "What did she see?")
        valid = rng.random() < 0.5
        penalties.append(0.0 if valid else -0.5)
        drafts = ()
        if number < corrections:
            drafts = (Draft("before", len(sampled), wrong),)
            logprobs = tuple(record.logprobs[start:end])
            target = (*(rng.randrange(20, 600) for _ in range(4)), record.completion_ids[end - 1])
            branches += [
                AuxSample("draft", index, start, sampled[::-1], logprobs, reward=-0.5, draft=0),
                AuxSample("correction", index, start, target, draft=0),
            ]
        turns[index] = replace(turns[index], review=Review(True, penalty=0.0) if valid else wrong, drafts=drafts)
    update = {"turns": turns, "branches": branches, "turn_rewards": {"supervisor": penalties}, "supervised": True}
    return record.model_copy(update=update)
