"""Captured steps against the same steps run as they come: in float32, on the CPU, where a graph is
its operators recorded (torch's attention) or its Python run again on the same buffers (FlashInfer's
contract, whose kernels are no operators)."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.cuda.capture import Capture, Work, repeat
from engine.cuda.flashinfer_attention import FlashInfer
from engine.cuda.flashinfer_graphs import FlashInferGraphs
from engine.cuda.graphed_model import GraphAttention, GraphedModel
from engine.cuda.padded_attention import PaddedAttention
from engine.cuda.shapes import Shape
from engine.kv_cache import KVCache
from engine.model import Model
from engine.weights import ModelWeights, read_weights
from tests.engine.conftest import TinyModel
from tests.engine.cuda.fake_flashinfer import FakeFlashInfer
from tests.engine.cuda.recorder import record
from tests.engine.model_driver import NUM_BLOCKS, ModelDriver, Running, random_prompt

CPU = torch.device("cpu")
MAX_NUM_SEQS = 11
MAX_TOKENS = 96
KINDS = ("torch", "flashinfer")

Open = Callable[[Model, int], GraphedModel]


num_replays = [0]


def counted(capture: Capture) -> Capture:
    """Adds up replays in `num_replays`."""

    def count(work: Work) -> Work:
        replay = capture(work)

        def counting() -> None:
            num_replays[0] += 1
            replay()

        return counting

    return count


def with_torch(model: Model, block_size: int) -> GraphedModel:
    max_blocks = -(-MAX_TOKENS // block_size)
    return GraphedModel(
        model, lambda kv: PaddedAttention(kv, MAX_NUM_SEQS, max_blocks), counted(record)
    )


def with_flashinfer(model: Model, block_size: int) -> GraphedModel:
    flashinfer = FlashInfer(FakeFlashInfer(), CPU)
    eager = Model(model.config, model._weights, flashinfer)

    def graphs(kv: KVCache) -> GraphAttention:
        windows = dict.fromkeys(model.config.windows)
        max_blocks = -(-MAX_TOKENS // block_size)
        return FlashInferGraphs(
            flashinfer, kv, model.config.num_heads, windows, MAX_NUM_SEQS, max_blocks
        )

    return GraphedModel(eager, graphs, counted(repeat))


@pytest.fixture(params=[with_torch, with_flashinfer], ids=KINDS)
def open_graphed(request: pytest.FixtureRequest) -> Open:
    opened: Open = request.param
    return opened


def model_of(tiny: TinyModel) -> Model:
    config = ModelConfig.from_folder(tiny.folder)
    return Model(config, read_weights(tiny.folder, config, torch.float32, CPU, ModelWeights.read))


def drivers(
    tiny: TinyModel, open_graphed: Open, block_size: int = 4
) -> tuple[ModelDriver, ModelDriver]:
    """With graphs and without, over pools of their own."""
    model = model_of(tiny)
    graphed = open_graphed(model, block_size)
    return (
        ModelDriver(graphed, model.config, torch.float32, CPU, block_size),
        ModelDriver(model, model.config, torch.float32, CPU, block_size),
    )


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def started(driver: ModelDriver, num_seqs: int) -> list[Running]:
    """Prompts of many lengths, computed."""
    seqs = [
        driver.add(random_prompt(1 + 29 * index % 23, seed=index), 30) for index in range(num_seqs)
    ]
    for seq in seqs:
        driver.step([(seq, len(seq.token_ids))])
    return seqs


def decode(driver: ModelDriver, seqs: list[Running], token_id: int) -> Tensor:
    for seq in seqs:
        seq.token_ids.append(token_id)
    return driver.step([(seq, 1) for seq in seqs])


def test_all_batch_sizes_in_any_order(tiny_model: TinyModel, open_graphed: Open) -> None:
    """Also after a larger one: what that left in the buffers is nobody's."""
    both = drivers(tiny_model, open_graphed)
    rows = [started(driver, MAX_NUM_SEQS) for driver in both]
    sizes = random.Random(2)
    num_replays[0] = 0
    order = [*sizes.sample(range(1, MAX_NUM_SEQS + 1), MAX_NUM_SEQS), 1, MAX_NUM_SEQS, 2]
    for turn, num_seqs in enumerate(order):
        members = sizes.sample(range(MAX_NUM_SEQS), num_seqs)
        ours, theirs = (
            decode(driver, [seqs[index] for index in members], 3 + turn)
            for driver, seqs in zip(both, rows, strict=True)
        )
        close(ours, theirs)
        assert num_replays[0] == turn + 1
    pools = [driver.kv.data[:, :, :NUM_BLOCKS] for driver in both]
    close(*pools)


@pytest.mark.parametrize("block_size", [1, 16])
def test_tokens_are_the_same(tiny_model: TinyModel, open_graphed: Open, block_size: int) -> None:
    """In chunks, so that steps with prompts and steps without take turns."""
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 40)]
    with_graphs, without = drivers(tiny_model, open_graphed, block_size)
    num_replays[0] = 0
    expected = without.generate(prompts, num_output=10, chunk_seed=5)
    assert with_graphs.generate(prompts, num_output=10, chunk_seed=5) == expected
    assert num_replays[0] >= 5


