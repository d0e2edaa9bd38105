from __future__ import annotations

import pytest

from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import byte_level, save


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save(byte_level(), tmp_path_factory.mktemp("model")))
