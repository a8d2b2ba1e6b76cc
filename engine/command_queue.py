"""Work for the engine thread from all others: first in, first out, closed once.

Any thread posts; the engine thread runs. After `close` nothing enters, so that a last `run` finds
everything that ever will have entered: no command is forgotten.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from engine.errors import EngineError, EngineStopped

T = TypeVar("T")

Command = Callable[[], None]


class CommandQueue:
    """See the module."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._gate = threading.Lock()
        self._is_open = True

    def post(self, command: Command) -> bool:
        """False: closed, and the command is dropped."""
        with self._gate:
            if self._is_open:
                self._commands.put(command)
            return self._is_open

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """What comes of it; the future may also raise EngineStopped."""
        future: Future[T] = Future()
        if not self.post(partial(answer, future, question)):
            future.set_exception(EngineStopped("the engine has stopped"))
        return future

    def fail(self, error: Exception) -> None:
        """`run` will raise it: the engine thread ends of it."""
        self.post(partial(_raise, error))

    def close(self) -> None:
        with self._gate:
            self._is_open = False

    def run(self, wait_s: float = 0.0) -> bool:
        """Runs what has come, waiting for the first command if `wait_s` is positive. False if
        none came. What a command raises goes through; the others stay."""
        try:
            command = self._commands.get(block=wait_s > 0, timeout=wait_s)
        except Empty:
            return False
        command()
        for _ in range(self._commands.qsize()):  # what has come by now: a turn must end
            self._commands.get_nowait()()
        return True


def _raise(error: Exception) -> None:
    raise error


def answer(future: Future[T], question: Callable[[], T]) -> None:
    """A command that asks: `future` has what comes of `question`; a bug is raised too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(question())
    except EngineError as error:
        future.set_exception(error)
    except Exception as error:
        future.set_exception(error)
        raise
