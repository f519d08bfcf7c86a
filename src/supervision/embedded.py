"""The embedded supervisors by name."""

from config.values import EMBEDDED_SUPERVISORS, RULES
from src.errors import ConfigError
from src.rollout.reviews import Supervisor
from src.supervision.rubric_supervisor import RubricSupervisor
from src.supervision.rules_supervisor import Rules, RulesSupervisor


def embedded_supervisor(name: str, rules: Rules | None = None) -> Supervisor:
    """The supervisor without a model that `supervisor_model.model_name_or_path` names.

    Args:
        rules: what `rules` stands for in the environment; None for the classroom's.

    Raises:
        ConfigError: if there is no such supervisor.
    """
    if name not in EMBEDDED_SUPERVISORS:
        raise ConfigError(f"There is no embedded supervisor {name!r}; there are {', '.join(EMBEDDED_SUPERVISORS)}.")
    return RulesSupervisor(rules) if name == RULES else RubricSupervisor()
