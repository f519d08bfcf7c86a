"""Pairs of made conversations: what becomes one, of which tokens, and what is said about the rest."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.errors import DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.corrections import CorrectionDecision, append_decision
from classroom_rl.results.pairs import PairMaker, PreferencePair, main, make_pairs, read_pairs, write_pairs
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.tokens import AuxSample, TokenBuffer, Turn
from classroom_rl.rollout.trajectory import Trajectory
from tests.rollout.test_chat_template import CHATML, make_tokenizer

TOKENIZER = make_tokenizer(CHATML)
STUDENT = "\n<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
RIGHT = "Two eggs."


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def said(text: str) -> tuple[int, ...]:
    """A message of the tutor, with its end."""
    return tuple(ids_of(f"{text}<|im_end|>"))


def talk(index: int, texts: Sequence[str], reward: float | None, problem: str = "eggs", step: int = 0) -> Trajectory:
    """A conversation in which the tutor says these texts, and the student greets in between."""
    buffer, turns = TokenBuffer(ids_of(f"<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n")), []
    for number, text in enumerate(texts):
        if number:
            buffer.append_given(ids_of(STUDENT))
            turns.append(Turn("student", "Hello."))
        span = buffer.append_sampled(said(text), [-1.0] * len(said(text)))
        turns.append(Turn("teacher", text, span=span, policy=PolicyVersion("run", step)))
    return Trajectory(
        **{"id": f"{problem}-{step}-{index}", "request_id": "r", "step": step, "index": index, "problem_id": problem},
        **{"problem": problem, "answer": "", "rewards": {}, "reward": reward, "turns": turns, "meta": {}},
        **{"prompt_ids": buffer.prompt_ids, "completion_ids": buffer.completion_ids},
        **{"mask": buffer.mask, "logprobs": buffer.logprobs},
    )


def reviewed(draft: AuxSample | None, correction: AuxSample | None, price: float = 0.0, **more) -> Trajectory:
    """A conversation whose second message (turn 2) has a rejected draft, a correction, or both."""
    record = talk(0, ["She cooked eggs.", "No more."], 0.5)
    wrong = Review(False, "leak", -2.0, correction=RIGHT)
    valid = Review(price == 0, "" if price == 0 else "leak", price, correction=None if price == 0 else RIGHT)
    drafts = (Draft("eggs", 1, wrong),) if draft is not None else ()
    changed = replace(record.turns[2], review=valid, drafts=drafts, **more)
    branches = [sample for sample in (draft, correction) if sample is not None]
    return record.model_copy(update={"turns": [*record.turns[:2], changed], "branches": branches})


START = reviewed(None, None).turns[2].span[0]
DRAFT = AuxSample("draft", 2, START, said("eggs"), (-1.0,) * len(said("eggs")), reward=-2.0, draft=0)
OF_DRAFT = AuxSample("correction", 2, START, said(RIGHT), draft=0)
OF_MESSAGE = replace(OF_DRAFT, draft=-1)
THOUGHTS = said("and")


def made(records: Sequence[Trajectory], decisions=(), least_margin: float = 0.1):
    """The pairs, and what was left out."""
    maker = PairMaker(
        {decision.place: decision for decision in decisions}, lambda text: list(said(text)), text, least_margin
    )
    return list(maker.of_step(records)), dict(maker.left_out)


def text(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(ids)


def learned(ids: Sequence[int], mask: Sequence[int]) -> str:
    return text([token for token, bit in zip(ids, mask, strict=True) if bit])


def test_the_best_and_the_worst_conversation_of_a_group_are_a_pair():
    rewards = [0.4, 0.9, None, 0.1, 0.5]
    group = [talk(index, ["eggs", f"{index}"], reward) for index, reward in enumerate(rewards)]
    (pair,), left_out = made([*group, talk(9, ["and"], 1.0, "other")])
    assert (pair.chosen_conversation, pair.rejected_conversation) == ("eggs-0-1", "eggs-0-3")
    assert (pair.source, pair.level, pair.margin, pair.turn) == ("group", "conversation", pytest.approx(0.8), None)
    assert pair.prompt_ids == group[0].prompt_ids
    assert learned(pair.chosen_ids, pair.chosen_mask) == "eggs<|im_end|>1<|im_end|>"
    assert learned(pair.rejected_ids, pair.rejected_mask) == "eggs<|im_end|>3<|im_end|>"
    assert left_out == {
        ("group", "conversations without a reward"): 1,
        ("group", "conversations whose prompt no other one of their group has"): 1,
        ("judge", "messages without a score of their own"): 11,
    }


def opened(index: int, answer: str, reward: float, name: str = "eggs") -> Trajectory:
    """A conversation that the prompt opens for the tutor: its first own message comes after the student's answer."""
    record = talk(index, [f"{index}"], reward)
    opening = ids_of(f"<|im_start|>user\n{name}<|im_end|>\n<|im_start|>assistant\neggs<|im_end|>\n<|im_start|>user\n")
    prompt = [*opening, *ids_of(f"{answer}<|im_end|>\n<|im_start|>assistant\n")]
    turns = [Turn("teacher", "eggs", given=True), Turn("student", f" {answer} "), *record.turns]
    return record.model_copy(update={"prompt_ids": prompt, "turns": turns})


