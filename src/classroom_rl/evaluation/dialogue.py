"""Measures of dialogue that papers report, from any file of conversations, for several files side by side:

    python -m classroom_rl.evaluation.dialogue before.jsonl after.jsonl

Each name is a run folder (its `rollouts/`, and every `eval/*/conversations.parquet`), a Parquet file of a run, a set of
rollouts (`.jsonl`, `.parquet`), or a `.jsonl` or `.json` file of others: a row per conversation, with its turns under
one of `TURNS`, each an object with one of `ROLE` and one of `TEXT`; or, as in CIMA, a `history` of alternating texts,
the last one the student's, and the reply `tutor`. The conversations on one problem (`PROBLEM`) resemble each other, so
intervals are over problems; a conversation without a problem is one of its own.

With `--level A1`, or on lessons whose text says their level, `--word-list` also measures how well the tutor's messages
stay at that level, and how that changes from message to message (evaluation/metrics/level.py).
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from classroom_rl.config.values import CEFR_LEVELS, END_OF_CONVERSATION, WORDFREQ
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.evaluation.metrics.level import LEVEL_LABELS, level_figures
from classroom_rl.evaluation.report.tables import align
from classroom_rl.judges.difficulty import LevelRules, flesch_reading_ease
from classroom_rl.judges.messages import is_english, sentences, spoken
from classroom_rl.judges.moves.classifier import STOPWORDS
from classroom_rl.judges.moves.labelled import numbered_rows
from classroom_rl.judges.moves.rules import is_question, words
from classroom_rl.judges.word_lists import ENGLISH
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.intervals import mean_with_ci, shown
from classroom_rl.rollout.rollout_set import RolloutSet
from classroom_rl.rollout.store.set_files import FORMAT
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn
from classroom_rl.system.keys import print_error

TURNS = ("turns", "messages", "conversation", "conversations", "dialogue", "dialog", "dialog_history")
ROLE = ("role", "speaker", "from", "user")
TEXT = ("text", "content", "value", "utterance")
PROBLEM = ("problem_id", "problem", "question", "lesson", "target")
"""The first of these keys that a row has is read."""

TUTOR_ROLES = {"teacher", "tutor", "assistant", "gpt"}
STUDENT_ROLES = {"student", "user", "human", "program"}
OTHER_ROLES = {"system", "tool"}
"""What neither side said: left out, and counted."""

PERSONAS, ENDED = "personas", "ended"
"""The key of the personas that were drawn for the turns, in what is read; None for a turn without one."""

SHORTEST_UPTAKE = 5
"""Uptake is measured after student turns of at least so many words (Demszky et al., 2021)."""

UPTAKE, EASE = "uptake (share of content words)", "Flesch reading ease (English)"
_NGRAM = 3


@dataclass
class Dialogues:
    """The conversations of a file: (problem, turns) each; a turn is (whether the tutor speaks, its visible text).
    `left_out` says what was left out, and how often. `rows` holds what else is known of each conversation: its row,
    with each turn's persona, and whether its speaker ended it, under `PERSONAS` and `ENDED`."""

    name: str
    conversations: list[tuple[str, list[tuple[bool, str]]]] = field(default_factory=list)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, problem: str, turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> None:
        """Add a conversation from its turns as stored. Raises `DataError` for an unknown role or key."""
        messages, personas, ended = [], [], []
        for number, turn in enumerate(turns, start=1):
            side, text = _side_and_text(f"{where}: turn {number}", turn)
            if side is None or text is None:
                self.left_out["messages of neither side" if side is None else "messages without text"] += 1
            else:
                messages.append((side, visible_text(text).replace(END_OF_CONVERSATION, "").strip()))
                personas.append(turn.get("persona"))
                ended.append(bool(turn.get("ended", True)))
        if {side for side, _ in messages} == {True, False}:
            self.conversations.append((problem, messages))
            self.rows.append({**row, PERSONAS: personas, ENDED: ended})
        else:
            self.left_out["conversations in which only one side speaks"] += 1


