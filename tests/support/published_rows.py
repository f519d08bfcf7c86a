"""Made-up rows in the published forms of MRBench, MathDial and MathTutorBench."""

import copy
import json
from pathlib import Path
from typing import Any

FULL_MARKS = {
    "Mistake_Identification": "Yes",
    "Mistake_Location": "To some extent",
    "Revealing_of_the_Answer": "No",
    "Providing_Guidance": "Yes",
    "Actionability": "Yes",
    "Coherence": "Yes",
    "Tutor_Tone": "Encouraging",
    "Humanlikeness": "Yes",
}
LEAK = FULL_MARKS | {
    "Revealing_of_the_Answer": "Yes (and the answer is correct)",
    "Actionability": "No",
    "Tutor_Tone": "Neutral",
}
BLIND = FULL_MARKS | {
    "Mistake_Identification": "No",
    "Mistake_Location": "No",
    "Revealing_of_the_Answer": "Yes (but the answer is incorrect)",
    "Actionability": "To some extent",
}


def mrbench_conversation(number: int) -> dict[str, Any]:
    """A conversation as published, with three labelled replies."""
    eggs = 10 + number
    replies = {
        "Expert": ("Good start! Have another look at the second basket. How many are in it?", FULL_MARKS),
        "Novice": (f"The answer is {eggs + 5}.", LEAK),
        "GPT4": (f"Right, it is {eggs}.", BLIND),
    }
    return {
        "conversation_id": f"made-{number}",
        "conversation_history": (
            f"Tutor: A basket has {eggs} eggs, another has 5. How many?\xa0\n\xa0Student: There are {eggs}."
        ),
        "Data": "Made",
        "Split": "test",
        "Ground_Truth_Solution": f"{eggs} + 5 = {eggs + 5}\n {eggs + 5}",
        "anno_llm_responses": {
            tutor: {"response": text, "annotation": dict(labels)} for tutor, (text, labels) in replies.items()
        },
    }


def mrbench_flat(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    """The same replies, one in a row."""
    return [
        {
            "id": f"{conversation['conversation_id']}-{tutor}",
            "history": conversation["conversation_history"],
            "solution": conversation["Ground_Truth_Solution"],
            "tutor": reply["response"],
            "labels": dict(reply["annotation"]),
        }
        for tutor, reply in conversation["anno_llm_responses"].items()
    ]


def mathdial_flat(number: int) -> dict[str, Any]:
    """A dialogue with three turns of the teacher that answer the student: a question, a telling one, a generic one."""
    apples = 20 + number
    return {
        "question": f"Ann has {apples} apples and gets 15 more. How many has she?",
        "ground_truth": f"{apples} + 15 = {apples + 15}\n {apples + 15}",
        "student_incorrect_solution": f"She has {apples - 15}.",
        "turns": [
            {"role": "teacher", "move": "generic", "text": "Hi, talk me through it."},
            {"role": "student", "move": None, "text": "I took 15 away."},
            {"role": "teacher", "move": "focus", "text": "Does she get apples, or give them away?"},
            {"role": "student", "move": None, "text": "She gives them away."},
            {"role": "teacher", "move": "telling", "text": f"No, you need to add: the answer is {apples + 15}."},
            {"role": "student", "move": None, "text": "Thank you."},
            {"role": "teacher", "move": "generic", "text": "See you tomorrow!"},
        ],
    }


def mathdial_published(row: dict[str, Any]) -> dict[str, Any]:
    """The same dialogue as published, its turns as one text."""
    parts = [
        f"Teacher: ({turn['move']}){turn['text']}" if turn["role"] == "teacher" else f"Ann: {turn['text']}"
        for turn in row["turns"]
    ]
    fields = {key: value for key, value in row.items() if key != "turns"}
    return fields | {"qid": 7, "self-correctness": "Yes", "conversation": "|EOM|".join(parts)}


def verified(number: int) -> dict[str, Any]:
    """A row of MathTutorBench's stepverify.json; the second of three steps is wrong."""
    eggs = 10 + number
    return {
        "problem": f"A basket has {eggs} eggs, another has twice as many. How many eggs are there?",
        "reference_solution": f"The other has {2 * eggs}.\nTogether {3 * eggs}.\n {3 * eggs}",
        "student_incorrect_solution": [
            f"One basket has {eggs}.",
            f"The other has {eggs + 2}.",
            f"Together {2 * eggs + 2}.",
            f"{2 * eggs + 2}",
        ],
        "incorrect_index": 1,
        "student_correct_response": f"The other has {2 * eggs}, so there are {3 * eggs}.",
        "dialog_history": [
            {"user": "Teacher", "text": "How did you do it?"},
            {"user": "Student", "text": f"I added 2 and got {2 * eggs + 2}."},
        ],
    }


def bridged(number: int) -> dict[str, Any]:
    """A row of MathTutorBench's mathdial_bridge.json."""
    row = verified(number)
    dialogue = [*row["dialog_history"], {"user": "Teacher", "text": "What does twice as many mean?"}]
    return {
        "problem": row["problem"],
        "reference_solution": row["reference_solution"],
        "dialog_history": dialogue,
    }


def solved(number: int) -> dict[str, Any]:
    """A row of GSM8K."""
    return {"question": f"What is 1000 + {number}?", "answer": f"1000 + {number} = 1,00{number}\n#### 1,00{number}"}


def with_field(row: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a row with another value at a dotted path."""
    changed = copy.deepcopy(row)
    *keys, last = path.split(".")
    node: Any = changed
    for key in keys:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[int(last) if isinstance(node, list) else last] = value
    return changed


def write_json(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as one JSON list."""
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)
