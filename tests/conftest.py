"""What all tests share: models to run, and the proof that a test left no thread behind."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long one example takes says more of the machine than of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

_LASTING = ("pytest_timeout", "asyncio_", "_poll_wrapper", "TMonitor", "litellm-logging")
"""Threads of libraries that live as long as the process: pytest's clock, asyncio's default
executor, grpc.aio's poller, tqdm's monitor, a foreign client's log."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real model, prepared once (about half a minute the first time)."""
    command = [sys.executable, "-m", "engine.prepare", "--model", "smollm2"]
    prepared = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    return Path(json.loads(prepared.stdout)["path"])


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A Llama of 2 layers, with the real model's tokenizer (and so its vocabulary)."""
    import torch  # here: most tests need no model, and this takes seconds
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,  # wide: greedy tokens then differ from step to step
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((smollm2 / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with a tokenizer of its own."""
    from tests.text_model import write_text_model

    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2.0
    while leaked := [t for t in threading.enumerate() if t not in before and _is_ours(t)]:
        assert time.monotonic() < deadline, f"threads left behind: {leaked}"
        time.sleep(0.02)


class _Violations(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "ledger of" in record.getMessage():
            self.said.append(record.getMessage())


@pytest.fixture(autouse=True)
def ledger_violations() -> Iterator[list[str]]:
    """A worker survives a wrong ledger; a test does not, but for one that wants it and takes out
    what it expected."""
    handler = _Violations()
    loggers = [logging.getLogger(name) for name in ("engine.books", "kvfabric.node")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.said
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not handler.said


def _is_ours(thread: threading.Thread) -> bool:
    names = (thread.name, type(thread).__name__)
    return thread.is_alive() and not any(lasting in name for lasting in _LASTING for name in names)
