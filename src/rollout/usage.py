"""What a batch took of a model behind an API."""

from contextvars import ContextVar
from dataclasses import dataclass, field

BATCH: ContextVar[str] = ContextVar("batch", default="")
"""The piece of work that requests belong to, for the figures of a step; set by whoever starts it."""


@dataclass
class Usage:
    """What a batch took of one seat's API: requests sent, how many of them were repeats after a failure, replies that
    were paid for and of no use (a judge's without a verdict), failures by kind, the provider's tokens and dollars, and
    dollars held for requests whose fate is unknown. `run_cost_usd` is the whole run's spending so far."""

    calls: int = 0
    retries: int = 0
    unusable: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    reserved_usd: float = 0.0
    run_cost_usd: float = 0.0
