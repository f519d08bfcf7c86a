"""Makes pairs of a better and a worse text of a finished training: python -m classroom_rl.results.pairs RUN

A pair is a context and two texts of the tutor after it, as the tokens that the records hold: nothing is rendered again.
Where the pairs come from:

- `group`: the conversations with the best and the worst reward of a group, from the same prompt. What the student said
  before the tutor's first own message is no part of the prompt, and is not learned.
- `draft`: a draft that the supervisor rejected, and the message that took its place; a message that it found invalid,
  and its correction.
- `desk`: a correction that a person accepted or edited, and the message that it corrects; the other way round where the
  person said that the message was fine.
- `judge`: the messages with the best and the worst score of a group, where all tokens before them are equal.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import yaml

from classroom_rl.config.values import TRAINS_STUDENT
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.results.corrections import (
    CorrectionDecision,
    Place,
    decision_about,
    read_decisions,
    read_token_rows,
    tokenizer_fingerprint,
    write_token_rows,
)
from classroom_rl.results.rollout_files import columns_of_dataclass, files_by_step, read_records
from classroom_rl.rollout.chat_template import encode_reply
from classroom_rl.rollout.environment import POLICY_ROLE
from classroom_rl.rollout.rows import CORRECTION, DRAFT, POLICY, message_numbers
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.system.keys import print_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIRS_NAME = "pairs.parquet"
LEAST_MARGIN = 0.1


@dataclass(frozen=True)
class Side:
    """A text of the tutor.

    Attributes:
        context: all tokens before it, as the policy saw them.
        ids: its tokens. Those of a whole conversation include the student's messages.
        mask: one entry per id; 1 for the tutor's own: sampled, or a checked target of a correction.
        conversation: the id of its record.
    """

    context: list[int]
    ids: list[int]
    mask: list[int]
    conversation: str


@dataclass(frozen=True)
class PreferencePair:
    """A better and a worse text after the same context, and the columns of the file.

    Attributes:
        prompt_ids: the tokens of the context; the other ids and masks are as in `Side`.
        margin: the difference of the two rewards, scores or prices; None where a person decided against the price.
        source: a member of `PAIR_SOURCES`.
        step: the optimizer step whose batch it belongs to.
        turn: the message's position among the turns of its conversation; None for whole conversations.
        prompt, chosen, rejected: the tokens as text, with all markup, for people and for other programs.
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    chosen_mask: list[int]
    rejected_ids: list[int]
    rejected_mask: list[int]
    margin: float | None
    source: str
    level: str
    problem_id: str
    step: int
    chosen_conversation: str
    rejected_conversation: str
    turn: int | None = None
    prompt: str = ""
    chosen: str = ""
    rejected: str = ""


PAIR_SCHEMA = columns_of_dataclass(PreferencePair)


