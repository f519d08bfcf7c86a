"""The figures of a batch of conversations."""

from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.values import LEDGER, STUDENT
from classroom_rl.environments.classroom.metrics import batch_metrics
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.post_test.records import GIVEN, MISSED, PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.tools.tool import ERRORS
from classroom_rl.rollout.tools.turn import tool_metrics
from tests.environments.classroom.conftest import tool_call
from tests.support.scripted_room import Room
from tests.support.supervised_room import play, supervising


def record(turns: int = 1, **changes) -> ConversationRecord:
    texts = dict.fromkeys(("id", "request_id", "problem_id", "problem", "answer"), "x")
    tokens = {name: [] for name in ("prompt_ids", "completion_ids", "mask", "logprobs")}
    messages = [Turn("teacher", "Go on.")] * turns
    return ConversationRecord(
        **texts, **tokens, step=0, index=0, turns=messages, rewards={}, reward=0.5, meta={}, **changes
    )


def scored(attempt: int, *scores: float, **changes) -> Verdict:
    return Verdict("pedagogical_eval", attempt, scores=Scores(*scores), **changes)


def entry(outcome: str, knew: bool | None) -> LedgerEntry:
    return LedgerEntry("i", "c", outcome, 0, knew)


def answers(*right: bool, student: str = LEDGER) -> tuple[ExamAnswer, ...]:
    return tuple(ExamAnswer(student, i, "q", "a", is_right) for i, is_right in enumerate(right))


def test_messages_and_scores_are_means_and_anchors_do_not_count() -> None:
    judged = record(3, verdicts=[scored(0, 1, 0.5, 10), scored(1, 0, 0.5, 5), scored(2, 0, 0, 0, anchor=True)])
    failed = record(1, verdicts=[Verdict("pedagogical_eval", 0, error="no JSON")])
    metrics = batch_metrics([judged, failed])
    assert metrics == {
        "conversation/messages": 2.0,
        "conversation/rejected_share": 0.0,
        "judge/refused_share": 0.0,
        "judge/task_final_score": 0.5,
        "judge/forward_progression_score": 0.5,
        "judge/overall_momentum_score": 7.5,
    }


def test_a_refusal_of_the_judge_is_a_share_of_the_conversations() -> None:
    refused = Verdict("does_not_leak_answer", 0, error="ContentRefused: flagged", refused=True)
    assert batch_metrics([record(verdicts=[refused]), record()])["judge/refused_share"] == 0.5


def test_conversations_that_an_embedded_judge_cannot_read_are_a_share() -> None:
    unread, read = (record(verdicts=[scored(0, 1, 1, 10, beyond_rules=count)]) for count in (2, 0))
    model = record(verdicts=[scored(0, 1, 1, 10)])
    assert batch_metrics([unread, read, model])["judge/beyond_rules_share"] == 0.5
    assert "judge/beyond_rules_share" not in batch_metrics([model])


def test_anchors_tell_how_far_scores_in_a_group_are_off() -> None:
    """In its group a conversation got 0.4 and another 0.8; judged alone they got 0.4 and 0.4."""
    anchor = scored(1, 1, 0, 0, anchor=True, group_size=1)
    first = record(verdicts=[scored(0, 1, 0, 0, rank=1, group_size=2), anchor])
    second = record(verdicts=[scored(0, 1, 1, 0, rank=2, group_size=2), anchor])
    metrics = batch_metrics([first, second, record(verdicts=[scored(0, 1, 1, 0, group_size=1)])])
    assert metrics["judge/group_share"] == pytest.approx(2 / 3) and metrics["judge/anchors"] == 2
    assert metrics["judge/anchor_gap"] == pytest.approx(0.2)
    assert metrics["judge/anchor_error"] == pytest.approx(0.08**0.5)  # of 0 and 0.4
    assert metrics["judge/contradictions"] == 1.0, "the first is ranked above the second, and has the lower score"
    assert "judge/anchor_correlation" not in metrics, "the anchors are equal"


def test_the_post_test() -> None:
    ledger = (entry(PRODUCED, True), entry(PRODUCED, False), entry(GIVEN, False), entry(MISSED, None))
    first = record(post_test=PostTest(ledger, answers(True, True, False, False)))
    both = answers(False) + answers(True, student=STUDENT)
    second = record(post_test=PostTest((entry(GIVEN, True),), both))
    metrics = batch_metrics([first, second, record()])
    assert {name: value for name, value in metrics.items() if "post_test" in name} == {
        "post_test/ledger": (0.5 + 0.0) / 2,
        "post_test/student": 1.0,
        "post_test/knew": (0.25 + 1.0) / 2,
        "post_test/given": (0.25 + 1.0) / 2,
        "post_test/learned": 0.5,  # of the first conversation alone: the second had nothing to learn
    }


def test_tool_calls_are_counted_also_those_of_rejected_drafts(room: Room, tooled: GenerationConfig) -> None:
    room.teacher_context = 6000
    misspelt = [tool_call("6*7", name="caculator"), f"{tool_call('6*8')}{tool_call('1/0')}", "It is wrong, 48."]
    played = play(room, supervising(replace(tooled, max_turns=1), on_invalid="replace"), misspelt)
    assert played.turns[0].tool_calls == () and len(played.turns[0].drafts[0].tool_calls) == 3
    metrics = tool_metrics([played, played.model_copy(update={"turns": []})])
    assert metrics["tools/calls_per_conversation"] == 1.5 and metrics["tools/error_share"] == pytest.approx(2 / 3)
    shares = {kind: metrics[f"tools/error_share/{kind}"] for kind in ERRORS}
    assert shares == pytest.approx(dict.fromkeys(ERRORS, 0) | {"unknown_tool": 1 / 3, "exception": 1 / 3})
    assert tool_metrics([played.model_copy(update={"turns": []})]) == {}
