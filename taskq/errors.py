"""Every error taskq raises, and the exceptions a task raises to steer its own run."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

#: The longest delay that anything here accepts, in seconds.
_EIGHT_YEARS: Final = 86_400.0 * 365 * 8


class TaskQError(Exception):
    """The root of every error that taskq reports to a caller."""


# -- what the caller gave -------------------------------------------------------------


class ConfigurationError(TaskQError, ValueError):
    """A setting, URL, option or declaration cannot work; the message names it and the remedy."""


class InvalidArgumentError(ConfigurationError):
    """An argument of a call is out of range or of the wrong type."""


class EncodeError(TaskQError, ValueError):
    """A value cannot travel; the message holds the path to it, such as ``kwargs['items'][3].when``."""


class PayloadTooLargeError(EncodeError):
    """The encoded job is larger than the backend or the configured limit accepts; both sizes are named."""


class DecodeError(TaskQError, ValueError):
    """Stored bytes are damaged, or use an envelope version or extension code that is not known here."""


class TaskNotFoundError(TaskQError, LookupError):
    """No task of that name is registered."""


class ScheduleNotFoundError(TaskQError, LookupError):
    """There is no schedule of that name."""


class IllegalMoveError(TaskQError):
    """A job was asked to change to a state that the table of legal moves does not allow from where it is."""


class AppNotFoundError(ConfigurationError):
    """``-A`` names nothing usable; the message says which step failed."""


# -- what the backend said ------------------------------------------------------------


class BackendError(TaskQError):
    """The backend or store failed."""


class BackendUnavailableError(BackendError):
    """The backend cannot be reached, or did not answer in time; trying again may help."""


class BackendBlockedError(BackendUnavailableError):
    """The broker refuses publishes for now (a memory or disk alarm)."""


class NotPublishedError(BackendError):
    """The job is certainly not stored."""


class UnroutableError(NotPublishedError):
    """The broker has no queue for the job."""


class PublishUnknownError(BackendError):
    """The job may or may not be stored. Repeating the push with the same id is safe where ids are unique."""

    def __init__(self, message: str, *, job_ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.job_ids = job_ids


class NotSupportedError(BackendError):
    """This backend truly cannot do that; the message names the operation and the alternative."""


class SchemaError(BackendError):
    """The stored layout is newer than this version of taskq, or is not taskq's."""


class LeaseLostError(BackendError):
    """The reservation has passed to another worker, or the job has ended."""


class DuplicateJobError(TaskQError):
    """A job with the same unique key is already there, and the conflict policy is to raise."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class LineFullError(TaskQError):
    """As many jobs as ``max_waiting`` allows wait already, and the overflow policy is to raise."""


# -- what a result says ---------------------------------------------------------------


class ResultError(TaskQError):
    """The job ended without a value; the base of the errors that :meth:`AsyncResult.get` raises."""


class ResultTimeoutError(ResultError, TimeoutError):
    """The job had not ended when the timeout ran out."""


class TaskFailedError(ResultError):
    """The job is dead. ``type_name``, ``text`` and ``traceback`` describe its last failure."""

    def __init__(self, message: str, *, type_name: str = "", text: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.text = text
        self.traceback = traceback


class TaskCancelledError(ResultError):
    """The job was cancelled, or expired before it started."""


class ResultNotFoundError(ResultError, LookupError):
    """Nothing is known of that job: it was never stored, or its result was kept no longer."""


# -- what a running task meets --------------------------------------------------------


class SoftTimeLimit(Exception):  # noqa: N818 - the name Celery users catch
    """The task's ``soft_time_limit`` has passed: finish up, or let it propagate to fail the run."""


class Interrupted(BaseException):
    """The run must end now. Derives from ``BaseException`` so that ``except Exception`` lets it through."""


class TimeLimitExceeded(Interrupted):
    """The task's hard ``time_limit`` has passed."""


class ShutdownRequested(Interrupted):
    """The worker is stopping and its grace is over; the job is given back uncounted."""


class JobCancelled(Interrupted):
    """The job was cancelled while it ran, or its lease passed to another worker."""


# -- what a task raises to steer its run ----------------------------------------------


class Steering(BaseException):
    """A decision, not a failure. Passes through ``except Exception`` so that no handler swallows it."""


class RetryRequested(Steering):
    """Run again later; raised by ``ctx.retry(...)``. Counts as a failed attempt."""

    def __init__(
        self,
        reason: str = "",
        *,
        countdown: float | None = None,
        queue: str | None = None,
        priority: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.countdown = countdown
        self.queue = queue
        self.priority = priority


class Snooze(Steering):
    """Run again in ``seconds`` (a number or a ``timedelta``, at most eight years); costs no attempt."""

    def __init__(self, seconds: float | timedelta) -> None:
        super().__init__(seconds)
        number: object = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if not isinstance(number, int | float) or not 0 <= number <= _EIGHT_YEARS:
            raise InvalidArgumentError(
                f"Snooze({seconds!r}): use 0 to {_EIGHT_YEARS:g} seconds, or a timedelta"
            )
        self.seconds = float(number)


class Reject(Steering):
    """Go to the dead letters at once, whatever retries are left; ``reason`` is a text or an exception."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Cancel(Steering):
    """End as cancelled; ``reason`` is a text or an exception."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
