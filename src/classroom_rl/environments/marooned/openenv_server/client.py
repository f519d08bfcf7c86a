"""A client of the server, which talks OpenEnv's WebSocket protocol."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from classroom_rl.environments.marooned.openenv_server.models import MaroonedAction, MaroonedObservation, MaroonedState


class MaroonedClient(EnvClient[MaroonedAction, MaroonedObservation, MaroonedState]):
    """Plays one seat on a server. `MaroonedClient(base_url="http://127.0.0.1:8000").sync()` is the synchronous client.
    `reset` takes the options of `MaroonedEnvironment.reset`."""

    def _step_payload(self, action: MaroonedAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[MaroonedObservation]:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = MaroonedObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> MaroonedState:
        return MaroonedState(**payload)
