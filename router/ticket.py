"""A request on its way through admission: what it may cost, and what it was served so far."""

import math
import time
from typing import NamedTuple

from router.objective import Objective
from router.record import RequestRecord
from router.request import ValidRequest
from router.tenant import Tenant

OUTPUT_WORTH = 2.0
"""Of an output token, in prompt tokens: the paper's weights (router/fair_queue.py)."""


class Served(NamedTuple):
    """Tokens."""

    prompt: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output

    def since(self, before: "Served") -> "Served":
        return Served(self.prompt - before.prompt, self.output - before.output)


class Ticket:
    """Of one request. `num_outputs`: tokens of a sample, on average."""

    def __init__(
        self,
        record: RequestRecord,
        request: ValidRequest,
        objective: Objective,
        num_outputs: float,
    ) -> None:
        self.record = record
        self.request = request
        self.objective = objective
        self.arrived_s = time.monotonic()
        self.num_prompt = request.num_prompt_tokens
        self.num_samples = sum(prompt.num_samples for prompt in request.prompts)
        self.num_expected = self.num_prompt + math.ceil(
            sum(
                prompt.num_samples * min(prompt.sampling.max_tokens, num_outputs)
                for prompt in request.prompts
            )
        )
        """Tokens, prompt and output."""
        self.patience_s = math.inf
        """How long it waits for its turn."""
        self.accounted = Served()
        """What its tenant has paid for, and metrics know of."""

    @property
    def tenant(self) -> Tenant:
        return self.record.grant.tenant

    @property
    def served(self) -> Served:
        """So far: prompts that went to a worker, and outputs that came."""
        begun = [prompt for prompt in self.record.prompts if prompt.num_attempts]
        outputs = sum(told.num_tokens for prompt in begun for told in prompt.samples())
        return Served(sum(prompt.num_tokens for prompt in begun), outputs)

    def tpot_s(self) -> float | None:
        """Of the whole request, now that it has ended: the slowest of its prompts' samples, taken
        from its first token on. None: no sample had two tokens."""
        now_ns, found = time.monotonic_ns(), []
        for prompt in self.record.prompts:
            longest = max((told.num_tokens for told in prompt.samples()), default=0)
            if prompt.first_token_ns and longest > 1:
                took_ns = (prompt.end_ns or now_ns) - prompt.first_token_ns
                found.append(took_ns / 1e9 / (longest - 1))
        return max(found, default=None)

    @property
    def num_unplaced(self) -> int:
        """Prompts of it that no worker has been picked for yet."""
        return sum(not prompt.num_attempts for prompt in self.record.prompts)
