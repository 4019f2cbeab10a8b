"""What can go wrong, as a user sees it.

    DormouseError                    a sentence for the user, and the HTTP status that says it
    ├── InvalidRequest        400    the request is malformed; names the field
    ├── Unauthenticated       401    no key, or none that is known here
    ├── Forbidden             403    asked from where, or by whom, it may not be asked
    ├── UnknownFunction       404    no such function or revision, for the one who asks
    ├── TooSlow               408    the request took too long to arrive
    ├── TooLarge              413    a body or tensor over a limit
    ├── Conflict              409    the name is taken, or the state forbids it
    ├── OverLimit             429    more than the tenant may ask; carries Retry-After
    ├── Unavailable           503    known but not now; carries Retry-After
    ├── DeadlineMissed        504    the request's timeout passed
    ├── HostMemoryFull        507    does not fit beside what may not be dropped
    ├── StateNotKept          507    the state directory cannot be written: the disk is full, or failed
    ├── ExecutionFault        500    the model raised
    ├── RefusedSource         400    a model source that is corrupt, unsafe or not supported
    ├── ConfigurationFault    2*     settings or a manifest that cannot be used (*exit status)
    └── DeviceError           500    a driver call failed; carries the driver's code

An impossible state asserts instead. Nothing here is raised inside core: there, a refusal is a value.
"""

from dormouse.core.types import Reason


class DormouseError(Exception):
    """One clear line for the user: what, which value, and the way out."""

    status = 500

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(DormouseError):
    status = 400


class RefusedSource(DormouseError):
    status = 400


class Unauthenticated(DormouseError):
    status = 401


class Forbidden(DormouseError):
    status = 403


class UnknownFunction(DormouseError):
    status = 404


class TooSlow(DormouseError):
    status = 408


class Conflict(DormouseError):
    status = 409


class TooLarge(DormouseError):
    status = 413


class ExecutionFault(DormouseError):
    status = 500


class DeviceError(DormouseError):
    """A driver call failed. ``call`` names it, ``code`` is what the driver answered."""

    status = 500

    def __init__(self, call: str, code: str, detail: str = "") -> None:
        super().__init__(f"{call} failed: {code}" + (f" ({detail})" if detail else ""))
        self.call = call
        self.code = code


class OutOfChunks(DeviceError):
    """The pool has fewer free chunks than asked for; nothing was mapped."""


class OverLimit(DormouseError):
    status = 429


class Unavailable(DormouseError):
    status = 503


class DeadlineMissed(DormouseError):
    status = 504


class HostMemoryFull(DormouseError):
    status = 507


class StateNotKept(DormouseError):
    status = 507


class ConfigurationFault(DormouseError):
    status = 400


_BY_REASON: dict[Reason, type[DormouseError]] = {
    Reason.UNKNOWN_FUNCTION: UnknownFunction,
    Reason.NOT_READY: Unavailable,
    Reason.QUEUE_FULL: Unavailable,
    Reason.TIMEOUT: DeadlineMissed,
    Reason.SHED: Unavailable,
    Reason.CANCELLED: Unavailable,
    Reason.HOST_MEMORY_FULL: HostMemoryFull,
    Reason.LARGER_THAN_DEVICE: RefusedSource,
    Reason.IMAGE_UNREADABLE: ExecutionFault,
    Reason.LOAD_FAILED: Unavailable,
    Reason.INVALID_INPUT: InvalidRequest,
    Reason.EXECUTION_FAILED: ExecutionFault,
    Reason.UNBATCHABLE: ExecutionFault,
    Reason.OUTPUT_TOO_LARGE: TooLarge,
    Reason.EXECUTOR_LOST: Unavailable,
    Reason.TOO_EARLY: Unavailable,
    Reason.TOO_LATE: DeadlineMissed,
    Reason.ALREADY_DEPLOYED: Conflict,
    Reason.IN_MEMORY_ONLY: Conflict,
    Reason.SHUTTING_DOWN: Unavailable,
}


def error_for(reason: Reason, message: str, retry_after_s: float | None = None) -> DormouseError:
    """The error a user sees for a refusal of the core."""
    return _BY_REASON[reason](message, retry_after_s=retry_after_s)


def without_paths(message: str, directory: str) -> str:
    """The same sentence for callers, whom it does not concern where on the server's disk ``directory`` is."""
    return message.replace(f"{directory}/", "").replace(directory, "the image")


def unknown_function(name: str) -> UnknownFunction:
    """In the same words whoever refuses: a name that is not there, and one that is not for whoever asks."""
    return UnknownFunction(f"no function {name!r}")
