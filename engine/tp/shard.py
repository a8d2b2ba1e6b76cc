"""Which part of a model one rank holds, when several compute it together. Pure.

A model is cut as in Megatron-LM (Shoeybi et al., 2019): what a layer makes of its input is cut by
columns (attention heads, the MLP's inner values), what it makes of that again by rows, so that one
sum over the ranks ends each half of a layer. All cuts are even to within one; query heads go with
the KV head that they share.
"""

import dataclasses
from dataclasses import dataclass

from engine.config import ModelConfig, ModelError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Rank 0 is the one that schedules and samples."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, self

    def cut(self, whole: int) -> range:
        """This rank's part of [0, whole); the first ranks have one more where it is not even."""
        each, more = divmod(whole, self.size)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def kv_heads(self, config: ModelConfig) -> range:
        return self.cut(config.num_kv_heads)

    def heads(self, config: ModelConfig) -> range:
        """Query heads: all that share this rank's KV heads."""
        group = config.num_heads // config.num_kv_heads
        kv_heads = self.kv_heads(config)
        return range(kv_heads.start * group, kv_heads.stop * group)

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank computes it. Layers, hidden size and vocabulary stay whole.

        Raises ModelError if there is nothing for some rank."""
        if self.size > config.num_kv_heads:
            raise ModelError(
                f"{self.size} ranks for {config.num_kv_heads} KV heads: each rank needs one of "
                "its own; choose a smaller --tensor-parallel"
            )
        return dataclasses.replace(
            config,
            num_heads=len(self.heads(config)),
            num_kv_heads=len(self.kv_heads(config)),
            intermediate_size=len(self.cut(config.intermediate_size)),
        )


WHOLE = Shard()
"""Of a model that one rank computes alone."""
