"""A request once it is checked: the only form in which it reaches dispatch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, NewType

from router.objective import NO_OBJECTIVE, Objective
from router.parsers.output import OutputParser

RequestId = NewType("RequestId", str)


class FinishReason(Enum):
    """Why a sample ended, in OpenAI's words."""

    STOP = "stop"
    """An end id, a stop token id or a stop string."""

    LENGTH = "length"
    """`max_tokens`, or the model's context, is used up."""


class TokenLogprobs(NamedTuple):
    """How likely a token was to the model itself; natural logarithms."""

    logprob: float
    rank: int
    """1: no token was likelier."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; every field is decided."""

    max_tokens: int
    """Output tokens in all."""
    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is off."""
    top_p: float
    """1 is off."""
    seed: int
    """Unsigned, 64 bits."""
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_p: float = 0.0
    """0 is off."""
    presence_penalty: float = 0.0
    """0 is off, as the next."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), each id once."""
    min_tokens: int = 0
    """Neither an end id nor a stop token id nor a stop string ends the sample before."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: anything."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not come."""
    num_logprobs: int = 0
    """Of each output token: 0 none, 1 its own, 1 + k the k likeliest tokens' too."""
    num_prompt_logprobs: int = 0
    """The same of each prompt token but the first."""
    grammar: str = ""
    """What the outputs must fit, as runtime/grammar.py writes it; empty: they are free."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text."""

    text: str
    offsets: tuple[int, ...]
    """Where the text of each token begins, in characters."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How an answer is taken apart: reasoning, content, calls of tools."""

    new_parser: Callable[[], OutputParser]
    """One for each choice."""
    id_chars: int
    """Of the ids of calls."""


@dataclass(frozen=True, slots=True)
class ValidPrompt:
    """One prompt, and how many samples are wanted of it."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    """Prompts with different ones never share cached KV."""
    echo: Echo | None = None
    """The prompt is part of the answer."""
    session: str = ""
    """Prompts with the same one are likely to begin alike; empty: it is of none."""
    num_samples: int = 1
    """`n` of them are choices."""
    objective: Objective = NO_OBJECTIVE


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What a client asked for in one POST."""

    request_id: RequestId
    prompts: tuple[ValidPrompt, ...]
    """Each gives `n` choices, in order."""
    stop: tuple[str, ...]
    """Texts that end an answer and are not part of it."""
    is_streaming: bool
    has_usage_chunk: bool
    num_prompt_logprobs: int = 0
    """As `SamplingParams` has it, but for their own sake: an echo may want others."""

    n: int = 1
    """Choices of each prompt: the best of its samples."""
    has_logprobs: bool = False
    """They are part of the answer."""
    output: OutputForm | None = None
    """None: the text is the answer as it stands."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text."""
    keeps_stop: bool = False
    """The stop string that ends a text is part of it."""
    has_token_ids: bool = False
    """They are part of the answer, the prompt's too."""
    names_are_ids: bool = False
    """Logprobs name tokens by their ids."""
    has_continuous_usage: bool = False
    """In every chunk."""
    has_output: bool = True
    """False: the answer is about the prompt alone."""
    priority: int = 0
    """Among its tenant's; lower goes first."""

    def with_objective(self, objective: Objective) -> "ValidRequest":
        if objective.is_none:
            return self
        prompts = tuple(replace(prompt, objective=objective) for prompt in self.prompts)
        return replace(self, prompts=prompts)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return any(prompt.sampling.num_prompt_logprobs for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)
