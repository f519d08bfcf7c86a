"""Formats a comparison of tutors as tables and as one self-contained page, `report.html`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from classroom_rl.config.values import SAMPLINGS
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.metrics.compared import figures_of
from classroom_rl.evaluation.metrics.supervision import DIFFERENCE
from classroom_rl.evaluation.report.build import SAMPLING_NAMES, page_template
from classroom_rl.evaluation.report.examples import Pair, show
from classroom_rl.evaluation.report.tables import (
    NO_VALUE,
    Cell,
    Measure,
    align,
    cell,
    change_cell,
    format_p,
    paid_line,
    reading_lines,
    supervised_line,
)
from classroom_rl.results.statistics import is_clear


@dataclass(frozen=True)
class TableRow:
    """A figure with one cell for each tutor. In a row of differences, the verdict on each: "better", "worse" or ""."""

    label: str
    cells: list[Cell]
    verdicts: Sequence[str] = ()


def samplings_of(metrics: Mapping[str, Any]) -> list[str]:
    """The samplings that metrics.json holds."""
    return [name for name in SAMPLINGS if name in metrics]


def figure_rows(metrics: Mapping[str, Any], sampling: str) -> list[TableRow]:
    """Each figure's estimate for each tutor; figures without any estimate are left out."""
    figures_of_tutors = metrics[sampling]["figures"]
    rows = []
    for key, measure in figures_of(figures_of_tutors.values()).items():
        cells = [cell(measure, figures.get(key, {})) for figures in figures_of_tutors.values()]
        rows.append(TableRow(measure.label, cells))
    return rows


def difference_rows(metrics: Mapping[str, Any], sampling: str) -> list[TableRow]:
    """The difference of every other tutor from the base in each figure, with its interval and p."""
    rows = []
    for key, measure in figures_of(metrics[sampling]["figures"].values()).items():
        pairs = [pair for pair in metrics[sampling]["paired"].get(key, []) if pair["against"] == metrics["base"]]
        if any(pair["mean"] is not None for pair in pairs):
            cells = [_difference(measure, pair) for pair in pairs]
            rows.append(TableRow(measure.label, cells, [_verdict(measure, pair) for pair in pairs]))
    return rows


def _difference(measure: Measure, pair: Mapping[str, Any]) -> Cell:
    if pair["mean"] is None:
        return Cell(NO_VALUE)
    return change_cell(measure, pair["mean"], pair["ci95"], f"p{format_p(pair['p_holm'])}")


def _verdict(measure: Measure, pair: Mapping[str, Any]) -> str:
    estimate = {"mean": pair["mean"], "ci95": pair["ci95"], "p": pair["p_holm"], "n": pair["lessons"]}
    if measure.direction == 0 or not is_clear(estimate):
        return ""
    return "better" if pair["mean"] * measure.direction > 0 else "worse"


def judge_rows(metrics: Mapping[str, Any], sampling: str) -> list[TableRow]:
    """Each judge's score for each tutor; [] if only one judge was asked."""
    judges = metrics[sampling].get("judges", {}).get("scores", {})
    measure = Measure("score", ("mean",), ("ci95",), direction=1)
    return [
        TableRow(f"Score by {name}", [cell(measure, score) for score in scores.values()])
        for name, scores in judges.items()
    ]


def judge_lines(metrics: Mapping[str, Any], sampling: str) -> list[str]:
    """Sentences on how far the judges agree; [] if only one was asked."""
    judges = metrics[sampling].get("judges")
    if judges is None:
        return []
    lines = [
        f"Spearman's ρ with {name}: {_format_score(value)}, over {judges['pairs'][name]} conversations."
        for name, value in judges["spearman"].items()
    ]
    alpha = _format_score(judges["krippendorff_alpha"])
    return [*lines, f"Krippendorff's α of all judges (interval): {alpha}, over {judges['n']} conversations."]