def _side_and_text(where: str, turn: Any) -> tuple[bool | None, str | None]:
    """Whether the tutor speaks (None: neither side), and the text."""
    fields = turn if isinstance(turn, Mapping) else {}
    role = next((fields[key] for key in ROLE if key in fields), None)
    text = next((fields[key] for key in TEXT if key in fields), "")
    if not isinstance(role, str) or not isinstance(text, str | None) or not any(key in fields for key in TEXT):
        raise DataError(
            f"{where} is {json.dumps(turn, default=str)[:120]}; it must be an object with the speaker under "
            f"{' or '.join(ROLE)}, and the text under {' or '.join(TEXT)}."
        )
    name = role.strip().lower()
    if name not in TUTOR_ROLES | STUDENT_ROLES | OTHER_ROLES:
        names = (", ".join(sorted(roles)) for roles in (TUTOR_ROLES, STUDENT_ROLES, OTHER_ROLES))
        raise DataError("{} is said by {!r}. Known: tutors {}; students {}; left out {}.".format(where, role, *names))
    return None if name in OTHER_ROLES else name in TUTOR_ROLES, text


# Reading -------------------------------------------------------------------------------------------------------------


def read_dialogues(path: Path) -> list[Dialogues]:
    """The conversations of a file or a run folder: one entry, or one for each set, sampling and tutor in it. Raises
    `DataError`, naming file, row and turn, if something cannot be read or there is no conversation."""
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    by_name: dict[str, Dialogues] = {}
    files = [path]
    if path.is_dir():
        sets = path.glob(f"eval/*/{CONVERSATIONS_NAME}")
        evaluation_files = sorted(sets, key=lambda file: (file.parent.name != "before", file))
        files = [*sorted(path.glob("rollouts/*.parquet")), *evaluation_files]
    for file in files:
        folder = file.parent.relative_to(path) if path.is_dir() else file
        for where, part, problem, turns, row in _read(file):
            name = " ".join([str(folder), *part])
            by_name.setdefault(name, Dialogues(name)).add(where, problem, turns, row)
    for dialogues in by_name.values() or [Dialogues(str(path))]:
        if not dialogues.conversations:
            left_out = ", ".join(f"{count} {reason}" for reason, count in dialogues.left_out.items()) or "nothing"
            raise DataError(f"{dialogues.name} holds no talk of a tutor and a student; left out: {left_out}.")
    return [*by_name.values()]


_Read = tuple[str, list[str], str, Sequence[Mapping[str, Any]], Mapping[str, Any]]


def _read(file: Path) -> Iterator[_Read]:
    """Each conversation: where it is, its sampling and tutor or student (if there are several), its problem, its turns,
    and its row."""
    columns = _columns(file)
    if "steps" in columns:
        for rollout in RolloutSet.load(file):
            messages = [*rollout.opening]
            for step in rollout.steps:
                messages += [{"role": "user", "content": step.prompt}, {"role": "assistant", "content": step.content}]
            yield f"{file}: rollout {rollout.id}", [], str(rollout.prompt_index), messages, {}
    elif columns:
        yield from _read_records(file, columns)
    else:
        for where, row in numbered_rows(str(file), ""):
            problem = next((json.dumps(row[key]) for key in PROBLEM if row.get(key) is not None), where)
            yield where, [], problem, _turns_of(where, row), row


def _columns(file: Path) -> list[str]:
    """The columns of a Parquet file, or of a set of rollouts; none of any other file."""
    if file.suffix != ".parquet":
        with file.open("rb") as lines:
            return ["steps"] if f'"format": "{FORMAT}"'.encode() in lines.readline(200) else []
    try:
        return pq.read_schema(file).names
    except pa.ArrowException as error:
        raise DataError(f"{file} is damaged or no Parquet file: {error}") from error


