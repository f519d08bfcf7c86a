"""Generates maths problems with steps and siblings from templates: the same text and formulas with other numbers.

python -m classroom_rl.judges.post_test.sibling_templates --templates data/maths_siblings/templates/train.jsonl \
    --out my_problems.jsonl [--problems 4] [--siblings 3] [--seed 42]

A template is a line of JSON: `problem` (the text, with {names} for numbers), `numbers` (name → [least, most]), `steps`
(each a name and a formula) and `answer` (a formula). With `whole: false`, values may have two decimals. The calculator
tool evaluates the formulas; no text is run as code.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.rollout.tools.calculator_worker import Mistake, compute

_TRIES = 10_000
_NAME = re.compile(r"\{([a-z]+)\}")
_WORD = re.compile(r"\b[a-z]+\b")
_VALUE = re.compile(r"\d+(?:\.\d{1,2})?")
"""Allowed values of steps and answers: integers, and numbers with up to two decimals."""

Text = Annotated[str, Field(min_length=1)]


class StepTemplate(BaseModel):
    """A step: its name, which is the same in all siblings, and its formula."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: Text
    formula: Text


class ProblemTemplate(BaseModel):
    """A problem without its numbers. If `whole` is true, the values of its steps and its answer must be integers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    id: Text
    problem: Text
    numbers: dict[Text, Annotated[tuple[int, int], Field(strict=False)]]
    steps: Annotated[tuple[StepTemplate, ...], Field(strict=False)]
    answer: Text
    whole: bool = True


def read_templates(path: Path) -> list[ProblemTemplate]:
    """The templates of a JSONL file.

    Raises:
        DataError: if there is no such file, or if a line is not a template; the message names file and line.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    templates = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                templates.append(ProblemTemplate.model_validate_json(line))
            except ValidationError as error:
                raise DataError(f"{path}: line {number} is no template: {error}") from error
    return templates


def make_rows(template: ProblemTemplate, problems: int, siblings: int, seed: int) -> list[dict]:
    """Rows of a dataset: `problems` problems from one template, each with `siblings` siblings. No text occurs twice.

    Raises:
        DataError: if the template uses a number that it does not define, if a formula cannot be computed, or if its
            ranges contain too few suitable numbers.
    """
    drawn = _draw(template, problems * (1 + siblings), random.Random(f"siblings|{seed}|{template.id}"))
    rows = []
    for number in range(problems):
        problem, *sibling_problems = drawn[number * (1 + siblings) : (number + 1) * (1 + siblings)]
        rows.append({"id": f"{template.id}-{number + 1}", **problem, "sibling_problems": sibling_problems})
    return rows


def _draw(template: ProblemTemplate, count: int, rng: random.Random) -> list[dict]:
    """Draw `count` distinct problems from a template, by rejection sampling."""
    drawn: dict[str, dict] = {}
    for _ in range(_TRIES):
        if len(drawn) == count:
            return list(drawn.values())
        numbers = {name: rng.randint(*bounds) for name, bounds in template.numbers.items()}
        problem = _filled(template, numbers)
        if problem is not None:
            drawn.setdefault(problem["problem"], problem)
    raise DataError(
        f"The template {template.id} gave {len(drawn)} problems with good numbers in {_TRIES} draws, and {count} are "
        "wanted: widen the ranges in numbers."
    )


def _filled(template: ProblemTemplate, numbers: Mapping[str, int]) -> dict | None:
    """The problem with these numbers; None if it is unsuitable: if a value is not positive, has too many decimals or is
    not whole although it must be, or if two quantities are equal, since a message that names one may mean the other."""
    steps = [{"name": step.name, "value": _value(step.formula, numbers)} for step in template.steps]
    answer = _value(template.answer, numbers)
    values = [*(step["value"] for step in steps), answer]
    if not all(_VALUE.fullmatch(value) and float(value) > 0 for value in values):
        return None
    if template.whole and "." in "".join(values):
        return None
    quantities = [float(value) for value in values] + [float(number) for number in numbers.values()]
    if len(set(quantities)) < len(quantities):
        return None
    text = _NAME.sub(lambda match: str(_number(match[1], numbers, template.problem)), template.problem)
    return {"problem": text, "answer": answer, "steps": steps}


def _value(formula: str, numbers: Mapping[str, int]) -> str:
    expression = _WORD.sub(lambda match: f"({_number(match[0], numbers, formula)})", formula)
    try:
        return compute(expression)
    except Mistake as mistake:
        raise DataError(f"The formula {formula!r} cannot be computed: {mistake}.") from mistake


def _number(name: str, numbers: Mapping[str, int], text: str) -> int:
    if name not in numbers:
        raise DataError(f"{text!r} names {name}, and the template gives: {', '.join(numbers)}.")
    return numbers[name]


def dataset(templates: Sequence[ProblemTemplate], problems: int, siblings: int, seed: int) -> Iterator[str]:
    """The lines of a dataset as JSON.

    Raises:
        DataError: as `make_rows`.
    """
    for template in templates:
        for row in make_rows(template, problems, siblings, seed):
            yield json.dumps(row, ensure_ascii=False)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom_rl.judges.post_test.sibling_templates",
        description="Make maths problems with siblings.",
    )
    parser.add_argument("--templates", type=Path, required=True, help="a JSONL file of templates")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--problems", type=int, default=4, help="problems from each template (4)")
    parser.add_argument("--siblings", type=int, default=3, help="siblings of each problem (3)")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    try:
        lines = list(dataset(read_templates(options.templates), options.problems, options.siblings, options.seed))
    except ClassroomError as error:
        parser.exit(2, f"error: {error}\n")
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{options.out}: {len(lines)} problems")


if __name__ == "__main__":
    main()
