"""Fine-tuning of a student: what it learns is what it said, after the prompts that the classroom gives it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from classroom_rl.errors import ClassroomError, ConfigError, DataError
from classroom_rl.evaluation.dialogue import read_dialogues
from classroom_rl.evaluation.metrics.students import talks_of
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.results.run_folder import METRICS_NAME, read_lines
from classroom_rl.rollout.chat_template import encode_chat, encode_reply
from classroom_rl.trainer.sft import run as sft
from classroom_rl.trainer.sft.corrections import MASKED, Example
from classroom_rl.trainer.sft.student import HELD_OUT_NAME, split_dialogues, student_examples
from tests.rollout.test_chat_template import CHATML
from tests.support.configs import loaded
from tests.support.scripted_engine import ScriptedEngine
from tests.trainer.sft.test_run import blank_model, make_config, one_thread, trainer_of, write_rows  # noqa: F401


@pytest.fixture(scope="module")
def blank(tmp_path_factory) -> Path:
    """A model whose chat template marks nothing: dialogues need no marks."""
    return blank_model(tmp_path_factory.mktemp("blank"), template=CHATML, context=1024)


@pytest.fixture(scope="module")
def small(blank):
    return AutoTokenizer.from_pretrained(blank)


@pytest.fixture
def keys(prompts) -> list[str]:
    """The keys of a student with one persona and an opening attempt."""
    return [
        f"student.student_personas_prompts_paths={{student: {prompts('student')}}}",
        f"student.student_initial_attempt_prompt_path={prompts('attempt')}",
        "model.max_length=1024",
    ]


def row(number: int, **changes: object) -> dict[str, object]:
    """A dialogue in MathDial's schema: with two messages of the student in a row, and one that spells markup."""
    turns = [
        {"role": "teacher", "text": "Hi. How?"},
        {"role": "student", "text": "I add."},
        {"role": "student", "text": "<|im_end|> is 3."},
        {"role": "teacher", "text": "No eggs?"},
        {"role": "student", "text": "Two eggs."},
        {"role": "teacher", "text": "Yes."},
    ]
    problem = {"question": f"1 + {number}?", "ground_truth": f"It is {number + 1}\n {number + 1}"}
    return {**problem, "student_incorrect_solution": "9", "turns": turns} | changes


def learned(example: Example) -> Iterator[tuple[list[int], list[int]]]:
    """What is before each stretch with labels, and the stretch."""
    ids, labels = example["input_ids"], example["labels"]
    assert len(ids) == len(labels) and all(label in (MASKED, token) for token, label in zip(ids, labels, strict=True))
    start = 0
    while start < len(ids):
        if labels[start] == MASKED:
            start += 1
            continue
        end = next((index for index in range(start, len(ids)) if labels[index] == MASKED), len(ids))
        yield ids[:start], ids[start:end]
        start = end


# Tokens --------------------------------------------------------------------------------------------------------------


def test_each_token_of_a_dialogue_is_learned_or_not(tmp_path, blank, small, keys):
    corpus = write_rows(tmp_path / "dialogues.jsonl", [row(2)])
    trainer = trainer_of(make_config(tmp_path, blank, corpus, *keys))
    start, end = small.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def tokens(*parts: int | str) -> list[int]:
        return [
            id
            for part in parts
            for id in ([part] if isinstance(part, int) else small.encode(part, split_special_tokens=True))
        ]

    def message(role: str, text: str) -> list[tuple[list[int], bool]]:
        is_own = role == "assistant"
        return [(tokens(start, f"{role}\n"), False), (tokens(text, end), is_own), (tokens("\n"), False)]

    prompt = message("user", "Attempt: 1 + 2?")
    attempt = [*prompt, *message("assistant", "9")[:2]]
    dialogue = [
        (ids, False) for ids, _ in (*message("system", "You are someone."), *prompt, *message("assistant", "9"))
    ]
    messages = [
        ("user", "Hi. How?"),
        ("assistant", "I add.\n<|im_end|> is 3."),
        ("user", "No eggs?"),
        ("assistant", "Two eggs."),
    ]
    dialogue += [part for role, text in messages for part in message(role, text)][:-1]
    for example, expected in zip(trainer.train_dataset, (attempt, dialogue), strict=True):
        assert example["input_ids"] == [id for ids, _ in expected for id in ids]
        assert example["labels"] == [id if labelled else MASKED for ids, labelled in expected for id in ids]


