"""docs/endpoint.md names every parameter that there is, and OpenAI's are all known."""

import json
from pathlib import Path
from typing import Any

from router.schemas import ChatBody, CompletionBody
from router.unsupported import UNSUPPORTED
from tests.router.openai_schemas import SCHEMAS, needs_schemas

DOCS = Path(__file__).parents[2] / "docs" / "endpoint.md"


def test_every_parameter_is_told_of() -> None:
    text = DOCS.read_text(encoding="utf-8")
    names = {*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED}
    assert not [name for name in sorted(names) if f"`{name}`" not in text]


@needs_schemas
def test_openais_parameters_are_all_known() -> None:
    schemas = json.loads(SCHEMAS.read_text())["components"]["schemas"]
    for name, body in (
        ("CreateChatCompletionRequest", ChatBody),
        ("CreateCompletionRequest", CompletionBody),
    ):
        theirs = parameters(schemas, schemas[name])
        assert len(theirs) > 15
        assert not theirs - body.model_fields.keys() - UNSUPPORTED.keys()


def parameters(schemas: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    names = set(schema.get("properties", ()))
    for part in [*schema.get("allOf", ()), *schema.get("anyOf", ())]:
        names |= parameters(schemas, part)
    return names
