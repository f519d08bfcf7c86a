"""The models in an environment's seats, once they are loaded. A seat has the name of its key in the configuration:
`teacher_model` is the model in the seat `teacher`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from src.rollout.engines import Api, EmbeddedJudge, Engine, EngineHealth, Judge, Teacher

POLICY_SEAT = "teacher"
"""The seat under training, in every environment: `teacher_model` is what a configuration trains."""


class LoadedModels:
    """What a server needs to know of the models in the seats, whatever the environment.

    Attributes:
        engines: the vLLM engines of this server, by seat.
        apis: what the seats behind an API are asked through, by seat.
    """

    engines: Mapping[str, Engine]
    apis: Mapping[str, Api]

    @property
    def policy(self) -> Teacher:
        """The model in the seat under training."""
        raise NotImplementedError

    def health(self) -> dict[str, EngineHealth]:
        """What is in each seat but an embedded judge.

        Raises:
            EngineFailure: if an engine died.
        """
        remote = {
            seat: EngineHealth(model=api.model, engine="api", engine_version=api.url, pids=[])
            for seat, api in self.apis.items()
        }
        own = {} if POLICY_SEAT in self.apis else {POLICY_SEAT: self.policy.health()}  # an engine's, or a script's
        return own | {seat: engine.health() for seat, engine in self.engines.items()} | remote

    def check_alive(self) -> None:
        """Raises:
        EngineFailure: if an engine died.
        """
        for engine in self.engines.values():
            engine.check_alive()

    def shutdown(self) -> None:
        """End the processes of all engines, and close what is open."""
        for engine in self.engines.values():
            engine.shutdown()
        for api in self.apis.values():
            api.ledger.close()


@dataclass
class Seats(LoadedModels):
    """The models in the seats of any environment: what a server opens, and hands to the environment.

    Attributes:
        models: who answers in each seat, by seat: engines, models behind an API, a script. Without the judge.
        judge: who judges; None when nothing is judged.
    """

    models: Mapping[str, Any]
    engines: Mapping[str, Engine] = field(default_factory=dict)
    apis: Mapping[str, Api] = field(default_factory=dict)
    judge: Optional[Judge | EmbeddedJudge] = None

    @property
    def policy(self) -> Teacher:
        """The model in the seat under training."""
        return self.models[POLICY_SEAT]
