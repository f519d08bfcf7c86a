"""Summarises the effect of supervision on a training. The figures are printed at its end and written to
`supervision.json`.

The first batches are compared with the last ones. If the rollout files have the values, the intervals are bootstrapped
over lessons, each with all its conversations; otherwise over steps. Intervals over steps only show how much the means
of the batches vary.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Optional

import pyarrow.parquet as pq
from pydantic import TypeAdapter

from classroom_rl.config.values import PASS
from classroom_rl.results.panels import PASS_EXAMPLES, is_supervised, passes_of
from classroom_rl.results.rollout_files import files_by_step
from classroom_rl.results.run_folder import RunData, is_number, load_run, look_up
from classroom_rl.rollout.intervals import Estimate, mean_with_ci
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.system.storage import write_whole

REVIEW_COLUMNS = (
    "step",
    "conversation",
    "turn",
    "draft",
    "valid",
    "category",
    "penalty",
    "critique",
    "correction",
    "heard",
)
"""The columns of `review_rows`: the message as the policy wrote it (`draft`), its review, and the message that entered
the conversation in the end (`heard`). Without a verdict, `valid` and `penalty` are null and `critique` says why there
is none. `turn` counts messages from 0."""

ReviewRow = tuple[int, str, int, str, bool | None, str, float | None, str, str | None, str]


def review_rows(records: Sequence[Trajectory]) -> list[ReviewRow]:
    """Make a row for each reviewed message, in order: first the rejected drafts of a turn, then the message itself. A
    message that the supervisor replaced has no row of its own, because its last draft is what was reviewed."""
    return [
        (
            record.step,
            record.id,
            index,
            text,
            review.valid,
            review.category,
            review.penalty,
            review.critique or (review.error or ""),
            review.correction,
            turn.text,
        )
        for record in records
        for index, turn in enumerate(record.turns)
        for text, review in reviewed_messages(turn)
    ]


def reviewed_messages(turn: Turn) -> Iterator[tuple[str, Review]]:
    """Yield the texts that the policy wrote for a turn and the supervisor reviewed, each with its review, in order."""
    yield from ((draft.text, draft.review) for draft in turn.drafts)
    if turn.review is not None and not turn.replaced:
        yield turn.text, turn.review


SUPERVISION_NAME = "supervision.json"
LESSONS, STEPS = "lessons", "steps"
MOST_BATCHES = 10
_FIGURES = {
    "reward": ("reward", "Reward"),
    "valid": ("supervision/valid_share", "Valid messages"),
    "process_reward": ("supervision/process_reward", "Process reward"),
}
"""Each figure's metric and its name for people."""

ByLesson = dict[str, list[float]]
_TURNS = TypeAdapter(list[Turn])


@dataclass(frozen=True)
class FirstAndLast:
    """A figure in the first and in the last batches. `over` is the unit of the intervals: `lessons` or `steps`."""

    first: Estimate
    last: Estimate
    over: str


@dataclass(frozen=True)
class SupervisionSummary:
    """The effect of the supervision.

    Attributes:
        batches: the number of batches on each side; no batch is on both.
        figures: `reward`; `valid`, the share of valid messages among those with a verdict, rejected drafts included;
            `process_reward`, the mean of the supervisor's penalties over each conversation's messages. A figure
            that the run does not have is left out.
        passes: the number of passes over corrections.
        examples: how many corrections were trained on, counted once per epoch of a pass, or once with a batch.
        final_loss: the last cross-entropy on corrections, in nats per token; None if there was no such training.
    """

    batches: int
    figures: Mapping[str, FirstAndLast] = field(default_factory=dict)
    passes: int = 0
    examples: int = 0
    final_loss: Optional[float] = None


def summarise_supervision(data: RunData) -> Optional[SupervisionSummary]:
    """Summarise a run folder; None if the run had no supervisor."""
    if not is_supervised(data):
        return None
    in_passes = look_up(data.config, "train", "corrections", "mode") == PASS or bool(passes_of(data))
    count_metric, loss_metric = (
        (PASS_EXAMPLES, "corrections/pass_loss") if in_passes else ("corrections/rows", "corrections/ce_loss")
    )
    losses = [value for _, value in data.series(loss_metric)]
    passes = [value for _, value in data.series("corrections/passes")]  # a step logs the number before its own pass
    return SupervisionSummary(
        batches=_batches(len(data.series("reward"))),  # a step that trains on a batch again has no reward
        figures=_figures(data),
        passes=int(max([*passes, len(passes_of(data))])),
        examples=int(sum(value for _, value in data.series(count_metric))),
        final_loss=losses[-1] if losses else None,
    )


