"""The errors that a user can meet. Each message says what was given, the rule, and the fix.

Programs print the message alone and end with status 2; the server answers with `status` and the message.
"""


class ClassroomError(Exception):
    """Base of all errors that are answered with a message instead of a traceback."""

    status = 500


class ConfigError(ClassroomError):
    """A configuration that cannot be run."""

    status = 422


class DataError(ClassroomError):
    """A dataset, a problem or a prompt template that cannot be used."""

    status = 422


class ContextOverflow(DataError):
    """What was said in one conversation leaves no room in a model's context. Only that conversation ends."""


class UnsafeCheckpoint(ClassroomError):
    """A checkpoint that is damaged, or that would run code when it is loaded."""


class UnknownConversation(ClassroomError):
    """A conversation or request id that this server does not know."""

    status = 404


class AccessDenied(ClassroomError):
    """A request without the server's token."""

    status = 401


class ForeignRequest(ClassroomError):
    """A request to a server without a token that another site's page may have sent."""

    status = 403


class RequestTooLarge(ClassroomError):
    """A request that is larger than the server takes."""

    status = 413


class PolicyMismatch(ClassroomError):
    """A batch was asked for under another policy version than the one loaded."""

    status = 409


class RequestConflict(ClassroomError):
    """A request id was used again with another body."""

    status = 409


class DeadlineExceeded(ClassroomError):
    """Something that was awaited did not come. The message names what, for how long, and where the log is."""

    status = 504


class EngineFailure(ClassroomError):
    """An inference engine died or refused a request."""

    status = 503


class RolloutsStopped(ClassroomError):
    """Rollouts that could not go on: a function of the user raised an error, or the engine died.

    Attributes:
        rollout_id, step: the rollout that was stopped first, and the number of the step that it was at.
        done: the `RolloutSet` of all rollouts, as far as they came; None until it is known.
    """

    def __init__(self, message: str, rollout_id: str, step: int):
        super().__init__(message)
        self.rollout_id, self.step = rollout_id, step
        self.done = None


class StorageError(ClassroomError):
    """Something that cannot be written: a full disk, a missing permission."""

    status = 507


class GpuFull(ClassroomError):
    """An engine that slept finds no room on its GPU."""

    status = 423


class JudgeOutputError(ClassroomError):
    """A judge's answer that holds no verdict. The message quotes it; `answer` is all of it, unless the receiver of the
    error has it anyway."""

    def __init__(self, message: str, answer: str = ""):
        super().__init__(message)
        self.answer = answer


class TooManyFailedJudgements(ClassroomError):
    """More conversations of a batch than allowed ended without a verdict."""


class RequestRefused(ClassroomError):
    """A provider refused this one request and would refuse it again; others may fare better."""

    status = 502


class RequestTooLong(RequestRefused):
    """A provider refused a request that does not fit into its model's context."""


class ContentRefused(RequestRefused):
    """What a request is about will not be read: a provider's filter, a model's refusal, or a judge whose context this
    tutor's words fill."""


class ProviderFailure(ClassroomError):
    """A provider turns every request away, or has not answered until the deadline. The run stops; nothing that it
    would have answered counts as failed."""

    status = 424


class SpendingCapReached(ProviderFailure):
    """The next request could pass the configured spending cap."""

    status = 402