def _read_records(file: Path, names: list[str]) -> Iterator[_Read]:
    """The conversations of a run's or an evaluation's Parquet file."""
    if not {"turns", "problem_id"} <= set(names):
        raise DataError(f"{file} has the columns {', '.join(names)[:200]}; a file of a run has turns and problem_id.")
    parts = [name for name in ("tutor", "student", "sampling") if name in names]
    facts = [name for name in ("problem", "answer", "type", "student_name", "initial_solutions") if name in names]
    problem = "problem" if "problem" in names else "problem_id"  # the text may say the lesson's level
    rows = pq.read_table(file, columns=["problem_id", "turns", *parts, *facts]).to_pylist()
    for number, row in enumerate(rows, start=1):
        yield f"{file}: row {number}", [row[part] for part in parts], row[problem], json.loads(row["turns"]), row


def _turns_of(where: str, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    key = next((key for key in TURNS if isinstance(row.get(key), list)), None)
    if key is not None:
        return row[key]
    history, reply = row.get("history"), row.get("tutor")
    if isinstance(history, list) and isinstance(reply, str):
        sides = [("tutor", "student")[(len(history) - index) % 2] for index in range(len(history))]
        turns = [{"role": side, "text": text} for side, text in zip(sides, history, strict=True)]
        return [*turns, {"role": "tutor", "text": reply}]
    raise DataError(
        f"{where} has the keys {', '.join(map(str, row))[:200]}; it must have a list of turns under one of "
        f"{', '.join(TURNS)}, or a list `history` and a text `tutor`."
    )


# Measures ------------------------------------------------------------------------------------------------------------


def uptake(student: str, tutor: str) -> float | None:
    """The share of the student's content words that the tutor's next message has: the lexical baseline "%-IN-T" of
    Demszky et al., "Measuring Conversational Uptake", ACL 2021. None after fewer than `SHORTEST_UPTAKE` words, or
    without a content word.

    It sees repeated words only: no paraphrase ("the total" for "the sum"), no pronoun, no inflected form, no answer to
    the student's question; and it cannot tell building on a contribution from echoing it.
    """
    tokens = words(student)
    content = set(tokens) - STOPWORDS
    return len(content & set(words(tutor))) / len(content) if len(tokens) >= SHORTEST_UPTAKE and content else None


def _ngrams(text: str) -> set[tuple[str, ...]]:
    """The n-grams of a message's words; of a shorter message, all of its words."""
    tokens = words(text)
    return (
        {tuple(tokens[index : index + _NGRAM]) for index in range(max(1, len(tokens) - _NGRAM + 1))}
        if tokens
        else set()
    )


def measures_of(
    turns: Sequence[tuple[bool, str]], problem: str = "", level: LevelRules | None = None
) -> dict[str, list[float]]:
    """The values of each measure in one conversation, from (whether the tutor speaks, text): one for each message or
    exchange, or one for the conversation. With `level` also the figures of `LEVEL_LABELS`."""
    turns = [(is_tutor, spoken(text)) for is_tutor, text in turns]
    tutor, student = ([text for is_tutor, text in turns if is_tutor == side] for side in (True, False))
    lengths = [[len(text.split()) for text in texts] for texts in (tutor, student)]
    parts = [sentences(text) for text in tutor]
    pairs = zip(turns, turns[1:], strict=False)
    uptakes = [uptake(before[1], after[1]) for before, after in pairs if after[0] and not before[0]]
    by_message: dict[str, list[float]] = {
        "tutor's words per message": [float(length) for length in lengths[0]],
        "student's words per message": [float(length) for length in lengths[1]],
        "questions per tutor's message": [float(sum(map(is_question, part))) for part in parts],
        "words per tutor's sentence": [fmean(len(sentence.split()) for sentence in part) for part in parts if part],
        UPTAKE: [value for value in uptakes if value is not None],
    }
    drifts = {f"drift: {name}": _drift(values) for name, values in by_message.items()}
    total, tutor_text = sum(map(sum, lengths)), "\n".join(tutor)
    ease = flesch_reading_ease(tutor_text) if is_english(tutor_text) else None
    seen_ngrams: set[tuple[str, ...]] = set()
    repeated = []
    for ngrams in filter(None, map(_ngrams, tutor)):
        repeated += [len(ngrams & seen_ngrams) / len(ngrams)] if seen_ngrams else []
        seen_ngrams |= ngrams
    return {
        "turns": [float(len(turns))],
        "student's share of words": [sum(lengths[1]) / total] if total else [],
        **by_message,
        "tutor repeats itself (share of trigrams)": repeated,
        EASE: [] if ease is None else [ease],
        **drifts,
        **({} if level is None else _level_measures(tutor, problem, level)),
    }


def _level_measures(tutor: Sequence[str], problem: str, level: LevelRules) -> dict[str, list[float]]:
    figures = level_figures(problem, [Turn("teacher", text) for text in tutor], level)
    return {label: figures.get(name, []) for name, (label, _, _) in LEVEL_LABELS.items()}


def _drift(values: Sequence[float]) -> list[float]:
    """The mean of the second half of the messages minus that of the first; the middle one of an odd number counts in
    neither. Empty for fewer than two."""
    half = len(values) // 2
    return [fmean(values[-half:]) - fmean(values[:half])] if half else []


def values_of(dialogues: Dialogues, level: LevelRules | None = None) -> dict[str, dict[str, list[float]]]:
    """Measure → problem → its values."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for problem, turns in dialogues.conversations:
        for name, new_values in measures_of(turns, problem, level).items():
            values[name][problem] += new_values
    return values


def table(files: Sequence[Dialogues], level: LevelRules | None = None) -> str:
    """The measures of each file in a column; of two files with common problems, also the mean change on these. With
    `level` also those of the level."""
    by_file = [values_of(dialogues, level) for dialogues in files]
    problems = [{problem for problem, _ in dialogues.conversations} for dialogues in files]
    common = len(problems[0] & problems[1]) if len(files) == 2 else 0
    titles = [f"[{number}]" for number in range(1, len(files) + 1)]
    rows = [["mean [95 % interval over problems]", *titles, *([f"[2] − [1] on {common} problems"] if common else [])]]
    for name in by_file[0]:
        estimates = [shown(mean_with_ci(values[name]), digits=2) for values in by_file]
        change = [shown(paired_change(by_file[0][name], by_file[1][name]), "+", 2)] if common else []
        rows.append([name, *estimates, *change])
    lines = []
    for title, dialogues, values, file_problems in zip(titles, files, by_file, problems, strict=True):
        exchanges, english = (sum(map(len, values[name].values())) for name in (UPTAKE, EASE))
        counts = f"{len(dialogues.conversations)} conversations ({english} in English) on {len(file_problems)} problems"
        left_out = "".join(f"; left out: {count} {reason}" for reason, count in dialogues.left_out.items())
        lines.append(f"{title} {dialogues.name}: {counts}, uptake in {exchanges} exchanges{left_out}")
    return "\n".join([*lines, "", align(rows), "", "drift: second half of a conversation minus its first half"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file, or a run folder")
    parser.add_argument(
        "--word-list", help=f"measures levels, by {WORDFREQ} or a CSV file (generation.level.word_list)"
    )
    parser.add_argument("--level", choices=CEFR_LEVELS, help="of lessons whose text does not say it")
    parser.add_argument("--language", default=ENGLISH, help="of lessons whose text does not say it")
    options = parser.parse_args(arguments)
    level = None if options.word_list is None else LevelRules(options.word_list, options.level, options.language)
    try:
        print(table([dialogues for path in options.files for dialogues in read_dialogues(path)], level))
    except (ClassroomError, OSError) as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
