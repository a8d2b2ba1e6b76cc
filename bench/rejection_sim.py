"""A disaggregated cluster in virtual time, to see what an admission rule does to both phases.

Prefill workers compute prompts one after the other, at so many tokens a second. Decode workers take
a step of `step_s` and `stream_s` more for each stream, which gives every stream a token. A prompt
goes to the shortest prefill queue, and to the decode worker with the fewest streams that run or are
on their way. What was let in is decoded, however slowly; with `drops_late` it is dropped where the
batch would miss the objective by then, and what was computed for it is lost.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.traces import Arrival
from router.decode_forecast import DecodeForecast


@dataclass(frozen=True)
class Plant:
    num_prefills: int
    num_decodes: int
    tokens_per_s: float
    step_s: float
    stream_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    drops_late: bool = False

    def step(self, num: float) -> float:
        return self.step_s + self.stream_s * num


Rule = Callable[[Plant, DecodeForecast, float], bool]
"""Whether a prompt is let in, by the decode worker it would come to and how long until then."""


def let_all_in(plant: Plant, forecast: DecodeForecast, after_s: float) -> bool:
    return True


def load_now(plant: Plant, forecast: DecodeForecast, after_s: float) -> bool:
    """The naive early rejection: by the streams that run while it is decided."""
    return plant.step(forecast.num_running + 1) <= plant.slo_tpot_s


def load_then(plant: Plant, forecast: DecodeForecast, after_s: float) -> bool:
    """The router's: by the streams that will run then."""
    return plant.step(forecast.most_from(after_s) + 1) <= plant.slo_tpot_s


RULES: dict[str, Rule] = {
    "no early rejection": let_all_in,
    "early, load now": load_now,
    "early, predicted": load_then,
}


@dataclass
class _Decode:
    """Streams advance alike: each ends when `given` has grown by its number of outputs."""

    ends: list[tuple[float, float, int]] = field(default_factory=list)
    """(`given` at its end, when it began, outputs), the next first."""
    given: float = 0.0
    now_s: float = 0.0
    num_coming: int = 0

    def run_until(self, at_s: float, plant: Plant, done: Callable[[float], None]) -> None:
        while self.ends:
            step_s = plant.step(len(self.ends))
            next_s = self.now_s + (self.ends[0][0] - self.given) * step_s
            if next_s > at_s:
                self.given += (at_s - self.now_s) / step_s
                break
            self.given, self.now_s = self.ends[0][0], next_s
            _, began_s, num_outputs = heapq.heappop(self.ends)
            done((next_s - began_s) / num_outputs)
        self.now_s = at_s


@dataclass
class Outcome:
    num_early: int = 0
    num_late: int = 0
    """Dropped at decode, their prompts computed for nothing."""
    num_done: int = 0
    num_slow: int = 0
    """Of those, that missed the objective on TPOT."""
    lost_tokens: int = 0
    decode_loads: list[float] = field(default_factory=list)
    """Each second: streams, by those that the objective allows."""
    prefill_loads: list[float] = field(default_factory=list)
    """Each second: seconds of work queued, on average of the workers."""


class Simulation:
    """See the module."""

    def __init__(self, plant: Plant, rule: Rule) -> None:
        self._plant = plant
        self._rule = rule
        self._free_s = [0.0] * plant.num_prefills
        self._decodes = [_Decode() for _ in range(plant.num_decodes)]
        self._on_way: list[tuple[float, int, int, int]] = []  # when, decode worker, outputs, prompt
        self._mean_outputs = 128.0
        self.outcome = Outcome()

    def run(self, trace: Sequence[Arrival], scale: float) -> Outcome:
        """The trace at so many times its rate."""
        second = 0
        for arrival in trace:
            at_s = arrival.at_s / scale
            while second <= at_s:
                self._advance(second)
                self._look(second)
                second += 1
            self._advance(at_s)
            self._come(arrival, at_s)
        self._advance(at_s + 3600)
        return self.outcome

    def _come(self, arrival: Arrival, at_s: float) -> None:
        plant, took_s = self._plant, arrival.num_tokens / self._plant.tokens_per_s
        prefill = min(range(plant.num_prefills), key=lambda one: self._free_s[one])
        after_s = max(0.0, self._free_s[prefill] - at_s) + took_s
        index = min(range(plant.num_decodes), key=self._num)
        decode = self._decodes[index]
        life_s = self._mean_outputs * plant.step(len(decode.ends))
        joining = tuple(when - at_s for when, where, *_ in self._on_way if where == index)
        forecast = DecodeForecast(len(decode.ends), life_s, joining)
        if after_s > plant.slo_ttft_s or not self._rule(plant, forecast, after_s):
            self.outcome.num_early += 1
            return
        self._free_s[prefill] = at_s + after_s
        decode.num_coming += 1
        on_way = at_s + after_s, index, arrival.num_outputs, arrival.num_tokens
        heapq.heappush(self._on_way, on_way)

    def _num(self, index: int) -> int:
        return len(self._decodes[index].ends) + self._decodes[index].num_coming

    def _advance(self, at_s: float) -> None:
        while self._on_way and self._on_way[0][0] <= at_s:
            now_s, index, num_outputs, num_tokens = heapq.heappop(self._on_way)
            self._run_decodes(now_s)
            decode = self._decodes[index]
            decode.num_coming -= 1
            is_too_slow = self._plant.step(len(decode.ends) + 1) > self._plant.slo_tpot_s
            if is_too_slow and self._plant.drops_late:
                self.outcome.num_late += 1
                self.outcome.lost_tokens += num_tokens
                continue
            self._mean_outputs += 0.02 * (num_outputs - self._mean_outputs)
            heapq.heappush(decode.ends, (decode.given + num_outputs, now_s, num_outputs))
        self._run_decodes(at_s)

    def _run_decodes(self, at_s: float) -> None:
        for decode in self._decodes:
            decode.run_until(at_s, self._plant, self._done)

    def _done(self, tpot_s: float) -> None:
        self.outcome.num_done += 1
        self.outcome.num_slow += tpot_s > self._plant.slo_tpot_s

    def _look(self, at_s: float) -> None:
        plant = self._plant
        allowed = (plant.slo_tpot_s - plant.step_s) / plant.stream_s * plant.num_decodes
        num = sum(len(decode.ends) for decode in self._decodes)
        queued_s = sum(max(0.0, free_s - at_s) for free_s in self._free_s)
        self.outcome.decode_loads.append(num / allowed)
        self.outcome.prefill_loads.append(queued_s / plant.num_prefills)
