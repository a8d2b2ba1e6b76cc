"""What one prompt finds: the workers as its sites, and which of them go together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.cost_model import NO_STREAMS, CostModel
from router.placement import Demand, Placement, Quotes, Site, place


@dataclass(frozen=True, slots=True)
class Scene:
    """See the module."""

    demand: Demand
    prefills: Sequence[Site]
    decodes: Sequence[Site]
    pairs: Sequence[tuple[int, int]]
    """Of their indices, prefill first."""
    may_be_alone: bool
    """Decode workers may compute it themselves."""

    def place(self, costs: CostModel, crowd: float) -> Placement | None:
        """As router/placement.py does."""
        pairs = [(self.prefills[one], self.decodes[other]) for one, other in self.pairs]
        alone = self.decodes if self.may_be_alone else ()
        return place(Quotes(costs, self.demand, crowd), pairs, alone)

    def idle(self) -> "Scene":
        """The same without anybody else; caches are as they are."""
        return replace(
            self, prefills=[*map(_idle, self.prefills)], decodes=[*map(_idle, self.decodes)]
        )


def _idle(site: Site) -> Site:
    return replace(
        site,
        queue_s=0.0,
        num_behind=0,
        streams=NO_STREAMS,
        forecast=None,
        room_s=0.0,
        load=0,
    )
