"""Rows of a table of reviews, for experiment trackers: what the supervisor said about each message of a batch."""

from collections.abc import Iterator, Sequence

from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.trajectory import Trajectory

REVIEW_COLUMNS = (
    "step",
    "conversation",
    "turn",
    "draft",
    "valid",
    "category",
    "penalty",
    "critique",
    "correction",
    "heard",
)
"""The columns of `review_rows`: the message as the policy wrote it (`draft`), its review, and the message that entered
the conversation in its place (`heard`). Without a verdict `valid` and `penalty` are null, and `critique` is the reason
why there is none. `turn` counts messages from 0."""

ReviewRow = tuple[int, str, int, str, bool | None, str, float | None, str, str | None, str]


def review_rows(records: Sequence[Trajectory]) -> list[ReviewRow]:
    """A row for each reviewed message, in order: first a turn's rejected drafts, then the message itself. A message
    that the supervisor replaced has no row of its own, because its last draft is what was reviewed."""
    return [
        (
            record.step,
            record.id,
            place,
            text,
            review.valid,
            review.category,
            review.penalty,
            review.critique or (review.error or ""),
            review.correction,
            turn.text,
        )
        for record in records
        for place, turn in enumerate(record.turns)
        for text, review in reviewed_messages(turn)
    ]


def reviewed_messages(turn: Turn) -> Iterator[tuple[str, Review]]:
    """The texts that the policy wrote for a turn and the supervisor read, each with its review, in order."""
    yield from ((draft.text, draft.review) for draft in turn.drafts)
    if turn.review is not None and not turn.replaced:
        yield turn.text, turn.review
