"""The process that renders a model's chat template (router/template_sandbox.py), from outside.

`render` is for threads: one rendering at a time, each of milliseconds. A rendering that took too
much is its request's fault or the template's, and no other's (router/line_process.py).
"""

import threading
from collections.abc import Mapping

from router.line_process import LineProcess, NotStarted, ProcessGone

_PATIENCE_S = 5.0
"""For others' renderings, and for one's own: it bounds itself to less (router/template_sandbox.py),
unless it does not run at all."""


class TemplateBusy(Exception):
    """Others' renderings, or the start of the process, take too long."""


class TemplateRefused(Exception):
    """The template refuses what it was given, or took too much; the text says which."""


class TemplateProcess(LineProcess):
    """See the module."""

    def __init__(self, source: str) -> None:
        super().__init__("router.template_sandbox", source)
        self._lock = threading.Lock()

    def render(self, variables: Mapping[str, object]) -> str:
        """Raises TemplateRefused, TemplateBusy."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise TemplateBusy
        try:
            told = self.ask(variables, _PATIENCE_S)
        except NotStarted as error:
            why = str(error) or "it takes too much time or memory to compile"
            raise TemplateRefused(why) from error
        except ProcessGone as error:
            raise TemplateRefused("it takes too much time or memory") from error
        finally:
            self._lock.release()
        if "text" not in told:
            raise TemplateRefused(told["refused"])
        return told["text"]
