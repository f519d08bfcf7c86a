"""Writes `report.html`, one self-contained page about a run: `python -m classroom_rl.evaluation.report RUN_FOLDER`.

The page contains its styles and plots and loads nothing. All text of conversations is escaped; special tokens and
control characters that a model wrote are shown as text.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

import jinja2
from markupsafe import Markup, escape

from classroom_rl.config.values import RULES, SAMPLINGS
from classroom_rl.environments.classroom.config import error_share
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.evaluation.report.examples import Pair, ShownConversation, choose_pairs, show
from classroom_rl.evaluation.report.level_chart import level_chart
from classroom_rl.evaluation.report.tables import (
    MEASURES,
    Cell,
    cell,
    compare_run,
    comparison_table,
    reading_lines_of_run,
    supervised_lines_of_run,
)
from classroom_rl.judges.verdicts import criterion_of, judged_criteria
from classroom_rl.results.charts import Drawing, Mark, Series, area_chart, line_chart, smooth
from classroom_rl.results.learning import describe_learning, learning_of, write_learning
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import STAGES, Measurement, RunData, is_number, load_run, look_up
from classroom_rl.results.step_time import time_of
from classroom_rl.results.supervision_summary import describe_supervision, summarise_supervision
from classroom_rl.rollout.extensions import MetricPanel, view_of
from classroom_rl.system.keys import print_error

MISMATCH = "sampling/sampling_logp_difference/mean"


def write_summary(run_folder: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Write `summary.json` into the run folder and return its content.

    Args:
        seconds: wall-clock seconds by stage (`sft`, `server_start`, `rollout`, `publish`, `train`, `eval`) and
            `total`. Missing stages of the training loop are summed from metrics.jsonl, a missing `eval` from the
            evaluations; other missing stages are null. A missing `total` is the sum of the known stages.

    Raises:
        DataError: if an evaluation is missing or the run was not trained.
    """
    data = load_run(Path(run_folder))
    missing = [f"eval/{name}" for name in ("before", "after") if name not in data.measurements]
    missing += [] if data.steps else ["metrics.jsonl"]
    if missing:
        raise DataError(f"{data.folder} has no {', '.join(missing)}: a summary tells of a run that was measured twice.")
    by_stage = _seconds_by_stage(data, seconds)
    rewards = data.series("reward")
    mismatch = [value for _, value in data.series(MISMATCH)]
    known_seconds = [value for value in by_stage.values() if value is not None]
    learning, _ = learning_of(data)
    summary = {
        "learning": {"verdict": learning.verdict, "reasons": list(learning.reasons)},
        "heldout": {name: _held_out(measurement) for name, measurement in data.measurements.items()},
        "training": {
            "steps": len(data.steps),
            "reward_first": rewards[0][1] if rewards else None,
            "reward_last": rewards[-1][1] if rewards else None,
            "seconds_total": seconds.get("total", round(sum(known_seconds), 3)),
            "seconds": by_stage,
        },
        "engine": data.measurements["after"].metrics["engine"],
        "mismatch": {"mean_abs_logprob_diff": fmean(mismatch) if mismatch else None},
    }
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    (data.folder / "summary.json").write_text(text, encoding="utf-8")
    return summary


def _held_out(measured: Measurement) -> dict[str, Any]:
    """The part of metrics.json that the summary repeats. Figures about turns are null if no rule can compute them."""
    names = ("reward", "error_turns", "clean_turns")
    return {sampling: {name: measured.metrics[sampling].get(name) for name in names} for sampling in measured.samplings}


def _seconds_by_stage(data: RunData, seconds: Mapping[str, float]) -> dict[str, Optional[float]]:
    evaluation_seconds = sum(measurement.metrics.get("seconds", 0.0) for measurement in data.measurements.values())
    known_seconds = {**data.step_seconds(), "eval": evaluation_seconds, **seconds}
    return {stage: None if known_seconds.get(stage) is None else round(known_seconds[stage], 3) for stage in STAGES}


