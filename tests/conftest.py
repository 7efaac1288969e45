from __future__ import annotations

import os

import pytest
from long_tests import read_list

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # users have none: what is told lies in a buffer first


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = set(read_list())
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")