def _batches(steps: int) -> int:
    return min(MOST_BATCHES, steps // 2)


def _figures(data: RunData) -> dict[str, FirstAndLast]:
    files = files_by_step(data.folder)
    batches = _batches(len(files))
    sides = [_read_values(sum(side, [])) for side in (files[:batches], files[-batches:])] if batches else []
    figures = {}
    for name, (metric, _) in _FIGURES.items():
        by_lesson = [mean_with_ci(side.get(name, {})) for side in sides]
        by_step = _over_steps(data.series(metric))
        if by_lesson and all(sum(map(bool, side.get(name, {}).values())) > 1 for side in sides):
            figures[name] = FirstAndLast(*by_lesson, LESSONS)
        elif by_step:
            figures[name] = FirstAndLast(*by_step, STEPS)
    return figures


def _over_steps(points: Sequence[tuple[float, float]]) -> list[Estimate]:
    """Estimate the first and the last batches, with intervals over steps; [] with fewer than two steps."""
    batches = _batches(len(points))
    if batches == 0:
        return []
    sides = (points[:batches], points[-batches:])
    return [mean_with_ci({str(step): [value] for step, value in side}) for side in sides]


def _read_values(files: Sequence[Path]) -> dict[str, ByLesson]:
    """Return figure → lesson → values: of each conversation the reward and the mean of its messages' penalties, and for
    each message or draft with a verdict 1 or 0, whether it is valid."""
    by_figure: dict[str, ByLesson] = {name: {} for name in _FIGURES}
    for path in files:
        for row in pq.read_table(path, columns=["problem_id", "reward", "turns"]).to_pylist():
            turns = _TURNS.validate_json(row["turns"])
            verdicts = [review.valid for turn in turns for _, review in reviewed_messages(turn)]
            penalties = [turn.review.penalty for turn in turns if turn.review is not None]
            known_penalties = [penalty for penalty in penalties if penalty is not None]
            values_by_figure = {
                "reward": [row["reward"]] if is_number(row["reward"]) else [],
                "valid": [float(valid) for valid in verdicts if valid is not None],
                "process_reward": [fmean(known_penalties)] if known_penalties else [],
            }
            for name, values in values_by_figure.items():
                by_figure[name].setdefault(row["problem_id"], []).extend(values)
    return by_figure


def write_supervision(run_folder: Path) -> Optional[SupervisionSummary]:
    """Write `supervision.json` into a run folder and return its content; None, and no file, without a supervisor.
    Raises `DataError` if the run was not trained."""
    summary = summarise_supervision(load_run(Path(run_folder)))
    if summary is not None:
        text = json.dumps(asdict(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(Path(run_folder) / SUPERVISION_NAME, text)
    return summary


def describe_supervision(summary: SupervisionSummary) -> str:
    """Format the summary for the terminal."""
    batches = "batch" if summary.batches == 1 else f"{summary.batches} batches"
    lines = [f"What the supervisor saw, in the first and the last {batches}:"]
    for name, figure in summary.figures.items():
        texts = [_format_estimate(side, as_share=name == "valid") for side in (figure.first, figure.last)]
        lines.append(f"  {_FIGURES[name][1]}: {texts[0]} → {texts[1]}, intervals over {figure.over}.")
    passes = "1 pass" if summary.passes == 1 else f"{summary.passes} passes"
    loss = "" if summary.final_loss is None else f", the last cross-entropy {summary.final_loss:.3f} nats per token"
    lines.append(f"  Corrections: {passes}, {summary.examples:,} examples trained on{loss}.")
    return "\n".join(lines)


def _format_estimate(estimate: Estimate, as_share: bool) -> str:
    if estimate["mean"] is None:
        return "–"
    number = "{:.1%}".format if as_share else "{:.3f}".format
    low_high = estimate["ci95"]
    interval = f" [{number(low_high[0])}, {number(low_high[1])}]" if low_high else f" (n = {estimate['n']})"
    return f"{number(estimate['mean'])}{interval}".replace("-", "−")
