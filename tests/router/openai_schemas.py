"""The schemas that OpenAI publishes, as a yardstick: `shared/openai/schemas.json`, where it lies
beside the checkout."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMAS = Path(__file__).parents[3] / "shared" / "openai" / "schemas.json"

needs_schemas = pytest.mark.skipif(
    not SCHEMAS.is_file(), reason="OpenAI's schemas are not beside the checkout (shared/openai)"
)


def check_against_schemas(answers: dict[str, list[str]]) -> None:
    """Schema's name → JSON documents."""
    if not SCHEMAS.is_file():
        print("OpenAI's schemas are not at hand: not checked against them")
        return
    for name, documents in answers.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": _components()}
        validator = jsonschema.Draft202012Validator(schema)
        for document in documents:
            validator.validate(json.loads(document))


@cache
def _components() -> Any:
    return _honour_nullable(json.loads(SCHEMAS.read_text())["components"])


def _honour_nullable(schema: Any) -> Any:
    """The file says 3.1 but uses `nullable`, a word of 3.0 that JSON Schema does not know."""
    if isinstance(schema, list):
        return [_honour_nullable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {key: _honour_nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [converted, {"type": "null"}]} if schema.get("nullable") else converted


def without_nulls(chunk: str) -> str:
    """OpenAI describes chunks of text completions as whole ones, whose `finish_reason` and
    `usage` are never null; but its own server sends null until the end."""
    body = json.loads(chunk)
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return json.dumps({key: value for key, value in body.items() if value is not None})