def test_what_the_student_answers_to_the_opening_is_no_part_of_the_prompt():
    group = [opened(0, "She cooked.", 0.9), opened(1, "No more.", 0.1), opened(2, "No more.", 0.0, name="and")]
    (pair,), left_out = made(group)
    assert (pair.chosen_conversation, pair.rejected_conversation) == ("eggs-0-0", "eggs-0-1")
    assert text(pair.prompt_ids).endswith("eggs<|im_end|>\n<|im_start|>user\n")
    assert text(pair.chosen_ids).startswith("She cooked.<|im_end|>") and text(pair.rejected_ids).startswith("No more.")
    assert learned(pair.chosen_ids, pair.chosen_mask) == "0<|im_end|>"
    assert learned(pair.rejected_ids, pair.rejected_mask) == "1<|im_end|>"
    assert left_out["group", "conversations whose prompt no other one of their group has"] == 1


def test_a_reward_that_the_supervisor_helped_to_earn_makes_no_pair():
    group = [talk(index, ["eggs", f"{index}"], reward) for index, reward in enumerate((0.5, 0.1, 0.9, 1.0))]
    replaced = replace(group[2].turns[2], replaced=True)
    group[2] = group[2].model_copy(update={"turns": [*group[2].turns[:2], replaced]})
    critiqued = AuxSample("policy", 2, START, said("3"), (-1.0,) * len(said("3")), hint_ids=said("Again!"))
    group[3] = group[3].model_copy(update={"branches": [critiqued]})
    (pair,), left_out = made(group)
    assert (pair.chosen_conversation, pair.rejected_conversation) == ("eggs-0-0", "eggs-0-1")
    assert left_out["group", "conversations with messages of the supervisor, or behind a critique"] == 2


def test_groups_whose_rewards_are_too_near_make_no_pair():
    assert made([talk(0, ["a"], 0.5), talk(1, ["b"], 0.55)])[1]["group", "groups with a margin below 0.1, or of 0"] == 1


def decided(decision: str, draft: int = -1, **more) -> CorrectionDecision:
    return CorrectionDecision(time=1.0, conversation="eggs-0-0", turn=2, draft=draft, decision=decision, **more)


@pytest.mark.parametrize(
    ("record", "decisions", "wanted", "why"),
    [
        (reviewed(DRAFT, None), [], [("draft", "No more.", "eggs", 2.0)], None),
        (reviewed(DRAFT, None, price=-2.0), [], [], "drafts no worse than what took their place"),
        (
            reviewed(DRAFT, OF_DRAFT),
            [decided("reject", 0, message_was_fine=True)],
            [("desk", "eggs", RIGHT, None)],
            "drafts that a person called fine",
        ),
        (reviewed(DRAFT, OF_DRAFT), [], [("draft", "No more.", "eggs", 2.0), ("draft", RIGHT, "eggs", 2.0)], None),
        (reviewed(DRAFT, OF_DRAFT, replaced=True, span=None), [], [("draft", RIGHT, "eggs", 2.0)], None),
        (reviewed(None, OF_MESSAGE, price=-1.0), [], [("draft", RIGHT, "No more.", 1.0)], None),
        (
            reviewed(replace(DRAFT, hint_ids=said("Again!")), None),
            [],
            [],
            "drafts that were written behind a critique, in another context",
        ),
        (
            reviewed(replace(DRAFT, ids=THOUGHTS + said("eggs")), replace(OF_DRAFT, hint_ids=THOUGHTS), replaced=True),
            [],
            [("draft", RIGHT, "eggs", 2.0)],
            None,
        ),
        (
            reviewed(DRAFT, replace(OF_DRAFT, hint_ids=THOUGHTS), replaced=True),
            [],
            [],
            "corrections in another context than what they correct",
        ),
        (
            reviewed(None, OF_MESSAGE, price=-1.0),
            [decided("accept", correction=RIGHT)],
            [("desk", RIGHT, "No more.", 1.0)],
            None,
        ),
        (
            reviewed(None, OF_MESSAGE, price=-1.0),
            [decided("accept", correction="Another text.")],
            [("draft", RIGHT, "No more.", 1.0)],
            None,
        ),
        (
            reviewed(None, OF_MESSAGE, price=-1.0),
            [decided("edit", text="Hello.")],
            [("desk", "Hello.", "No more.", 1.0)],
            None,
        ),
        (
            reviewed(None, OF_MESSAGE, price=-1.0),
            [decided("reject", message_was_fine=True)],
            [("desk", "No more.", RIGHT, None)],
            None,
        ),
        (
            reviewed(None, OF_MESSAGE, price=-1.0),
            [decided("reject")],
            [],
            "corrections that a person rejected, as the message, too",
        ),
    ],
)
def test_drafts_and_corrections(record, decisions, wanted, why):
    pairs, left_out = made([record], decisions)
    rows = [(pair.source, learned(pair.chosen_ids, pair.chosen_mask), learned(pair.rejected_ids, pair.rejected_mask),
             pair.margin) for pair in pairs]  # fmt: skip
    assert rows == [(source, f"{good}<|im_end|>", f"{bad}<|im_end|>", margin) for source, good, bad, margin in wanted]
    assert {reason for source, reason in left_out if source in ("draft", "desk")} == ({why} if why else set())
    context = text(record.prompt_ids) + "She cooked eggs.<|im_end|>" + STUDENT
    has_thoughts = any(sample.hint_ids == THOUGHTS for sample in record.branches)
    for pair in pairs:
        assert text(pair.prompt_ids) == context + text(THOUGHTS) * has_thoughts
        assert (pair.level, pair.turn) == ("message", 2)


