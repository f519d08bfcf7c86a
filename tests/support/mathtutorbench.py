"""A made-up clone of MathTutorBench in the schema of the real one, and a double of the benchmark's own program: what it
sends, how it reads answers, and its figures, written from its formulas without any of the project's code."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from tests.support.published_rows import bridged, solved, verified, write_json
from tests.support.tutor_messages import write_rows

INSTRUCTION = "Rate the last turn. Good turns let the student think."
_SCORER = f'import json\n\nSYSTEM_PROMPT = ("{INSTRUCTION[:20]}"\n                 "{INSTRUCTION[20:]}")\n'

_GSM8K = {"dataset_path": "gsm8k", "training_split": "train", "test_split": "test"}
_STEPS = {
    "dataset_path": "eth-nlped/stepverify",
    "dataset_name": "default",
    "training_split": "train",
    "test_split": "train",
}
_TURN = {
    "dataset_name": "main",
    "training_split": "train",
    "test_split": "test",
    "system_prompt": "You teach.\n\nProblem: {{question}}\n\nConversation:\n\n{{dialog_history}}\n\nTeacher: ",
    "ground_truth_format": "",
    "few_shot_samples": "",
    "stop": ["Student:", "\n\n", "Teacher:"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "problem_solving": _GSM8K
    | {
        "dataset_name": "main",
        "system_prompt": "Solve it.\n{{ shots }}\nQuestion: {{question}}\nAnswer:",
        "ground_truth_format": "{{ answer.split('### ')[-1].replace(',', '').strip() }}",
        "few_shot_samples": "Question: What is 1 + 1?\n\nAnswer: Final answer: 2",
        "stop": ["Question:"],
    },
    "socratic_questioning": _GSM8K
    | {
        "dataset_name": "socratic",
        "system_prompt": "Ask, on one line.\n{{ shots }}\nProblem: {{question}}\nQuestions:",
        "ground_truth_format": "{{ answer }}",
        "few_shot_samples": "Problem: Two and two?\n\nQuestions: What is two? And twice that?",
        "stop": ["Problem:", "\n"],
    },
    "student_solution_correctness": _STEPS
    | {
        "name": "solution_correctness",
        "system_prompt": "{{ shots }}\nProblem: {{question}}\n\n{{dialog_history}}\nStudent: "
        "{{student_chat_solution}}\n\nQ: Is it incorrect?\n\nA:",
        "ground_truth_format": "{{ 'Yes' if is_error else 'No' }}",
        "few_shot_samples": "Problem: 1 + 1?\nStudent: 3\nA: Yes",
        "stop": ["Problem:", "Q:"],
    },
    "mistake_location": _STEPS
    | {
        "system_prompt": "{{ shots }}\n\nProblem: {{question}}\n\nSolution: {{student_solution}}\n\nWhich step?\nA:",
        "ground_truth_format": "{{ error_step }}",
        "few_shot_samples": "Problem: 1 + 1?\n\nSolution: Step 1 - 2\n\nA: 0",
        "stop": ["Problem:", "Q:"],
    },
    "mistake_correction": _STEPS
    | {
        "system_prompt": "{{question}}\n\n{{dialog_history}}\n\nStudent: {{student_chat_solution}}\n\nTeacher: ",
        "ground_truth_format": "{{ reference_solution.split('\\n')[-1].replace(',', '').strip() }}",
        "few_shot_samples": "",
        "stop": ["Problem:", "Student:"],
    },
    "scaffolding_generation": _TURN | {"dataset_path": "datasets/mathdial_bridge.json"},
    # As older revisions have it: the folder is called datasets.
    "pedagogy_following": _TURN | {"dataset_path": "dataset/mathdial_bridge.json"},
    "scaffolding_generation_hard": _TURN | {"dataset_path": "datasets/mathdial_bridge_hard.json"},
    "pedagogy_following_hard": _TURN | {"dataset_path": "datasets/mathdial_bridge_hard.json"},
}
"""The files in `configs/`, by their names without .yaml; `name` is that of the file where it is left out."""


def socratic(number: int) -> dict[str, Any]:
    """A row of GSM8K's `socratic`; every third has no question."""
    steps = [f"How many eggs are in basket {n}? ** It has {number + n}.<<1+1=2>>" for n in range(1, 3)]
    return {
        "question": f"How many eggs, with {number} each?",
        "answer": "\n".join([*(steps if number % 3 else ["It has some."]), f"#### {2 * number}"]),
    }


