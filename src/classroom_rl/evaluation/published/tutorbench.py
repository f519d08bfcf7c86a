"""TutorBench: the tutor answers a student, and judges judge its reply by the criteria that experts wrote for that row.

Srinivasa et al., "TutorBench: A Benchmark To Assess Tutoring Capabilities Of Large Language Models", 2025
(ScaleAI/TutorBench on the Hub). Rows with an image are counted and left out: the tutor is asked in text.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from classroom_rl.config.benchmark import JUDGE, TUTOR, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.rubric import weighted_score
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, checked, draw, read_rows, write_rows
from classroom_rl.evaluation.published.labellers import ask_judge
from classroom_rl.evaluation.published.tutor import open_tutor
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.prompts import render

USE_CASES = {"USE_CASE_1": "adaptive_explanation", "USE_CASE_2": "assessment", "USE_CASE_3": "active_learning"}
WEIGHTS = {"critical": 5.0, "not_critical": 1.0, "critical_negative": -5.0}
"""The paper's weights, by a criterion's severity. The published rows have severities in place of weights."""
YES, NO = "yes", "no"
WITH_IMAGE, WITHOUT_WEIGHT = "with an image", "without a positive weight"
REPLIES_NAME = "replies.jsonl"


class _Attributes(PublishedRow):
    severity: str


class _Criterion(PublishedRow):
    criteria: str
    weight: FiniteFloat | None = None
    attributes: _Attributes | None = None


class _Row(PublishedRow):
    TASK_ID: str
    BATCH: str
    PROMPT: str
    RUBRICS: str | list[Any]
    UC1_INITIAL_EXPLANATION: str | None = None
    FOLLOW_UP_PROMPT: str | None = None
    IMAGE_URL: str | None = None
    Image: Any = None


@dataclass(frozen=True)
class TutoringRow:
    """A student's question, and the criteria for the tutor's reply.

    Attributes:
        use_case: one of the values of `USE_CASES`.
        explanation: what the tutor has explained already; "" except in adaptive explanation.
        follow_up: the student's next question, or its work on the problem.
        weights: of the criteria; at least one is positive.
    """

    id: str
    use_case: str
    prompt: str
    explanation: str
    follow_up: str
    criteria: tuple[str, ...]
    weights: tuple[float, ...]

    @property
    def choices(self) -> dict[str, tuple[str, str]]:
        """What the judge answers about each criterion."""
        return {f"criterion_{number}": (YES, NO) for number in range(1, len(self.criteria) + 1)}

    def score(self, answer: dict[str, str]) -> float:
        """`weighted_score` of a judge's answer, at most 1. It can be negative if a weight is."""
        met = (float(answer[key] == YES) for key in self.choices)
        return weighted_score(zip(met, self.weights, strict=True))

    @property
    def lowest(self) -> float:
        """The lowest possible score: nothing is met but what is penalised."""
        return weighted_score((float(weight < 0), weight) for weight in self.weights)


def read_tutorbench(name: str, split: str) -> tuple[list[TutoringRow], Counter[str]]:
    """Read the rows without an image, and count the others by the reason why they are left out. Raises `DataError`,
    naming file, row and field, if it cannot be read or no row is left."""
    rows: list[TutoringRow] = []
    left_out: Counter[str] = Counter()
    for where, row in read_rows(name, split, _Row):
        if row.Image or row.IMAGE_URL or row.BATCH.endswith("MULTIMODAL"):
            left_out[WITH_IMAGE] += 1
            continue
        use_case = USE_CASES.get(row.BATCH[: len("USE_CASE_1")])
        if use_case is None:
            raise DataError(f"{where}: BATCH is {row.BATCH!r}; it begins with one of {', '.join(USE_CASES)}.")
        criteria = _criteria(where, row.RUBRICS)
        weights = tuple(_weight(where, criterion) for criterion in criteria)
        if not any(weight > 0 for weight in weights):
            left_out[WITHOUT_WEIGHT] += 1
            continue
        texts = (row.PROMPT, row.UC1_INITIAL_EXPLANATION or "", row.FOLLOW_UP_PROMPT or "")
        criteria_texts = tuple(criterion.criteria for criterion in criteria)
        rows.append(TutoringRow(row.TASK_ID, use_case, *texts, criteria_texts, weights))
    if not rows:
        raise DataError(f"{name} holds no row without an image and with criteria (left out: {dict(left_out)}).")
    return rows, left_out


