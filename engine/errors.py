"""What an engine refuses or loses, as typed exceptions; services translate them once."""


class EngineError(Exception):
    """Root of everything the engine raises for peers, users and hardware."""


class UnsupportedModel(EngineError, ValueError):
    """The model's configuration asks for something this engine does not compute."""


class InvalidRequest(EngineError, ValueError):
    """The request asks for something no engine can do; the text tells the user."""


class RequestTooLong(EngineError, ValueError):
    """The request can never fit: longer than the context, or than the whole pool."""


class QueueFull(EngineError):
    """So much is queued that the request would wait too long; nothing was begun."""

    def __init__(self, wait_s: float, max_wait_s: float) -> None:
        super().__init__(
            f"the prefill queue is full: a prompt would wait {wait_s * 1e3:.0f} ms "
            f"(predicted), at most {max_wait_s * 1e3:.0f} ms are allowed"
        )
        self.retry_after_s = wait_s - max_wait_s
        """When a prompt will be taken again, if nothing else comes."""


class UnknownRequest(EngineError, LookupError):
    """No such request here (any more)."""


class NotReserved(EngineError):
    """The request has no room at present: never reserved, or the reservation was taken back."""


class LeaseClosed(EngineError):
    """The sequence's blocks are not ours to copy any more."""


class EngineStopped(EngineError):
    """The engine does not run (any more)."""


class EngineFault(EngineError):
    """The engine gave a request up: a fault of ours or of the hardware."""


class OutOfDeviceMemory(EngineError):
    """A step needed more memory than the device has left; the engine lives."""