def test_a_message_that_was_written_behind_a_critique_is_taken_in_its_conversation():
    record = reviewed(DRAFT, None)
    critiqued = AuxSample("policy", 2, START, said("No more."), (-1.0,) * len(said("No more.")), said("Again!"))
    turns = [*record.turns[:2], replace(record.turns[2], span=None)]
    (pair,), _ = made([record.model_copy(update={"turns": turns, "branches": [DRAFT, critiqued]})])
    assert learned(pair.chosen_ids, pair.chosen_mask) == "No more.<|im_end|>"
    assert text(pair.prompt_ids).endswith(STUDENT)


def test_messages_with_scores_are_pairs_where_all_before_them_is_equal():
    texts = [["eggs", "a"], ["eggs", "b"], ["and", "c"], ["eggs", "d"]]
    scores = [[1.0, 0.2], [0.7, 0.9], [0.0, 1.0], [None, 0.5]]
    group = [
        talk(index, messages, 0.5).model_copy(update={"turn_rewards": {"judge": values}})
        for index, (messages, values) in enumerate(zip(texts, scores, strict=True))
    ]
    pairs, left_out = made(group)
    rows = [(text(pair.chosen_ids), text(pair.rejected_ids), pair.margin, pair.turn) for pair in pairs]
    assert rows == [
        ("eggs<|im_end|>", "and<|im_end|>", pytest.approx(1.0), 0),
        ("b<|im_end|>", "a<|im_end|>", pytest.approx(0.7), 2),
    ]
    assert left_out["judge", "messages whose context no other one of their group has"] == 1
    assert left_out["judge", "messages without a score of their own"] == 1


def test_messages_with_prompts_of_their_own_are_compared_one_by_one():
    def game(index: int, move: str, score: float) -> Trajectory:
        sample = AuxSample("policy", 1, 0, said(move), (-1.0,) * len(said(move)), prompt_ids=tuple(ids_of("think")))
        record = talk(index, ["eggs"], score)
        turns = [*record.turns, Turn("teacher", move, policy=PolicyVersion("run", 0))]
        scores = {"judge": [0.5, score]}
        return record.model_copy(update={"turns": turns, "branches": [sample], "turn_rewards": scores})

    pairs, left_out = made([game(0, "a", 0.0), game(1, "b", 1.0)])
    assert [(text(pair.prompt_ids), text(pair.chosen_ids)) for pair in pairs] == [("think", "b<|im_end|>")]
    assert left_out["group", "conversations with a prompt for each message"] == 2


WORDS = st.lists(st.sampled_from(["eggs", "and", "Hello.", "No more."]), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, st.floats(0, 1), st.sampled_from(["eggs", "user"])), min_size=2, max_size=8))
def test_masks_cover_what_the_tutor_sampled_and_no_pair_is_on_two_prompts(group):
    records = {
        record.id: record.model_copy(update={"turn_rewards": {"judge": [reward] * len(texts)}})
        for index, (texts, reward, problem) in enumerate(group)
        for record in [talk(index, texts, reward, problem)]
    }
    for pair in made(list(records.values()), least_margin=0.0)[0]:
        assert pair.margin > 0 and pair.chosen_ids != pair.rejected_ids
        for side in ("chosen", "rejected"):
            record = records[getattr(pair, f"{side}_conversation")]
            ids, mask = getattr(pair, f"{side}_ids"), getattr(pair, f"{side}_mask")
            start = len(pair.prompt_ids) - len(record.prompt_ids)
            assert pair.prompt_ids == [*record.prompt_ids, *record.completion_ids[:start]]
            assert ids == record.completion_ids[start : start + len(ids)]
            assert mask == record.mask[start : start + len(ids)] and 1 in mask


