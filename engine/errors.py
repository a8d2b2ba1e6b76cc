"""What an engine refuses or loses, as typed exceptions; services translate them once."""


class EngineError(Exception):
    """Root of everything the engine raises for peers, users and hardware."""


class UnsupportedModel(EngineError, ValueError):
    """The model's configuration asks for something this engine does not compute."""


class InvalidRequest(EngineError, ValueError):
    """The request asks for something no engine can do; the text tells the user."""


class RequestTooLong(EngineError, ValueError):
    """The request can never fit: longer than the context, or than the whole pool."""


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
