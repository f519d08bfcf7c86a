"""The errors that a user may see. Each message says what was given, what is allowed, and how to fix it.

Programs print only the message and end with exit status 2; the server answers with the HTTP status `status` and the
message.
"""

from typing import Any


class ClassroomError(Exception):
    """Base of all errors that are shown as a message instead of a traceback. `status` is the HTTP status."""

    status = 500


class ConfigError(ClassroomError):
    """A configuration that cannot be run."""

    status = 422


class DataError(ClassroomError):
    """A dataset, a problem or a prompt template that cannot be used."""

    status = 422


class ContextOverflow(DataError):
    """A conversation leaves no room in a model's context. Only that conversation ends."""


class UnsafeCheckpoint(ClassroomError):
    """A checkpoint that is damaged, or that would run code when it is loaded."""


class UnknownConversation(ClassroomError):
    """A conversation or request id that this server does not know."""

    status = 404


class AccessDenied(ClassroomError):
    """A request without the server's token."""

    status = 401


class ForeignRequest(ClassroomError):
    """A request to a server without a token that may come from another site's web page."""

    status = 403


class RequestTooLarge(ClassroomError):
    """A request that is larger than the server accepts."""

    status = 413


class PolicyMismatch(ClassroomError):
    """A batch was requested for another policy version than the loaded one."""

    status = 409


class RequestConflict(ClassroomError):
    """A request id was reused with a different body."""

    status = 409


class DeadlineExceeded(ClassroomError):
    """Something did not happen in time. The message says what was waited for, how long, and where the log is."""

    status = 504


class ServerLost(DeadlineExceeded):
    """A server that ended, or cannot be reached, and did not come back in the time that it may take. With other
    servers the training goes on."""


class EngineFailure(ClassroomError):
    """An inference engine died or refused a request."""

    status = 503


class RolloutsStopped(ClassroomError):
    """Rollouts that could not continue: a user's function raised an error, or the engine died.

    Attributes:
        rollout_id, step: the rollout that stopped first, and the index of the step at which it stopped, from 0.
        done: the `RolloutSet` of all rollouts up to where each of them stopped; None until it is known.
    """

    def __init__(self, message: str, rollout_id: str, step: int):
        super().__init__(message)
        self.rollout_id, self.step = rollout_id, step
        self.done: Any = None  # no type: `rollout` imports this module


class StorageError(ClassroomError):
    """Something that cannot be written: a full disk, a missing permission."""

    status = 507


class GpuFull(ClassroomError):
    """A sleeping engine cannot wake up, because its GPU has no free memory for it."""

    status = 423


class JudgeOutputError(ClassroomError):
    """A judge's answer without a verdict. The message quotes it; `answer` is the full text, or empty where the caller
    has it already."""

    def __init__(self, message: str, answer: str = ""):
        super().__init__(message)
        self.answer = answer


class TooManyFailedJudgements(ClassroomError):
    """More conversations of a batch than allowed ended without a verdict."""


class TrainingCollapsed(ClassroomError):
    """A training that was stopped, because held-out lessons show that the policy became worse than it was at first."""


class RequestRefused(ClassroomError):
    """A provider refused this one request and would refuse it again; other requests may succeed."""

    status = 502


class RequestTooLong(RequestRefused):
    """A provider refused a request that does not fit into its model's context."""


class ContentRefused(RequestRefused):
    """The content of a request is refused: by a provider's filter, by the model itself, or because a tutor's text fills
    the judge's context."""


class ProviderFailure(ClassroomError):
    """A provider refuses every request, or did not answer before the deadline. The run stops; its unanswered requests
    do not count as failed."""

    status = 424


class SpendingCapReached(ProviderFailure):
    """The next request could exceed the configured spending cap."""

    status = 402
