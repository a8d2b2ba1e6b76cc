"""Tools as a request names them, and what of them it lets a model call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.errors import BadRequest

MAX_TOOLS = 128
NO_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class FunctionDefinition(_Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name


class FunctionName(_Strict):
    name: ToolName


class NamedTool(_Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(_Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(_Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


class ToolFields(BaseModel):
    """The fields of a chat's body."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a model is told of, and may or must call."""

    shown: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    is_forced: bool
    """It must call one: it says nothing else."""
    is_single: bool
    """It calls one at most."""

    @property
    def is_held(self) -> bool:
        """Calls are held to their form by a grammar."""
        is_strict = any(tool.function.strict for tool in self.callable)
        return self.is_forced or self.is_single or is_strict or len(self.callable) < len(self.shown)


def tool_use(body: ToolFields) -> ToolUse | None:
    """None: the model hears of no tools. Raises BadRequest."""
    choice, tools = body.tool_choice, tuple(body.tools)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest(
                "'tool_choice' is only allowed when 'tools' are given.", param="tool_choice"
            )
        return None
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise BadRequest("Two of the 'tools' have the same name.", param="tools")
    is_single = not body.parallel_tool_calls
    match choice:
        case "none":
            return None
        case NamedTool(function=named):
            return ToolUse(tools, _chosen(by_name, [named.name]), is_forced=True, is_single=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            chosen = _chosen(by_name, [tool.function.name for tool in allowed.tools])
            return ToolUse(tools, chosen, allowed.mode == "required", is_single)
    return ToolUse(tools, tools, choice == "required", is_single)


def _chosen(by_name: Mapping[str, Tool], names: list[str]) -> tuple[Tool, ...]:
    if missing := [name for name in names if name not in by_name]:
        raise BadRequest(
            f"'tool_choice' names {missing[0]!r}, which is not among the 'tools'.",
            param="tool_choice",
        )
    return tuple(by_name[name] for name in dict.fromkeys(names))
