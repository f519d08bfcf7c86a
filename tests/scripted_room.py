"""A classroom of scripted engines with a real tokenizer: what they say is set per test."""

import asyncio
import json
from pathlib import Path

from config.base import GenerationConfig
from src.api import ConversationRecord, SampleRequest
from src.batches import BatchDesk
from src.classroom import Classroom, classroom_rules
from src.inference_providers.base import Sampling
from src.inference_providers.scripted_inference import ScriptedEngine, ScriptedJudge
from src.journal import Journal
from src.phases import PHASED, Concurrent, PhaseClock
from src.rewards import default_weights
from src.seats import Seats

SCORES = {
    "task_final_score": 1,
    "task_final_reasoning": "",
    "forward_progression_score": 0.5,
    "forward_progression_reasoning": "",
    "overall_momentum_score": 5,
    "overall_momentum_reasoning": "",
}
TEMPLATES = {
    "teacher": "Teach {{ problem }} to {{ student_name or 'someone' }}.{% if include_thinking %} Think.{% endif %}",
    "student": "You are {{ student_name or 'someone' }}.",
    "error": "Make an error.",
    "attempt": "Attempt: {{ problem }}",
    "wrapper": "I tried: {{ attempt }}",
    "final": "Now solve it.",
}


class Room:
    """A classroom of scripted engines: what they say is set per test. `turned_to` are the seats that each phase asked
    for, if the schedule has phases."""

    def __init__(self, tokenizer, folder: Path):
        self.tokenizer = tokenizer
        self.folder = folder
        self.teacher = ScriptedEngine(tokenizer, lambda _: "Say hello.")
        self.student = ScriptedEngine(tokenizer, lambda _: "Hello.")
        self.judge = ScriptedJudge(lambda rule, conversation, attempt: json.dumps(SCORES))
        self.reward = None
        self.turned_to: list[tuple[str, ...]] = []

    def open(self, generation: GenerationConfig, keep: int = 8) -> BatchDesk:
        weights = default_weights(tuple(generation.judges_rules_prompts_paths), frozenset({"pedagogical_eval"}))
        rules = classroom_rules(generation, weights, teacher_context=900, graded=True)
        seats = Seats(
            self.teacher,
            Sampling(1.0, max_tokens=generation.max_tokens_per_turn),
            self.student,
            Sampling(0.6, max_tokens=generation.max_tokens_per_turn),
            self.judge,
            {"teacher": self.teacher},
            reward=self.reward,
        )
        journal = Journal(self.folder)
        schedule = PhaseClock(self._turn_to) if generation.schedule == PHASED else Concurrent()
        return BatchDesk(Classroom(generation, seats, journal, weights, rules, schedule), journal, keep)

    async def _turn_to(self, seats: tuple[str, ...]) -> None:
        """In place of engines that sleep and wake."""
        self.turned_to.append(seats)
        await asyncio.sleep(0)

    def play(self, generation: GenerationConfig, **request) -> list[ConversationRecord]:
        body = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0} | request
        return asyncio.run(self.open(generation).sample(SampleRequest(**body))).conversations
