"""The choice moves with the measured speed of the link."""

from hypothesis import given
from hypothesis import strategies as st

from engine.codec_choice import RAW, CodecCost, choose_codec

LOSSLESS, LOSSY = 2, 1
COSTS = {
    LOSSLESS: CodecCost(ratio=0.68, encode_s=1 / 600e6, decode_s=1 / 1400e6),
    LOSSY: CodecCost(ratio=0.53, encode_s=1 / 700e6, decode_s=1 / 2300e6),
}
GBIT = 1e9 / 8


def test_a_fast_link_gets_raw_and_a_slow_one_the_smallest() -> None:
    both = (LOSSY, LOSSLESS)
    assert choose_codec(both, 3e9, COSTS) == RAW
    assert choose_codec(both, 1 * GBIT, COSTS) == LOSSY
    assert choose_codec((LOSSLESS,), 1 * GBIT, COSTS) == LOSSLESS
    assert choose_codec((LOSSLESS,), 2 * GBIT, COSTS) == RAW


def test_what_is_not_allowed_or_not_known_is_not_chosen() -> None:
    assert choose_codec((), 1e6, COSTS) == RAW
    assert choose_codec((RAW,), 1e6, COSTS) == RAW
    assert choose_codec((7,), 1e6, COSTS) == RAW
    assert choose_codec((LOSSY, LOSSLESS), None, COSTS) == RAW


def test_frames_that_compress_badly_teach_it() -> None:
    cost = COSTS[LOSSLESS]
    for _ in range(20):
        cost = cost.after(ratio=1.0, encode_s=1 / 300e6, weight=0.2)
    assert choose_codec((LOSSLESS,), 0.5 * GBIT, {LOSSLESS: cost}) == RAW


@given(st.floats(1e5, 1e11), st.floats(1e5, 1e11))
def test_a_slower_link_never_gets_a_larger_payload(one: float, other: float) -> None:
    def ratio(link: float) -> float:
        codec = choose_codec((LOSSY, LOSSLESS), link, COSTS)
        return 1.0 if codec == RAW else COSTS[codec].ratio

    slow, fast = sorted((one, other))
    assert ratio(slow) <= ratio(fast)


@given(
    st.floats(1e5, 1e11),
    st.lists(
        st.builds(CodecCost, st.floats(0.1, 1.2), st.floats(1e-11, 1e-7), st.floats(1e-11, 1e-7)),
        max_size=4,
    ),
)
def test_the_choice_is_the_soonest(link: float, made: list[CodecCost]) -> None:
    costs = dict(enumerate(made, start=1))
    chosen = choose_codec(costs, link, costs)
    seconds = {RAW: 1 / link} | {codec: cost.seconds(link) for codec, cost in costs.items()}
    assert seconds[chosen] == min(seconds.values())