class PairMaker:
    """Makes the pairs of a training, one step after the other.

    Args:
        decisions: what people decided about corrections.
        encode: the ids of a text and of the end of a message, for texts that people wrote.
        decode: the text of ids, with all markup.
        least_margin: the least difference of rewards or scores in a group.

    Attributes:
        left_out: (source, what became no pair, and why) → how many.
    """

    def __init__(
        self,
        decisions: Mapping[Place, CorrectionDecision],
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        least_margin: float = LEAST_MARGIN,
    ):
        self._decisions, self._encode, self._decode, self._least_margin = decisions, encode, decode, least_margin
        self.left_out: Counter[tuple[str, str]] = Counter()

    def of_step(self, records: Sequence[Trajectory]) -> Iterator[PreferencePair]:
        """The pairs of the conversations of one step, of all processes."""
        groups: dict[tuple, list[Trajectory]] = defaultdict(list)
        for record in records:
            groups[self._beginning(record)].append(record)
        for group in groups.values():
            pairs = [self._of_rewards(group), *self._of_scores(group)]
            for record in group:
                pairs += [self._of_draft(record, sample) for sample in record.branches if sample.kind == DRAFT]
                pairs += [
                    self._of_correction(record, sample) for sample in record.branches if sample.kind == CORRECTION
                ]
            yield from (pair for pair in pairs if pair is not None)

    def _beginning(self, record: Trajectory) -> tuple:
        """What the conversations of a group have in common: the problem, and the prompt up to what the student said."""
        leading_turns = takewhile(lambda turn: turn.span is None, record.turns)
        message = next((turn.text.strip() for turn in leading_turns if turn.role != POLICY_ROLE and not turn.given), "")
        prefix, separator, _ = self._decode(record.prompt_ids).rpartition(message) if message else ("", "", "")
        return (record.problem_id, prefix) if separator else (record.problem_id, *record.prompt_ids)

    def _of_rewards(self, group: Sequence[Trajectory]) -> PreferencePair | None:
        scored, shared = [], len(commonprefix([record.prompt_ids for record in group]))
        for record in group:
            if any(sample.prompt_ids for sample in record.branches):
                self.left_out["group", "conversations with a prompt for each message"] += 1
            elif record.reward is None:
                self.left_out["group", "conversations without a reward"] += 1
            elif any(turn.replaced for turn in record.turns) or any(
                sample.kind == POLICY for sample in record.branches
            ):
                self.left_out["group", "conversations with messages of the supervisor, or behind a critique"] += 1
            else:
                context, suffix = record.prompt_ids[:shared], record.prompt_ids[shared:]
                side = Side(context, suffix + record.completion_ids, [0] * len(suffix) + record.mask, record.id)
                scored.append((record.reward, side))
        if len(scored) == 1:
            self.left_out["group", "conversations whose prompt no other one of their group has"] += 1
            return None
        return self._best_and_worst("group", "groups", scored, group[0]) if scored else None

    def _of_scores(self, group: Sequence[Trajectory]) -> Iterator[PreferencePair | None]:
        by_context: dict[tuple, list[tuple[float, Side]]] = defaultdict(list)
        for record in group:
            scores = record.turn_rewards.get("judge", [])
            for turn, number in message_numbers(record).items():
                score, side = scores[number] if number < len(scores) else None, message_in(record, turn)
                if score is None or side is None:
                    self.left_out["judge", "messages without a score of their own"] += 1
                else:
                    by_context[turn, *side.context].append((score, side))
        for (turn, *_), scored in by_context.items():
            if len(scored) == 1:
                self.left_out["judge", "messages whose context no other one of their group has"] += 1
            else:
                yield self._best_and_worst("judge", "contexts", scored, group[0], turn)

    def _best_and_worst(
        self, source: str, what: str, scored: Sequence[tuple[float, Side]], record: Trajectory, turn: int | None = None
    ) -> PreferencePair | None:
        best, worst = max(scored, key=lambda entry: entry[0]), min(scored, key=lambda entry: entry[0])
        margin = best[0] - worst[0]
        if margin <= 0 or margin < self._least_margin:
            self.left_out[source, f"{what} with a margin below {self._least_margin:g}, or of 0"] += 1
            return None
        return self._pair(source, best[1], worst[1], margin, record, turn)

    def _of_draft(self, record: Trajectory, draft: AuxSample) -> PreferencePair | None:
        """A rejected draft, and the message that the tutor wrote instead. If a correction took its place, that has a
        sample of its own."""
        turn, chosen = record.turns[draft.turn], message_in(record, draft.turn)
        price = None if turn.review is None else turn.review.penalty
        if turn.replaced:
            return None
        correction = turn.drafts[draft.draft].review.correction if turn.drafts[draft.draft].review else None
        decision = decision_about(self._decisions, (record.id, draft.turn, draft.draft), correction)
        if decision is not None and decision.message_was_fine:
            self.left_out["draft", "drafts that a person called fine"] += 1
        elif draft.hint_ids or chosen is None:
            self.left_out["draft", "drafts that were written behind a critique, in another context"] += 1
        elif price is None or draft.reward is None or price <= draft.reward:
            self.left_out["draft", "drafts no worse than what took their place"] += 1
        else:
            return self._pair("draft", chosen, _side_of(record, draft), price - draft.reward, record, draft.turn)
        return None

    def _of_correction(self, record: Trajectory, sample: AuxSample) -> PreferencePair | None:
        """A correction, and the message or draft that it corrects. The thoughts before both belong to the context."""
        turn, thoughts, position = record.turns[sample.turn], list(sample.hint_ids), (sample.turn, sample.draft)
        review = turn.review if sample.draft < 0 else turn.drafts[sample.draft].review
        drafts = [
            branch for branch in record.branches if branch.kind == DRAFT and (branch.turn, branch.draft) == position
        ]
        rejected = message_in(record, sample.turn) if sample.draft < 0 else None
        if drafts and not drafts[0].hint_ids:
            rejected = _side_of(record, drafts[0])
        if rejected is None or review is None or rejected.ids[: len(thoughts)] != thoughts:
            self.left_out["draft", "corrections in another context than what they correct"] += 1
            return None
        tail = slice(len(thoughts), None)
        rejected = Side([*rejected.context, *thoughts], rejected.ids[tail], rejected.mask[tail], record.id)
        chosen = replace(rejected, ids=list(sample.ids), mask=[1] * len(sample.ids))
        margin = None if review.penalty is None else -review.penalty
        decision = decision_about(self._decisions, (record.id, *position), review.correction)
        if decision is None:
            return self._pair("draft", chosen, rejected, margin, record, sample.turn)
        if decision.decision == "reject" and not decision.message_was_fine:
            self.left_out["desk", "corrections that a person rejected, as the message, too"] += 1
            return None
        if decision.decision == "edit":
            ids = self._encode(decision.text)
            chosen = replace(chosen, ids=ids, mask=[1] * len(ids))
        elif decision.decision == "reject":  # the message was fine, so it is preferred to its correction
            chosen, rejected, margin = rejected, chosen, None
        return self._pair("desk", chosen, rejected, margin, record, sample.turn)

    def _pair(
        self, source: str, chosen: Side, rejected: Side, margin: float | None, record: Trajectory, turn: int | None
    ) -> PreferencePair | None:
        if chosen.context != rejected.context:
            self.left_out[source, "pairs whose contexts differ"] += 1
        elif chosen.ids == rejected.ids:
            self.left_out[source, "pairs of equal texts"] += 1
        elif not (chosen.context and any(chosen.mask) and any(rejected.mask)):
            self.left_out[source, "pairs without tokens of the tutor"] += 1
        else:
            tokens = (chosen.context, chosen.ids, chosen.mask, rejected.ids, rejected.mask)
            origin = (record.problem_id, record.step, chosen.conversation, rejected.conversation, turn)
            return PreferencePair(*tokens, margin, source, "conversation" if turn is None else "message", *origin)
        return None