def test_a_message_is_learned_as_it_was_said_and_ends_only_where_it_ended(tmp_path, blank, small, keys):
    turns = [
        {"role": "teacher", "text": "No eggs?"},
        {"role": "student", "text": "x² is 9"},
        {"role": "teacher", "text": "Yes."},
        {"role": "student", "text": "Two", "ended": False},
        {"role": "teacher", "text": "Yes."},
        {"role": "student", "text": "Two eggs."},
    ]
    dialogue = row(2, turns=turns, student_incorrect_solution=None)
    trainer = trainer_of(make_config(tmp_path, blank, write_rows(tmp_path / "dialogues.jsonl", [dialogue]), *keys))
    (example,) = trainer.train_dataset
    decoded = [small.decode(ids) for _, ids in learned(example)]
    assert decoded == ["x² is 9<|im_end|>", "Two", "Two eggs.<|im_end|>"]


@pytest.mark.parametrize("kind", ["guided", "attempt"])
def test_what_is_learned_in_a_run_is_what_the_classroom_s_student_was_shown_and_said(
    room, generation, tmp_path, blank, small, kind
):
    prompts, numbers = [], count()

    class Listening(ScriptedEngine):
        async def chat(self, messages, sampling):
            prompts.append(tuple(encode_chat(small, messages)))
            return await super().chat(messages, sampling)

    room.student = Listening(room.tokenizer, lambda _: f"Hello {next(numbers)}.")
    generation = replace(
        generation,
        forced_conversation_type=kind,
        quote_teacher=True,
        student_error_rate=0.5,
        max_turns=9,
        number_student_attempts=0,
    )
    records = room.play(generation, problems=["fractions", "eggs"], answers=["1/2", "2"])
    write_rollouts(tmp_path / "run", 0, 0, records)
    personas = ",".join(f"{name}: {path}" for name, path in generation.student_personas_prompts_paths.items())
    options = [
        f"student.student_personas_prompts_paths={{{personas}}}",
        f"student.student_initial_attempt_prompt_path={generation.student_initial_attempt_prompt_path}",
        "student.quote_teacher=true",
    ]
    config = make_config(tmp_path / "sft", blank, tmp_path / "run", *options)
    examples = student_examples(split_dialogues(config)[0], config.student, small, 1024)
    learned_messages = [(tuple(prompt), reply) for example in examples for prompt, reply in learned(example)]
    turns = [turn for record in records for turn in record.turns if turn.role == "student"]
    assert {turn.persona for turn in turns} >= {"correct_student", "error_student"}
    assert sorted(prompt for prompt, _ in learned_messages) == sorted(prompts)
    assert sorted(reply for _, reply in learned_messages) == sorted(encode_reply(small, turn.text) for turn in turns)
    assert len(examples) < len(learned_messages), "messages of one persona share an example"


def test_messages_that_do_not_fit_are_left_out_and_counted(tmp_path, blank, small, keys, caplog):
    rows = [
        row(1),
        row(2, turns=[{"role": "student", "text": "Hello."}, *row(2)["turns"]], student_incorrect_solution=None),
    ]
    config = make_config(tmp_path, blank, write_rows(tmp_path / "a.jsonl", rows), *keys)
    dialogues, _ = split_dialogues(config)
    examples = student_examples(dialogues, config.student, small, 1024)
    longest = max(len(example["input_ids"]) for example in examples)
    cut = student_examples(dialogues, config.student, small, longest - 1)
    assert sum(len(list(learned(example))) for example in examples) == 3 + 2
    assert sum(len(list(learned(example))) for example in cut) == 3 + 2 - 1
    assert "1 of the student's messages: before the tutor's first" in caplog.text
    assert f"1 of the student's messages: beyond {longest - 1} tokens" in caplog.text
    with pytest.raises(DataError, match="Nothing is left of 2 dialogues"):
        student_examples(dialogues, config.student, small, 5)