SAMPLING_NAMES = {name: name.capitalize() for name in SAMPLINGS}
_SPECIAL_TOKENS = r"<\|[^<>|\s]{1,60}\|>|</?think>|<end_of_conversation>|</?s>|<(?:pad|bos|eos|unk)>"
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
"""All control characters except tab and line feed. Those in the last two ranges change the direction of text and could
hide what a model wrote."""

_MARKED = re.compile(f"{_SPECIAL_TOKENS}|{_CONTROLS}")


def write_report(run_folder: Path) -> Path:
    """Write `report.html`, the plots and, for a trained run, `learning.json` into the run folder; returns the path of
    the page. Raises `DataError` if the folder holds neither an evaluation nor a step of training."""
    data = load_run(Path(run_folder))
    if data.steps:
        write_learning(data.folder)
    path = data.folder / "report.html"
    path.write_text(render_report(data), encoding="utf-8", errors="replace")
    write_plots(data)
    return path


def render_report(data: RunData) -> str:
    """The page as HTML."""
    return page_template("report.html.j2").render(
        name=data.folder.resolve().name,
        answer=answer(data),
        facts=facts(data),
        tiles=tiles(data),
        table=table(data),
        notes=reading_lines_of_run(data) + supervised_lines_of_run(data),
        charts=charts(data),
        time_split=time_split(data),
        showcases=showcases(data),
        measured=bool(data.before and data.after),
        scored=_any_metric(data, "scores"),
        marked=_any_metric(data, "error_turns"),
    )


def page_template(name: str) -> jinja2.Template:
    """Load a page template from this folder. Everything that it renders is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["as_text"] = as_text
    environment.globals["scores_of"] = scores_of
    return environment.get_template(name)


def as_text(text: str) -> Markup:
    """A model's text for the page: escaped, with special tokens and control characters marked and spelled out."""
    text = text.replace("\r\n", "\n")
    parts, position = [], 0
    for token in _MARKED.finditer(text):
        name = f"U+{ord(token[0]):04X}" if len(token[0]) == 1 else token[0]
        parts += [escape(text[position : token.start()]), Markup('<span class="token">{}</span>').format(name)]
        position = token.end()
    return Markup("").join([*parts, escape(text[position:])])


def _any_metric(data: RunData, name: str) -> bool:
    return any(side.metrics[sampling].get(name) for side in data.measurements.values() for sampling in side.samplings)


# What was run ----------------------------------------------------------------------------------------------------


def facts(data: RunData) -> list[tuple[str, str]]:
    """(name, value) pairs that describe the run, as far as the folder holds them."""
    config, environment = data.config, data.environment
    train = config.get("train", {})
    batch = [train.get("number_of_problems_per_batch"), train.get("num_samples_per_problem")]
    values = {
        "Teacher": look_up(config, "teacher_model", "model_name_or_path"),
        **(
            _roles_of_the_classroom(config, environment)
            if config.get("environment", "classroom") == "classroom"
            else {}
        ),
        "Engine": _engine(data),
        "Steps": len(data.steps) or None,
        "Collapse": "; ".join(sign for line in data.evaluations[-1:] for sign in line["collapse"]) or None,
        "Trained student": _pleasing(data),
        "Batch": f"{batch[0]} lessons × {batch[1]} conversations" if None not in batch else None,
        "Learning rate": _learning_rate(train),
        "Loss": train.get("loss_type"),
        "Seed": config.get("seed"),
        "Student errs in": _share(error_share(config), "of its turns"),
        "Paid in training": _paid_in_training(data),
        "Total time": format_duration(look_up(data.summary, "training", "seconds_total")),
        "Commit": (environment.get("git_commit") or "")[:10] or None,
    }
    return [(name, str(value)) for name, value in values.items() if value is not None]


def _pleasing(data: RunData) -> Optional[str]:
    """Whether a student under training learned to please (trainer/pleasing.py); None in the training of a tutor."""
    steps = [step for step, pleases in data.series("guard/student_pleases") if pleases]
    if steps:
        return f"learns to please, from step {steps[0]:g} (guard/student_…)"
    return "no sign of pleasing" if data.series("guard/student_pleases") else None