def message_in(record: Trajectory, turn: int) -> Side | None:
    """A message of the policy in its conversation, also if it was written behind a critique; None for a message that
    the policy did not sample."""
    for sample in record.branches:
        if sample.kind == POLICY and sample.turn == turn:
            return _side_of(record, sample)
    if (span := record.turns[turn].span) is None:
        return None
    context = [*record.prompt_ids, *record.completion_ids[: span[0]]]
    return Side(context, record.completion_ids[slice(*span)], record.mask[slice(*span)], record.id)


def _side_of(record: Trajectory, sample: AuxSample) -> Side:
    context = [*record.prompt_ids, *record.completion_ids[: sample.start]]
    mask = list(sample.mask) or [1] * len(sample.ids)
    return Side(list(sample.prompt_ids) or context, list(sample.ids), mask, record.id)


def steps_of(run_folder: Path) -> Iterator[list[Trajectory]]:
    """The conversations of a training, step by step. Raises `DataError` if there are none, or a file cannot be read."""
    steps = files_by_step(run_folder)
    if not steps:
        raise DataError(
            f"{run_folder} holds no conversations of a training (rollouts/step_*.parquet): give the run folder of "
            "train_rl.py (its logging.save_dir)."
        )
    for paths in steps:
        records = []
        for path in paths:
            try:
                records += read_records(path, Trajectory)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise DataError(
                    f"{path} cannot be read: {error}\nIf it is damaged, move it out of the folder: the other steps do "
                    "not need it."
                ) from error
        yield records