@pytest.fixture
def graphed(tiny_llama: TinyModel, open_graphed: Open) -> tuple[GraphedModel, ModelDriver]:
    driver, _ = drivers(tiny_llama, open_graphed)
    assert isinstance(driver.model, GraphedModel)
    return driver.model, driver


def test_padding_touches_nobody(graphed: tuple[GraphedModel, ModelDriver]) -> None:
    """Three rows in a graph of four: but for their own slots the pool stays as it is."""
    _, driver = graphed
    seqs = started(driver, 3)
    before = driver.kv.data.clone()
    decode(driver, seqs, 7)
    is_changed = (driver.kv.data != before).any(-1).any(-1).any(0).any(0)  # [blocks, block_size]
    changed = {(int(block), int(slot)) for block, slot in is_changed.nonzero()}
    last = [seq.num_computed - 1 for seq in seqs]
    own = {(seq.block_ids[at // 4], at % 4) for seq, at in zip(seqs, last, strict=True)}
    assert own <= changed <= own | {(driver.kv.scratch_block, 0)}


def row(num_new: int, computed: int, first_block: int, wants_logits: bool = True) -> BatchRow:
    num_blocks = -(-(num_new + computed) // 4)
    blocks = np.arange(first_block, first_block + num_blocks, dtype=np.int64)
    return BatchRow(np.full(num_new, 5, dtype=np.int64), computed, blocks, wants_logits)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([row(1, 3, 0)], 1),
        ([row(1, 3, 0), row(1, MAX_TOKENS - 1, 1), row(1, 0, 30)], 4),
        ([row(1, 3, index) for index in range(MAX_NUM_SEQS)], MAX_NUM_SEQS),
        ([row(1, 3, 0), row(2, 3, 1)], None),
        ([row(1, MAX_TOKENS, 0)], None),
        ([row(1, 3, index) for index in range(MAX_NUM_SEQS + 1)], None),
    ],
    ids=["one", "the longest", "the most", "a prompt", "too long", "too many"],
)
def test_what_does_not_fit_runs_as_it_comes(
    graphed: tuple[GraphedModel, ModelDriver], rows: list[BatchRow], wanted: int | None
) -> None:
    model, driver = graphed
    batch = BatchInput.build(rows, 4, CPU)
    shape = model.shape_of(batch, driver.kv)
    assert (shape and shape.num_seqs) == wanted
    close(model.forward(batch, driver.kv).logits, model.model.forward(batch, driver.kv).logits)


def test_logits_of_those_that_want_them(graphed: tuple[GraphedModel, ModelDriver]) -> None:
    model, driver = graphed
    rows = [row(1, 3, 0, False), row(1, 9, 1), row(1, 2, 8, False), row(1, 17, 9)]
    batch = BatchInput.build(rows, 4, CPU)
    logits, hidden = model.forward(batch, driver.kv)
    assert logits.shape[0] == 2
    expected = model.model.forward(batch, driver.kv)
    close(logits, expected.logits)
    close(hidden, expected.hidden)


def test_another_cache_is_not_the_captured_one(graphed: tuple[GraphedModel, ModelDriver]) -> None:
    model, _ = graphed
    other = KVCache(model.model.config, 8, 4, torch.float32, CPU)
    assert model.shape_of(BatchInput.build([row(1, 3, 0)], 4, CPU), other) is None


def test_stale_slots_do_not_leak(tiny_llama: TinyModel) -> None:
    """Not even as a NaN times a zero probability."""
    driver, _ = drivers(tiny_llama, with_torch)
    assert isinstance(driver.model, GraphedModel)
    batch = BatchInput.build([row(1, 5, 0), row(1, 17, 9), row(1, 2, 20)], 4, CPU)
    before = driver.model.forward(batch, driver.kv).logits.clone()
    slots = driver.kv.data.flatten(2, 3)
    used = [*range(6), *range(36, 36 + 18), *range(80, 83), driver.kv.scratch_block * 4]
    stale = torch.ones(slots.shape[2], dtype=torch.bool)
    stale[used] = False
    slots[:, :, stale] = torch.nan
    assert torch.equal(driver.model.forward(batch, driver.kv).logits, before)


def test_graphs_that_would_gather_too_much_are_left_out(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(tiny_llama.folder)
    kv = KVCache(config, 1, 16, torch.float32, CPU, has_scratch=True)
    per_token = 2 * config.num_kv_heads * config.head_dim * 4
    monkeypatch.setattr("engine.cuda.padded_attention.MAX_GATHERED_NBYTES", 2048 * per_token)
    shapes = PaddedAttention(kv, max_num_seqs=4, max_blocks=128).shapes
    assert shapes == [
        *(Shape(1, n) for n in (32, 64, 128)),
        Shape(2, 32),
        Shape(2, 64),
        Shape(4, 32),
    ]


def test_the_recorder_does_not_decide_again() -> None:
    """It is what a graph is: a branch on the host is taken once."""
    source, out = torch.tensor([1.0]), torch.zeros(1)

    def work() -> None:
        out.copy_(source * 2 if source > 0 else source)

    again: Work = record(work)
    source.fill_(-3.0)
    again()
    assert out == -6.0
