"""The embedded supervisors by name."""

from classroom_rl.config.values import EMBEDDED_SUPERVISORS, RULES
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.reviews import Supervisor
from classroom_rl.supervision.rules_supervisor import Rules, RulesSupervisor
from classroom_rl.supervision.toy_supervisor import RubricSupervisor


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
