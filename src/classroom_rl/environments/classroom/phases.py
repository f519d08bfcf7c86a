"""The phases of a conversation under `generation.schedule: phased`."""

from classroom_rl.environments.classroom.conversation import State
from classroom_rl.rollout.scheduler import Phase

DIALOGUE_SEATS = ("teacher", "student", "supervisor")
DIALOGUE = (State.TEACHER_TURN, State.SUPERVISOR_TURN, State.STUDENT_TURN)
PHASES = (
    Phase("dialogue", DIALOGUE, DIALOGUE_SEATS),
    Phase("judging", (State.JUDGE_TURN,), ("judge",)),
    Phase("solutions", (State.POST_TEST, State.GENERATE_SOLUTION), ("student",)),
    Phase("rewards", (State.REWARD_TURN,), ("reward",)),
)
"""The phases in order. The last one grades solutions, with the reward model if there is one. A seat without an engine
of this server (an API, the embedded rubric, an empty seat) needs no GPU memory."""
