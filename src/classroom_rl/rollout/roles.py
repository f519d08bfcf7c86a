"""The loaded models of an environment, by seat. A seat is a role; its name comes from the config key: `teacher_model`
is the model in the seat `teacher`."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional

from classroom_rl.rollout.engine import Api, EmbeddedJudge, Engine, EngineHealth, Judge, Teacher
from classroom_rl.rollout.post_test import Examiner
from classroom_rl.rollout.reviews import Supervisor

POLICY_SEAT = "teacher"
"""The seat of the policy in every environment: training updates `teacher_model`."""


class LoadedModels:
    """The interface of loaded models that a server needs, for every environment.

    Attributes:
        engines: the vLLM engines of this server, by seat.
        apis: the clients of the seats behind an API, by seat.
    """

    engines: Mapping[str, Engine]
    apis: Mapping[str, Api]

    @property
    def policy(self) -> Teacher:
        """The model under training."""
        raise NotImplementedError

    @property
    def spent_usd(self) -> float | None:
        """Dollars that this run spent on all seats behind an API; None if there are no such seats."""
        return sum(api.ledger.spent_usd for api in self.apis.values()) if self.apis else None

    def health(self) -> dict[str, EngineHealth]:
        """The health of each seat except an embedded judge.

        Raises:
            EngineFailure: if an engine died.
        """
        remote = {
            seat: EngineHealth(model=api.model, engine="api", engine_version=api.url, pids=[], trouble=api.trouble)
            for seat, api in self.apis.items()
        }
        own = {} if POLICY_SEAT in self.apis else {POLICY_SEAT: self.policy.health()}  # an engine's, or a script's
        return own | {seat: engine.health() for seat, engine in self.engines.items()} | remote

    def check_alive(self) -> None:
        """Raise an `EngineFailure` if an engine died."""
        for engine in self.engines.values():
            engine.check_alive()

    def shutdown(self) -> None:
        """End the processes of all engines, at once because each takes seconds, and close the ledgers of the APIs."""
        with ThreadPoolExecutor(max(1, len(self.engines))) as pool:
            for _ in pool.map(lambda engine: engine.shutdown(), self.engines.values()):
                pass  # an engine's error is raised here
        for api in self.apis.values():
            api.ledger.close()


@dataclass
class Seats(LoadedModels):
    """The models that a server loads and hands to the environment.

    Attributes:
        models: engines, models behind an API, or a script, by seat; without the judge.
        judge: the judge; None if nothing is judged.
        supervisor: the supervisor; None if nothing is supervised.
        examiner: knows the post-test on every problem; None if there is none.
    """

    models: Mapping[str, Any]
    engines: Mapping[str, Engine] = field(default_factory=dict)
    apis: Mapping[str, Api] = field(default_factory=dict)
    judge: Optional[Judge | EmbeddedJudge] = None
    supervisor: Optional[Supervisor] = None
    examiner: Optional[Examiner] = None

    @property
    def policy(self) -> Teacher:
        """The model under training."""
        return self.models[POLICY_SEAT]
