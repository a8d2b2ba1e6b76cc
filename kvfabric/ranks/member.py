"""A rank beside rank 0, as rank 0's fabric sees it."""

from kvfabric.ranks.channel import RankChannel
from kvfabric.ranks.messages import Here, Message
from kvfabric.stats import LentSlot

ANSWER_SECONDS = 10.0
"""For what a rank that is told to give something up must do: it only lets frames under way end."""


class Member:
    """On rank 0's loop, but for `stats`."""

    def __init__(self, rank: int, channel: RankChannel, here: Here) -> None:
        self.rank = rank
        self.shard = here.shard
        self.is_gone = False
        self.stats = here.stats
        """Its last word on them; each is whole, so any thread may read it."""
        self.lent: list[LentSlot] = []
        """Its last word on whose its slots are."""
        self._channel = channel

    def tell(self, message: Message) -> None:
        if not self.is_gone:
            self._channel.send(message)

    def close(self) -> None:
        self.is_gone = True
        self._channel.close()
