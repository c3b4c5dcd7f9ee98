"""What becomes of a job when something happens to it: pure rules that every backend with rows applies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from taskq.job import Attempt, Job, Outcome, State, Verdict, exhausted, loss_delay

EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Move:
    """The job as it is afterwards, and the bad end to record, if that was one."""

    job: Job
    attempt: Attempt | None = None


def arrival(job: Job, now: float) -> tuple[float, State]:
    """When a pushed job is due and where it starts. ``due`` 0 becomes the present, so that age counts."""
    due = job.due or now
    return due, State.SCHEDULED if due > now else State.PENDING


def settled(job: Job, outcome: Outcome, now: float, *, cancel: str | None = None) -> Move:
    """``job`` after its run decided ``outcome``; ``cancel`` is the reason of a cancel request, if there is one."""
    attempt = outcome.attempt
    verdict = outcome.verdict
    if attempt is not None and job.first_started is None:
        job = replace(job, first_started=attempt.started)
    error = outcome.error or (attempt.error if attempt else None)
    if verdict is Verdict.COMPLETE:
        return Move(end(job, State.COMPLETED, now, result=outcome.result), attempt)
    if outcome.counted and (verdict is Verdict.RETRY or (verdict is Verdict.BURY and attempt is not None)):
        job = replace(job, attempts=job.attempts + 1)
    if verdict is Verdict.BURY or (
        verdict is Verdict.RETRY and outcome.counted and exhausted(job, job.attempts)
    ):
        return Move(end(job, State.DEAD, now, error=error, result=outcome.result), attempt)
    if verdict is Verdict.CANCEL or cancel is not None:
        return Move(end(job, State.CANCELLED, now, error=error or cancelled(cancel or "")), attempt)
    return Move(_again(job, outcome, now, error), attempt)


def released(job: Job, now: float, *, cancel: str | None = None) -> Job:
    """``job`` given back before it started: uncounted, to the place it had."""
    job = replace(job, deliveries=job.deliveries - 1)
    if cancel is not None:
        return end(job, State.CANCELLED, now, error=cancelled(cancel))
    return replace(job, state=State.PENDING, worker=None)


def lost(job: Job, started: float | None, now: float, *, cancel: str | None = None) -> Move:
    """``job`` after its reservation ran out; ``started`` is the mark of its run, if it had one.

    A job that was to be cancelled is not run again.
    """
    if cancel is not None:
        return Move(end(job, State.CANCELLED, now, error=cancelled(cancel)))
    if started is None:
        return Move(replace(job, state=State.PENDING, worker=None, losses=job.losses + 1))
    attempts = job.attempts + 1
    dead = exhausted(job, attempts)
    delay = None if dead else loss_delay(job)
    attempt = Attempt(
        number=attempts,
        generation=job.generation,
        worker=job.worker or "",
        started=started,
        ended=now,
        error_type="WorkerLost",
        message="reservation timed out",
        delay=delay,
    )
    job = replace(job, attempts=attempts)
    if delay is None:
        return Move(end(job, State.DEAD, now, error=attempt.error), attempt)
    return Move(_wait(replace(job, error=attempt.error), now + delay, now), attempt)


def revived(job: Job, due: float, now: float) -> Job:
    """A dead job's new generation."""
    fresh = replace(
        job,
        generation=job.generation + 1,
        attempts=0,
        losses=0,
        first_started=None,
        ended=None,
        result=None,
    )
    return _wait(fresh, due or now, now)


def hastened(job: Job, now: float) -> Job:
    """A scheduled job, due now instead."""
    return replace(job, state=State.PENDING, due=now)


def end(job: Job, state: State, now: float, *, error: str | None = None, result: bytes | None = None) -> Job:
    """``job`` at its end."""
    return replace(job, state=state, ended=now, worker=None, error=error or job.error, result=result)


def forget_at(job: Job) -> float | None:
    """When retention may delete an ended job; ``None`` for dead ones, which wait for a person."""
    return None if job.ended is None or job.state is State.DEAD else job.ended + job.keep


def expired(job: Job, now: float) -> bool:
    """Whether it is too late to start ``job``."""
    return job.expires is not None and job.expires <= now


def cancelled(reason: str) -> str:
    """The error line of a cancelled job."""
    return f"cancelled: {reason}" if reason else "cancelled"


def _again(job: Job, outcome: Outcome, now: float, error: str | None) -> Job:
    if error:
        job = replace(job, error=error)
    if outcome.verdict is Verdict.RELEASE:
        losses = job.losses + outcome.suspect
        return replace(job, state=State.PENDING, worker=None, losses=losses)
    if outcome.verdict is Verdict.RETRY:
        queue = job.queue if outcome.queue is None else outcome.queue
        priority = job.priority if outcome.priority is None else outcome.priority
        job = replace(job, queue=queue, priority=priority)
    return _wait(job, outcome.due or now, now)


def _wait(job: Job, due: float, now: float) -> Job:
    state = State.SCHEDULED if due > now else State.PENDING
    return replace(job, state=state, due=due, worker=None)
