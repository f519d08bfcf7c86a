"""The state machine: the order of states, who has the last turn, and which transitions it refuses."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.conversation import (
    ClassroomRules,
    Conversation,
    InvalidTransition,
    Solution,
    State,
)
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.supervision import SampledDraft
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn

GUIDED, ATTEMPTED = ConversationType.GUIDED, ConversationType.ATTEMPTED
ORDER = list(State)
PROMPT = [1, 2, 3]
DEFAULT_RULES = ClassroomRules()
GOOD, BAD = Scores(1, 1, 10), Scores(0, 0, 0)


def new_conversation(kind: ConversationType = GUIDED, rules: ClassroomRules = DEFAULT_RULES) -> Conversation:
    personas = tuple(f"persona {i}" for i in range(rules.max_turns))
    return Conversation("c", Problem.of("2 + 2", "4"), Setup(kind, "Alex", personas), rules)


def teacher_says(conversation: Conversation, text: str = "Go on.", tokens: int = 1) -> Turn:
    if conversation.buffer is None:
        conversation.open_buffer(PROMPT)
    span = conversation.buffer.append_sampled([7] * tokens, [-0.5] * tokens)
    turn = Turn("teacher", text, tokens=tokens, span=span)
    conversation.add_teacher_turn(turn)
    return turn


def student_says(conversation: Conversation, text: str = "Four.", framed: int = 2) -> Turn:
    turn = Turn("student", text, persona=None if conversation.next_is_opening_attempt else conversation.next_persona)
    conversation.add_student_turn(turn, [9] * framed)
    return turn


def talk_to_the_end(conversation: Conversation) -> list[State]:
    """Let both speak, and nothing else, until the dialogue is over; the states that were left."""
    conversation.start()
    seen = []
    while conversation.state in (State.TEACHER_TURN, State.STUDENT_TURN):
        seen.append(conversation.state)
        teacher_says(conversation) if conversation.state is State.TEACHER_TURN else student_says(conversation)
    return seen


# Lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_turns", "kind", "messages"),
    [(15, GUIDED, 15), (15, ATTEMPTED, 16), (1, GUIDED, 1), (1, ATTEMPTED, 2), (4, GUIDED, 5), (4, ATTEMPTED, 4)],
)
def test_max_turns_counts_messages_and_the_teacher_closes(max_turns, kind, messages):
    conversation = new_conversation(kind, ClassroomRules(max_turns=max_turns))
    talk_to_the_end(conversation)
    roles = [turn.role for turn in conversation.turns]
    first, second = ("teacher", "student") if kind is GUIDED else ("student", "teacher")
    assert roles == [first if i % 2 == 0 else second for i in range(messages)]
    assert roles[-1] == "teacher"


def test_the_teachers_goodbye_ends_the_dialogue():
    conversation = new_conversation()
    conversation.start()
    teacher_says(conversation)
    student_says(conversation)
    teacher_says(conversation, f"Well done! {END_OF_CONVERSATION}")
    assert conversation.state is State.REWARD_TURN
    assert len(conversation.turns) == 3


@pytest.mark.parametrize(
    "text", [f"<think>Shall I say {END_OF_CONVERSATION}?</think>Go on.", f"Go on. <think>{END_OF_CONVERSATION}"]
)
def test_a_goodbye_in_a_thought_is_none(text):
    conversation = new_conversation()
    conversation.start()
    teacher_says(conversation, text)
    assert conversation.state is State.STUDENT_TURN


def test_a_students_goodbye_does_not_end_the_dialogue():
    conversation = new_conversation()
    conversation.start()
    teacher_says(conversation)
    student_says(conversation, END_OF_CONVERSATION)
    assert conversation.state is State.TEACHER_TURN


@pytest.mark.parametrize(("framed", "state"), [(4, State.TEACHER_TURN), (5, State.REWARD_TURN), (6, State.REWARD_TURN)])
def test_only_an_exhausted_budget_ends_after_the_student(framed, state):
    # A budget of 10 holds the prompt (3), one sampled token and the framed reply. The teacher needs two more places:
    # a token, and the end token that it may leave out.
    conversation = new_conversation(rules=ClassroomRules(max_tokens_in_conversation=10))
    conversation.start()
    teacher_says(conversation)
    student_says(conversation, framed=framed)
    assert conversation.state is state
    assert conversation.tokens_left == 10 - 3 - 1 - framed


def test_a_teacher_turn_that_fills_the_budget_ends_the_dialogue():
    conversation = new_conversation(rules=ClassroomRules(max_tokens_in_conversation=10))
    conversation.start()
    teacher_says(conversation, tokens=6)
    assert conversation.state is State.REWARD_TURN


def test_a_teacher_turn_is_limited_by_its_own_limit_and_by_the_budget():
    conversation = new_conversation(rules=ClassroomRules(max_tokens_in_conversation=10, max_tokens_per_turn=4))
    conversation.start()
    assert conversation.teacher_turn_limit == 4
    teacher_says(conversation, tokens=2)
    student_says(conversation, framed=2)
    assert conversation.teacher_turn_limit == 2  # 10 − 3 − 2 − 2 − 1


# Everything after the dialogue --------------------------------------------------------------------------------------


def rest_of(conversation: Conversation, scores: Scores | None) -> list[State]:
    """Judge, solve and reward as the conversation asks; the states that were passed."""
    seen = []
    while conversation.state is not State.END:
        seen.append(conversation.state)
        if conversation.state is State.JUDGE_TURN:
            conversation.add_verdicts([Verdict("pedagogical_eval", 0, scores=scores)])
        elif conversation.state is State.GENERATE_SOLUTION:
            conversation.add_solutions([Solution("4", 1.0)] * conversation.rules.solutions)
        else:
            conversation.add_rewards({"pedagogical": 1.0})
    return seen


JUDGED = ("pedagogical_eval",)


@pytest.mark.parametrize(
    ("rules", "scores", "passed"),
    [
        (ClassroomRules(), None, ["REWARD_TURN"]),
        (ClassroomRules(judge_rules=JUDGED), GOOD, ["JUDGE_TURN", "REWARD_TURN"]),
        (ClassroomRules(solutions=2), None, ["GENERATE_SOLUTION", "REWARD_TURN"]),
        (ClassroomRules(judge_rules=JUDGED, solutions=2), GOOD, ["JUDGE_TURN", "GENERATE_SOLUTION", "REWARD_TURN"]),
        (ClassroomRules(judge_rules=JUDGED, solutions=2), BAD, ["JUDGE_TURN", "REWARD_TURN"]),
        (
            ClassroomRules(judge_rules=JUDGED, solutions=2, ignore_rejected_judge=True),
            BAD,
            ["JUDGE_TURN", "GENERATE_SOLUTION", "REWARD_TURN"],
        ),
        (
            ClassroomRules(judge_rules=JUDGED, solutions=2, ignore_rejected_judge=True),
            None,
            ["JUDGE_TURN", "REWARD_TURN"],
        ),
    ],
    ids=["nothing", "judge", "solutions", "both", "rejected hard", "rejected soft", "no verdict"],
)
def test_states_without_a_use_are_skipped(rules, scores, passed):
    conversation = new_conversation(rules=rules)
    talk_to_the_end(conversation)
    assert rest_of(conversation, scores) == passed


def test_a_failed_panel_leaves_the_conversation_without_a_verdict():
    conversation = new_conversation(rules=ClassroomRules(judge_rules=JUDGED))
    talk_to_the_end(conversation)
    conversation.add_verdicts([Verdict("pedagogical_eval", i, error="timeout") for i in range(2)])
    assert conversation.lacks_verdict
    assert conversation.judgement is None
    assert not conversation.rejected


def test_low_scores_and_rejecting_rules_reject():
    threshold = Scores(0.5, 0.25, 0.0)  # 0.4 × 0.5 + 0.4 × 0.25 = 0.3: on the threshold, not under it
    below = Scores(0.5, 0.24, 0.0)
    for scores, rejected in ((threshold, False), (below, True)):
        conversation = new_conversation(rules=ClassroomRules(judge_rules=JUDGED, low_score_threshold=0.3))
        talk_to_the_end(conversation)
        conversation.add_verdicts([Verdict("pedagogical_eval", 0, scores=scores)])
        assert conversation.rejected is rejected
    for accepted in (True, False):
        conversation = new_conversation(rules=ClassroomRules(judge_rules=("does_not_leak_answer",)))
        talk_to_the_end(conversation)
        conversation.add_verdicts([Verdict("does_not_leak_answer", 0, accepted=accepted)])
        assert conversation.rejected is not accepted


# Any conversation ---------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["Go on.", f"Bye {END_OF_CONVERSATION}", "<think>hm</think>So?", f"<think>{END_OF_CONVERSATION}"]
)
RULES = st.builds(
    ClassroomRules,
    max_turns=st.integers(1, 9),
    max_tokens_in_conversation=st.integers(5, 60),
    max_tokens_per_turn=st.integers(1, 8),
    judge_rules=st.sampled_from([(), ("pedagogical_eval",), ("a", "b"), ("a", "pedagogical_eval")]),
    solutions=st.integers(0, 2),
    ignore_rejected_judge=st.booleans(),
)


def draw_verdict(data: st.DataObject, rule: str, attempt: int) -> Verdict:
    outcome = data.draw(st.sampled_from(["good", "bad", "failed"]))
    if outcome == "failed":
        return Verdict(rule, attempt, error="failed")
    if rule == "pedagogical_eval":
        return Verdict(rule, attempt, scores=GOOD if outcome == "good" else BAD)
    return Verdict(rule, attempt, accepted=outcome == "good")


def one_step(conversation: Conversation, data: st.DataObject) -> None:
    if conversation.state is State.TEACHER_TURN:
        if conversation.buffer is None:
            conversation.open_buffer(PROMPT)
        teacher_says(conversation, data.draw(TEXTS), data.draw(st.integers(1, conversation.teacher_turn_limit)))
        conversation.buffer.append_given([5] * data.draw(st.integers(0, 1)))  # an end token that was left out
    elif conversation.state is State.STUDENT_TURN:
        student_says(conversation, framed=data.draw(st.integers(1, 12)))
    elif conversation.state is State.JUDGE_TURN:
        rules = conversation.rules.judge_rules
        conversation.add_verdicts([draw_verdict(data, rule, i) for rule in rules for i in range(2)])
    elif conversation.state is State.GENERATE_SOLUTION:
        conversation.add_solutions([Solution("4", 1.0)] * conversation.rules.solutions)
    else:
        conversation.add_rewards({"length": 0.0})


def assert_refuses_everything_else(conversation: Conversation) -> None:
    """All that does not belong to the present state raises and changes nothing."""
    teacher_turn = State.SUPERVISOR_TURN if conversation.supervised else State.TEACHER_TURN
    review = {State.SUPERVISOR_TURN: lambda c: c.reject_draft(Review())}
    draft = {State.TEACHER_TURN: lambda c: c.add_draft(SampledDraft(Turn("teacher", "")))}
    attempts = {
        State.START: lambda c: c.start(),
        **(draft if conversation.supervised else review),
        teacher_turn: lambda c: c.add_teacher_turn(Turn("teacher", "")),
        State.STUDENT_TURN: lambda c: c.add_student_turn(Turn("student", ""), [1]),
        State.JUDGE_TURN: lambda c: c.add_verdicts([]),
        State.GENERATE_SOLUTION: lambda c: c.add_solutions([Solution("4", 1.0)] * c.rules.solutions),
        State.REWARD_TURN: lambda c: c.add_rewards({}),
    }
    for state, attempt in attempts.items():
        if state is not conversation.state:
            before = copy.deepcopy(vars(conversation) | {"buffer": None})
            with pytest.raises(InvalidTransition, match=str(conversation.state)):
                attempt(conversation)
            assert vars(conversation) | {"buffer": None} == before


@given(rules=RULES, kind=st.sampled_from(ConversationType), data=st.data())
def test_every_conversation_runs_through_the_states_in_order_and_ends(rules, kind, data):
    conversation = new_conversation(kind, rules)
    assert_refuses_everything_else(conversation)
    conversation.start()
    passed = []
    while conversation.state is not State.END:
        assert len(passed) < 2 * rules.max_turns + 10, "it does not come to an end"
        passed.append(conversation.state)
        assert_refuses_everything_else(conversation)
        one_step(conversation, data)
    assert_refuses_everything_else(conversation)
    assert_dialogue_is_well_formed(conversation)
    assert_rest_is_well_formed(conversation, passed)
    buffer = conversation.buffer
    if buffer is not None:
        assert len(buffer.completion_ids) == len(buffer.mask) == len(buffer.logprobs)
        sampled = {i for turn in conversation.teacher_turns for i in range(*turn.span)}
        assert [i in sampled for i in range(len(buffer.mask))] == [m == 1 for m in buffer.mask]


def assert_dialogue_is_well_formed(conversation: Conversation) -> None:
    roles = [turn.role for turn in conversation.turns]
    first = 0 if conversation.setup.type is GUIDED else 1
    assert roles == [("teacher", "student")[(i + first) % 2] for i in range(len(roles))]
    goodbyes = [END_OF_CONVERSATION in visible_text(turn.text) for turn in conversation.turns if turn.role == "teacher"]
    exhausted = conversation.teacher_turn_limit < 1
    assert not any(goodbyes[:-1])
    assert len(roles) <= conversation.rules.max_turns + 1
    if roles[-1] == "student":
        assert exhausted
    else:
        assert goodbyes[-1] or exhausted or len(roles) >= conversation.rules.max_turns


def assert_rest_is_well_formed(conversation: Conversation, passed: list[State]) -> None:
    after = passed[len(conversation.turns) :]
    assert after == sorted(set(after), key=ORDER.index), "after the dialogue each state comes once, in order"
    assert passed[: len(conversation.turns)] == [State(f"{turn.role.upper()}_TURN") for turn in conversation.turns]
    assert (State.JUDGE_TURN in after) == bool(conversation.rules.judge_rules)
    rules = conversation.rules
    valid = {v.rule for v in conversation.verdicts if v.valid}
    rejected = any(v.accepted is False for v in conversation.verdicts) or (
        conversation.judgement is not None
        and conversation.judgement.scores is not None
        and conversation.judgement.scores.final_reward < 0.3
    )
    judged = valid == set(rules.judge_rules)
    wanted = rules.solutions > 0 and judged and (rules.ignore_rejected_judge or not rejected)
    assert (State.GENERATE_SOLUTION in after) == wanted


# What it refuses besides --------------------------------------------------------------------------------------------


def test_the_context_is_opened_once_and_on_the_teachers_turn():
    conversation = new_conversation(ATTEMPTED)
    conversation.start()
    with pytest.raises(InvalidTransition):
        conversation.open_buffer(PROMPT)
    student_says(conversation)
    conversation.open_buffer(PROMPT)
    with pytest.raises(InvalidTransition, match="open already"):
        conversation.open_buffer(PROMPT)


def test_a_draft_needs_a_supervisor():
    conversation = new_conversation()
    conversation.start()
    with pytest.raises(InvalidTransition, match="without a supervisor"):
        conversation.add_draft(SampledDraft(Turn("teacher", "")))


def test_a_turn_of_the_wrong_role_is_refused():
    conversation = new_conversation()
    conversation.start()
    with pytest.raises(InvalidTransition, match="student"):
        conversation.add_teacher_turn(Turn("student", "I am the teacher now."))
    teacher_says(conversation)
    with pytest.raises(InvalidTransition, match="teacher"):
        conversation.add_student_turn(Turn("teacher", "And I the student."))


def test_the_number_of_solutions_must_be_the_rules_number():
    conversation = new_conversation(rules=ClassroomRules(solutions=2))
    talk_to_the_end(conversation)
    with pytest.raises(InvalidTransition, match="1 solutions came, 2 were due"):
        conversation.add_solutions([Solution("4", 1.0)])


# What others see of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(ConversationType))
def test_personas_come_in_the_order_drawn_and_the_opening_attempt_has_none(kind):
    conversation = new_conversation(kind, ClassroomRules(max_turns=7))
    talk_to_the_end(conversation)
    spoken = [turn.persona for turn in conversation.turns if turn.role == "student"]
    assert spoken == ([] if kind is GUIDED else [None]) + ["persona 0", "persona 1", "persona 2"]


def test_the_opening_attempt_asks_for_no_persona():
    conversation = new_conversation(ATTEMPTED)
    conversation.start()
    with pytest.raises(InvalidTransition, match="opening attempt"):
        _ = conversation.next_persona


def test_the_judge_sees_roles_and_visible_text():
    conversation = new_conversation(rules=ClassroomRules(max_turns=3))
    conversation.start()
    teacher_says(conversation, "<think>He is wrong.</think>Are you sure?")
    student_says(conversation, "No.")
    assert conversation.transcript() == [
        {"role": "teacher", "content": "Are you sure?"},
        {"role": "student", "content": "No."},
    ]


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("Hello.", "Hello."),
        ("<think>secret</think>Hello.", "Hello."),
        ("Hel<think>secret</think>lo.", "Hello."),
        ("<think>a</think>Hel<think>b</think>lo.", "Hello."),
        ("Hello. <think>secret", "Hello."),
        ("<think>secret", ""),
        ("secret</think>Hello.", "Hello."),
        ("secret</think>Hello. <think>secret", "Hello."),
        ("<think>secret</think>secret</think>Hello.", "Hello."),
        ("<think>secret<think>secret</think>secret</think>Hello.", "Hello."),
        ("<think>\nsecret\n</think>\n\nHello.", "Hello."),
        ("<thi<think>x</think>nk>secret", ""),
    ],
)
def test_thoughts_are_hidden(text, heard):
    assert visible_text(text) == heard


PIECES = st.lists(st.tuples(st.booleans(), st.text(alphabet="ab \n", max_size=4)))


@given(pieces=PIECES, opened_in_prompt=st.none() | st.text("xy"), left_open=st.none() | st.text("xy"))
def test_what_is_said_is_heard_and_what_is_thought_is_not(pieces, opened_in_prompt, left_open):
    text = "".join(f"<think>{words}</think>" if is_thought else words for is_thought, words in pieces)
    said = "".join(words for is_thought, words in pieces if not is_thought)
    before = "" if opened_in_prompt is None else f"{opened_in_prompt}</think>"
    after = "" if left_open is None else f"<think>{left_open}"
    assert visible_text(before + text + after) == said.strip()


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "x"])))
def test_no_tag_is_ever_heard(pieces):
    heard = visible_text("".join(pieces))
    assert "<think>" not in heard
    assert "</think>" not in heard
