"""The errors of the jobs domain. The tree is drawn in thinwire.service.errors."""

from __future__ import annotations

from thinwire.contract.states import JobState
from thinwire.service.errors import Conflict, NotFound


class JobNotFound(NotFound):
    """There is no job of this id."""

    code = "job_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; GET /v1/jobs lists them")


class JobOver(Conflict):
    """The job has ended or is being ended, so this can no longer be asked of it."""

    code = "job_over"

    def __init__(self, job_id: str, state: JobState, asked: str) -> None:
        super().__init__(f"job {job_id} is {state}: {asked}")


class IdempotencyKeyReused(Conflict):
    """The idempotency key belongs to a job with another spec."""

    code = "idempotency_key_reused"

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"Idempotency-Key {key!r} has already made job {job_id} from another spec; use a new key for a new job"
        )


class StaleAttempt(Conflict):
    """The report is from a submission of the job that is not the current one."""

    code = "stale_attempt"

    def __init__(self, job_id: str, attempt: int, current: int) -> None:
        super().__init__(f"job {job_id} is at attempt {current}; a report of attempt {attempt} is refused")
