import os
from pathlib import Path

# Tests never reach for a network, whatever a library would like to look up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

from learnable_multipliers.cli import main

# The same examples on every run: a red test stays red until it is fixed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Tiny models: more threads than one only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _reseed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Keep the user's cache folder out of the tests, and their data out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LRM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Prepare a small corpus, shared by all tests: to read, not to write into."""
    # Not above: tests of the library run where torch alone is installed.
    from runs import prepared

    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def ranks():
    """Four ranks, started when a test first runs something on them."""
    from ranks import Ranks

    found = Ranks()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def played():
    """The rounds of the headline's whole program in a made-up world, its runs and their records."""
    from headline_world import play

    return play()


@pytest.fixture(scope="session")
def labelled(played):
    """The records of that program, with their labels."""
    from headline_world import with_labels

    _, runs, records = played
    return with_labels(runs, records)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Work in an empty folder, with a cache of its own and a terminal of 80 columns."""
    monkeypatch.setenv("LRM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def ask(place, capsys):
    """Return a function that runs the command and returns exit code, output and complaints."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code: object = 0
        try:
            main([str(word) for word in arguments])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        # Python prints what is no number and exits with 1.
        return (code, out, err) if isinstance(code, int) else (1, out, err + str(code))

    return run


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="every law once: two cases of each parametrized test, one where they are slow",
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        _keep_every_law_once(config, items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        # Not in item.keywords, which holds the names of cases too.
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def _keep_every_law_once(config, items):
    """Keep the first and the last case of each test; the rest of a grid is for `make test-all`."""
    cases: dict[str, list] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for group in cases.values():
        ends = group[:1] if "slow" in group[0].keywords else (group[0], group[-1])
        kept.update(map(id, ends))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