def _paid_in_training(data: RunData) -> Optional[str]:
    """What each role behind an API cost, and how many of its requests failed; None if no price is known."""
    parts = []
    for key in dict.fromkeys(key for line in data.steps for key in line if key.endswith("/cost_usd")):
        role, _, _ = key.partition("/")
        if cost := sum(value for _, value in data.series(key)):
            calls, failed = (
                sum(value for _, value in data.series(f"{role}/{name}")) for name in ("calls", "failed_calls")
            )
            parts.append(f"{role} ${cost:.4f} for {calls:,.0f} requests, of which {failed:,.0f} failed")
    return "; ".join(parts) or None


def _engine(data: RunData) -> Optional[str]:
    for measurement in data.measurements.values():
        engine = measurement.metrics["engine"]
        return f"{engine['name']} {engine['version']}"
    return None


def _roles_of_the_classroom(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Optional[str]]:
    """Student and judge; another environment may have neither, although its configuration has their groups of keys."""
    student = look_up(config, "student_model", "model_name_or_path")
    return {"Student": student, "Judge": _judge(config, environment)}


def _judge(config: Mapping[str, Any], environment: Mapping[str, Any]) -> Optional[str]:
    """The judge's name; for the `rules` judge also the version of its rules, because its verdicts depend on it. None if
    nothing is judged."""
    if look_up(config, "generation", "number_judge_attempts") == 0:
        return None
    name, version = look_up(config, "judge_model", "model_name_or_path"), environment.get("rules_version")
    return f"{name}, version {version}" if name == RULES and version else name


def _learning_rate(train: Mapping[str, Any]) -> Optional[str]:
    rate = train.get("learning_rate")
    return None if rate is None else f"{rate:g}, {train.get('lr_scheduler_type', 'constant')}"


def _share(value: Any, of_what: str) -> Optional[str]:
    return f"{100 * value:g} % {of_what}" if is_number(value) else None


def format_duration(seconds: Any) -> Optional[str]:
    """Format seconds: "42 s", "7 min 5 s"."""
    if not is_number(seconds):
        return None
    rounded = round(seconds)
    return f"{rounded} s" if rounded < 60 else f"{rounded // 60} min {rounded % 60} s"


# Before and after ------------------------------------------------------------------------------------------------


def answer(data: RunData) -> Optional[tuple[str, Sequence[str]]]:
    """Whether the tutor learned, as a short answer and its reasons (`classroom_rl.results.learning`); None for a run
    that was neither trained nor measured twice."""
    if not data.steps and not data.reward_changes():
        return None
    learning, _ = learning_of(data)
    yes = "Yes, in training." if learning.in_training else "Yes."
    return yes if learning.learned else "No evidence of it.", learning.reasons


def tiles(data: RunData) -> list[tuple[str, Optional[Cell], Cell]]:
    """The headline figures of the last evaluation, the reward of each sampling, then the reactions to errors: (label,
    before, after), with the value before training if both were measured."""
    last = data.after or data.before
    if last is None:
        return []
    headlines = []
    for label, sampling, key in (
        ("Held-out reward, sampled", "sampled", "reward"),
        ("Held-out reward, greedy", "greedy", "reward"),
        ("Error turns scaffolded", "sampled", "error_turns"),
        ("Clean turns falsely corrected", "sampled", "clean_turns"),
    ):
        measure = next(measure for measure in MEASURES if measure.path[0] == key)
        after = cell(measure, last.metrics.get(sampling, {}))
        before = cell(measure, data.before.metrics.get(sampling, {})) if data.before and data.after else None
        if look_up(last.metrics, sampling, *measure.path) is not None:
            headlines.append((label, before, after))
    return headlines


def table(data: RunData) -> Optional[dict[str, Any]]:
    """The before/after table: the samplings, and for each measure one line per sampling; None without an evaluation."""
    by_sampling = compare_run(data)
    rows = [lines for lines in zip(*by_sampling.values(), strict=True) if not all(line.is_empty for line in lines)]
    return {"samplings": [SAMPLING_NAMES.get(name, name) for name in by_sampling], "rows": rows} if rows else None


