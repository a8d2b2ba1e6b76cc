"""What is known of one prompt while it is served: its samples, workers that failed, time left.

Of each of its samples router/sample.py knows what was delivered.
"""

import asyncio
from collections.abc import Callable, Sequence

from router.errors import Reopen
from router.placement import Placement
from router.queue_line import FullQueues
from router.record import PromptRecord, unkept
from router.request import TokenLogprobs, ValidPrompt
from router.sample import Deliver, SampleProgress


class Progress:
    def __init__(
        self,
        prompt: ValidPrompt,
        deliver: Sequence[Deliver],
        deadline: float,
        note_cached: Callable[[int], None] = lambda num_tokens: None,
        record: PromptRecord | None = None,
    ) -> None:
        self.prompt = prompt
        self.record = record or unkept(prompt)
        """What whoever explains the request will know of it."""
        self.samples = [SampleProgress(prompt.sampling, one) for one in deliver]
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens but the first, as far as they have been told."""
        self.failed_prefills: set[str] = set()
        """Addresses: not asked again for this prompt."""
        self.failed_decodes: dict[str, int] = {}
        """Address → statuses it had given when it failed: asked again only if nobody else is
        left, and after it has told its status again."""
        self.is_for_decode_alone = False
        """No prefill worker is to take part."""
        self.placement: Placement | None = None
        """What was predicted of the present attempt, if anything was."""
        self.full_queues = FullQueues()
        self._deadline = deadline
        self._note_cached = note_cached
        self._num_cached_tokens = 0

    @property
    def remaining_s(self) -> float:
        """Until the deadline; at least a millisecond, because 0 is no limit on the wire."""
        return max(0.001, self._deadline - asyncio.get_running_loop().time())

    def note_cached(self, num_tokens: int) -> None:
        """So many prompt tokens were found in a worker's prefix cache; the largest number counts.
        To be told before the tokens that it came with."""
        if num_tokens > self._num_cached_tokens:
            self._num_cached_tokens = self.record.num_cached_tokens = num_tokens
            self._note_cached(num_tokens)

    def sample(self, index: int) -> SampleProgress:
        """Raises Reopen if a worker tells of one that nobody asked for."""
        if index >= len(self.samples):
            raise Reopen("contradiction")
        return self.samples[index]

    def accept_prompt(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keeps the first copy of each. Raises Reopen if a worker skips one."""
        num_known = len(self.prompt_logprobs) - (first_index - 1)
        if num_known < 0:
            raise Reopen("contradiction")
        self.prompt_logprobs += logprobs[num_known:]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        num_wanted = len(self.prompt.token_ids) - 1
        wants = self.prompt.sampling.num_prompt_logprobs > 0
        return wants and len(self.prompt_logprobs) < num_wanted

    @property
    def num_tokens(self) -> int:
        """Delivered, of all samples, and told of the prompt."""
        return sum(len(one.token_ids) for one in self.samples) + len(self.prompt_logprobs)

    @property
    def has_tokens(self) -> bool:
        """Some sample has."""
        return any(sample.token_ids for sample in self.samples)

    @property
    def has_ended(self) -> bool:
        """All samples have."""
        return all(sample.has_ended for sample in self.samples)

    @property
    def is_finished(self) -> bool:
        """The answers have ended, and nothing about the prompt is still to come."""
        return self.has_ended and not self.lacks_prompt_logprobs

    @property
    def resume(self) -> list[Sequence[int] | None]:
        """What another attempt is told of each sample's outputs; None: it has ended. If only
        something about the prompt is missing, one token is left for the first to say again."""
        told = [None if sample.has_ended else sample.token_ids.copy() for sample in self.samples]
        if self.has_ended:
            told[0] = self.samples[0].token_ids[:-1]
        return [*told]
