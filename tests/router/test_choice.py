"""Pieces of a choice: text and logprobs go out together, and neither tells what is to be hidden."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.choice import Choice, Piece, PieceToken
from router.metrics import RouterMetrics, TokenTimer
from router.request import FinishReason, TokenLogprobs
from router.tokenizer import TextTokenizer
from router.workers import WorkerSet

TEXT = "The relay runner hands over 🌍🏃 the baton. Größe, 東京は日本!"


class Answer:
    """A choice and the pieces it gave."""

    def __init__(
        self, tokenizer: TextTokenizer, stops: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        metrics = RouterMetrics(CollectorRegistry(), WorkerSet((), (), interval_s=1, timeout_s=1))
        timer = TokenTimer(metrics, 0.0)
        self.pieces: list[Piece] = []
        self.choice = Choice(0, tokenizer.detokenizer(), stops, min_tokens, timer, self._take)
        self._num_delivered = 0

    def _take(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self._check()

    def _check(self) -> None:
        """What has gone out: the text of each token told of has begun to."""
        if self.pieces[-1].finish_reason is None:
            assert all(token.text_offset < len(self.text) for token in self.tokens)

    def deliver(self, token_ids: Sequence[int], reason: FinishReason | None = None) -> bool:
        first = self._num_delivered
        self._num_delivered += len(token_ids)
        logprobs = [TokenLogprobs(-float(first + i), 1, ()) for i in range(len(token_ids))]
        return self.choice.deliver(token_ids, reason, logprobs)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[PieceToken]:
        return [token for piece in self.pieces for token in piece.tokens]


def parts_of(token_ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    ends = sorted({min(cut, len(token_ids)) for cut in cuts} | {len(token_ids)})
    return [token_ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def run(answer: Answer, token_ids: Sequence[int], cuts: Sequence[int]) -> None:
    *firsts, last = parts_of(token_ids, cuts)
    for part in firsts:
        if not answer.deliver(part):
            return
    answer.deliver(last, FinishReason.LENGTH)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(1, 60), max_size=20))
def test_every_token_is_told_once_and_in_order(tokenizer: TextTokenizer, cuts: list[int]) -> None:
    token_ids = tokenizer.encode(TEXT)
    answer = Answer(tokenizer)
    run(answer, token_ids, cuts)
    assert answer.text == TEXT
    assert [token.token_id for token in answer.tokens] == list(token_ids)
    told = [token.logprobs for token in answer.tokens]
    assert told == [TokenLogprobs(-float(i), 1, ()) for i in range(len(token_ids))]
    raw = b"".join(tokenizer.token_bytes(token.token_id) for token in answer.tokens)
    assert raw.decode() == TEXT
    for token in answer.tokens:
        own = tokenizer.token_bytes(token.token_id)
        if own.isascii():
            assert TEXT[token.text_offset :].startswith(own.decode())


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(1, 60), max_size=20),
    begin=st.integers(0, len(TEXT) - 1),
    length=st.integers(1, 12),
)
def test_nothing_from_a_stop_string_on_is_told(
    tokenizer: TextTokenizer, cuts: list[int], begin: int, length: int
) -> None:
    stop = TEXT[begin : begin + length]
    answer = Answer(tokenizer, (stop,))
    run(answer, tokenizer.encode(TEXT), cuts)
    kept = TEXT[: TEXT.index(stop)]
    assert answer.text == kept
    assert all(token.text_offset < len(kept) for token in answer.tokens)
    raw = b"".join(tokenizer.token_bytes(token.token_id) for token in answer.tokens)
    assert raw.startswith(kept.encode()), "each token whose text has begun"
    assert answer.pieces[-1].finish_reason is FinishReason.STOP


def test_an_end_token_goes_out_at_the_end(tokenizer: TextTokenizer) -> None:
    hi, (end,) = tokenizer.encode_bare("The"), tokenizer.encode_bare("<|im_end|>")
    answer = Answer(tokenizer)
    answer.deliver(hi)
    answer.deliver([end], FinishReason.STOP)
    assert [token.token_id for token in answer.pieces[-1].tokens] == [end]
    assert answer.pieces[-1].text == ""
    assert answer.tokens[-1].text_offset == 3


def test_stop_strings_wait_for_min_tokens(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("The relay. The relay.")
    half = len(tokenizer.encode("The relay."))
    answer = Answer(tokenizer, ("relay",), min_tokens=half)
    run(answer, token_ids, range(1, 60))
    assert answer.text == "The relay. The "
    assert Answer(tokenizer, ("relay",)).deliver(token_ids) is False
