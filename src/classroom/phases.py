"""The phases of a lesson: what all conversations do at a time under `generation.schedule: phased`."""

from src.classroom.conversation import State
from src.rollout.scheduler import Phase

PHASES = (
    Phase("dialogue", (State.TEACHER_TURN, State.STUDENT_TURN), ("teacher", "student")),
    Phase("judging", (State.JUDGE_TURN,), ("judge",)),
    Phase("solutions", (State.GENERATE_SOLUTION,), ("student",)),
    Phase("rewards", (State.REWARD_TURN,), ("reward",)),
)
"""In their order. Solutions are graded in the last one, by the reward model if there is one. Seats that are no engines
of this server (an API, the embedded rubric, none at all) need no room."""
