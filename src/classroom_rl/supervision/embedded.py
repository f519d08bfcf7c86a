"""The embedded supervisors by name, and the rule supervisor, which reviews messages in any lesson and on any maths
problem.
"""

from collections.abc import Callable

from classroom_rl.config.values import EMBEDDED_SUPERVISORS, RULES
from classroom_rl.errors import ConfigError
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.rollout.reviews import MessageToReview, Review, Supervisor
from classroom_rl.supervision.faults import faults_of_form, review_of
from classroom_rl.supervision.language_rules import language_correction, language_faults
from classroom_rl.supervision.maths_rules import maths_correction, maths_faults
from classroom_rl.supervision.toy_supervisor import RubricSupervisor, review_by_rubric

Rules = Callable[[MessageToReview], Review]
"""A function that reviews a message by rules."""


class RulesSupervisor:
    """The rule supervisor. It needs no model: the same message with the same facts always gets the same review.

    In the classroom, messages in lessons of the quickstart are reviewed by the toy judge, on problems with a reference
    answer by the rules for maths, and on lesson plans by the rules for languages. On any other problem, only the form
    of a message is reviewed.

    Args:
        rules: the rules of the environment; None for those of the classroom.
    """

    def __init__(self, rules: Rules | None = None):
        self._rules = rules or review_by_rules

    async def review(self, request: MessageToReview) -> Review:
        """The review; it has no verdict if the rules cannot decide about such a message."""
        return self._rules(request)


def review_by_rules(request: MessageToReview, readers: MessageReaders | None = None) -> Review:
    """The classroom's rules: review a message, with a correction if a shortened version of it is valid.

    Args:
        request: the message to review.
        readers: trained move classifiers for labels that they predict better than rules; None for rules alone.
    """
    plan = read_plan(request.problem)
    if plan.lesson:
        return review_by_rubric(request)
    if request.answer.strip():
        faults = maths_faults(request, readers)
        return review_of(faults, maths_correction(request, readers) if faults else None)
    if plan.phrases:
        faults = language_faults(request, plan, readers)
        return review_of(faults, language_correction(request, plan, readers) if faults else None)
    if faults := faults_of_form(request):
        return review_of(faults)
    return Review(
        error="The problem is no lesson plan and has no reference answer: rules cannot review messages on it."
    )


def embedded_supervisor(name: str, rules: Rules | None = None) -> Supervisor:
    """The supervisor without a model that `supervisor_model.model_name_or_path` names.

    Args:
        name: one of `EMBEDDED_SUPERVISORS`.
        rules: the rules of the environment, which the name `rules` selects; None for those of the classroom.

    Raises:
        ConfigError: if there is no such supervisor.
    """
    if name not in EMBEDDED_SUPERVISORS:
        raise ConfigError(f"There is no embedded supervisor {name!r}; there are {', '.join(EMBEDDED_SUPERVISORS)}.")
    return RulesSupervisor(rules) if name == RULES else RubricSupervisor()
