"""`baton up` as a newcomer starts it: real workers, the real model."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from openai import OpenAI

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@dataclass
class Up:
    process: "subprocess.Popen[str]"
    ready_line: str
    url: str
    run_dir: Path

    def cluster(self) -> dict[str, dict[str, object]]:
        """Of cluster.json, by name."""
        rows = json.loads((self.run_dir / "cluster.json").read_text())
        return {row["name"]: row for row in rows}

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def ask(self) -> str | None:
        with self.client() as client:
            answer = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                max_tokens=20,
            )
        return answer.choices[0].message.content


def read_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()
