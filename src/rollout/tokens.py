"""Tokens of a conversation: token in, token out.

`TokenBuffer` is the only way tokens enter the teacher's context. Sampled tokens are appended exactly as the engine
sampled them. Tokens that the program adds (the student's message, the chat template's markup around it, an end token
that the policy did not write) are appended as given. A transcript is never tokenized again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from src.models.policy_version import PolicyVersion

_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: "teacher" or "student".
        text: the message with special tokens, without the end-of-turn token.
        persona: the student's persona drawn for this turn; None for the teacher.
        tokens: the number of tokens that the model sampled for it, its end token included.
        ended: True if the model ended the turn itself, False if it was cut at its token limit.
        span: [start, end) of the sampled tokens among the completion tokens of the teacher's context; None for student
            turns.
        policy: the policy version that sampled it; None for student turns.
        given: True for a message from the teacher's prompt template, which was not sampled.
    """

    role: str
    text: str
    persona: str | None = None
    tokens: int = 0
    ended: bool = True
    span: tuple[int, int] | None = None
    policy: PolicyVersion | None = None
    given: bool = False


def approximate_tokens(text: str) -> int:
    """An estimate of a text's token count, for models whose tokenizer is not available: a quarter of its UTF-8 bytes,
    rounded up. For most languages the real count differs by at most a third, for some by more."""
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)


class TokenBuffer:
    """The teacher's context as token ids: a prompt, then completion ids with a mask and log-probs of equal length.

    `mask` is 1 for tokens that the policy sampled and 0 for all others; `logprobs` are the engine's, 0.0 where the
    mask is 0.
    """

    def __init__(self, prompt_ids: Sequence[int]):
        self.prompt_ids = list(prompt_ids)
        self.completion_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def ids(self) -> list[int]:
        """All ids in order: the engine's next prompt."""
        return self.prompt_ids + self.completion_ids

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[int, int]:
        """Append tokens that the policy sampled, with the engine's log-probs; return their completion span.

        Raises:
            ValueError: if the two do not have the same length.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probs: each needs one")
        start = len(self.completion_ids)
        self._extend(ids, logprobs, 1)
        return start, len(self.completion_ids)

    def append_given(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: they are context and never trained on."""
        self._extend(ids, [0.0] * len(ids), 0)

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.completion_ids.extend(int(i) for i in ids)
        self.logprobs.extend(float(x) for x in logprobs)
        self.mask.extend([mask] * len(ids))
