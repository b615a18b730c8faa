"""Ranks' processes log as the server does: level and form as told, the ranks' names in every line."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from crosspool.cluster.base import RankReady
from crosspool.cluster.rank_log import RankLog, set_up_rank_log
from crosspool.cluster.start import start_cluster
from tests.support.lane_driver import wait_for
from tests.support.real_cluster import make_config


@pytest.mark.parametrize("level", ["info", "warning"])
def test_lines_have_level_ranks_and_logger(level, capfd):
    set_up_rank_log(RankLog(level), ("kv0", "p0"))
    logger = logging.getLogger("crosspool.some.where")
    logger.info("came in %.1f s", 0.5)
    logger.warning("late")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (2 if level == "info" else 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING kv0,p0 crosspool\.some\.where: late", lines[-1])


def test_json_lines_have_the_ranks_as_a_field(capfd):
    set_up_rank_log(RankLog("info", is_json=True), ("w0",))
    logging.getLogger("crosspool.x").info("swapped", extra={"model": "m"})
    (line,) = capfd.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["rank"], found["level"], found["logger"], found["message"], found["model"]) == (
        "w0",
        "info",
        "crosspool.x",
        "swapped",
        "m",
    )


def test_a_ranks_process_writes_to_the_descriptor_that_it_is_given():
    readable, writable = os.pipe()
    log = RankLog("debug", fd=writable)
    cluster = start_cluster(make_config("processes", 1, backend="tests.support.talking_backend", log=log))
    try:
        wait_for(cluster, RankReady, 2)
    finally:
        cluster.close()
        os.close(writable)
    with open(readable, encoding="utf-8") as lines:
        found = lines.read().splitlines()
    assert {line.split(" ", 2)[2] for line in found} == {
        "DEBUG kv0 tests.support.talking_backend: 2 frames",
        "DEBUG w0 tests.support.talking_backend: w0 is here",
    }


def test_text_lines_cost_a_ranks_start_no_further_package():
    code = "import sys, crosspool.cluster.rank_process; print('structlog' in sys.modules, 'rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
