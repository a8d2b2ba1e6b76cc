"""A small vocabulary for grammars."""

from pathlib import Path

import pytest

from runtime.grammar import Vocabulary
from tests.router.model_folder import byte_level_tokenizer

END = 1  # <|im_end|>


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary.from_folder(folder, 333, [END])  # more rows than the tokenizer has tokens
