"""A tiny random model that has text: 2 layers over the byte-level tokenizer of the router's tests.

It says nonsense with conviction, which is what a grammar has to hold.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.grammar import Vocabulary
from tests.router.model_folder import write_model_folder

VOCAB_SIZE = 320
END = 1
"""<|im_end|>"""


def write_text_model(folder: Path) -> Path:
    """A model folder for workers and a router."""
    write_model_folder(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.3,  # wide: greedy tokens then differ from step to step
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)  # its config.json replaces the router's
    return folder


def text_vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary.from_folder(folder, VOCAB_SIZE, [END])
