"""Metrics of a batch of conversations, for the training's log."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import correlation, fmean, stdev

from classroom_rl.config.values import POST_TEST_STUDENTS
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.verdicts import CRITERIA, Verdict, contradictions
from classroom_rl.rollout.post_test import GIVEN, PostTest
from classroom_rl.rollout.tools.tool import ERRORS


def batch_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Means over the conversations of a batch: messages, rejections, refusals, the judge's scores by criterion, what is
    known of a judge of groups, the post-test, and the calls of tools."""
    metrics = {
        "conversation/messages": fmean(len(record.turns) for record in records),
        "conversation/rejected_share": fmean(record.rejected for record in records),
        "judge/refused_share": fmean(record.refused for record in records),
    }
    scores = [verdict.scores for record in records for verdict in scoring_verdicts(record)]
    if scores:
        metrics |= {f"judge/{name}": fmean(getattr(each, name) for each in scores) for name in CRITERIA}
    return metrics | group_metrics(records) | post_test_metrics(records) | tool_metrics(records)


def scoring_verdicts(record: ConversationRecord) -> list[Verdict]:
    """The verdicts with scores that count in a conversation's reward."""
    return [verdict for verdict in record.verdicts if verdict.scores is not None and not verdict.anchor]


def group_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """How a judge of groups compares with itself in single calls; empty if conversations are judged one by one.

    `judge/group_share` is the share of conversations with a verdict on their group; the others' groups got none.
    `judge/anchor_gap` is the mean of a conversation's score in its group minus that of its anchor,
    `judge/anchor_error` the standard deviation of this difference, and `judge/anchor_correlation` the correlation of
    the two (Pearson). `judge/contradictions` is the share of pairs of conversations ranked one way and scored the
    other, of those with different scores.
    """
    groups: dict[tuple[str, str, str, int], list[Verdict]] = defaultdict(list)
    for record in records:
        for verdict in scoring_verdicts(record):
            if verdict.rank is not None:
                groups[record.request_id, record.problem_id, verdict.rule, verdict.attempt].append(verdict)
    if all(verdict.group_size is None for record in records for verdict in record.verdicts):
        return {}
    shares = [share for share in map(contradictions, groups.values()) if share is not None]
    pairs = [pair for record in records for pair in _anchored(record)]
    gaps = [in_group - alone for in_group, alone in pairs]
    together = [any(verdict.rank is not None for verdict in record.verdicts) for record in records]
    metrics = {"judge/group_share": fmean(together), "judge/anchors": float(len(pairs))}
    if shares:
        metrics["judge/contradictions"] = fmean(shares)
    if len(pairs) > 1:
        metrics |= {"judge/anchor_gap": fmean(gaps), "judge/anchor_error": stdev(gaps)}
        if all(len(set(values)) > 1 for values in zip(*pairs, strict=True)):
            metrics["judge/anchor_correlation"] = correlation(*zip(*pairs, strict=True))
    return metrics


def _anchored(record: ConversationRecord) -> Iterator[tuple[float, float]]:
    """For each anchor with a score: the conversation's mean score by the same rule in its group, and the anchor's."""
    for anchor in record.verdicts:
        in_group = [each for each in scoring_verdicts(record) if each.rule == anchor.rule and each.rank is not None]
        if anchor.anchor and anchor.scores is not None and in_group:
            yield fmean(each.scores.final_reward for each in in_group), anchor.scores.final_reward


def post_test_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Means over the conversations with a post-test; empty without any.

    `post_test/ledger` and `post_test/student` are the shares of right answers of the student that the program holds and
    of its model. Of the items: `post_test/knew` is the share that the student knew before the lesson, as far as the
    program can tell, `post_test/given` the share that the teacher gave away, and `post_test/learned`, of those that the
    student did not know before, the share with evidence.
    """
    shares = [post_test_shares(record.post_test) for record in records if record.post_test is not None]
    names = dict.fromkeys(name for found in shares for name in found)
    return {f"post_test/{name}": fmean(found[name] for found in shares if name in found) for name in names}


def post_test_shares(test: PostTest) -> dict[str, float]:
    """The figures of one post-test, as in `post_test_metrics`; a share without anything to count is left out."""
    scores = {student: test.score(student) for student in POST_TEST_STUDENTS}
    unknown = [entry for entry in test.ledger if entry.knew is False]
    shares = {
        "knew": fmean(entry.knew is True for entry in test.ledger),
        "given": fmean(entry.outcome == GIVEN for entry in test.ledger),
    }
    learned = {"learned": fmean(entry.known for entry in unknown)} if unknown else {}
    return {name: score for name, score in scores.items() if score is not None} | shares | learned


def tool_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Calls of tools per conversation, those in rejected drafts included, the share that failed, by kind of error, and
    the seconds of a call; empty for a batch without calls."""
    messages = [message for record in records for turn in record.turns for message in (turn, *turn.drafts)]
    calls = [call for message in messages for call in message.tool_calls]
    if not calls:
        return {}
    failed = Counter(call.error for call in calls if call.error is not None)
    return {
        "tools/calls_per_conversation": len(calls) / len(records),
        "tools/error_share": failed.total() / len(calls),
        **{f"tools/error_share/{kind}": failed[kind] / len(calls) for kind in ERRORS},
        "tools/seconds_per_call": fmean(call.seconds for call in calls),
    }
