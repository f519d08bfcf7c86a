"""The rewards: pure functions of a finished conversation. Those of `REWARDS` give the whole conversation a number,
those of `TURN_REWARDS` each message of the teacher.

Each returns a number, or None for a conversation that should have been judged and was not. Such a conversation gets
None from all of them and does not count in its group's mean. To change a reward, change its function; to add one, add
it to `REWARDS`, and the server offers it at `POST /get_{name}_reward`.

Formulas: Dinucu-Jianu et al., "From Problem-Solving to Teaching Problem-Solving", EMNLP 2025, and docs/classroom.md.

Each returns one number for every teacher message, in order, or None for a message that it cannot score. To add one,
write a function and name it in `TURN_REWARDS`; `train.turn_credit.rewards` gives it a weight. How a message's tokens
are credited with it: trainer/turn_advantages.py and docs/supervision.md.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from statistics import fmean

from classroom_rl.config.values import END_OF_CONVERSATION, SUPERVISOR_REWARD
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.rollout.text import UNSPACED, normal
from classroom_rl.rollout.thoughts import thoughts_in, visible_text

Reward = Callable[[Conversation], float | None]
LEAST_OF_A_THOUGHT = 5
"""Words. A shorter thought earns no reward, because it plans no message."""


def _none_without_verdict(reward: Callable[[Conversation], float]) -> Reward:
    @wraps(reward)
    def checked(conversation: Conversation) -> float | None:
        return None if conversation.lacks_verdict else reward(conversation)

    return checked


@_none_without_verdict
def pedagogical(conversation: Conversation) -> float:
    """The weighted sum of the judge's three scores, minus a penalty if the conversation was rejected; in [0, 1].

    For a rejected conversation (below the low-score threshold), soft mode subtracts λ, but not below 0, and hard mode
    gives 0. If the judge refused the content, the reward is 0 in both modes.

    Raises:
        ValueError: if no rule that scores judged the conversation.
    """
    judgement = conversation.judgement
    if judgement is not None and judgement.refusing_rules:
        return 0.0
    if judgement is None or judgement.scores is None:
        raise ValueError(f"{conversation.id}: the pedagogical reward needs a judge rule that scores")
    reward = judgement.scores.final_reward
    if not conversation.rejected:
        return reward
    if not conversation.rules.ignore_rejected_judge:
        return 0.0
    return max(0.0, round(reward - conversation.rules.extra_penalty_for_rejected_judges, 4))


@_none_without_verdict
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


@_none_without_verdict
def thinking(conversation: Conversation) -> float:
    """0.5 × the share of teacher messages with a new closed thought of at least `LEAST_OF_A_THOUGHT` words, minus 0.5
    for each message with unbalanced tags. Thoughts earn something only if the teacher is told to think
    (`generation.use_thinking`); the penalty always applies."""
    turns = conversation.teacher_turns
    if _rejected_in_hard_mode(conversation) or not turns:
        return 0.0
    balanced = [turn.text.count("<think>") == turn.text.count("</think>") for turn in turns]
    thoughts = _new_thoughts(turn.text for fits, turn in zip(balanced, turns, strict=True) if fits)
    paid = 0.5 * thoughts / len(turns) if conversation.rules.use_thinking else 0.0
    return paid - 0.5 * balanced.count(False)


def _new_thoughts(texts: Iterable[str]) -> int:
    """The number of texts with a closed thought that is long enough and in no earlier text."""
    seen: set[str] = set()
    count = 0
    for text in texts:
        found = {normal(thought) for thought in thoughts_in(text) if _words(thought) >= LEAST_OF_A_THOUGHT}
        count += not found <= seen
        seen |= found
    return count


def _words(thought: str) -> int:
    """The number of words in a text; in a script without spaces between words, the number of letters."""
    return sum(len(each) if UNSPACED.search(each) else 1 for each in normal(thought).split())


@_none_without_verdict
def end_of_conversation(conversation: Conversation) -> float:
    """0.1 if a teacher message holds `<end_of_conversation>`, otherwise 0."""
    if _rejected_in_hard_mode(conversation):
        return 0.0
    said = any(END_OF_CONVERSATION in visible_text(turn.text) for turn in conversation.teacher_turns)
    return 0.1 if said else 0.0


@_none_without_verdict
def length(conversation: Conversation) -> float:
    """−0.5 if any teacher message reaches `max_tokens_per_turn` − 1 tokens, otherwise 0."""
    longest = max((turn.tokens for turn in conversation.teacher_turns), default=0)
    return -0.5 if longest >= conversation.rules.max_tokens_per_turn - 1 else 0.0


@_none_without_verdict
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


def _rejected_in_hard_mode(conversation: Conversation) -> bool:
    return conversation.rejected and not conversation.rules.ignore_rejected_judge


REWARDS: dict[str, Reward] = {
    "end_rm": end_rm,
    "thinking": thinking,
    "end_of_conversation": end_of_conversation,
    "length": length,
    "pedagogical": pedagogical,
    "post_test": post_test,
}


TurnReward = Callable[[Conversation], list[float | None]]


def supervisor(conversation: Conversation) -> list[float | None]:
    """The supervisor's penalty of each message: 0 for a valid one, below 0 for an invalid one."""
    return [turn.review.penalty if turn.review is not None else None for turn in conversation.teacher_turns]


def judge(conversation: Conversation) -> list[float | None]:
    """The judge's findings on each message in [0, 1], averaged over the attempts that gave some. The embedded rubric
    gives them; a judge model need not. A judge also scores a message from the prompt template, which does not count."""
    counted = [verdict for verdict in conversation.verdicts if not verdict.anchor]
    found = [verdict.turn_scores for verdict in counted if verdict.turn_scores is not None]
    heard = [turn for turn in conversation.turns if turn.role == "teacher"]
    places = [place for place, turn in enumerate(heard) if not turn.given]
    known = [[scores[place] for scores in found if place < len(scores)] for place in places]
    known = [[value for value in values if value is not None] for values in known]
    return [fmean(values) if values else None for values in known]


def turn_length(conversation: Conversation) -> list[float | None]:
    """−0.5 for a message that reaches `max_tokens_per_turn` − 1 tokens, otherwise 0."""
    most = conversation.rules.max_tokens_per_turn - 1
    return [-0.5 if turn.tokens >= most else 0.0 for turn in conversation.teacher_turns]


TURN_REWARDS: dict[str, TurnReward] = {SUPERVISOR_REWARD: supervisor, "judge": judge, "length": turn_length}
