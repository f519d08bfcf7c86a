"""Fine-tuning of a student on recorded dialogues: the loss is on the student's messages only, each after exactly the
prompt that the classroom gives the student's model at that place."""

import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.config.train_sft import ConversationSource, StudentDataConfig, TrainSFTConfig
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.environments.classroom.student import attempt_request, student_chat
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.dialogue import ENDED, Dialogues, read_dialogues
from classroom_rl.evaluation.metrics.students import Talk, talks_of
from classroom_rl.rollout.chat_template import Message, encode_chat, encode_reply
from classroom_rl.rollout.datasets import gather
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.tokens import Turn
from classroom_rl.system.storage import write_whole
from classroom_rl.trainer.sft.corrections import MASKED, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
HELD_OUT_NAME = "held_out.jsonl"


@dataclass(frozen=True)
class StudentDialogue:
    """A dialogue to learn from.

    Attributes:
        talk: the dialogue as it was read.
        turns: its messages as the classroom would have them: teacher and student alternate, and the student's opening
            attempt is the first, if there is one.
        attempted: whether the first of `turns` is such an attempt.
        student_name: the name in the student's prompt; None if none is known.
    """

    talk: Talk
    turns: tuple[Turn, ...]
    attempted: bool
    student_name: str | None


def split_dialogues(config: TrainSFTConfig) -> tuple[list[StudentDialogue], list[StudentDialogue]]:
    """The dialogues to learn from, and those to measure on: of `dataset.val_datasets`, or about problems that are held
    out.

    Raises:
        DataError: if they cannot be read, lack what the prompts need, or are about a single problem.
        ConfigError: if a run's dialogues need a prompt that is not configured.
    """
    dataset = config.dataset

    def read(sources: list[ConversationSource]) -> list[StudentDialogue]:
        return gather(sources, lambda source: _read(source.name_or_path, config.student), seed=config.seed)

    learned, measured = read(dataset.train_datasets), read(dataset.val_datasets) if dataset.val_datasets else []
    if config.student.held_out_share:
        problems = sorted({dialogue.talk.problem for dialogue in learned})
        if len(problems) < 2:
            raise DataError("The dialogues are about one problem, so none can be held out: student.held_out_share=0.")
        count = min(max(1, round(len(problems) * config.student.held_out_share)), len(problems) - 1)
        held_out = set(random.Random(f"held out|{config.seed}").sample(problems, count))
        measured = [dialogue for dialogue in learned if dialogue.talk.problem in held_out]
        learned = [dialogue for dialogue in learned if dialogue.talk.problem not in held_out]
    learned_limit, measured_limit = dataset.max_train_examples, dataset.max_val_examples  # -1: all
    learned = learned[:learned_limit] if learned_limit >= 0 else learned
    return learned, measured[:measured_limit] if measured_limit >= 0 else measured


