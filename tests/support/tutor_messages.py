"""Lessons with labelled messages of a tutor, made from templates: something small to train readers on.

Nothing in it is from a public data set; only the forms of the rows are theirs. The templates of a label overlap with
those of others, so that no single word decides.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

_NOUNS = {"house": "casa", "book": "libro", "door": "puerta", "car": "coche", "flower": "flor", "window": "ventana"}
_COLOURS = {"red": "rojo", "white": "blanco", "black": "negro", "old": "viejo", "new": "nuevo"}
_PLACES = {"in": "está en", "behind": "está detrás de", "over": "está sobre"}

_HINTS = ("The word for {english} is {missing}.", "{missing} means {english}.", "A clue: it begins with {letter}.")
_QUESTIONS = ("How would you say {english}?", "What comes next?", "And where is it, do you think?")
_CORRECTIONS = (
    "I would take another word for {english} here.",
    "Not quite: {wrong} is another word, you need {missing}.",
    "Nearly, but it is {missing} and not {wrong}.",
    "There is a slip in {wrong}. It should be {missing}.",
)
_CONFIRMATIONS = ("Yes, that is right!", "Exactly, well done.", "Perfect, you have it.")

_NOISE = 0.12
"""The share of messages whose labels say something else than the message."""

_MISTAKES = (
    "Count the apples of both days, please.",
    "Are you sure about {wrong}? Go back to the first step.",
    "There is a mistake in the second step, check it again.",
    "I am not sure that {wrong} is right. What did you add?",
)
_BLIND = ("Great work, let's move on to the next problem.", "Nice! Now another question about shapes.")
_REVEALS = ("No, it is {left} + {right} = {answer}.", "The mistake is at the end: the answer is {answer}.")


def cima_rows(lessons: int, seed: int) -> list[dict[str, Any]]:
    """Flat rows of a language tutor: a few replies in each of some lessons."""
    return [row for lesson in range(lessons) for row in _language_lesson(lesson, Random(f"{seed}|{lesson}"))]


def _language_lesson(number: int, random: Random) -> list[dict[str, Any]]:
    (obj_en, obj), (color_en, color) = random.choice([*_NOUNS.items()]), random.choice([*_COLOURS.items()])
    prep_en, prep = random.choice([*_PLACES.items()])
    target = {"obj": obj, "engObj": obj_en, "prep": prep, "engPrep": prep_en, "color": color, "engColor": color_en}
    opening = [f"Lesson {number}: please fill in the blank.", "Let me see."]
    rows = []
    for reply in range(5):
        wrong = random.choice([noun for noun in _NOUNS.values() if noun != obj])
        student, moves = random.choice(
            [
                (f"What is {obj_en}?", ["hint"]),
                (f"How do I say {obj_en}?", ["hint", "question"]),
                (f"{prep} {wrong} {color}", ["correction"]),
                (f"{prep} {wrong} {color}", ["question"]),
                (f"{prep} {obj} {color}", ["confirmation"]),
                (f"{prep} {obj}", ["confirmation", "question"]),
            ]
        )
        slots = {"english": obj_en, "missing": obj, "letter": obj[0], "wrong": wrong}
        templates = {"hint": _HINTS, "correction": _CORRECTIONS, "confirmation": _CONFIRMATIONS, "question": _QUESTIONS}
        text = " ".join(random.choice(templates[move]).format(**slots) for move in moves)
        if random.random() < _NOISE:  # people err, too
            moves = [random.choice(["hint", "question", "correction"])]
        actions = {move: move in moves for move in ("question", "hint", "correction", "confirmation", "other")}
        rows.append(
            {
                "id": f"made-{number}-{reply}",
                "history": [*opening, "Go on.", student],
                "student_actions": {},
                "target": target,
                "tutor": text,
                "tutor_actions": actions,
            }
        )
    return rows


def mrbench_rows(lessons: int, seed: int) -> list[dict[str, Any]]:
    """Flat rows of a maths tutor: a few replies to the mistake in each of some problems."""
    rows = []
    for number in range(lessons):
        random = Random(f"maths|{seed}|{number}")
        left, right = random.randint(21, 60), random.randint(21, 60)
        slots = {"left": left, "right": right, "answer": left + right, "wrong": left + right + random.randint(1, 9)}
        history = (
            f"Tutor: Problem {number}: Ann has {left} apples and gets {right} more. How many has she? \n "
            "Student: She has {wrong}. \n Tutor: How did you get there? \n Student: I added and got {wrong}."
        ).format(**slots)
        for reply in range(6):
            kind = random.choice(["mistake", "mistake", "blind", "reveals"])
            text = random.choice({"mistake": _MISTAKES, "blind": _BLIND, "reveals": _REVEALS}[kind]).format(**slots)
            if random.random() < _NOISE:
                kind = random.choice(["mistake", "blind", "reveals"])
            labels = {
                "Mistake_Identification": "No" if kind == "blind" else "Yes",
                "Revealing_of_the_Answer": "Yes (and the answer is correct)" if kind == "reveals" else "No",
                "Actionability": "Yes" if kind == "mistake" else random.choice(["No", "To some extent"]),
            }
            solution = f"{left} + {right} = {left + right} \n {left + right}" if number % 4 else "Not Available"
            rows.append(
                {
                    "id": f"{number}-{reply}",
                    "history": history,
                    "solution": solution,
                    "tutor": text,
                    "labels": labels,
                }
            )
    return rows


def mathdial_rows(lessons: int, seed: int) -> list[dict[str, Any]]:
    """Flat rows of whole dialogues on a maths problem."""
    rows = []
    for number in range(lessons):
        random = Random(f"dialogue|{seed}|{number}")
        left, right = random.randint(21, 60), random.randint(21, 60)
        turns = []
        for _ in range(4):
            move = random.choice(["focus", "probing", "telling", "generic"])
            text = {
                "focus": "What do you know about the apples?",
                "probing": "Why did you subtract?",
                "telling": f"You need to add here: {left} + {right} = {left + right}.",
                "generic": "Hello Ann, thank you.",
            }[move]
            turns.append({"role": "teacher", "move": move, "text": text})
            turns.append({"role": "student", "move": None, "text": f"I took {right} away."})
        rows.append(
            {
                "id": str(number),
                "question": f"Problem {number}: {left} apples and {right} more. How many?",
                "ground_truth": f"{left} + {right}\n {left + right}",
                "student_incorrect_solution": f"{left} less {right}",
                "turns": turns,
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def write_data(folder: Path, lessons: int = 36, seed: int = 1) -> list[str]:
    """Write a file of each data set, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"cima": cima_rows, "mrbench": mrbench_rows, "mathdial": mathdial_rows}
    return [str(write_rows(folder / f"{name}.jsonl", rows(lessons, seed))) for name, rows in files.items()]