# Training --------------------------------------------------------------------------------------------------------


def charts(data: RunData) -> list[Drawing]:
    """The training's charts, as far as metrics.jsonl holds their values, those of the run's environment included."""
    drawings = [_reward_chart(data), _held_out_chart(data), _rewards_chart(data), _scores_chart(data)]
    drawings += [_environment_chart(data, panel) for panel in view_of(data.config).panels]
    drawings += [level_chart(data), _mismatch_chart(data), _time_chart(data)]
    return [chart for chart in drawings if chart is not None]


def _reward_chart(data: RunData) -> Optional[Drawing]:
    points = data.series("reward")
    if not points:
        return None
    deviations = dict(data.series("reward_std"))
    spread = [deviations.get(x, 0.0) for x, _ in points]
    series = [
        Series("this batch", "a", points, faint=True, spread=spread),
        Series("training, running mean", "a", smooth(points)),
    ]
    bounds = [y + sign * deviation for (_, y), deviation in zip(points, spread, strict=True) for sign in (-1, 1)]
    return line_chart(
        "Reward",
        series,
        note="Each batch's mean; the band is its standard deviation.",
        y_range=(min(0.0, *bounds), max(1.0, *bounds)),
    )


def _held_out_chart(data: RunData) -> Optional[Drawing]:
    """The rewards on held-out lessons. They are not in the training's chart, because lessons, sampling and perhaps the
    judge differ."""
    colours = {"sampled": "b", "greedy": "c", "supervised": "d"}
    lines: dict[str, list[tuple[float, float]]] = {}
    marks = []
    for sampling, when, step, reward in data.held_out_rewards():
        lines.setdefault(sampling, []).append((step, reward["mean"]))
        label, colour = f"{sampling}, {when}", colours.get(sampling, "b")
        marks.append(Mark(label, sampling, colour, step, reward["mean"], reward["ci95"]))
    if not data.steps or not marks:
        return None
    bounds = [y for mark in marks for y in mark.interval or (mark.y, mark.y)]
    return line_chart(
        "Reward on held-out lessons",
        [Series(sampling, colours.get(sampling, "b"), points, faint=True) for sampling, points in lines.items()],
        note="With 95 % intervals over lessons. "
        + ("During the training." if data.evaluations else "Before and after the training."),
        y_range=(min(0.0, *bounds), max(1.0, *bounds)),
        marks=marks,
    )


def _rewards_chart(data: RunData) -> Optional[Drawing]:
    """Each of several rewards, and each turn reward."""
    names = dict.fromkeys(key for line in data.steps for key in line if re.fullmatch(r"(turn_)?rewards/.+/mean", key))
    if len(names) < 2:
        return None
    lines = [(name, name.partition("/")[2].removesuffix("/mean")) for name in names]
    note = "Unweighted, running means; a turn reward is a mean over messages."
    return line_chart("The rewards in the sum", _running_means(data, lines), note=note)


def _environment_chart(data: RunData, panel: MetricPanel) -> Optional[Drawing]:
    series = _running_means(data, [(name, label) for name, label, _ in panel.lines])
    return line_chart(panel.title, series, note=f"{panel.y}; running means.") if series else None


def _running_means(data: RunData, lines: Sequence[tuple[str, str]]) -> list[Series]:
    """A series for each (metric, label) that the run has."""
    colours = dict(zip(lines, cycle("abcd"), strict=False))
    return [Series(line[1], colours[line], smooth(points)) for line in lines if (points := data.series(line[0]))]


def _scores_chart(data: RunData) -> Optional[Drawing]:
    series = []
    for colour, (name, criterion) in zip(cycle("abc"), judged_criteria(data.steps).items(), strict=False):
        points = [(step, value / criterion.top) for step, value in data.series(f"judge/{name}")]
        if points:
            label = criterion.label
            series += [Series(label, colour, points, faint=True), Series(label, colour, smooth(points))]
    if not series:
        return None
    note = "The judge's scores, each as a share of its maximum; running means over the batches' own values."
    return line_chart("What the reward is made of", series, note=note, y_range=(0.0, 1.0))


