"""What stands in for the fabric between fake workers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Relay:
    """What all fake workers of a test share."""

    answer: Sequence[int] = ()
    others: Sequence[Sequence[int]] = ()
    """What samples 1, 2, … say, where it is not the answer."""
    commits: dict[bytes, asyncio.Future[list[int]]] = field(default_factory=dict)
    """Transfer id → token 0 (or nothing, on a resume), once the prefill leg has shipped."""
    num_open_calls: int = 0
    prefill_hit: int = 0
    """Prompt tokens that the workers say they had cached, as the next."""
    decode_hit: int = 0

    def answer_of(self, sample: int) -> Sequence[int]:
        return ((self.answer, *self.others)[sample : sample + 1] or (self.answer,))[0]

    def commit(self, transfer_id: bytes) -> asyncio.Future[list[int]]:
        if transfer_id not in self.commits:
            self.commits[transfer_id] = asyncio.get_running_loop().create_future()
        return self.commits[transfer_id]