def make_clone(folder: Path, rows: int = 4) -> dict[str, str]:
    """Write a clone, and local copies of the Hub's data sets beside it.

    Returns:
        The copies, as `benchmark.datasets` names them.
    """
    for name in ("configs", "datasets", "reward_model"):
        (folder / name).mkdir(parents=True)
    (folder / "reward_model/compute_scaffolding_score.py").write_text(_SCORER, encoding="utf-8")
    for stem, config in CONFIGS.items():
        (folder / f"configs/{stem}.yaml").write_text(yaml.safe_dump({"name": stem} | config), encoding="utf-8")
    write_json(folder / "datasets/mathdial_bridge.json", [bridged(number) for number in range(rows)])
    write_json(folder / "datasets/mathdial_bridge_hard.json", [bridged(number) for number in range(rows, 2 * rows)])
    copies = {
        "gsm8k/main": write_rows(folder / "main.jsonl", [solved(number) for number in range(rows)]),
        "gsm8k/socratic": write_rows(folder / "socratic.jsonl", [socratic(number) for number in range(rows)]),
        "eth-nlped/stepverify": write_json(folder / "stepverify.json", [verified(number) for number in range(rows)]),
    }
    return {name: str(path) for name, path in copies.items()}


# The benchmark's own program -----------------------------------------------------------------------------------------


@dataclass
class DoubleTask:
    """A task as the benchmark's program runs it: `prompts`, and `figures` of the answers to them, in their order."""

    prompts: list[str]
    stop: list[str]
    examples: list[dict[str, Any]]
    figures: Callable[[Sequence[str]], dict[str, float]]


def program(clone: Path, stem: str, copies: dict[str, str]) -> DoubleTask:
    config = yaml.safe_load((clone / f"configs/{stem}.yaml").read_text(encoding="utf-8"))
    path = config["dataset_path"].replace("dataset/", "datasets/")
    key = f"{path}/{config['dataset_name']}" if path == "gsm8k" else path
    text = Path(copies.get(key, clone / path)).read_text(encoding="utf-8")
    rows = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    examples = [example for row in rows for example in _examples(config["name"], row)]
    for example in examples:
        example["shots"] = config["few_shot_samples"]
    prompts = [jinja2.Template(config["system_prompt"]).render(**example) for example in examples]
    targets = [jinja2.Template(config["ground_truth_format"]).render(**example) for example in examples]
    score = SCORES.get(config["name"], _turns)
    return DoubleTask(prompts, config["stop"], examples, lambda answers: score(answers, targets))


