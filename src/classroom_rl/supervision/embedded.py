"""The embedded supervisors by name, and the one of them that reviews messages in any lesson and on any maths problem by
rules.
"""

from collections.abc import Callable

from classroom_rl.config.values import EMBEDDED_SUPERVISORS, RULES
from classroom_rl.errors import ConfigError
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.rollout.reviews import MessageToReview, Review, Supervisor
from classroom_rl.supervision.faults import Fault, faults_of_form, review_of
from classroom_rl.supervision.language_rules import language_correction, language_faults
from classroom_rl.supervision.maths_rules import maths_correction, maths_faults
from classroom_rl.supervision.toy_supervisor import RubricSupervisor, review_by_rubric

Rules = Callable[[MessageToReview], Review]
"""Rules that review a message."""


class RulesSupervisor:
    """A supervisor without a model. The same message with the same facts always gets the same review.

    Args:
        rules: the environment's rules; None for those of the classroom.

    In the classroom, lessons of the quickstart are reviewed by the rubric, problems with a reference answer by the
    rules for maths, lesson plans by the rules for languages. On any other problem only the form of a message is
    reviewed.
    """

    def __init__(self, rules: Rules | None = None):
        self._rules = rules or review_by_rules

    async def review(self, about: MessageToReview) -> Review:
        """The review; without a verdict if rules say nothing about such a message."""
        return self._rules(about)


def review_by_rules(about: MessageToReview, readers: MessageReaders | None = None) -> Review:
    """The rules' review of a message, with a correction if the message without some of its words would be valid.

    Args:
        readers: trained readers, for what they read better than rules; None for rules alone.
    """
    plan = read_plan(about.problem)
    if plan.lesson:
        return review_by_rubric(about)
    if about.answer.strip():
        faults = maths_faults(about, readers)
        return review_of(faults, maths_correction(about, readers) if faults else None)
    if plan.phrases:
        faults = language_faults(about, plan, readers)
        return review_of(faults, language_correction(about, plan, readers) if faults else None)
    return _review_form(faults_of_form(about))


def _review_form(faults: list[Fault]) -> Review:
    if faults:
        return review_of(faults)
    return Review(
        error="The problem is no lesson plan and has no reference answer: rules cannot review messages on it."
    )


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
