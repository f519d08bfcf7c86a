"""The rewards: pure functions of a finished conversation. `REWARDS` score the whole conversation, `TURN_REWARDS` each
message of the teacher.

A function of `REWARDS` returns one number, or None for a conversation that should have been judged and was not. Such a
conversation gets None from all of them and does not count in its group's mean. To change a reward, change its function.
The server offers those of `REWARDS` at `POST /get_{name}_reward`.

Formulas: Dinucu-Jianu et al., "From Problem-Solving to Teaching Problem-Solving", EMNLP 2025, and docs/classroom.md.

A function of `TURN_REWARDS` returns one number for every message that the teacher sampled, in order, or None for a
message that it cannot score. trainer/advantages.py and docs/supervision.md say how a message's tokens are credited.

A reward of one's own is such a function in any module, named as `package.module:function` in `train.reward_weights` or
`train.turn_credit.rewards`; `reward_of` and `turn_reward_of` find both kinds by name.
"""

from collections.abc import Callable, Iterable
from functools import cache, wraps
from statistics import fmean

from classroom_rl.config.values import END_OF_CONVERSATION, LEVEL_REWARD, STUDENT_REWARD, SUPERVISOR_REWARD
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.student_reward import fidelity
from classroom_rl.judges.difficulty import level_scores
from classroom_rl.judges.post_test.records import GIVEN
from classroom_rl.rollout.own_rewards import own_reward, own_turn_reward
from classroom_rl.rollout.text import UNSPACED, normal
from classroom_rl.rollout.thoughts import thoughts_in, visible_text

Reward = Callable[[Conversation], float | None]
LEAST_OF_A_THOUGHT = 5
"""The fewest words of a thought that earns a reward. A shorter one plans no message."""


def none_without_verdict(reward: Reward) -> Reward:
    """Decorate a reward: a conversation that the judge could not judge has None in its place, and trains nothing."""

    @wraps(reward)
    def checked(conversation: Conversation) -> float | None:
        return None if conversation.lacks_verdict else reward(conversation)

    return checked


@none_without_verdict
def pedagogical(conversation: Conversation) -> float:
    """The weighted sum of the judge's three scores, minus a penalty if the conversation was rejected; in [0, 1].

    With `generation.post_test.caps_pedagogical` it is at most the share of items that the teacher did not give away.
    For a rejected conversation (below the low-score threshold), soft mode subtracts λ and clips at 0, and hard mode
    gives 0. If the judge refused to judge the content, the reward is 0 in both modes.

    Raises:
        ValueError: if no rule that scores judged the conversation.
    """
    judgement = conversation.judgement
    if judgement is not None and judgement.refusing_rules:
        return 0.0
    if judgement is None or judgement.scores is None:
        raise ValueError(f"{conversation.id}: the pedagogical reward needs a judge rule that scores")
    reward = min(judgement.scores.final_reward, _share_not_given(conversation))
    if not conversation.rejected:
        return reward
    if not conversation.rules.ignore_rejected_judge:
        return 0.0
    # Rounding removes the floating-point error of the subtraction.
    return max(0.0, round(reward - conversation.rules.extra_penalty_for_rejected_judges, 4))


def _share_not_given(conversation: Conversation) -> float:
    """The most that the ledger lets a form earn; 1 where it sets no cap, or for a conversation without a post-test."""
    test = conversation.post_test
    if not conversation.rules.ledger_caps_pedagogical or test is None:
        return 1.0
    return 1.0 - fmean(entry.outcome == GIVEN for entry in test.ledger)


@none_without_verdict
def end_rm(conversation: Conversation) -> float:
    """The mean grade of the student's solutions after the dialogue. A rejection subtracts λ (soft mode) or gives −λ
    (hard mode).

    Raises:
        ValueError: if the conversation has no graded solutions.
    """
    penalty = conversation.rules.extra_penalty_for_rejected_judges if conversation.rejected else 0.0
    if _rejected_in_hard_mode(conversation):
        return -penalty
    grades = [solution.grade for solution in conversation.solutions]
    if not grades or None in grades:
        raise ValueError(f"{conversation.id}: the end_rm reward needs graded solutions; it has {grades}")
    return fmean(grades) - penalty


@none_without_verdict
def thinking(conversation: Conversation) -> float:
    """0.5 × the share of teacher messages with a new closed thought of at least `LEAST_OF_A_THOUGHT` words, minus 0.5
    for each message with unbalanced tags.

    Thoughts are rewarded only if the teacher is told to think (`generation.use_thinking`); the penalty always applies.
    A rejection in hard mode gives 0.
    """
    turns = conversation.teacher_turns
    if _rejected_in_hard_mode(conversation) or not turns:
        return 0.0
    balanced = [turn.text.count("<think>") == turn.text.count("</think>") for turn in turns]
    thoughts = _new_thoughts(turn.text for is_balanced, turn in zip(balanced, turns, strict=True) if is_balanced)
    bonus = 0.5 * thoughts / len(turns) if conversation.rules.use_thinking else 0.0
    return bonus - 0.5 * balanced.count(False)


def _new_thoughts(texts: Iterable[str]) -> int:
    """The number of texts with a long enough closed thought that occurs in no earlier text."""
    seen: set[str] = set()
    count = 0
    for text in texts:
        thoughts = {normal(thought) for thought in thoughts_in(text) if _words(thought) >= LEAST_OF_A_THOUGHT}
        count += not thoughts <= seen  # a repeated thought earns nothing
        seen |= thoughts
    return count


