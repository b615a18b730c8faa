"""The suite's own rules: --fail-on-skip lets no skipped test pass for a green one."""

from pathlib import Path

import pytest

pytest_plugins = "pytester"  # its tests run in this process; only xdist's workers are others

CONFTEST = Path(__file__).with_name("conftest.py")
CONFIG = """[pytest]
markers =
    judge: x
    triton: x
asyncio_default_fixture_loop_scope = function
"""
SKIPPING_TESTS = """
import pytest

def test_skips_itself(): pytest.skip("no such library")

@pytest.mark.skip(reason="later")
def test_is_marked(): pass

@pytest.mark.xfail(reason="known")
def test_known_failure(): assert False

def test_passes(): pass
"""


@pytest.fixture
def run_pytest(pytester):
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini(CONFIG)

    def run(source: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_sample=source)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)

    return run


def test_skips_pass_by_default(run_pytest):
    done = run_pytest(SKIPPING_TESTS)
    assert done.ret == 0, done.stdout.str()
    assert "1 passed, 2 skipped, 1 xfailed" in done.stdout.str()


@pytest.mark.parametrize("xdist", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_skips_fail_under_fail_on_skip(run_pytest, xdist):
    done = run_pytest(SKIPPING_TESTS, "--fail-on-skip", *xdist)
    assert done.ret == 1, done.stdout.str()
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in done.stdout.str()  # a skip by marker happens in set-up: an error
    assert "no such library" in done.stdout.str()


@pytest.mark.parametrize("xdist", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_a_module_that_skips_itself_fails_under_fail_on_skip(run_pytest, xdist):
    done = run_pytest('import pytest\npytest.importorskip("no_such_module")\n', "--fail-on-skip", *xdist)
    assert done.ret != 0, done.stdout.str()
    assert "no_such_module" in done.stdout.str()
    assert "error" in done.stdout.str()


def test_judge_tests_are_skipped_where_the_judge_is_missing(run_pytest, pytester):
    pytester.makeconftest(CONFTEST.read_text().replace('("torch", "transformers")', '("no_such_judge",)'))
    source = "import pytest\n@pytest.mark.judge\ndef test_against_the_judge(): pass\n"
    assert "1 skipped" in run_pytest(source).stdout.str()
    done = run_pytest(source, "--fail-on-skip")
    assert done.ret == 1
    assert "1 error" in done.stdout.str()
