import os
from pathlib import Path

# Tests never reach for a network, whatever a library would like to look up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

# The same examples on every run: a red test stays red until it is fixed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Tiny models: more threads than one only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _reseed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Prepare a small corpus, shared by all tests: to read, not to write into."""
    # Not above: tests of the library run where torch alone is installed.
    from runs import prepared

    return prepared(tmp_path_factory.mktemp("corpus"))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
