"""Measures of dialogue: values worked out by hand, every kind of file, and what is refused or left out."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.errors import DataError
from classroom_rl.evaluation.dialogue import (
    Dialogues,
    flesch_reading_ease,
    main,
    measures_of,
    read_dialogues,
    table,
    uptake,
)
from classroom_rl.rollout.rollout_set import RolloutSet
from tests.support.played_rollouts import made

TALK = [
    ("tutor", "How many eggs are there? Count them."),
    ("student", "I count ten eggs in the basket."),
    ("tutor", "Ten eggs, good. How many eggs are there in the other basket? Why?"),
    ("student", "Five."),
    ("tutor", "Good."),
]
SIDES = [(role == "tutor", text) for role, text in TALK]


def test_measures_of_a_conversation_worked_by_hand():
    measures = measures_of(SIDES)
    assert measures["turns"] == [5] and measures["tutor's words per message"] == [7, 13, 1]
    assert measures["student's share of words"] == [pytest.approx(8 / 29)]
    assert measures["questions per tutor's message"] == [1, 2, 0]
    assert measures["words per tutor's sentence"] == [3.5, pytest.approx(13 / 3), 1]
    # "I count ten eggs in the basket.": count, ten, eggs and basket are content words; "Five." is too short.
    assert measures["uptake (share of content words)"] == [pytest.approx(3 / 4)]
    # Of the 11 trigrams of 13 words, "how many eggs", "many eggs are" and "eggs are there" came before; "good" did not.
    assert measures["tutor repeats itself (share of trigrams)"] == [pytest.approx(3 / 11), 0]
    assert measures["drift: tutor's words per message"] == [1 - 7] and measures[
        "drift: questions per tutor's message"
    ] == [-1]
    assert measures["drift: uptake (share of content words)"] == [], "one value has no halves"
    twice = measures_of([(True, "Good!"), (False, "Thanks."), (True, "good")])
    assert twice["tutor repeats itself (share of trigrams)"] == [1], "a short message is compared as a whole"


UPTAKES = [
    ("I add five and ten together", "Why five?", 1 / 4),
    ("I add five and ten together", "Yes, go on.", 0),
    ("I add five and ten together", "You ADD ten and five together!", 1),
    ("I add five and", "Why five?", None),
    ("I am in the the the", "I am", 1),
    ("it is what that is to", "", 0),
    ("it is that we are to", "it is", None),
]


@pytest.mark.parametrize(("student", "tutor", "expected"), UPTAKES)
def test_uptake_is_the_share_of_the_student_s_content_words(student: str, tutor: str, expected: float | None):
    assert uptake(student, tutor) == (expected if expected is None else pytest.approx(expected))


def test_reading_ease_is_flesch_s():
    # Six words of one syllable in one sentence.
    assert flesch_reading_ease("The cat sat on the mat.") == pytest.approx(206.835 - 1.015 * 6 - 84.6)
    # Syllables: ta-ble, made, beau-ti-ful, asked, wan-ted; 5 words in two sentences, 9 syllables. Numbers do not count.
    assert flesch_reading_ease("Table made 12 beautiful. Asked wanted!") == pytest.approx(
        206.835 - 1.015 * 2.5 - 84.6 * 1.8
    )
    assert flesch_reading_ease("12 + 3 = 15") is None
    english = "Flesch reading ease (English)"
    assert measures_of([(True, "What is this and where are you?"), (False, "x")])[english]
    assert measures_of([(True, "Dove si trova la casa bianca adesso?"), (False, "x")])[english] == []


# Files ---------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(
    role: str = "role", text: str = "text", names: tuple[str, str] = ("tutor", "student")
) -> list[dict[str, str]]:
    return [{role: names[speaker != "tutor"], text: message} for speaker, message in TALK]


FORMS = {
    "MathDial, flat": {
        "question": "Eggs?",
        "turns": [turn | {"move": None} for turn in turns(names=("teacher", "student"))],
    },
    "chat": {"messages": [{"role": "system", "content": "Teach."}, *turns("role", "content", ("assistant", "user"))]},
    "ShareGPT": {"conversations": turns("from", "value", ("gpt", "human"))},
    "bridge": {"dialog_history": turns("user", "text", ("Teacher", "Student"))},
    "CIMA": {"history": [message for _, message in TALK[:-1]], "tutor": TALK[-1][1], "target": {"obj": "eggs"}},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS.keys())
def test_files_of_others_are_read(row: dict[str, Any], tmp_path: Path):
    (dialogues,) = read_dialogues(write_lines(tmp_path / "a.jsonl", row, row))
    assert [turns for _, turns in dialogues.conversations] == [SIDES, SIDES]
    assert len({problem for problem, _ in dialogues.conversations}) == (
        1 if "question" in row or "target" in row else 2
    )
    assert dialogues.left_out == ({"messages of neither side": 2} if "messages" in row else {})


REFUSED = [
    (
        {"turns": [{"role": "Mariana", "text": "Hi"}]},
        "line 2: turn 1 is said by 'Mariana'. Known: tutors assistant, gpt",
    ),
    ({"turns": [{"role": "tutor"}]}, "line 2: turn 1 is .*text under text or content"),
    ({"turns": ["Hello"]}, 'line 2: turn 1 is "Hello"; it must be an object'),
    ({"turns": [{"role": "tutor", "content": [1]}]}, "turn 1 is .*it must be an object with the speaker under role or"),
    ({"text": "Hello"}, "line 2 has the keys text; it must have a list of turns under one of turns, messages"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_what_cannot_be_read_is_named(row: dict[str, Any], message: str, tmp_path: Path, capsys):
    path = write_lines(tmp_path / "a.jsonl", FORMS["bridge"], row)
    with pytest.raises(DataError, match=message):
        read_dialogues(path)
    assert main([str(path)]) == 2 and "line 2" in capsys.readouterr().err


def test_what_is_left_out_is_counted_and_thoughts_are_not_seen(tmp_path: Path):
    silent, call = {"messages": [{"role": "assistant", "content": "Hi"}]}, {"role": "assistant", "content": None}
    row = {
        "messages": [
            {"role": "assistant", "content": "<think>Eggs.</think>Why?"},
            call,
            {"role": "user", "text": "So."},
        ]
    }
    (dialogues,) = read_dialogues(write_lines(tmp_path / "a.jsonl", row, silent))
    assert [turns for _, turns in dialogues.conversations] == [[(True, "Why?"), (False, "So.")]]
    assert dialogues.left_out == {"messages without text": 1, "conversations in which only one side speaks": 1}
    for path, message in (
        (
            write_lines(tmp_path / "b.jsonl", silent),
            "holds no talk of a tutor and a student; left out: 1 conversations in which only",
        ),
        (tmp_path / "c", "There is no"),
    ):
        with pytest.raises(DataError, match=message):
            read_dialogues(path)


def write_parquet(path: Path, **columns: list[str]) -> None:
    path.parent.mkdir(parents=True)
    turns_json = json.dumps(turns(names=("teacher", "student")))
    pq.write_table(pa.table({"problem_id": ["1", "2"], "turns": [turns_json, turns_json]} | columns), path)


def test_a_run_folder_has_a_column_for_each_set(tmp_path: Path, capsys):
    write_parquet(tmp_path / "rollouts/step_000001-0.parquet")
    for name in ("before", "after"):
        write_parquet(tmp_path / f"eval/{name}/conversations.parquet", sampling=["sampled", "greedy"])
    sets = read_dialogues(tmp_path)
    names = ["rollouts", "eval/before sampled", "eval/before greedy", "eval/after sampled", "eval/after greedy"]
    assert [dialogues.name for dialogues in sets] == names
    assert [len(dialogues.conversations) for dialogues in sets] == [2, 1, 1, 1, 1]
    assert sets[0].conversations == [("1", SIDES), ("2", SIDES)]
    assert (
        main([str(tmp_path)]) == 0
        and "[2] eval/before sampled: 1 conversations (1 in English) on 1 problems, uptake in 1 ex"
        in capsys.readouterr().out
    )
    (other := tmp_path / "other.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="is damaged or no Parquet file"):
        read_dialogues(other)
    pq.write_table(pa.table({"text": ["a"]}), other)
    with pytest.raises(DataError, match="has the columns text; a file of a run has turns and problem_id"):
        read_dialogues(other)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_sets_of_rollouts_are_read(suffix: str, tmp_path: Path):
    rollout = made(0)
    (dialogues,) = read_dialogues(RolloutSet([rollout, made(1)]).save(tmp_path / f"set{suffix}"))
    (_, talk), _ = dialogues.conversations
    texts = [text.strip() for step in rollout.steps for text in (step.prompt, step.content)]
    assert [text for _, text in talk[-len(texts) :]] == texts and [side for side, _ in talk[-2:]] == [False, True]


def test_two_files_are_compared_on_their_common_problems():
    def dialogues(name: str, extra: int) -> Dialogues:
        talk = [*SIDES, *[(False, "And more.")] * extra]
        return Dialogues(name, [(str(problem), talk[: 4 + extra + problem % 2]) for problem in range(8)])

    text = table([dialogues("before", 0), dialogues("after", 2)])
    assert (
        "[1] before: 8 conversations (8 in English) on 8 problems, uptake in 8 exchanges" in text
        and "[2] − [1] on 8 problems" in text
    )
    row = next(line for line in text.splitlines() if line.startswith("turns"))
    assert "4.50 [3.93, 5.07]" in row and "6.50 [5.93, 7.07]" in row and "+2.00 (n = 8)" in row


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.text(max_size=40)), max_size=8))
def test_every_measure_of_any_text_is_a_number_in_its_range(talk: list[tuple[bool, str]]):
    for name, values in measures_of(talk).items():
        low = -1e9 if "drift" in name or "Flesch" in name else 0
        assert all(
            low <= value <= (1 if name.split(" (")[-1].startswith("share") or "share of words" in name else 1e9)
            for value in values
        )