def _criteria(where: str, rubrics: str | list[Any]) -> list[_Criterion]:
    try:
        entries = json.loads(rubrics) if isinstance(rubrics, str) else rubrics
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: RUBRICS is not JSON: {error}.") from error
    if not isinstance(entries, list):
        raise DataError(f"{where}: RUBRICS is no list of criteria.")
    return [checked(_Criterion, f"{where}, RUBRICS {number}", entry) for number, entry in enumerate(entries, start=1)]


def _weight(where: str, criterion: _Criterion) -> float:
    if criterion.weight is not None:
        return criterion.weight
    severity = "" if criterion.attributes is None else criterion.attributes.severity.strip().lower()
    if severity not in WEIGHTS:
        raise DataError(
            f"{where}: a criterion has no weight and the severity {severity!r}; there are {', '.join(WEIGHTS)}."
        )
    return WEIGHTS[severity]


async def judge_replies(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Have the tutor reply to each row, and each judge judge the replies by the row's criteria, one request a reply. A
    row without a reply meets no criterion. The replies and the judges' answers are written to `replies.jsonl`."""
    all_rows, left_out = read_tutorbench(benchmark.path, benchmark.split)
    rows = draw(all_rows, lambda row: row.id, benchmark.max_dialogues, config.seed)
    async with open_tutor(config, folder) as tutor:
        prompts = [render(benchmark.prompts_paths[TUTOR], **_variables(row)) for row in rows]
        replies = await tutor.answer(prompts, "answering students")
        about = tutor.about()
    pairs = [(row, text) for row, text in zip(rows, replies.texts, strict=True) if text is not None]
    replied = [row for row, _ in pairs]
    silent = [row for row, text in zip(rows, replies.texts, strict=True) if text is None]
    unmet = [dict.fromkeys(row.choices, NO) for row in silent]
    prompts = [render(benchmark.prompts_paths[JUDGE], reply=text, **_variables(row)) for row, text in pairs]
    max_tokens, judges, lines = config.generation.max_tokens_per_judge_attempt, {}, []
    for judge in config.judges:
        choices = [row.choices for row in replied]
        answers = await ask_judge(judge, prompts, choices, max_tokens, folder / "judges")
        scores = score_replies([*replied, *silent], [*answers.by_prompt, *unmet])
        judges[judge.model_name_or_path] = answers.about() | {"scores": scores}
        lines += [
            {"judge": judge.model_name_or_path, "answer": answer, "score": answer and row.score(answer), "reply": text}
            | asdict(row)
            for (row, text), answer in zip(pairs, answers.by_prompt, strict=True)
        ]
    write_rows(folder / REPLIES_NAME, lines)
    return about | {
        "rows": len(rows),
        "left_out": dict(left_out),
        "answered": len(pairs),
        "failures": dict(replies.failures),
        "cut": replies.cut,
        "judges": judges,
    }


def score_replies(rows: Sequence[TutoringRow], answers: Sequence[dict[str, str] | None]) -> dict[str, Any]:
    """The mean weighted `score` over rows, and the share of criteria with a positive weight that are `met`, of all
    replies that the judge judged (`all`) and by use case, each with an interval over rows."""
    groups: dict[str, list[tuple[TutoringRow, dict[str, str]]]] = {name: [] for name in ("all", *USE_CASES.values())}
    for row, answer in zip(rows, answers, strict=True):
        if answer is not None:
            groups["all"].append((row, answer))
            groups[row.use_case].append((row, answer))
    return {name: _figures(group) for name, group in groups.items() if group or name == "all"}


def _figures(judged: Sequence[tuple[TutoringRow, dict[str, str]]]) -> dict[str, Any]:
    lowest = min((row.lowest for row, _ in judged), default=0.0)
    met = [
        [float(answer[key] == YES) for key, weight in zip(row.choices, row.weights, strict=True) if weight > 0]
        for row, answer in judged
    ]
    scores = {str(number): [row.score(answer)] for number, (row, answer) in enumerate(judged)}
    return {
        "score": mean_with_ci(scores, (lowest, 1.0)),
        "met": mean_with_ci({str(number): values for number, values in enumerate(met)}),
    }


def _variables(row: TutoringRow) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in ("use_case", "prompt", "explanation", "follow_up")}
    return fields | {"criteria": list(row.criteria)}
