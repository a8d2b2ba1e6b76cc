"""FlashInfer's workspaces are hundreds of megabytes, which its stand-in does not use."""

import pytest


@pytest.fixture(autouse=True)
def _small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.flashinfer_attention.WORKSPACE_NBYTES", 64)
    monkeypatch.setattr("engine.cuda.flashinfer_graphs.INT_WORKSPACE_NBYTES", 64)
