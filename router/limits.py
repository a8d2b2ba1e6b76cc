"""How much one request may ask for, as the operator says: checked before anything is worked out.

The body is looked at as it came, whatever is wrong with it otherwise: types are router/schemas.py's
matter, and what has another type than it should is passed over here. Bounds that hold whatever the
operator wants are the schemas' and router/grammar_bounds.py's. Pure; raises BadRequest.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from router.errors import BadRequest
from router.grammar_bounds import depth_of
from router.tokenizer import JSONObject

MAX_STOPS = 16
MAX_LOGPROBS = 20
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """See router/config.py for each."""

    max_prompts: int
    max_messages: int
    max_stops: int
    max_logprobs: int
    max_schema_nbytes: int
    max_schema_depth: int

    def check(self, body: JSONObject) -> None:
        """Raises BadRequest, naming the parameter and the numbers."""
        _check_length(body, "messages", self.max_messages)
        _check_length(body, "stop", self.max_stops)
        if _num_prompts(body.get("prompt")) > self.max_prompts:
            raise _too_many("prompt", _num_prompts(body.get("prompt")), self.max_prompts, "prompts")
        for name in _LOGPROBS:
            value = body.get(name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if is_number and value > self.max_logprobs:  # type: ignore[operator]
                raise BadRequest(
                    f"{name!r} is {value}; this server allows at most {self.max_logprobs}.",
                    param=name,
                    code="limit_exceeded",
                )
        for param, schema in schemas_in(body):
            self._check_schema(param, schema)

    def _check_schema(self, param: str, schema: object) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        nbytes = len(text.encode(errors="surrogatepass"))
        if nbytes > self.max_schema_nbytes:
            raise BadRequest(
                f"Invalid value for {param!r}: the schema has {nbytes} bytes; this server allows "
                f"at most {self.max_schema_nbytes}.",
                param=param,
                code="limit_exceeded",
            )
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                return  # it is told what is wrong with it where it is read
        if depth_of(schema) > self.max_schema_depth:
            raise BadRequest(
                f"Invalid value for {param!r}: the schema is nested more than "
                f"{self.max_schema_depth} deep.",
                param=param,
                code="limit_exceeded",
            )


def schemas_in(body: JSONObject) -> Iterator[tuple[str, object]]:
    """(parameter, schema) of every JSON schema that the body holds, at whichever place."""
    if (schema := _at(body, "response_format", "json_schema", "schema")) is not None:
        yield "response_format", schema
    if (schema := _at(body, "structured_outputs", "json")) is not None:
        yield "structured_outputs.json", schema
    if (schema := body.get("guided_json")) is not None:
        yield "guided_json", schema
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        if (schema := _at(tool, "function", "parameters")) is not None:
            yield f"tools.{index}.function.parameters", schema


def _at(value: object, *path: str) -> object:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _num_prompts(prompt: object) -> int:
    if not isinstance(prompt, list):
        return 1
    return 1 if prompt and isinstance(prompt[0], int) else len(prompt)


def _check_length(body: JSONObject, name: str, most: int) -> None:
    value = body.get(name)
    if isinstance(value, list) and len(value) > most:
        raise _too_many(name, len(value), most, "of them")


def _too_many(name: str, number: int, most: int, what: str) -> BadRequest:
    text = f"{name!r} holds {number} {what}; this server allows at most {most}."
    return BadRequest(text, param=name, code="limit_exceeded")