def _format_score(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"


def fidelity_lines(metrics: Mapping[str, Any], sampling: str) -> list[str]:
    """Sentences on how faithful the simulated student was with each tutor, and on the move classifiers and rules that
    the figures come from."""
    lines = []
    for name, fidelity in metrics[sampling]["fidelity"].items():
        if fidelity["trusted"] is False:
            lines.append(f"With {name} the simulated student is NOT to be trusted: {'; '.join(fidelity['warnings'])}.")
        elif fidelity["trusted"] is None:
            lines.append(
                f"With {name} nobody told which of the student's turns hold an error: its fidelity is unknown."
            )
        else:
            shares = [fidelity[persona] for persona in ("error_persona", "correct_persona")]
            texts = [
                NO_VALUE if share["share"] is None else f"{share['share']:.1%} of {share['n']}" for share in shares
            ]
            lines.append(
                f"With {name} the student erred when asked to in {texts[0]} turns and did not when not in {texts[1]} "
                f"(told by {fidelity['labelled_by']})."
            )
        if fidelity["unlabelled"]:
            lines.append(
                f"With {name}, {fidelity['unlabelled']} conversations have no labels of the student's errors: they are "
                "in no figure about errors."
            )
    lines += reading_lines(metrics[sampling])
    if version := metrics[sampling].get("rules_version"):
        lines.append(f"Figures that are read by rules: version {version} of the rules.")
    return lines


def supervised_lines(metrics: Mapping[str, Any]) -> list[str]:
    """A sentence for each tutor on its reward with a supervisor against without; [] if there was none."""
    sentences = {name: supervised_line(difference) for name, difference in metrics.get(DIFFERENCE, {}).items()}
    return [f"{name}: {line}" for name, line in sentences.items() if line]


def comparison_text(metrics: Mapping[str, Any]) -> str:
    """The whole comparison as text for the terminal."""
    lessons = f"{metrics['problems']} lessons × {metrics['num_samples_per_problem']}"
    parts = [f"\nTutors on {lessons} conversations, with 95 % intervals over lessons"]
    for name, about in metrics["tutors"].items():
        parts.append(f"  {name}: {about['tutor']} {paid_line(about.get('paid', {}))}".rstrip())
    for sampling in samplings_of(metrics):
        names = list(metrics["tutors"])
        table = [[sampling, *names], *([row.label, *map(str, row.cells)] for row in figure_rows(metrics, sampling))]
        table += [[row.label, *map(str, row.cells)] for row in judge_rows(metrics, sampling)]
        other_names = [name for name in names if name != metrics["base"]]
        changes = [[f"against {metrics['base']}, lesson by lesson", *other_names]]
        changes += [[row.label, *map(str, row.cells)] for row in difference_rows(metrics, sampling)]
        parts += ["", align(table), "", align(changes), "", *fidelity_lines(metrics, sampling)]
        parts += judge_lines(metrics, sampling)
    parts += supervised_lines(metrics)
    if spending := paid_line(metrics.get("extra_judges_paid", {})):
        parts.append(f"Further judges. {spending}")
    parts.append("p: sign-flip test over lessons, two-sided, corrected by Holm for all pairs of tutors.")
    return "\n".join(parts)


Records = Mapping[str, Sequence[tuple[str, ConversationRecord]]]
"""Tutor → (sampling, record) of each conversation, in the same order for all tutors."""
SHOWN_FURTHEST = 3


def write_comparison_report(folder: Path, metrics: Mapping[str, Any], records: Records) -> Path:
    """Write `report.html` into the folder and return its path."""
    parts = []
    for sampling in samplings_of(metrics):
        by_tutor = {
            tutor: [record for record_sampling, record in pairs if record_sampling == sampling]
            for tutor, pairs in records.items()
        }
        parts.append(
            {
                "title": SAMPLING_NAMES[sampling],
                "notes": fidelity_lines(metrics, sampling) + judge_lines(metrics, sampling),
                "figures": figure_rows(metrics, sampling) + judge_rows(metrics, sampling),
                "differences": difference_rows(metrics, sampling),
                "others": [name for name in metrics["tutors"] if name != metrics["base"]],
                "lessons": [_show(group) for group in choose_lessons(by_tutor)],
            }
        )
    page = page_template("comparison.html.j2").render(
        name=folder.resolve().name,
        metrics=metrics,
        tutors=metrics["tutors"],
        parts=parts,
        notes=supervised_lines(metrics),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def choose_lessons(by_tutor: Mapping[str, Sequence[ConversationRecord]]) -> list[dict[str, ConversationRecord]]:
    """Choose the lessons to show, each with every tutor's first conversation: the `SHOWN_FURTHEST` lessons with the
    largest spread of rewards between tutors, the median, and the smallest. Ties are broken by lesson id."""
    by_lesson: dict[str, dict[str, ConversationRecord]] = {}
    for name, records in by_tutor.items():
        for record in records:
            by_lesson.setdefault(record.problem_id, {}).setdefault(name, record)
    ranked = sorted(by_lesson, key=lambda lesson: (-_spread(by_lesson[lesson]), lesson))
    ranks = [*range(SHOWN_FURTHEST), len(ranked) // 2, len(ranked) - 1]
    chosen = dict.fromkeys(ranked[rank] for rank in ranks if rank < len(ranked))
    return [by_lesson[lesson] for lesson in chosen]


def _spread(group: Mapping[str, ConversationRecord]) -> float:
    rewards = [record.reward for record in group.values() if record.reward is not None]
    return round(max(rewards) - min(rewards), 6) if rewards else 0.0


def _show(group: Mapping[str, ConversationRecord]) -> dict[str, Any]:
    """A lesson as the page shows it, with each tutor's first conversation on it."""
    lesson = Pair("", None, next(iter(group.values())))
    sides = {name: show(record) for name, record in group.items()}
    return {"title": lesson.title, "plan": lesson.plan, "sides": sides}