# Training ------------------------------------------------------------------------------------------------------------


def test_a_student_learns_and_is_measured_on_problems_that_it_did_not_learn(tmp_path, blank, keys, caplog):
    corpus = write_rows(tmp_path / "dialogues.jsonl", [row(number % 8) for number in range(16)])
    config = make_config(tmp_path / "run", blank, corpus, *keys, "student.held_out_share=0.25", "train.epochs=2")
    with caplog.at_level("INFO"):
        folder = sft.train(config)
    losses = [line["eval_loss"] for line in read_lines(tmp_path / "run" / METRICS_NAME) if "eval_loss" in line]
    assert losses[-1] < losses[0] and f"{losses[0]:.4f} before, {losses[-1]:.4f} after" in caplog.text
    (held_out,) = read_dialogues(tmp_path / "run" / HELD_OUT_NAME)
    talks = talks_of(held_out)
    assert len(talks) == 4 and len({talk.problem for talk in talks}) == 2
    assert {(talk.answer, talk.attempt, talk.attempt_failed) for talk in talks} == {
        (str(int(talk.problem[4]) + 1), "9", True) for talk in talks
    }
    assert not {talk.problem for talk in talks} & {dialogue.talk.problem for dialogue in split_dialogues(config)[0]}
    student = loaded("eval", "--config-name=maths_students", f"student_model.model_name_or_path={folder}")
    assert AutoTokenizer.from_pretrained(student.student_model.model_name_or_path).chat_template == CHATML


REFUSED = [
    ([row(1, question=None, problem_id="7")], [], "without the text of its problem"),
    ([row(1)], ["student.held_out_share=0.5"], "about one problem"),
    ([row(1)], ["student.student_personas_prompts_paths.other=x.txt"], "has the persona None"),
    ([row(1)], ["student.student_personas_prompts_paths.student=none.txt"], "no prompt template none.txt"),
]


@pytest.mark.parametrize(("rows", "overrides", "message"), REFUSED)
def test_dialogues_that_cannot_be_learned_from_are_refused(tmp_path, blank, small, keys, rows, overrides, message):
    config = make_config(tmp_path, blank, write_rows(tmp_path / "a.jsonl", rows), *keys, *overrides)
    with pytest.raises(ClassroomError, match=message):
        student_examples(split_dialogues(config)[0], config.student, small, 1024)


def test_an_attempt_of_a_run_needs_its_prompt(room, generation, tmp_path, blank, prompts):
    records = room.play(replace(generation, forced_conversation_type="attempt"))
    write_rollouts(tmp_path / "run", 0, 0, records)
    key = f"student.student_personas_prompts_paths={{student: {prompts('student')}}}"
    with pytest.raises(ConfigError, match="student.student_initial_attempt_prompt_path"):
        split_dialogues(make_config(tmp_path, blank, tmp_path / "run", key))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["student.student_personas_prompts_paths=null"], "must be"),
        (["student.held_out_share=1.5"], "student.held_out_share is 1.5"),
        (["dataset.val_datasets=[{name_or_path: b.jsonl}]"], "are both set"),
        (["dataset.train_datasets=[{name_or_path: b.jsonl, conversation_column: talk}]"], "conversation_column is set"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded("train_sft", "--config-name=student", *overrides)
    with pytest.raises(ConfigError, match="no student is fine-tuned"):
        loaded("train_sft", "student.quote_teacher=true")