def write_held_out(config: TrainSFTConfig, run_folder: Path) -> None:
    """Write the dialogues that are measured into `held_out.jsonl`: rows with `problem`, `answer`, `turns`, and
    `student_incorrect_solution` where an attempt is known to be wrong."""
    rows = []
    for talk in (dialogue.talk for dialogue in split_dialogues(config)[1]):
        attempt = {"student_incorrect_solution": talk.attempt} if talk.attempt and talk.attempt_failed else {}
        turns = [{"role": "teacher" if tutor else "student", "text": text} for tutor, text in talk.turns]
        rows.append({"problem": talk.problem, "answer": talk.answer, **attempt, "turns": turns})
    write_whole(run_folder / HELD_OUT_NAME, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _read(name: str, options: StudentDataConfig) -> list[StudentDialogue]:
    """The dialogues of a file or a run folder."""
    student_dialogues = []
    for dialogues in read_dialogues(Path(name)):
        for reason, count in dialogues.left_out.items():
            logger.warning("%s: left out %d %s", dialogues.name, count, reason)
        student_dialogues += _dialogues_of(dialogues, options)
    return student_dialogues


def _dialogues_of(dialogues: Dialogues, options: StudentDataConfig) -> list[StudentDialogue]:
    student_dialogues = []
    for talk, row in zip(talks_of(dialogues), dialogues.rows, strict=True):
        if not any(isinstance(row.get(key), str) for key in ("problem", "question")):
            raise DataError(
                f"{dialogues.name} has a dialogue without the text of its problem (`problem` or `question`), which the "
                "student's prompt shows."
            )
        opened_by_student = bool(talk.turns) and not talk.turns[0][0]
        if row.get("type") == ConversationType.ATTEMPTED and options.student_initial_attempt_prompt_path is None:
            raise ConfigError(
                f"{dialogues.name} has dialogues that the student's attempt opens: name the prompt that asks for it in "
                "student.student_initial_attempt_prompt_path."
            )
        attempted = bool(talk.attempt) and not opened_by_student
        attempted = attempted and options.student_initial_attempt_prompt_path is not None
        ended = row[ENDED][-len(talk.turns) :]
        opening_ended = len(row[ENDED]) == len(talk.turns) or row[ENDED][0]  # an opening attempt is no turn of the talk
        turns = [Turn("student", talk.attempt, ended=opening_ended)] if attempted else []
        messages = zip(talk.turns, talk.personas, ended, strict=True)
        for is_tutor, group in groupby(messages, key=lambda message: message[0][0]):
            texts, personas, ends = zip(*((text, persona, end) for (_, text), persona, end in group), strict=True)
            role, text = "teacher" if is_tutor else "student", "\n".join(texts).strip()
            turns.append(Turn(role, text, personas[-1], ended=ends[-1]))
        student_dialogues.append(StudentDialogue(talk, tuple(turns), attempted, row.get("student_name")))
    return student_dialogues


# Tokens --------------------------------------------------------------------------------------------------------------


def student_examples(
    dialogues: Sequence[StudentDialogue],
    options: StudentDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
) -> list[Example]:
    """The tokens of the dialogues as the student's model reads them, with labels on its messages and their ends.

    A dialogue is one example for each system prompt: of several personas, each sees the messages of the others without
    loss. It is cut into more where the chat template renders an earlier message otherwise once a later one follows.
    Messages that end behind `max_length` tokens are left out with a warning, as the context would be full.

    Raises:
        DataError: if nothing is left to learn, a prompt cannot be rendered, or a persona has none.
    """
    examples: list[Example] = []
    left_out: Counter[str] = Counter()
    for dialogue in dialogues:
        by_prompt: dict[str, Example] = {}
        for position, turn in enumerate(dialogue.turns):
            if turn.role != "student":
                continue
            if not turn.text or position == 0 and not dialogue.attempted:
                left_out["empty" if not turn.text else "before the tutor's first"] += 1
                continue
            messages = _messages_before(dialogue, position, options)
            prompt, target = encode_chat(tokenizer, messages), encode_reply(tokenizer, turn.text)
            if len(prompt) + len(target) > max_length:
                left_out[f"beyond {max_length} tokens (model.max_length)"] += 1
                continue
            example = by_prompt.get(messages[0]["content"])
            if example is None or prompt[: len(example["input_ids"])] != example["input_ids"]:
                example = by_prompt[messages[0]["content"]] = {"input_ids": [], "labels": []}
                examples.append(example)
            context_ids = prompt[len(example["input_ids"]) :]
            # A message that was cut at its limit has no end of its own.
            reply_ids = target if turn.ended else target[:-1]
            example["input_ids"] += context_ids + reply_ids
            example["labels"] += [MASKED] * len(context_ids) + reply_ids
    for reason, count in left_out.items():
        logger.warning("left out %d of the student's messages: %s", count, reason)
    if not examples:
        raise DataError(f"Nothing is left of {len(dialogues)} dialogues: {dict(left_out) or 'the student is silent'}.")
    return examples


def _messages_before(dialogue: StudentDialogue, position: int, options: StudentDataConfig) -> list[Message]:
    """What the student's model is shown before its message at a position."""
    problem, before = dialogue.talk.problem, dialogue.turns[:position]
    if not before:
        return attempt_request(options, problem)
    prompts, persona = options.student_personas_prompts_paths, dialogue.turns[position].persona
    path = next(iter(prompts.values())) if len(prompts) == 1 else prompts.get(persona or "")
    if path is None:
        raise DataError(
            f"A message of the student on {problem[:60]!r} has the persona {persona}, but prompts are configured for "
            f"{', '.join(prompts)}: name one prompt for all messages in student.student_personas_prompts_paths, or one "
            "for each persona of the dialogues."
        )
    system = render(path, student_name=dialogue.student_name, problem=problem, include_thinking=False)
    return student_chat(options, system, problem, before, dialogue.attempted)