def write_pairs(path: Path, pairs: Sequence[PreferencePair], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write pairs, one per row, with their tokens as text. The file is replaced atomically. Raises `StorageError` if
    the disk is full or may not be written to."""
    names = ("prompt", "chosen", "rejected")
    rows = [
        row | {name: tokenizer.decode(row[f"{name}_ids"], skip_special_tokens=False) for name in names}
        for row in map(asdict, pairs)
    ]
    write_token_rows(path, rows, PAIR_SCHEMA, tokenizer_fingerprint(tokenizer))


def read_pairs(path: Path) -> tuple[list[PreferencePair], str]:
    """Read a file of `write_pairs`. Returns the pairs, and the tokenizer's fingerprint. Raises `DataError` if there is
    no such file, it is damaged or not one of pairs, or a row's lists do not fit together."""
    advice = "Make it with `python -m classroom_rl.results.pairs RUN`."
    rows, fingerprint = read_token_rows(path, PAIR_SCHEMA, "pairs", advice)
    for number, row in enumerate(rows, start=1):
        prompt, *lengths = (len(row[name] or ()) for name, kind in zip(row, PAIR_SCHEMA.types, strict=True)
                            if pa.types.is_list(kind))  # fmt: skip
        if not (prompt and all(lengths)) or lengths[::2] != lengths[1::2]:
            raise DataError(f"{path}: in row {number}, a list of ids is empty or has another length than its mask.")
    return [PreferencePair(**row) for row in rows], fingerprint


def make_pairs(run_folder: Path, out: Path | None, tokenizer_name: str | None, least_margin: float) -> str:
    """Write the pairs of a run. Returns what was written and what was left out, in words.

    Raises:
        DataError: if the run cannot be read, or no pair can be made of it.
        ConfigError: if the tokenizer cannot be loaded.
    """
    steps = steps_of(run_folder)
    first_step = next(steps)
    if any(turn.policy is not None and turn.role == TRAINS_STUDENT for record in first_step for turn in record.turns):
        raise DataError(f"{run_folder} trained the student, and pairs are made of a tutor's messages: name its run.")
    tokenizer = load_tokenizer("--tokenizer", tokenizer_name or _model_of(run_folder))
    maker = PairMaker(read_decisions(run_folder), partial(encode_reply, tokenizer), tokenizer.decode, least_margin)
    pairs = [pair for records in (first_step, *steps) for pair in maker.of_step(records)]
    lines = ["No pair was made of:"]
    lines += [f"  {source}: {count} {what}" for (source, what), count in sorted(maker.left_out.items())] or [
        "  nothing"
    ]
    if not pairs:
        raise DataError("\n".join([f"No pair can be made of the conversations in {run_folder}.", *lines]))
    path, counts = out or run_folder / PAIRS_NAME, Counter((pair.source, pair.level) for pair in pairs)
    write_pairs(path, pairs, tokenizer)
    kinds = [f"  {source}: {count} of {level}s" for (source, level), count in sorted(counts.items())]
    problems = len({pair.problem_id for pair in pairs})
    return "\n".join([f"{len(pairs)} pairs on {problems} problems are in {path}:", *kinds, *lines])


def _model_of(run_folder: Path) -> str:
    """The trained model of a run, else the one that the training began with: both have the tutor's tokenizer."""
    if (run_folder / "model" / "config.json").is_file():
        return str(run_folder / "model")
    config = run_folder / "config" / "train_rl.yaml"
    try:
        return yaml.safe_load(config.read_text(encoding="utf-8"))["teacher_model"]["model_name_or_path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"{config} does not name the tutor's model: give --tokenizer.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m classroom_rl.results.pairs", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="the run folder of a training")
    parser.add_argument("--out", type=Path, help=f"the file to write; by default RUN/{PAIRS_NAME}")
    parser.add_argument("--tokenizer", help="the tutor's tokenizer; by default that of the model in the run")
    parser.add_argument(
        "--least-margin", type=float, default=LEAST_MARGIN, help="of rewards and scores in a group (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        print(make_pairs(arguments.run, arguments.out, arguments.tokenizer, arguments.least_margin))
    except ClassroomError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
