"""The messages of a conversation as the page shows them: visible text and thoughts, the teacher's tokens as pieces of
text, drafts and reviews.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from classroom_rl.errors import JudgeOutputError
from classroom_rl.judges.json_answer import find_object
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.thoughts import split_thoughts
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.tools.tool import ToolCall
from classroom_rl.viewer.schemas import DraftView, ReviewView, ToolCallView, TurnView

_TOKENIZER_FILE = "tokenizer.json"


class UnknownTokenIds(Exception):
    """The tokenizer does not have these ids, so it belongs to another model."""


class RunTokenizer:
    """The tokenizer of a run: that of the trained model, of the published weights, or of the teacher's own folder."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder
        self._cached: tuple[Path, Callable[[Sequence[int]], str]] | None = None
        self.why = (
            f"The tokens cannot be shown as text: {run_folder} holds no {_TOKENIZER_FILE} (in policy/… or model/), "
            "and the teacher's model is no local folder that does."
        )

    def decoder(self) -> Callable[[Sequence[int]], str] | None:
        """Return a function that decodes ids, special tokens included; None without a tokenizer, as `why` says."""
        path = next((path for path in self._candidates() if path.is_file()), None)
        if path is None:
            return None
        if self._cached is None or self._cached[0] != path:
            self._cached = (path, _load(path))
        return self._cached[1]

    def _candidates(self) -> list[Path]:
        folders = [self._folder / "model", *sorted(self._folder.glob("policy/v*"), reverse=True)]
        for name in ("vllm_server", "train_rl", "eval"):
            config = self._folder / "config" / f"{name}.yaml"
            if config.is_file():
                content = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
                model = (content.get("teacher_model") or {}).get("model_name_or_path")
                folders += [Path(model)] if model else []
        return [folder / _TOKENIZER_FILE for folder in folders]


def _load(path: Path) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()

    def decode(ids: Sequence[int]) -> str:
        if any(not 0 <= token_id < size for token_id in ids):
            raise UnknownTokenIds(f"The tokens cannot be shown as text: {path} does not have all of them.")
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode


_MAX_TOKENS_PER_CHARACTER = 8


def pieces_of(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], mask: Sequence[int]
) -> list[tuple[str, int, int]]:
    """Return (text, mask, number of tokens) for each token. Tokens with equal masks that form one character share an
    entry."""
    pieces = []
    start = 0
    while start < len(ids):
        end = start + 1
        while (
            decode(ids[start:end]).endswith("\ufffd")  # the replacement character: bytes of a character are missing
            and end < len(ids)
            and mask[end] == mask[start]
            and end - start < _MAX_TOKENS_PER_CHARACTER
        ):
            end += 1
        pieces.append((decode(ids[start:end]), mask[start], end - start))
        start = end
    return pieces


_TURNS = TypeAdapter(list[Turn])


def turns_of(record: Mapping[str, Any]) -> list[Turn]:
    """Return the messages of a record that is given as plain data."""
    return _TURNS.validate_python(record["turns"])


def turn_view(turn: Turn, mask: Sequence[int] = (), score: float | None = None) -> TurnView:
    """Make the view of a message.

    Args:
        mask: the mask of the conversation's tokens; empty if none are stored.
        score: the score of the pedagogical reward model.
    """
    trained = 0 if mask else None
    if turn.span and mask:
        trained = sum(mask[turn.span[0] : turn.span[1]])
    return TurnView(
        role=turn.role,
        parts=split_thoughts(turn.text),
        persona=turn.persona,
        tokens=turn.tokens,
        trained=trained,
        ended=turn.ended,
        given=turn.given,
        policy=str(turn.policy) if turn.policy else None,
        score=score,
        review=review_view(turn.review) if turn.review else None,
        drafts=[_draft_view(draft) for draft in turn.drafts],
        replaced=turn.replaced,
        tool_calls=_tool_call_views(turn.tool_calls),
    )


def _draft_view(draft: Draft) -> DraftView:
    return DraftView(
        parts=split_thoughts(draft.text),
        tokens=draft.tokens,
        review=review_view(draft.review),
        tool_calls=_tool_call_views(draft.tool_calls),
    )


def _tool_call_views(calls: Sequence[ToolCall]) -> list[ToolCallView]:
    return [
        ToolCallView(
            name=call.name,
            arguments=json.dumps(call.arguments, ensure_ascii=False) if call.name else call.raw,
            result=call.result,
            error=call.error,
            seconds=call.seconds,
        )
        for call in calls
    ]


def review_view(review: Review) -> ReviewView:
    """Make the view of a review."""
    refused_text = _correction_in(review.raw) if review.refused_correction is not None else None
    return ReviewView(**vars(review), refused_text=refused_text)


def _correction_in(answer: str) -> str | None:
    """Return the correction in a supervisor's raw answer; None if there is none."""
    try:
        correction = find_object(answer).get("correction") if answer else None
    except JudgeOutputError:
        return None
    return correction if isinstance(correction, str) and correction.strip() else None
