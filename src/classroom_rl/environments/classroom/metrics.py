"""Metrics of a batch of conversations, for the training's log."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import correlation, fmean, stdev

from classroom_rl.config.values import LEVEL_REWARD, POST_TEST_STUDENTS
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.post_test.records import GIVEN, PostTest
from classroom_rl.judges.verdicts import Verdict, contradictions
from classroom_rl.rollout.tools.turn import tool_metrics


def batch_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Means over the conversations of a batch: messages, rejections, refusals, the judge's scores by criterion, the
    share that an embedded judge cannot read, the consistency of a group judge, the post-test, the level, and
    tool calls."""
    metrics = {
        "conversation/messages": fmean(len(record.turns) for record in records),
        "conversation/rejected_share": fmean(record.rejected for record in records),
        "judge/refused_share": fmean(record.refused for record in records),
    }
    scores = [verdict.scores for record in records for verdict in scoring_verdicts(record)]
    if scores:
        metrics |= {
            f"judge/{name}": fmean(verdict_scores.values[name] for verdict_scores in scores)
            for name in scores[0].values
        }
    if counts := [count for count in map(beyond_rules, records) if count is not None]:
        metrics["judge/beyond_rules_share"] = fmean(count > 0 for count in counts)
    metrics |= group_metrics(records) | post_test_metrics(records) | level_metrics(records)
    return metrics | tool_metrics(records)


def level_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """How the turn reward `level` changes over a conversation; empty where it is not recorded.

    `level/first_half` and `level/second_half` are its means over the messages of each half; the middle one of an odd
    number counts in neither. A message that could not be measured is left out.
    """
    scores_by_record = [
        [score for score in record.turn_rewards.get(LEVEL_REWARD, ()) if score is not None] for record in records
    ]
    halves = [
        (scores[: len(scores) // 2], scores[-(len(scores) // 2) :]) for scores in scores_by_record if len(scores) > 1
    ]
    if not halves:
        return {}
    first_half, second_half = (fmean(score for half in side for score in half) for side in zip(*halves, strict=True))
    return {"level/first_half": first_half, "level/second_half": second_half}


def beyond_rules(record: ConversationRecord) -> int | None:
    """The number of the teacher's messages that no rule of the embedded judge can read; None for other judges."""
    counts = [verdict.beyond_rules for verdict in scoring_verdicts(record) if verdict.beyond_rules is not None]
    return max(counts, default=None)


def scoring_verdicts(record: ConversationRecord) -> list[Verdict]:
    """The verdicts whose scores count in a conversation's reward: those with scores, anchors left out."""
    return [verdict for verdict in record.verdicts if verdict.scores is not None and not verdict.anchor]


def group_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """How consistent a judge of groups is with its own verdicts on single conversations; empty if conversations are
    judged one by one.

    An anchor is a verdict on a single conversation of a group, used only for this comparison.

    - `judge/group_share`: the share of conversations whose group got a verdict.
    - `judge/anchors`: the number of anchors with scores.
    - `judge/anchor_gap`: the mean difference between a conversation's score in its group and its anchor's score.
    - `judge/anchor_error`: the standard deviation of that difference.
    - `judge/anchor_correlation`: the Pearson correlation of the two scores.
    - `judge/contradictions`: among pairs of conversations with different scores, the share that the judge ranked in
      the opposite order.
    """
    groups: dict[tuple[str, str, str, int], list[Verdict]] = defaultdict(list)
    for record in records:
        for verdict in scoring_verdicts(record):
            if verdict.rank is not None:
                groups[record.request_id, record.problem_id, verdict.rule, verdict.attempt].append(verdict)
    if all(verdict.group_size is None for record in records for verdict in record.verdicts):
        return {}
    shares = [share for share in map(contradictions, groups.values()) if share is not None]
    pairs = [pair for record in records for pair in _anchor_pairs(record)]
    gaps = [group_score - anchor_score for group_score, anchor_score in pairs]
    has_group_verdict = [any(verdict.rank is not None for verdict in record.verdicts) for record in records]
    metrics = {"judge/group_share": fmean(has_group_verdict), "judge/anchors": float(len(pairs))}
    if shares:
        metrics["judge/contradictions"] = fmean(shares)
    if len(pairs) > 1:  # a standard deviation and a correlation need two values
        metrics |= {"judge/anchor_gap": fmean(gaps), "judge/anchor_error": stdev(gaps)}
        # A correlation is undefined if one of the two series is constant.
        if all(len(set(values)) > 1 for values in zip(*pairs, strict=True)):
            metrics["judge/anchor_correlation"] = correlation(*zip(*pairs, strict=True))
    return metrics


def _anchor_pairs(record: ConversationRecord) -> Iterator[tuple[float, float]]:
    """Yields two scores for each anchor: the conversation's mean score in its group by the same rule, and its own."""
    for anchor in record.verdicts:
        group_verdicts = [
            verdict for verdict in scoring_verdicts(record) if verdict.rule == anchor.rule and verdict.rank is not None
        ]
        if anchor.anchor and anchor.scores is not None and group_verdicts:
            yield fmean(verdict.scores.final_reward for verdict in group_verdicts), anchor.scores.final_reward


def post_test_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Means over the conversations with a post-test; empty without any.

    - `post_test/ledger`: the share of right answers of the simulated student, which answers from the ledger.
    - `post_test/student`: the share of right answers of the student's model.
    - `post_test/knew`: the share of items that the student knew before the lesson, as far as the program can tell.
    - `post_test/given`: the share of items that the teacher gave away.
    - `post_test/learned`: among items that the student did not know before, the share that the ledger has evidence for.
    """
    shares = [post_test_shares(record.post_test) for record in records if record.post_test is not None]
    names = dict.fromkeys(name for test_shares in shares for name in test_shares)
    return {
        f"post_test/{name}": fmean(test_shares[name] for test_shares in shares if name in test_shares) for name in names
    }


def post_test_shares(test: PostTest) -> dict[str, float]:
    """The shares of one post-test, named as in `post_test_metrics`. A share of zero items is left out."""
    scores = {student: test.score(student) for student in POST_TEST_STUDENTS}
    unknown = [entry for entry in test.ledger if entry.knew is False]
    shares = {
        "knew": fmean(entry.knew is True for entry in test.ledger),
        "given": fmean(entry.outcome == GIVEN for entry in test.ledger),
    }
    learned = {"learned": fmean(entry.known for entry in unknown)} if unknown else {}
    return {name: score for name, score in scores.items() if score is not None} | shares | learned
