"""A model's chat template: messages to the text that the model was trained on.

Templates come with the model and were written for transformers. They run in a process of their own
(router/template_sandbox.py), which bounds what they take. What one refuses is the user's error.
"""

from collections.abc import Mapping, Sequence

from jinja2 import meta

from router.chat_messages import Message
from router.errors import BadRequest, TemplateOccupied
from router.template_process import TemplateBusy, TemplateProcess, TemplateRefused
from router.template_sandbox import environment


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        # Parsed, but not compiled: that works out what is constant, however long it takes.
        self.variables = meta.find_undeclared_variables(environment().parse(source))
        """What it may be given."""
        self.knows_tools = "tools" in self.variables
        """It tells a model of tools, and shows calls and results."""
        self._process = TemplateProcess(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = {},
    ) -> str:
        """The prompt, open for the assistant's answer. `variables` are the template's own. Raises
        BadRequest, TemplateOccupied."""
        given = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._process.render(given)
        except TemplateBusy as error:
            raise TemplateOccupied from error
        except TemplateRefused as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
