"""The suite's own rules: --fail-on-skip lets no skipped test pass for a green one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
CONFIG = "[pytest]\nmarkers = judge: x\n    triton: x\nasyncio_mode = auto\n"
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
def run_pytest(tmp_path):
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text(CONFIG)

    def run(source: str, *args: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_sample.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    return run


def test_skips_pass_by_default(run_pytest):
    done = run_pytest(SKIPPING_TESTS)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped, 1 xfailed" in done.stdout


@pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_skips_fail_under_fail_on_skip(run_pytest, xdist):
    done = run_pytest(SKIPPING_TESTS, "--fail-on-skip", *xdist)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in done.stdout  # a skip by marker happens in set-up: an error
    assert "no such library" in done.stdout


@pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_module_that_skips_itself_fails_under_fail_on_skip(run_pytest, xdist):
    done = run_pytest('import pytest\npytest.importorskip("no_such_module")\n', "--fail-on-skip", *xdist)
    assert done.returncode != 0, done.stdout
    assert "no_such_module" in done.stdout
    assert "error" in done.stdout


def test_judge_tests_are_skipped_where_the_judge_is_missing(run_pytest, tmp_path):
    (tmp_path / "conftest.py").write_text(
        CONFTEST.read_text().replace('("torch", "transformers")', '("no_such_judge",)')
    )
    source = "import pytest\n@pytest.mark.judge\ndef test_against_the_judge(): pass\n"
    assert "1 skipped" in run_pytest(source).stdout
    done = run_pytest(source, "--fail-on-skip")
    assert done.returncode == 1
    assert "1 error" in done.stdout
