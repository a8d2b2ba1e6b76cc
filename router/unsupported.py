"""Parameters of OpenAI's and vLLM's that Baton does not have, and values of them that ask for
nothing: many clients always send those. docs/endpoint.md lists them all.
"""

from collections.abc import Mapping

from pydantic import BaseModel

from router.errors import BadRequest
from router.tokenizer import JSONObject

# Parameter → values that ask for nothing; null always does.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # says nothing as long as there are no tools
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "request_id": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_INSTEAD = {
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "request_id": "x-baton-request-id in the answer's head names it",
    "chat_template": "the model's own is used; 'chat_template_kwargs' gives it variables",
}


def asked_for(model: type[BaseModel], body: JSONObject) -> JSONObject:
    """What of `body` asks for something. Raises BadRequest, naming what `model` does not have."""
    present = {name: value for name, value in body.items() if not _is_nothing(model, name, value)}
    for name in present:
        if name in UNSUPPORTED and name not in model.model_fields:
            hint = f" ({_INSTEAD[name]})" if name in _INSTEAD else ""
            raise BadRequest(
                f"{name!r} is not supported with this value{hint}.",
                param=name,
                code="unsupported_parameter",
            )
    return present


def _is_nothing(model: type[BaseModel], name: str, value: object) -> bool:
    if name in model.model_fields:
        return value is None
    if name not in UNSUPPORTED:
        return False
    # By type too: 1 == True, and `n: true` is no number.
    return value is None or any(
        value == nothing and isinstance(value, bool) == isinstance(nothing, bool)
        for nothing in UNSUPPORTED[name]
    )
