"""Chat completions, whole and in chunks: text, or what router/parsers finds in it.

A whole answer goes through the same parser as a stream: both say the same.
"""

import secrets
from collections.abc import Callable, Sequence

from router.chat_objects import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    FunctionDelta,
    Reason,
    ToolCall,
    ToolCallDelta,
)
from router.choice import Piece, PieceToken
from router.logprobs import ChatLogprobs, prompt_logprobs
from router.parsers.events import CallArguments, CallBegin, Event, Reasoning, Text
from router.parsers.output import OutputParser
from router.request import FinishReason, OutputForm, ValidRequest
from router.responses import Completion, Format, Object, TextChoice, Usage, WholeChoice


class ChatFormat(Format):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ValidRequest, model: str, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__(request, model, bytes_of)
        self._output = request.output
        self._parts: dict[int, ParsedChoice] = {}
        self._has_told_prompt = not request.has_token_ids

    @property
    def is_plain(self) -> bool:
        return super().is_plain and self._output is None

    def opening(self, index: int) -> list[ChatChunkChoice]:
        return [ChatChunkChoice(index=index, delta={"role": "assistant", "content": ""})]

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Completion:
        told = prompt_logprobs(choices[0].prompt_tokens, self._names)  # one prompt, n choices
        return super().whole(choices, usage).model_copy(update={"prompt_logprobs": told})

    def delta(self, piece: Piece) -> list[ChatChunkChoice]:
        if self._output is None:
            deltas: list[Delta] = [{"content": piece.text}] if piece.text else []
            tokens: Sequence[PieceToken] = piece.tokens
            reason: Reason | None = _value(piece.finish_reason)
        else:
            parsed = self._parts.get(piece.index) or ParsedChoice(self._output)
            self._parts[piece.index] = parsed
            deltas = parsed.deltas(piece)
            reason = parsed.reason(piece.finish_reason)
            tokens = parsed.tokens(piece.tokens, is_told=bool(deltas) or reason is not None)
        choices = [ChatChunkChoice(index=piece.index, delta=delta) for delta in deltas]
        if reason is not None:
            choices.append(ChatChunkChoice(index=piece.index, delta={}, finish_reason=reason))
        if choices and tokens:
            if self._request.has_logprobs:
                choices[0].logprobs = self._logprobs(tokens)
            if self._request.has_token_ids:
                choices[0].token_ids = [token.token_id for token in tokens]
        return choices

    def _logprobs(self, tokens: Sequence[PieceToken] | None) -> ChatLogprobs | None:
        return None if tokens is None else ChatLogprobs.of(tokens, self._names)

    def _object(
        self,
        kind: Object,
        choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice],
        usage: Usage | None,
    ) -> Completion:
        told = super()._object(kind, choices, usage)
        if not self._has_told_prompt:  # in the first chunk
            told.prompt_token_ids = self._request.prompts[0].token_ids
            self._has_told_prompt = True
        return told

    def choice(self, whole: WholeChoice) -> ChatChoice:
        reason: Reason | None = whole.finish_reason.value
        message = AssistantMessage(content=whole.text)
        if self._output is not None:
            parsed = ParsedChoice(self._output)
            message = parsed.message(whole.text)
            reason = parsed.reason(whole.finish_reason)
        assert reason is not None
        return ChatChoice(
            index=whole.index,
            message=message,
            logprobs=self._logprobs(whole.tokens),
            finish_reason=reason,
            token_ids=whole.token_ids if self._request.has_token_ids else None,
        )


class ParsedChoice:
    """One choice that is taken apart."""

    def __init__(self, output: OutputForm) -> None:
        self._parser: OutputParser = output.new_parser()
        self._id_chars = output.id_chars
        self._num_calls = 0
        self._tokens: list[PieceToken] = []

    def deltas(self, piece: Piece) -> list[Delta]:
        events = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish()
        return [self._delta(event) for event in events]

    def message(self, text: str) -> AssistantMessage:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for event in [*self._parser.push(text), *self._parser.finish()]:
            match event:
                case Text(said):
                    texts.append(said)
                case Reasoning(thought):
                    thoughts.append(thought)
                case CallBegin(name):
                    function = CalledFunction(name=name, arguments="")
                    calls.append(ToolCall(id=self._new_id(), function=function))
                case CallArguments(arguments):
                    calls[-1].function.arguments += arguments
        self._num_calls = len(calls)
        reasoning = "".join(thoughts) if thoughts else None
        return AssistantMessage(
            content="".join(texts) if texts or not (calls or thoughts) else None,
            tool_calls=calls or None,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )

    def reason(self, reason: FinishReason | None) -> Reason | None:
        """A call that was cut off, by a stop string or by `length`, is none to be made."""
        if reason is FinishReason.STOP and self._num_calls and not self._parser.is_cut:
            return "tool_calls"
        return _value(reason)

    def tokens(self, new: Sequence[PieceToken], *, is_told: bool) -> Sequence[PieceToken]:
        """Those whose logprobs go out now: they wait for something to go out with."""
        self._tokens += new
        if not is_told:
            return ()
        told, self._tokens = self._tokens, []
        return told

    def _delta(self, event: Event) -> Delta:
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallBegin(name):
                self._num_calls += 1
                call = ToolCallDelta(
                    index=self._num_calls - 1,
                    id=self._new_id(),
                    type="function",
                    function=FunctionDelta(name=name, arguments=""),
                )
                return {"tool_calls": [call]}
            case CallArguments(text):
                more = FunctionDelta(arguments=text)
                return {"tool_calls": [ToolCallDelta(index=self._num_calls - 1, function=more)]}

    def _new_id(self) -> str:
        text = secrets.token_hex(12)
        return f"call_{text}" if self._id_chars >= len(text) else text[: self._id_chars]


def _value(reason: FinishReason | None) -> Reason | None:
    return reason.value if reason is not None else None
