"""Which weights an engine holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyVersion:
    """Which weights the teacher engine holds: the run that published them, and its counter.

    A server that was never published to holds the model it was started with: run "" and version 0.
    """

    run_id: str = ""
    version: int = 0

    def __str__(self) -> str:
        return f"{self.run_id or 'initial weights'} v{self.version}"
