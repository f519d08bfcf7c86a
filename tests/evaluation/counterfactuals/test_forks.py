"""Forks of played conversations, and the tokens that continue them."""

from collections.abc import Sequence
from dataclasses import replace

from classroom_rl.evaluation.counterfactuals.forks import Fork, Message, all_forks, corrected, forks_of
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.tokens import Turn
from tests.evaluation.counterfactuals.conftest import PROBLEM, asks, says
from tests.support.scripted_engine import ScriptedEngine
from tests.support.synthetic_run import record_of


def forks_at(turns: Sequence[Turn], max_turns: int = 9) -> list[Fork]:
    record = record_of(PROBLEM.text, turns)
    events = [{"event": "turn", "turn": turn, "ids": [], "logprobs": []} for turn in turns if not turn.given]
    return forks_of(record, PROBLEM, 0, [*events, {"event": "rewards"}], max_turns)


def test_forks_are_the_tutors_own_messages_that_the_student_could_answer():
    turns = [Turn("teacher", "Hi!", given=True), Turn("student", "Hi.", given=True), asks(0), says(0), asks(1)]
    assert [fork.position for fork in forks_at(turns)] == [2, 4]
    assert [fork.position for fork in forks_at(turns, max_turns=5)] == [2], "nothing follows the last message"
    second = forks_at(turns)[1]
    assert second.before == tuple(turns[:4]) and [event["turn"] for event in second.events] == turns[2:4]
    assert second.message.turn == turns[4]


def test_every_conversation_is_forked_once_before_one_is_forked_twice():
    turns = [asks(0), says(0), asks(1), says(1), asks(2)]
    records = [record_of(PROBLEM.text, turns, index=i) for i in range(6)]
    records = [record.model_copy(update={"id": f"r-{i}", "problem_id": PROBLEM.id}) for i, record in enumerate(records)]
    events = [{"event": "turn", "turn": turn, "ids": [], "logprobs": []} for turn in turns]
    forks = [all_forks(records, [PROBLEM], lambda _: events, 9, seed) for seed in (1, 1, 2)]
    assert [len({fork.conversation for fork in forks[0][i : i + 6]}) for i in (0, 6, 12)] == [6, 6, 6]
    assert forks[0] == forks[1] != forks[2] and sorted({fork.copy for fork in forks[0]}) == list(range(6))
    failed = [records[0].model_copy(update={"failure": "refused"})]
    assert all_forks(failed, [PROBLEM], lambda _: events, 9, 1) == []


def test_a_correction_has_the_tokens_of_a_supervised_training(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda _: "")
    ids = [*tokenizer.encode("Hm.", add_special_tokens=False), engine.frame.turn_end_id]
    event = {"event": "turn", "turn": Turn("teacher", "Hm.", tokens=len(ids)), "ids": ids, "prompt_ids": [1, 2]}
    event["logprobs"] = [-1.0] * len(ids)
    fork = Fork(PROBLEM, "c", 0, (), (), Message.of(event))
    review = Review(False, "task", -0.5, correction="Say it.")
    message = corrected(fork, review, engine, has_tokens=True)
    expected = [*tokenizer.encode("Say it.", add_special_tokens=False), engine.frame.turn_end_id]
    assert (
        list(message.event["ids"]) == expected
        and message.event["logprobs"] == ()
        and message.event["prompt_ids"] == [1, 2]
    )
    assert message.turn.text == "Say it." and message.turn.replaced and message.turn.review is None
    assert corrected(fork, review, engine, has_tokens=False).event["ids"] == ()
    assert corrected(fork, replace(review, correction=None), engine, has_tokens=True) is None
