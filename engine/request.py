"""What goes into an engine and what comes out: the vocabulary between a service and its engine.

Knows token ids only: no text, no network, no tensors. A service submits an `EngineRequest`; the
engine answers with `EngineEvent`s, all events of one step in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, NewType

from engine.errors import EngineError, EngineFault, InvalidRequest

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)

MAX_TOP_LOGPROBS = 20
"""Likeliest tokens told of a position, at most; as in OpenAI's API."""


MAX_SAMPLES = 128
"""Of one prompt, at most."""


class Leg(Enum):
    """Which part of a request this engine runs."""

    LOCAL = "local"
    """Computes the prompt and generates."""

    PREFILL = "prefill"
    """Computes the prompt, samples token 0 (unless outputs were delivered) and keeps the KV until
    `Engine.abort`."""

    DECODE = "decode"
    """Gets the prompt's KV by a transfer (`Engine.claim`, `Engine.attach`) and generates."""


class FinishReason(Enum):
    STOP = "stop"
    """The model's end id or a stop token id."""

    LENGTH = "length"
    """`max_tokens`, or the model's context, is used up."""


class TokenLogprobs(NamedTuple):
    """How likely a token was to the model itself: natural logarithms of its probabilities, before
    masks, bias, penalties, temperature and filters (vLLM's `raw_logprobs`)."""

    logprob: float
    rank: int
    """1: no token was likelier."""
    top_token_ids: tuple[int, ...]
    """The likeliest tokens, as many as were asked for, the likeliest first."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Sampling is counter-based on (seed, sample, output index)."""

    max_tokens: int
    """Output tokens in all, those already delivered included."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """0 is off; else tokens less likely than this part of the likeliest are left out."""
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    """Taken from the logit of each token that is among the outputs."""
    frequency_penalty: float = 0.0
    """The same, as often as it is there."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in prompt or outputs; 1 is
    off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    min_tokens: int = 0
    """No end id and no stop token id is sampled before so many outputs."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else is sampled; empty: anything may be."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the outputs never contain."""
    num_logprobs: int = 0
    """Told of each output token: 0 nothing, 1 its own logprob, 1 + k the k likeliest
    tokens' too."""
    num_prompt_logprobs: int = 0
    """The same for each prompt token but the first. Cached KV is not used for tokens that are still
    to be told of."""
    grammar: str = ""
    """What the outputs must fit, as runtime/grammar.py writes it; empty: they are free. Where it is
    whole the model's end ids may come, and where it must end they end it, whatever `ignore_eos`
    says."""

    @property
    def ends_at_eos(self) -> bool:
        return not self.ignore_eos or bool(self.grammar)


class SampleStart(NamedTuple):
    """A sample beside the first."""

    sample: int
    output_token_ids: tuple[int, ...] = ()
    """As `EngineRequest` has it."""


class FirstToken(NamedTuple):
    """Token 0 of a sample, which another engine has sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as an engine takes it: one sample, or several of one prompt, which is computed or
    received once (engine/fork.py)."""

    request_id: RequestId
    leg: Leg
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Output tokens already delivered; treated as uncomputed tokens after the prompt."""
    sample: int = 0
    """Sample index, for the sampling counter."""
    cache_salt: str = ""
    """Requests with different salts never share cached KV."""
    siblings: tuple[SampleStart, ...] = ()
    """The other samples, if several are wanted."""

    @property
    def num_samples(self) -> int:
        return 1 + len(self.siblings)

    def each(self) -> tuple["EngineRequest", ...]:
        """Its samples, each as a request of one. What is told of the prompt is told once."""
        alone = replace(self, siblings=())
        if not self.siblings:
            return (alone,)
        sampling = replace(self.sampling, num_prompt_logprobs=0)
        others = (
            replace(alone, sampling=sampling, sample=sample, output_token_ids=outputs)
            for sample, outputs in self.siblings
        )
        return (alone, *others)

    def only(self, samples: Sequence["EngineRequest"]) -> "EngineRequest":
        """Of `each`, some but not none, as one request."""
        first, *others = samples
        siblings = tuple(SampleStart(one.sample, one.output_token_ids) for one in others)
        return replace(first, sampling=self.sampling, siblings=siblings)

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Any of them ends a sample."""
        ends = self.sampling.stop_token_ids
        return ends | eos_token_ids if self.sampling.ends_at_eos else ends

    def is_ended(self, eos_token_ids: frozenset[int]) -> bool:
        """The last delivered token ended its (first) sample; only `finish_reason` was not told."""
        return not self.end_token_ids(eos_token_ids).isdisjoint(self.output_token_ids[-1:])


@dataclass(frozen=True, slots=True)
class Reserved:
    """A `Leg.DECODE` request has room for its prompt; now its KV may come. Possibly again, after
    the engine took the room back under memory pressure: then every earlier copy is void."""

    request_id: RequestId
    queue_ns: int
    """Submitted → reserved."""
    num_cached_tokens: int
    """KV of so many first tokens, whole blocks, is there already: only the rest is to come."""
    at_ns: int
    """When, by time.monotonic_ns, as in the other events."""


@dataclass(frozen=True, slots=True)
class ReservationLost:
    """Memory pressure took the room of a waiting `Leg.DECODE` request; it is queued again."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A request is about to run behind the cached KV of its first tokens; nothing comes of one
    that found none. A `Leg.DECODE` request that lacks no more than one block needs no transfer:
    it hears this, not `Reserved`. KV of a `Leg.PREFILL` request may be copied so far."""

    request_id: RequestId
    num_cached_tokens: int
    """Whole blocks."""
    queue_ns: int
    """Submitted → about to run."""
    at_ns: int


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """KV of prompt positions [0, num_computed_tokens) of a `Leg.PREFILL` request may be copied."""

    request_id: RequestId
    num_computed_tokens: int
    is_last: bool
    """The whole prompt is computed."""
    queue_ns: int
    """Submitted → first scheduled."""
    build_ns: int
    """First scheduled → this chunk computed."""
    begin_ns: int
    """Of the step that computed it."""
    at_ns: int


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """In the midst of the step that computes the last chunk of a `Leg.PREFILL` request: KV of all
    prompt positions and of layers [0, num_layers) may be copied. ChunkComputed follows, or
    RequestFailed."""

    request_id: RequestId
    num_computed_tokens: int
    """As ChunkComputed will tell."""
    num_layers: int


@dataclass(frozen=True, slots=True)
class TokensOut:
    """Output tokens of a sample, contiguous from `first_index`; its last ones if `finish_reason` is
    set, and the request's last event if all other samples have ended (blocks of a `Leg.PREFILL`
    request stay until `Engine.abort`)."""

    request_id: RequestId
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if asked for."""
    sample: int = 0
    scheduled_ns: int = 0
    """When this engine first scheduled it; 0: it computed nothing of it."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely prompt tokens were, contiguous; the first token has none. All come before token 0,
    in whatever leg computes the prompt. Once each, also if the prompt is computed again."""

    request_id: RequestId
    first_index: int
    """Position in the prompt of `logprobs[0]`."""
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The engine gave the request up; the last event. For faults of ours or the hardware, and for
    grammars: they are compiled when the request is here already."""

    request_id: RequestId
    error: str
    is_refusal: bool = False
    """The request itself is at fault, and would fail anywhere."""

    def exception(self) -> EngineError:
        return InvalidRequest(self.error) if self.is_refusal else EngineFault(self.error)


EngineEvent = (
    Reserved
    | ReservationLost
    | PrefixHit
    | LayersComputed
    | ChunkComputed
    | PromptLogprobs
    | TokensOut
    | RequestFailed
)
