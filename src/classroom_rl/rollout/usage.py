"""What a batch used of a model behind an API."""

from contextvars import ContextVar
from dataclasses import dataclass, field

BATCH: ContextVar[str] = ContextVar("batch", default="")
"""The id of the batch or check that API requests belong to, for the metrics of a step; whoever starts one sets it."""


@dataclass
class Usage:
    """What a batch used of one seat's API.

    Attributes:
        calls, retries: requests sent, and those of them that repeated a failed one.
        unusable: paid replies of no use, such as a judge's without a verdict.
        failures: failures by kind.
        prompt_tokens, completion_tokens, cost_usd: by the provider's count.
        reserved_usd: dollars reserved for requests of which it is unknown whether they were billed.
        run_cost_usd: the spending of the whole run so far.
    """

    calls: int = 0
    retries: int = 0
    unusable: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    reserved_usd: float = 0.0
    run_cost_usd: float = 0.0
