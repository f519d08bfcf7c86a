"""The version of an engine's weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyVersion:
    """The version of the weights in the teacher's engine: the run that published them, and a counter.

    Before the first publication, the engine holds the model that the server loaded: run "" and version 0.
    """

    run_id: str = ""
    version: int = 0

    def __str__(self) -> str:
        return f"{self.run_id or 'initial weights'} v{self.version}"
