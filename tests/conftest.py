"""What every test has: a seed that is printed and can be given, a traceback when the process dies,
and a clear reason where this machine lacks what a test needs.

``CXLFS_SEED=N`` repeats a run with other random choices; the default is always the same.
``CXLFS_SAMPLE=N`` draws another sample of the long tests; the default is a number of the commit.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import signal
import zlib
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.repository import ROOT
from tests.support.sample import left_out, number_of_commit

SEED_DEFAULT = 20_260_101
SEED = int(os.environ.get("CXLFS_SEED", SEED_DEFAULT))
# In the environment, so that all workers of a run draw one sample.
SAMPLE = int(os.environ.get("CXLFS_SAMPLE") or number_of_commit(ROOT, SEED_DEFAULT))
os.environ["CXLFS_SAMPLE"] = str(SAMPLE)

# Without CXLFS_SEED the same examples each time: a failure is the change's, not luck's. Times are
# the machine's business, and pytest-timeout's.
hypothesis.settings.register_profile(
    "cxlfs", derandomize="CXLFS_SEED" not in os.environ, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("cxlfs")


# A run started in the background of a script has SIGINT ignored, and so would have every program
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Thousands of tests, which all stay: looking through them for garbage again and again costs a third
# of the time of short ones.
gc.disable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leave to campaigns what this run does not sample; order what pytest has selected."""
    sampled = [
        (item, marker)
        for item in items
        if (marker := item.get_closest_marker("sampled")) is not None
    ]
    cases = [
        (marker.kwargs.get("group", item.nodeid.partition("[")[0]), marker.args[0])
        for item, marker in sampled
    ]
    for position in left_out(cases, SAMPLE):
        sampled[position][0].add_marker("campaign")
    yield
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        from tests.support.order import long_first

        long = [item for item in items if item.get_closest_marker("slow") is not None]
        others = [item for item in items if item.get_closest_marker("slow") is None]
        items[:] = long_first(long, others, workers)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_report_header() -> list[str]:
    reason = _why_not_mountable()
    return [
        f"seed: {SEED} (set CXLFS_SEED to choose another)",
        f"sample of long tests: {SAMPLE} (set CXLFS_SAMPLE to choose another)",
        "mounts: yes" if reason is None else f"mounts: NO, {reason}; mounted tests are skipped",
    ]


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _why_not_mountable()
    if item.get_closest_marker("mounted") is not None and reason is not None:
        pytest.skip(f"cannot mount here: {reason}")
    marker = item.get_closest_marker("frameworks")
    for name in marker.args if marker is not None else ():
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (scripts/test --frameworks installs it)")


@functools.cache
def _why_not_mountable() -> str | None:
    from tests.support.mount import why_not_mountable

    return why_not_mountable()


@pytest.fixture(scope="session")
def base_seed() -> int:
    """The one of the whole run, for what divides it itself."""
    return SEED


@pytest.fixture(scope="session")
def sample() -> int:
    """The number that draws which part of the long tests this run makes."""
    return SAMPLE


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of this test alone: the same whichever tests run before it."""
    return zlib.crc32(f"{SEED} {request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)