def _mismatch_chart(data: RunData) -> Optional[Drawing]:
    points = data.series(MISMATCH)
    if not points:
        return None
    note = (
        "Mean |Δ log-prob| of the sampled tokens, engine against trainer: near 0 means that both hold the same weights."
    )
    return line_chart("Engine against trainer", [Series("mean |Δ log-prob|", "a", points)], note=note)


def _time_chart(data: RunData) -> Optional[Drawing]:
    stages = {stage: dict(data.series(f"seconds/{stage}")) for stage in ("rollout", "publish", "train")}
    steps = [step for step, _ in data.series("seconds/rollout") if all(step in seconds for seconds in stages.values())]
    series = [
        Series(stage, colour, [(step, seconds[step]) for step in steps])
        for colour, (stage, seconds) in zip("abc", stages.items(), strict=True)
    ]
    note = f"Wall-clock seconds of each step. {time_of(data.steps, data.config, data.folder)[1] or ''}".strip()
    return area_chart("Where a step's time goes", series, note=note, unit=" s") if steps else None


def time_split(data: RunData) -> list[tuple[str, str, float]]:
    """The run's total time by stage, from summary.json: (stage, its time as text, its percentage)."""
    seconds = look_up(data.summary, "training", "seconds") or {}
    names = {"sft": "fine-tuning the base", "server_start": "starting the server", "eval": "evaluations"}
    known_seconds = {stage: seconds[stage] for stage in STAGES if seconds.get(stage)}
    total = sum(known_seconds.values())
    return [
        (names.get(stage, stage), format_duration(stage_seconds), 100 * stage_seconds / total)
        for stage, stage_seconds in known_seconds.items()
    ]


# Lessons ---------------------------------------------------------------------------------------------------------


ShownPair = tuple[Pair, Optional[ShownConversation], Optional[ShownConversation]]


def showcases(data: RunData) -> list[tuple[str, list[ShownPair]]]:
    """For each sampling, sampled first, the lessons to show with their conversations before and after training."""
    sections = []
    for name, title in SAMPLING_NAMES.items():
        sides = [measurement.records.get(name, []) if measurement else [] for measurement in (data.before, data.after)]
        pairs = choose_pairs(*sides)
        if pairs:
            sections.append((title, [(pair, show(pair.before), show(pair.after)) for pair in pairs]))
    return sections


def scores_of(verdict: Any) -> list[tuple[str, float, float, str]]:
    """(criterion, value, percent of its maximum, reason) for each score of a verdict; [] for one without scores."""
    if verdict.scores is None:
        return []
    reasons = verdict.reasons or {}
    values = [(name, criterion_of(name), value) for name, value in verdict.scores.values.items()]
    return [
        (criterion.label, value, 100 * value / criterion.top, reasons.get(name, ""))
        for name, criterion, value in values
    ]


def main(arguments: Sequence[str]) -> int:
    """The command line: write the page, and for a complete run the summary, and print the table."""
    if len(arguments) != 1:
        print("usage: python -m classroom_rl.evaluation.report RUN_FOLDER", file=sys.stderr)
        return 2
    try:
        data = load_run(Path(arguments[0]))
        if data.before and data.after and data.steps:
            training = data.summary.get("training", {})
            seconds = {stage: value for stage, value in training.get("seconds", {}).items() if value is not None}
            total = {"total": training["seconds_total"]} if "seconds_total" in training else {}
            write_summary(data.folder, {**seconds, **total})
        path = write_report(data.folder)
    except ClassroomError as error:
        print_error(error)
        return 2
    print(comparison_table(data))
    if data.steps:
        print(f"\n{describe_learning(learning_of(data)[0])}")
    if (supervision := summarise_supervision(data)) is not None:
        print(describe_supervision(supervision))
    print(f"\n{path}")
    return 0
