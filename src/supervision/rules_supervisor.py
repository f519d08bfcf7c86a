"""The embedded supervisor `rules`: reviews messages in any lesson and on any maths problem by rules on the text."""

from src.message_rules.plans import read_plan
from src.rollout.reviews import MessageToReview, Review
from src.supervision.faults import Fault, faults_of_form, review_of
from src.supervision.language_rules import language_correction, language_faults
from src.supervision.maths_rules import maths_correction, maths_faults
from src.supervision.rubric_supervisor import review_by_rubric


class RulesSupervisor:
    """A supervisor without a model. The same message with the same facts always gets the same review.

    Lessons of the quickstart are reviewed by the rubric, problems with a reference answer by the rules for maths,
    lesson plans by the rules for languages. On any other problem only the form of a message is reviewed.
    """

    async def review(self, about: MessageToReview) -> Review:
        """The review; without a verdict if the problem is neither, and the form of the message is right."""
        return review_by_rules(about)


def review_by_rules(about: MessageToReview) -> Review:
    """The rules' review of a message, with a correction if the message without some of its words would be valid."""
    plan = read_plan(about.problem)
    if plan.lesson:
        return review_by_rubric(about)
    if about.answer.strip():
        faults = maths_faults(about)
        return review_of(faults, maths_correction(about) if faults else None)
    if plan.phrases:
        faults = language_faults(about, plan)
        return review_of(faults, language_correction(about, plan) if faults else None)
    return _review_form(faults_of_form(about))


def _review_form(faults: list[Fault]) -> Review:
    if faults:
        return review_of(faults)
    return Review(
        error="The problem is no lesson plan and has no reference answer: rules cannot review messages on it."
    )
