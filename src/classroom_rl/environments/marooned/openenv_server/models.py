"""The messages between the server and its clients."""

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class MaroonedAction(Action):
    """One decision of the sailor."""

    message: str = Field(
        max_length=20_000,
        description="REASONING: one sentence, then on a line of its own ACTION: one command; or a command alone, "
        "such as MOVE NORTH. What cannot be read becomes WAIT and costs a little.",
    )


class MaroonedObservation(Observation):
    """What the sailor knows before a decision. `reward` is the scaled reward since the last decision."""

    text: str = Field(description="What the sailor knows now, as a model reads it")
    prompt: str = Field(default="", description="The rules as a model reads them; only reset gives them")
    seat: int = Field(description="The sailor's number")
    role: str = Field(description="colonist or traitor")
    possible: list[str] = Field(default_factory=list, description="The commands that are possible now")
    fault: str = Field(default="", description="Why the last action was not possible; empty if it was")
    outcome: str = Field(
        default="",
        description="escaped, stranded or dead; empty while the game goes on, or if it goes on without the sailor",
    )


class MaroonedState(State):
    """The state of the game on the server. It contains nothing that is hidden from the sailor."""

    preset: str = ""
    island: int | None = None
    seat: int | None = None
    role: str = ""
    day: int = 0
    turn: int = 0
    ship_progress: float = 0.0
    total_reward: float = 0.0
    outcome: str = ""
