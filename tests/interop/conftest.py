from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hugging_face_cases import model_cache


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function: name -> (transformers model, its directory). Each is created once; no test changes one."""
    return model_cache(tmp_path_factory.mktemp("hf"))
