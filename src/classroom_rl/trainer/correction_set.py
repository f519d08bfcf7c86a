"""The corrections of a run as targets for the teacher.

Every process holds the whole set, in the same order; the main process writes the file. The cursor, which says what was
trained on already, is saved in each checkpoint, so that a resumed run makes the same passes.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from classroom_rl.results.corrections import (
    CORRECTIONS_NAME,
    Correction,
    decided,
    read_corrections,
    read_decisions,
    tokenizer_fingerprint,
    write_corrections,
)
from classroom_rl.rollout.chat_template import encode_reply
from classroom_rl.rollout.rows import CORRECTION, context_of, sampled_tokens, unchanged_tokens
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.checkpoints import step_of
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.session import TrainingSession

CURSOR_NAME = "corrections.json"
_KEPT_SETS = 2
"""The file keeps this many times the capacity, so that a run that resumes finds what it had at its checkpoint."""


@dataclass(frozen=True)
class Cursor:
    """How far the set was trained on.

    Attributes:
        passes: the number of supervised passes.
        examples: the number of examples that they trained on.
        next_step: corrections of earlier steps were in a pass already.
    """

    passes: int = 0
    examples: int = 0
    next_step: int = 0


class CorrectionSet:
    """The corrections of a run.

    Args:
        capacity: the most corrections that wait for a pass.
        fingerprint: that of the tokenizer that the ids are of.
        encode: the ids of a corrected text and of the end of a message, for texts that people wrote.
        cursor_of: the file of a checkpoint's cursor, if the run resumes; None otherwise.
        resumed_step: the first step that is played now; corrections of this one and later ones come again.
    """

    def __init__(
        self,
        run_folder: Path,
        capacity: int,
        fingerprint: str,
        encode: Callable[[str], list[int]],
        cursor_of: Path | None = None,
        resumed_step: int = 0,
    ):
        self._run_folder = run_folder
        self._path = run_folder / CORRECTIONS_NAME
        self._capacity = capacity
        self._fingerprint = fingerprint
        self._encode = encode
        self.cursor = _read_cursor(cursor_of)
        self._known: list[Correction] = []
        if resumed_step > 0 and self._path.is_file():
            corrections, _ = read_corrections(self._path)
            self._known = [correction for correction in corrections if correction.step < resumed_step]

    @classmethod
    def of(cls, session: TrainingSession, tokenizer: PreTrainedTokenizerBase) -> "CorrectionSet | None":
        """The set of a training; None without a supervisor."""
        if session.config.supervisor_model is None:
            return None
        return cls(
            session.run_folder,
            session.config.train.corrections.capacity,
            tokenizer_fingerprint(tokenizer),
            partial(encode_reply, tokenizer),
            None if session.checkpoint is None else Path(session.checkpoint),
            step_of(session.checkpoint),
        )

    def add(self, accelerator: Accelerator, step: int, records: Sequence[Trajectory]) -> None:
        """Add the corrections of a batch, from all processes, and write the file; all processes call this together.

        Raises:
            StorageError: on every process, if the file cannot be written.
        """
        own_corrections = [correction for record in records for correction in corrections_of(record)]
        corrections = gather_object(own_corrections)
        if not corrections:
            return
        earlier = [correction for correction in self._known if correction.step < step]
        self._known = [*earlier, *corrections][-_KEPT_SETS * self._capacity :]
        on_main_process(accelerator, lambda: write_corrections(self._path, self._known, self._fingerprint))

    def waiting(self, accelerator: Accelerator) -> list[Correction]:
        """The corrections that came since the last pass, as people decided about them: the newest ones, as many as the
        capacity allows; all ranks call this together."""
        new = [correction for correction in self._known if correction.step >= self.cursor.next_step]
        return self._as_decided(accelerator, new)[-self._capacity :]

    def earlier(self, accelerator: Accelerator, most: int, seed: int) -> list[Correction]:
        """At most so many of the kept corrections that were in a pass already, drawn by the seed, as people decided
        about them; all ranks call this together."""
        if not most:
            return []
        candidates = self._as_decided(
            accelerator, [correction for correction in self._known if correction.step < self.cursor.next_step]
        )
        return random.Random(f"{seed}|earlier").sample(candidates, min(most, len(candidates)))

    def _as_decided(self, accelerator: Accelerator, candidates: list[Correction]) -> list[Correction]:
        decisions = on_main_process(accelerator, lambda: read_decisions(self._run_folder))
        return decided(candidates, decisions, self._encode)

    @property
    def count(self) -> int:
        """The number of corrections that came since the last pass."""
        return min(self._capacity, sum(correction.step >= self.cursor.next_step for correction in self._known))

    def passed(self, step: int, examples: int) -> None:
        """Record that a pass trained on these many examples of the steps before `step`."""
        self.cursor = Cursor(self.cursor.passes + 1, self.cursor.examples + examples, step)

    def save_cursor(self, checkpoint: Path) -> None:
        """Write the cursor into a checkpoint."""
        (checkpoint / CURSOR_NAME).write_text(json.dumps(asdict(self.cursor)) + "\n", encoding="utf-8")


def corrections_of(record: Trajectory) -> list[Correction]:
    """The corrections of one conversation, one for each of its rows of that kind."""
    return [_correction(record, branch) for branch in record.branches if branch.kind == CORRECTION]


def _correction(record: Trajectory, branch: AuxSample) -> Correction:
    turn = record.turns[branch.turn]
    review = turn.review if branch.draft < 0 else turn.drafts[branch.draft].review
    prompt, before = context_of(record, branch)
    ids, logprobs = sampled_tokens(record, branch)
    return Correction(
        conversation=record.id,
        step=record.step,
        turn=branch.turn,
        draft=branch.draft,
        policy=str(turn.policy),
        prompt_ids=[*prompt, *before],
        draft_ids=ids,
        draft_logprobs=logprobs,
        target_text=review.correction,
        target_ids=list(branch.ids),
        category=review.category,
        critique=review.critique,
        source=review.source,
        unchanged=unchanged_tokens(record, branch),
    )


def _read_cursor(checkpoint: Path | None) -> Cursor:
    """The cursor in a checkpoint; that of a new run without one, or in a checkpoint from before there were
    corrections."""
    path = None if checkpoint is None else checkpoint / CURSOR_NAME
    if path is None or not path.is_file():
        return Cursor()
    return Cursor(**json.loads(path.read_text(encoding="utf-8")))