# The file and the program -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps, the second one by two processes, which share its group; and one decision at the desk."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    write_rollouts(tmp_path, 0, 0, [talk(0, ["eggs", "a"], 0.0), talk(1, ["eggs", "b"], 1.0)])
    write_rollouts(tmp_path, 1, 0, [talk(0, ["eggs", "a"], 0.0, step=1)])
    write_rollouts(tmp_path, 1, 1, [talk(1, ["eggs", "b"], 1.0, step=1)])
    write_rollouts(tmp_path, 2, 0, [reviewed(None, OF_MESSAGE, price=-1.0)])
    append_decision(tmp_path, decided("accept", correction=RIGHT))
    return tmp_path


def test_the_program_writes_a_file_that_reads_as_the_pairs(run: Path, capsys):
    assert main([str(run), "--tokenizer", str(run / "tokenizer")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"3 pairs on 1 problems are in {run / 'pairs.parquet'}:",
        "  desk: 1 of messages",
        "  group: 2 of conversations",
    ]
    assert "  group: 1 conversations whose prompt no other one of their group has" in lines
    pairs, fingerprint = read_pairs(run / "pairs.parquet")
    assert [(pair.source, pair.step) for pair in pairs] == [("group", 0), ("group", 1), ("desk", 0)]
    assert all(pair.chosen == text(pair.chosen_ids) and pair.prompt == text(pair.prompt_ids) for pair in pairs)
    write_pairs(run / "again.parquet", pairs, TOKENIZER)
    assert read_pairs(run / "again.parquet") == (pairs, fingerprint)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def without_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns("mask"), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: [path.unlink() for path in (run / "rollouts").iterdir()], "holds no conversations of a training"),
        (lambda run: cut(run / "rollouts/step_000001-0.parquet"), r"step_000001-0\.parquet cannot be read"),
        (lambda run: without_column(run / "rollouts/step_000000-0.parquet"), "cannot be read: .*\n.*mask"),
        (lambda run: (run / "rollouts/step_000002-0.parquet").write_bytes(b""), "step_000002-0.*cannot be read"),
        (lambda run: (run / "correction_decisions.jsonl").write_text("{}\n"), "line 1, is no decision"),
        (
            lambda run: [(run / f"rollouts/step_00000{name}.parquet").unlink() for name in ("0-0", "1-0", "2-0")],
            "(?s)No pair can be made of .* whose prompt no other one",
        ),
    ],
)
def test_a_damaged_or_empty_run_is_an_error_that_says_so(run: Path, damage, message: str):
    damage(run)
    with pytest.raises(DataError, match=message):
        make_pairs(run, None, str(run / "tokenizer"), 0.1)
    assert not (run / "pairs.parquet").exists()


def test_a_trained_student_s_messages_make_no_pairs_of_a_tutor(run: Path):
    record = talk(0, ["eggs", "a"], 0.0)
    turns = [replace(turn, role="student", policy=PolicyVersion("run", 1)) for turn in record.turns]
    write_rollouts(run, 0, 0, [record.model_copy(update={"turns": turns})])
    with pytest.raises(DataError, match="trained the student"):
        make_pairs(run, None, str(run / "tokenizer"), 0.1)


def test_a_run_that_names_no_model_needs_a_tokenizer(run: Path, capsys):
    assert main([str(run)]) == 2
    assert "does not name the tutor's model: give --tokenizer" in capsys.readouterr().err


def test_a_damaged_file_of_pairs_is_an_error(tmp_path: Path):
    path = tmp_path / "pairs.parquet"
    pair = PreferencePair([1], [2, 3], [1, 1], [4], [1], 1.0, "group", "conversation", "p", 0, "a", "b")
    for damage, message in (
        (lambda: write_pairs(path, [replace(pair, chosen_mask=[1])], TOKENIZER), "in row 1, a list of ids is empty or"),
        (lambda: write_pairs(path, [replace(pair, prompt_ids=[])], TOKENIZER), "in row 1, a list of ids is empty or"),
        (lambda: cut(path), "is not a Parquet file with the columns of pairs. Make it with"),
        (path.unlink, "does not exist. Make it with"),
    ):
        damage()
        with pytest.raises(DataError, match=message):
            read_pairs(path)
