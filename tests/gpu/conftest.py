"""The tiny models of the engine's tests."""

from tests.engine.conftest import tiny_llama, tiny_model, tiny_models, wide_llama

__all__ = ["tiny_llama", "tiny_model", "tiny_models", "wide_llama"]
