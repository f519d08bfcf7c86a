"""The rewards, compared with values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.config import MATHS_REWARDS, classroom_rules, default_weights
from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation, Solution, State
from classroom_rl.environments.classroom.rewards import REWARDS, pedagogical
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.runner import weighted_sum
from classroom_rl.rollout.tokens import Turn

SCORING = ("pedagogical_eval",)
DECIDING = ("does_not_leak_answer", "follows_pedagogical_values")
SOFT, HARD = True, False


def finished(
    teacher: list[Turn] | list[str] = ("Go on.",),
    verdicts: list[Verdict] = (),
    grades: list[float] = (),
    **rules,
) -> Conversation:
    """A conversation on its way out, put together by hand."""
    turns = [turn if isinstance(turn, Turn) else Turn("teacher", turn, tokens=5) for turn in teacher]
    conversation = Conversation(
        "c", Problem.of("p"), Setup(ConversationType.GUIDED, None, ()), ClassroomRules(**rules), turns=turns
    )
    conversation.verdicts = list(verdicts)
    conversation.solutions = [Solution("", grade) for grade in grades]
    conversation.state = State.REWARD_TURN
    return conversation


def scored(*attempts: Scores | None, mode: bool = HARD, **rules) -> Conversation:
    verdicts = [Verdict("pedagogical_eval", i, scores=s, error=None if s else "?") for i, s in enumerate(attempts)]
    return finished(verdicts=verdicts, judge_rules=SCORING, ignore_rejected_judge=mode, **rules)


def decided(accepted: bool | None, mode: bool, **more) -> Conversation:
    verdicts = [
        Verdict(DECIDING[0], 0, accepted=True),
        Verdict(DECIDING[1], 0, accepted=accepted, error=None if accepted is not None else "timeout"),
    ]
    return finished(verdicts=verdicts, judge_rules=DECIDING, ignore_rejected_judge=mode, **more)


# The language tutor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SOFT, HARD])
@pytest.mark.parametrize(
    ("scores", "reward"),
    [
        (Scores(1, 1, 10), 1.0),
        (Scores(1, 0, 0), 0.4),
        (Scores(0, 1, 0), 0.4),
        (Scores(0.5, 0.25, 5), 0.4),  # 0.2 + 0.1 + 0.1
        (Scores(2 / 3, 1 / 3, 7), 0.54),  # 0.26667 + 0.13333 + 0.14
        (Scores(1 / 3, 1 / 7, 9), 0.3705),  # 0.133333 + 0.057143 + 0.18
        (Scores(0.75, 0, 0), 0.3),  # on the threshold is not under it
    ],
)
def test_pedagogical_is_the_weighted_sum_of_the_scores(scores, reward, mode):
    assert pedagogical(scored(scores, mode=mode)) == reward


@pytest.mark.parametrize(
    ("scores", "mode", "rules", "reward"),
    [
        (Scores(0.7, 0, 0), SOFT, {}, 0.03),  # 0.28 is under 0.3: less 0.25
        (Scores(0.7, 0, 0), HARD, {}, 0.0),
        (Scores(0.7, 0, 0), SOFT, {"extra_penalty_for_rejected_judges": 0.1}, 0.18),
        (Scores(0.7, 0, 0), HARD, {"extra_penalty_for_rejected_judges": 0.1}, 0.0),
        (Scores(0.5, 0, 0), SOFT, {}, 0.0),  # 0.2 − 0.25 is under 0
        (Scores(0.7, 0, 0), SOFT, {"low_score_threshold": 0.28}, 0.28),
        (Scores(0.7, 0, 0), HARD, {"low_score_threshold": 0.0}, 0.28),
        (Scores(1, 1, 5), SOFT, {"low_score_threshold": 0.95}, 0.65),
    ],
)
def test_a_low_score_costs_the_penalty_or_everything(scores, mode, rules, reward):
    assert pedagogical(scored(scores, mode=mode, **rules)) == reward


def test_attempts_are_averaged_before_the_threshold_is_asked():
    # 0.0 and 0.8 are 0.4 on average: not rejected, though one of them alone would be.
    assert pedagogical(scored(Scores(0, 0, 0), Scores(1, 1, 0), None)) == 0.4
    # 0.2 and 0.36 are 0.28 on average: the penalty comes off once.
    assert pedagogical(scored(Scores(0.5, 0, 0), Scores(0.9, 0, 0), mode=SOFT)) == 0.03


def test_pedagogical_needs_a_rule_that_scores():
    with pytest.raises(ValueError, match="a judge rule that scores"):
        pedagogical(decided(True, SOFT))
    with pytest.raises(ValueError, match="a judge rule that scores"):
        pedagogical(finished())


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 10), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_pedagogical_stays_between_0_and_1_and_a_better_score_never_costs(a, b, c, mode, penalty, threshold):
    rules = {"mode": mode, "extra_penalty_for_rejected_judges": penalty, "low_score_threshold": threshold}
    reward = pedagogical(scored(Scores(a, b, c), **rules))
    assert 0 <= reward <= 1
    assert pedagogical(scored(Scores(1, b, c), **rules)) >= reward
    assert pedagogical(scored(Scores(a, 1, c), **rules)) >= reward
    assert pedagogical(scored(Scores(a, b, 10), **rules)) >= reward


# The maths tutor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "mode", "grades", "reward"),
    [
        (True, HARD, [1, 0, 0, 1], 0.5),
        (True, SOFT, [1, 1, 1, 0], 0.75),
        (False, SOFT, [1, 1, 1, 0], 0.5),  # 0.75 − 0.25
        (False, SOFT, [0, 0], -0.25),
        (False, HARD, [], -0.25),
    ],
)
def test_end_rm_is_the_share_of_right_solutions_less_the_penalty(accepted, mode, grades, reward):
    assert REWARDS["end_rm"](decided(accepted, mode, grades=grades)) == pytest.approx(reward)


def test_end_rm_uses_the_configured_penalty():
    assert REWARDS["end_rm"](decided(False, HARD, extra_penalty_for_rejected_judges=0.6)) == -0.6
    soft = decided(False, SOFT, grades=[1.0], extra_penalty_for_rejected_judges=0.6)
    assert REWARDS["end_rm"](soft) == pytest.approx(0.4)


@pytest.mark.parametrize("grades", [[], [1.0, None]])
def test_end_rm_without_graded_solutions_is_an_error_and_not_a_number(grades):
    with pytest.raises(ValueError, match="graded solutions"):
        REWARDS["end_rm"](decided(True, HARD, grades=grades))


ONE, OTHER = "<think>The ending is wrong, so hint.</think>", "<think>Now ask for the next phrase.</think>"


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["a", "b"], 0.0),
        ([f"{ONE}a", "b"], 0.25),
        ([f"{ONE}a", f"{OTHER}b"], 0.5),
        ([f"{ONE}a", f"{ONE}b"], 0.25),  # the same thought pays once
        ([f"{ONE}a", f"{ONE}{OTHER}b"], 0.5),
        (["<think>a</think>a", "<think>b</think>b"], 0.0),  # too short
        ([f"{ONE}a", "<think>y"], -0.25),  # 0.5 × 1/2 − 0.5
        (["a</think>", "<think>b"], -1.0),
        ([f"{ONE}a{OTHER}b"], 0.5),
        ([f"{ONE}a<think>y"], -0.5),
    ],
)
def test_thinking_counts_closed_thoughts_and_fines_unbalanced_ones(texts, reward):
    assert REWARDS["thinking"](finished(texts, use_thinking=True)) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("thought", "says_something"),
    [
        ("<think></think>", False),
        ("<think> \n\t</think>", False),
        ("<think>…</think>", False),
        ("<think>_*_</think>", False),
        ("</think>a<think>", False),  # closes and opens: no thought
        ("<think><think></think></think>", False),
        ("<think></think><think>?</think>", False),
        ("<think></think><think>3 + 4 is not 8.</think>", True),
        ("<think>3 + 4 is 7.</think>", False),  # four words
        ("<think>да, но он не понял</think>", True),
        ("<think>想</think>", False),
        ("<think>他把动词放错了</think>", True),
        ("<think>A slip\nin the tense.</think>", True),
    ],
)
def test_a_thought_that_says_nothing_pays_nothing(thought, says_something):
    conversation = finished([f"{thought}Go on.", "Go on."], use_thinking=True)
    assert REWARDS["thinking"](conversation) == (0.25 if says_something else 0.0)


@pytest.mark.parametrize(
    ("texts", "reward"), [(["<think>x</think>a", "<think>y</think>b"], 0.0), (["<think>x</think>a", "b</think>"], -0.5)]
)
def test_thoughts_do_not_pay_where_the_teacher_is_not_told_to_think(texts, reward):
    assert REWARDS["thinking"](finished(texts)) == reward


@pytest.mark.parametrize(("use", "force"), [(False, False), (True, False), (False, True)])
def test_the_rules_of_a_run_say_whether_thoughts_pay(use, force):
    generation = GenerationConfig(use_thinking=use, force_thinking=force)
    assert classroom_rules(generation, {"thinking": 1.0}, 1024, graded=False).use_thinking == (use or force)


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["a", "b"], 0.0),
        (["a", f"b {END_OF_CONVERSATION}"], 0.1),
        ([f"<think>{END_OF_CONVERSATION}</think>b"], 0.0),
        ([f"<think>{END_OF_CONVERSATION}"], 0.0),
    ],
)
def test_end_of_conversation_counts_a_goodbye_that_can_be_heard(texts, reward):
    assert REWARDS["end_of_conversation"](finished(texts)) == reward


def test_a_students_goodbye_counts_nothing():
    conversation = finished(["a"])
    conversation.turns.append(Turn("student", END_OF_CONVERSATION))
    assert REWARDS["end_of_conversation"](conversation) == 0.0


@pytest.mark.parametrize(("tokens", "reward"), [([3, 8], 0.0), ([3, 9], -0.5), ([10, 3], -0.5), ([9, 9, 9], -0.5)])
def test_length_fines_a_turn_at_its_limit_once(tokens, reward):
    turns = [Turn("teacher", "a", tokens=count) for count in tokens]
    assert REWARDS["length"](finished(turns, max_tokens_per_turn=10)) == reward


def test_length_looks_at_the_teacher_only():
    turns = [Turn("teacher", "a", tokens=3), Turn("student", "b", tokens=10)]
    assert REWARDS["length"](finished(turns, max_tokens_per_turn=10)) == 0.0


def test_hard_rejection_takes_thinking_and_goodbye_but_not_the_fine_for_length():
    turns = [Turn("teacher", f"{ONE}Bye {END_OF_CONVERSATION}", tokens=10)]
    hard = decided(False, HARD, teacher=turns, max_tokens_per_turn=10, use_thinking=True)
    soft = decided(False, SOFT, teacher=turns, max_tokens_per_turn=10, grades=[1.0], use_thinking=True)
    names = ("end_rm", "thinking", "end_of_conversation", "length")
    assert [REWARDS[name](hard) for name in names] == [-0.25, 0.0, 0.0, -0.5]
    assert [REWARDS[name](soft) for name in names] == [0.75, 0.5, 0.1, -0.5]


# None, and sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(REWARDS))
@pytest.mark.parametrize(
    "conversation",
    [scored(None), scored(), decided(None, HARD), decided(None, SOFT, grades=[1.0])],
    ids=["all failed", "no attempt", "one rule failed", "one rule failed, with solutions"],
)
def test_without_a_verdict_every_reward_is_none(name, conversation):
    assert REWARDS[name](conversation) is None


@pytest.mark.parametrize("name", ["thinking", "end_of_conversation", "length"])
def test_without_judge_rules_nothing_is_missing(name):
    assert REWARDS[name](finished(["a"])) == 0.0


def test_judge_rules_imply_the_rewards():
    def implied(*rules: str) -> dict[str, float]:
        return default_weights(GenerationConfig(judges_rules_prompts_paths=dict.fromkeys(rules, "a.txt")))

    assert implied("pedagogical_eval") == {"pedagogical": 1.0}
    assert implied(*DECIDING, "pedagogical_eval") == {"pedagogical": 1.0}
    assert implied(*DECIDING) == implied() == dict.fromkeys(MATHS_REWARDS, 1.0)


def test_the_weighted_sum_is_none_if_a_part_is_none():
    rewards = {"end_rm": 0.5, "length": -0.5, "thinking": 9.0}
    assert weighted_sum(rewards, {"end_rm": 2.0, "length": 1.0}) == 0.5
    assert weighted_sum(rewards | {"length": None}, {"end_rm": 2.0, "length": 1.0}) is None
    assert weighted_sum(rewards | {"thinking": None}, {"end_rm": 2.0}) == 1.0