def _words(thought: str) -> int:
    """The number of words in a text; for a script without spaces between words, the number of letters."""
    return sum(len(word) if UNSPACED.search(word) else 1 for word in normal(thought).split())


@none_without_verdict
def end_of_conversation(conversation: Conversation) -> float:
    """0.1 if a teacher message contains `<end_of_conversation>` outside its thoughts, otherwise 0."""
    if _rejected_in_hard_mode(conversation):
        return 0.0
    says_goodbye = any(END_OF_CONVERSATION in visible_text(turn.text) for turn in conversation.teacher_turns)
    return 0.1 if says_goodbye else 0.0


@none_without_verdict
def length(conversation: Conversation) -> float:
    """−0.5 if any teacher message reaches `max_tokens_per_turn` − 1 tokens, otherwise 0."""
    longest = max((turn.tokens for turn in conversation.teacher_turns), default=0)
    return -0.5 if longest >= conversation.rules.max_tokens_per_turn - 1 else 0.0


@none_without_verdict
def post_test(conversation: Conversation) -> float:
    """The share of the post-test's questions that the student answers right, in [0, 1]; 0 if rejected in hard mode.
    `generation.post_test.scored_by` says whose answers count.

    Raises:
        ValueError: if the conversation has no post-test.
    """
    if _rejected_in_hard_mode(conversation):
        return 0.0
    test = conversation.post_test
    score = None if test is None else test.score(conversation.rules.post_test)
    if score is None:
        raise ValueError(f"{conversation.id}: the post_test reward needs a post-test, and there is none")
    return score


@none_without_verdict
def student(conversation: Conversation) -> float | None:
    """The share of the student's messages that are those of the learner that it plays, for a student under training
    (`student_reward.py`); None for a conversation without such messages."""
    return fidelity(conversation.problem.text, conversation.turns)


def _rejected_in_hard_mode(conversation: Conversation) -> bool:
    return conversation.rejected and not conversation.rules.ignore_rejected_judge


REWARDS: dict[str, Reward] = {
    "end_rm": end_rm,
    "thinking": thinking,
    "end_of_conversation": end_of_conversation,
    "length": length,
    "pedagogical": pedagogical,
    "post_test": post_test,
    STUDENT_REWARD: student,
}


TurnReward = Callable[[Conversation], list[float | None]]


def supervisor(conversation: Conversation) -> list[float | None]:
    """The supervisor's penalty for each message: 0 for a valid one, negative for an invalid one."""
    return [turn.review.penalty if turn.review is not None else None for turn in conversation.teacher_turns]


def judge(conversation: Conversation) -> list[float | None]:
    """The judge's score of each message in [0, 1], averaged over the attempts that gave one. The embedded judges
    score single messages; a judge model may do so with `response_format: text`."""
    verdicts = [verdict for verdict in conversation.verdicts if not verdict.anchor]
    attempts = [verdict.turn_scores for verdict in verdicts if verdict.turn_scores is not None]
    # A judge sees and scores all teacher messages. One from the prompt template was not sampled and gets no reward.
    teacher_turns = [turn for turn in conversation.turns if turn.role == "teacher"]
    sampled_indices = [index for index, turn in enumerate(teacher_turns) if not turn.given]
    # An attempt may have scored fewer messages than there are.
    scores_by_turn = [[scores[index] for scores in attempts if index < len(scores)] for index in sampled_indices]
    scores_by_turn = [[score for score in scores if score is not None] for scores in scores_by_turn]
    return [fmean(scores) if scores else None for scores in scores_by_turn]


def turn_length(conversation: Conversation) -> list[float | None]:
    """−0.5 for a message that reaches `max_tokens_per_turn` − 1 tokens, otherwise 0."""
    limit = conversation.rules.max_tokens_per_turn - 1
    return [-0.5 if turn.tokens >= limit else 0.0 for turn in conversation.teacher_turns]


def level(conversation: Conversation) -> list[float | None]:
    """How well each message stays at the lesson's CEFR level, in [0, 1]: `level_scores` of judges/difficulty.py, by the
    word list in `generation.level`. At most the judge's score of the message, where it has one: easy words alone are no
    teaching.

    Raises:
        ConfigError: as `lesson_level`; `Classroom.check_problems` finds out before a training.
    """
    scores = level_scores(conversation.problem.text, conversation.turns, conversation.rules.level)
    score_pairs = zip(scores, judge(conversation), strict=True)
    return [
        level_score if None in (level_score, judge_score) else min(level_score, judge_score)
        for level_score, judge_score in score_pairs
    ]


TURN_REWARDS: dict[str, TurnReward] = {
    SUPERVISOR_REWARD: supervisor,
    "judge": judge,
    "length": turn_length,
    LEVEL_REWARD: level,
}


# By name -------------------------------------------------------------------------------------------------------------


@cache
def reward_of(name: str) -> Reward:
    """The reward of this name: one of `REWARDS`, or a function of one's own.

    Raises as `own_reward` does.
    """
    if name in REWARDS:
        return REWARDS[name]
    return none_without_verdict(own_reward(name, REWARDS))


@cache
def turn_reward_of(name: str) -> TurnReward:
    """The turn reward of this name: one of `TURN_REWARDS`, or a function of one's own.

    Raises as `own_turn_reward` does.
    """
    if name in TURN_REWARDS:
        return TURN_REWARDS[name]
    return own_turn_reward(name, lambda conversation: len(conversation.teacher_turns), TURN_REWARDS)