def _examples(name: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    if "answer" in row:
        return [dict(row)]
    turns = [(turn["user"], turn["text"]) for turn in row["dialog_history"]]
    common = {"question": row["problem"], "reference_solution": row["reference_solution"]}
    if "incorrect_index" not in row:
        lines = [("Student: " if speaker == "Student" else "Teacher: ") + text for speaker, text in turns]
        more = {"conversation_json": row["dialog_history"][:-1], "ground_truth_response": row["dialog_history"][-1]}
        return [common | more | {"dialog_history": "\n".join(lines[:-1])}]
    cutoff = [speaker for speaker, _ in turns].index("Student")
    common["dialog_history"] = "\n".join("Teacher: " + text for _, text in turns[:cutoff])

    def solution(steps: list[str]) -> str:
        return r"\n".join(f"Step {i + 1} - {step}" for i, step in enumerate(steps[:-1]))

    wrong = common | {
        "student_solution": solution(row["student_incorrect_solution"]),
        "is_error": True,
        "error_step": row["incorrect_index"] + 1,
        "student_chat_solution": turns[cutoff][1],
    }
    right = common | {
        "student_solution": solution(row["reference_solution"].split("\n")),
        "is_error": False,
        "error_step": 0,
        "student_chat_solution": row["student_correct_response"],
    }
    return [wrong] if name == "mistake_correction" else [wrong, right]


def _share_equal(predictions: Sequence[float | None], targets: Sequence[str]) -> float:
    right = [p is not None and abs(p - float(t)) < 1e-6 for p, t in zip(predictions, targets, strict=True)]
    return sum(right) / len(targets)


def _solving(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    matches = [re.findall(r"-?\d*\.?\d+", answer) for answer in answers]
    return {"accuracy": _share_equal([float(numbers[-1]) if numbers else None for numbers in matches], targets)}


def _correction(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    def read(answer: str) -> float | None:
        marked = re.search(r"Final Answer:\s*\$?([-,\d]*\.?\d+)", answer)
        numbers = [marked.group(1)] if marked else re.findall(r"\$?([-,\d]*\.?\d+)", answer)
        try:
            return float(numbers[-1].replace(",", "")) if numbers else None
        except ValueError:
            return None

    return {"accuracy": _share_equal([read(answer) for answer in answers], targets)}


def _location(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    matches = [re.search(r"\d+", answer) for answer in answers]
    steps, expected = [int(match.group()) if match else 0 for match in matches], [int(target) for target in targets]
    return {f"f1_{how}": f1_score(expected, steps, average=how) for how in ("micro", "macro", "weighted")}


def _correctness(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    def is_incorrect(answer: str) -> bool:
        answer = answer.strip().lower()
        return "yes" in answer or "no" not in answer

    predicted, expected = [is_incorrect(answer) for answer in answers], [is_incorrect(target) for target in targets]
    scores = {"accuracy": accuracy_score, "precision": precision_score, "recall": recall_score, "f1": f1_score}
    return {name: score(expected, predicted) for name, score in scores.items()}


def _turns(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    words = ["what", "how", "why", "when", "where", "which", "who", "whose", "whom", "can", "could", "would"]
    asking = [answer for answer in answers if "?" in answer or any(w in answer.lower().split() for w in words)]
    return {"match": len(asking) / len(answers)}


def _socratic(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    bleus, counts = [], []
    for answer, target in zip(answers, targets, strict=True):
        lines = [line.strip() for line in answer.split("\n")]
        questions = [line.split(" ** ")[0] for line in target.split("\n") if line.count(" ** ") == 1]
        if questions:
            bleus.append(max(bleu(line, questions) for line in lines))
            counts.append(min(len(lines), len(questions)))
    return {"bleu": sum(bleus) / len(bleus) / 100, "avg_questions": sum(counts) / len(counts)}


SCORES: dict[str, Callable[[Sequence[str], Sequence[str]], dict[str, float]]] = {
    "problem_solving": _solving,
    "socratic_questioning": _socratic,
    "solution_correctness": _correctness,
    "mistake_location": _location,
    "mistake_correction": _correction,
}
"""The figures of answers and ground truths, by task; the other tasks' are those of turns."""


def bleu(hypothesis: str, references: Sequence[str]) -> float:
    """Sentence BLEU in percent, step by step: 13a words, clipped counts of 1- to 4-grams, exponential smoothing, and
    only the orders that the sentence has."""
    words, others = _words_13a(hypothesis), [_words_13a(reference) for reference in references]
    correct, total = [0] * 4, [0] * 4
    for n in range(4):
        grams = [tuple(words[i : i + n + 1]) for i in range(len(words) - n)]
        total[n] = len(grams)
        for gram, count in Counter(grams).items():
            most = max(sum(tuple(o[i : i + n + 1]) == gram for i in range(len(o) - n)) for o in others)
            correct[n] += min(count, most)
    if sum(correct) == 0:
        return 0.0
    smooth, logs = 1.0, []
    for n in range(4):
        if total[n] == 0:
            break
        if correct[n] == 0:
            smooth *= 2
            logs.append(math.log(100.0 / (smooth * total[n])))
        else:
            logs.append(math.log(100.0 * correct[n] / total[n]))
    closest = sorted((abs(len(other) - len(words)), len(other)) for other in others)[0][1]
    penalty = 1.0 if len(words) >= closest else math.exp(1 - closest / len(words))
    return penalty * math.exp(sum(logs) / len(logs))


def _words_13a(line: str) -> list[str]:
    line = line.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    line = line.replace("&quot;", '"').replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    line = re.sub(r"([\x20-\x26\x28-\x2b\x2f\x3a-\x40\x5b-\x60\x7b-\x7e])", r" \1 ", f" {line} ")
    line = re.sub(r"([^0-9])([.,])", r"\1 \2 ", line)
    line = re.sub(r"([.,])([^0-9])", r" \1 \2", line)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", line).split()


def scored_conversation(example: dict[str, Any], reply: str) -> list[dict[str, str]]:
    """What the benchmark's scorer gives its reward model."""
    prompt = f"Problem: {example['question']}\nReference Solution: {example['reference_solution']}"
    conversation = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": prompt}]
    for turn in example["conversation_json"]:
        role = "assistant" if turn["user"] in ("Teacher", "Tutor") else "user"
        conversation.append({"role": role, "content": turn["text"]})
    return [*conversation, {"role": "assistant", "content": reply}]


def win_figures(
    examples: Sequence[dict[str, Any]], replies: Sequence[str], score: Callable[[list[dict[str, str]]], float]
) -> dict[str, float]:
    """The scorer's figures: a reply wins if it scores higher than the human teacher's."""
    chosen = [score(scored_conversation(*pair)) for pair in zip(examples, replies, strict=True)]
    rejected = [score(scored_conversation(example, example["ground_truth_response"]["text"])) for example in examples]
    count = len(chosen)
    return {
        "win_rate": sum(a > b for a, b in zip(chosen, rejected, strict=True)) / count,
        "score": sum(chosen) / count,
        "baseline_score": sum(rejected) / count,
        "mean_margin": sum(a - b for a, b in zip(chosen, rejected, strict=True)) / count,
    }
