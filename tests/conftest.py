"""Options, marker rules and hypothesis profiles that hold for every test."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Libraries a marked test is measured against. Missing ones skip the test, or fail it under --fail-on-skip.
NEEDED_MODULES = {
    "judge": ("torch", "transformers"),
    "triton": ("torch", "triton"),
    "ui": ("playwright",),
    "api": ("schemathesis",),
}

# The default run repeats exactly; `make fuzz` draws fresh seeds and many more examples.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("fuzz", settings.get_profile("default"), derandomize=False, max_examples=3000)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="report every skipped test or module as failed: for runs in which everything needed is installed",
    )


@pytest.fixture(autouse=True)
def _no_log_handler_is_left() -> Iterator[None]:
    """A command sets logging up for its process, on a stream that in tests is closed once the test has ended."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, modules in NEEDED_MODULES.items():
            missing = [name for name in modules if importlib.util.find_spec(name) is None]
            if missing and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker} test: {', '.join(missing)} not installed"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    return _failed_if_skipped(report, item.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """A module that skips itself on import has no markers yet, so under --fail-on-skip it always counts."""
    report = yield
    return _failed_if_skipped(report, collector.config)


def _failed_if_skipped(report: Any, config: pytest.Config) -> Any:
    """Turn a skip into a failure under --fail-on-skip; an expected failure (xfail) stays what it is.

    Runs where the report is made, which under xdist is the worker, so that the controller counts a failure.
    """
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("fail_on_skip"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\n(a skip counts as a failure under --fail-on-skip)"
    return report
