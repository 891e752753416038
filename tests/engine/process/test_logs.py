"""Lines of the log: one an event, whatever it quotes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from penstock.engine.process.logs import _JsonFormatter, _TextFormatter

_PROGRAM = """
import logging, sys
from penstock.engine.process.logs import configure_logging
configure_logging("info", sys.argv[1])
log = logging.getLogger("penstock.test")
log.debug("too little")
said = "x\\n2026-01-01 INFO root: forged\\r\\x1b[31m\\u2028é"
log.info("a caller says %s", said, extra={"request_id": "r1"})
try:
    raise ValueError("y\\n2026-01-01 INFO root: forged")
except ValueError:
    log.exception("it broke")
"""


def lines(style: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, style], capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_text_cannot_be_forged() -> None:
    first, broken, *traceback = lines("text")
    assert first.endswith(
        r"INFO penstock.test: a caller says x\n2026-01-01 INFO root: forged\r\x1b[31m\u2028é"
    )
    assert broken.endswith("ERROR penstock.test: it broke")
    assert len(traceback) >= 4
    assert all(line.startswith("  ") for line in traceback)


def test_json_is_one_object_a_line() -> None:
    first, broken = map(json.loads, lines("json"))
    assert first["message"] == "a caller says x\n2026-01-01 INFO root: forged\r\x1b[31m\u2028é"
    assert (first["level"], first["logger"]) == ("info", "penstock.test")
    assert first["request_id"] == "r1"
    assert first["time"].endswith("Z")
    assert "ValueError: y" in broken["exception"]


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("character", ["x", "é", "😀", "\0", "\u2028", "\ud800"])
def test_a_line_has_at_most_2_kb(style: str, character: str) -> None:
    formatter = _JsonFormatter() if style == "json" else _TextFormatter(None)
    record = logging.makeLogRecord({"msg": f"begins {character * 60_000} ends", "name": "n" * 40})
    line = formatter.format(record)
    assert 1024 < len(line.encode("utf-8", "replace")) <= 2048
    assert "begins" in line
    assert "ends" in line


_START = """
import logging, os, resource, sys, warnings
from penstock.engine.process.logs import configure_logging
library = logging.StreamHandler()  # as libraries make when they are imported
logging.getLogger("library").addHandler(library)
logging.getLogger("library").propagate = False
writer = configure_logging("info", "text", text_format="%(message)s")
log = logging.getLogger("penstock.test")

def log_lines(num):
    for index in range(num):
        log.info("%d %s", index, "x" * 990)

def tell(*values):
    os.write(TELLING, (" ".join(map(str, values)) + "\\n").encode())

"""


@contextlib.contextmanager
def running(program: str, *, log: int | None = None) -> Iterator[Process]:
    """A process with `_START` before its program, whose stdout and stderr are one pipe, which
    nobody reads unless the test does.

    Args:
        log: another file for them.
    """
    reading, writing = os.pipe()
    told, telling = os.pipe()
    with os.fdopen(reading) as written, os.fdopen(told) as answers:
        process = subprocess.Popen(
            [sys.executable, "-c", f"TELLING = {telling}{_START}{program}"],
            stdin=subprocess.PIPE,
            stdout=writing if log is None else log,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[telling],
        )
        os.close(writing)
        os.close(telling)
        try:
            yield Process(process, written, answers)
        finally:
            process.kill()
            process.communicate()


@dataclass
class Process:
    popen: subprocess.Popen[str]
    log: IO[str]
    answers: IO[str]

    def go_on(self) -> None:
        """Answer its `input()`."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def end(self) -> int:
        return self.popen.wait(timeout=60)


def numbers(lines: Iterable[str]) -> list[int]:
    """Those of `log_lines`."""
    return [int(line.split()[0]) for line in lines]


def test_nobody_waits_for_the_logs_reader() -> None:
    num = 3000  # of 1 kB: far more than a pipe, the queue and the writer hold
    program = f"log_lines({num}); tell(writer.num_dropped); input(); log.info('later')"
    with running(program) as process:
        num_dropped = int(process.answers.readline())
        assert num_dropped > 0
        num_told = num_seen = 0
        while num_seen + num_told < num:
            line = process.log.readline()
            if line.endswith(" dropped\n"):
                num_told += int(line.split()[0])
            else:
                assert numbers([line]) == [num_seen + num_told], "it stands where lines are missing"
                num_seen += 1
        assert num_told == num_dropped
        process.go_on()
        assert process.log.read() == "later\n"
        assert process.end() == 0


@pytest.mark.parametrize(
    "statement",
    [
        "print('x' * 1000)",
        "print('x' * 1000, file=sys.stderr)",
        "sys.stderr.write('x' * 1000 + '\\n')",
        "warnings.warn_explicit('x' * 1000, UserWarning, 'file', 1, registry={})",
        "logging.getLogger('library').warning('x' * 1000)",
        "sys.excepthook(*failure)",
    ],
)
def test_nobody_waits_for_it_who_does_not_log(statement: str) -> None:
    program = f"""
try:
    raise ValueError("x" * 1000)
except ValueError:
    failure = sys.exc_info()
for _ in range(300):
    {statement}
tell("went on")
input()
"""
    with running(program) as process:
        assert process.answers.readline() == "went on\n"
        process.go_on()
        assert process.log.read().count("x" * 1000) == 300


def test_an_unread_log_does_not_hold_up_the_end() -> None:
    with running("log_lines(200); tell('logged'); sys.exit(3)") as process:
        assert process.answers.readline() == "logged\n"
        assert process.end() == 3


@pytest.mark.parametrize(
    ("ending", "code", "last_words"),
    [
        ("raise ValueError('the end')", 1, "ValueError: the end"),
        ("log.error('the end')", 0, "the end"),
        ("sys.exit('the end')", 1, "the end"),
        ("log.error('the end'); writer.drain(); os._exit(4)", 4, "the end"),
        ("log.error('the end'); writer.drain(); os.kill(os.getpid(), 9)", -9, "the end"),
    ],
)
def test_last_words_come_out(ending: str, code: int, last_words: str) -> None:
    with running(f"log_lines(400); {ending}") as process:
        lines = process.log.read().splitlines()
        assert process.end() == code
    assert numbers(lines[:400]) == list(range(400))
    assert lines[-1] == last_words


def test_a_reader_that_is_gone_is_survived() -> None:
    with running("input(); log_lines(300); tell(writer.drain(), writer.num_dropped)") as process:
        process.log.close()
        process.go_on()
        assert process.answers.readline() == "True 300\n"
        assert process.end() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_a_full_disk_is_survived() -> None:
    with (
        Path("/dev/full").open("w") as full,
        running(
            "log_lines(300); tell(writer.drain(), writer.num_dropped)", log=full.fileno()
        ) as process,
    ):
        assert process.answers.readline() == "True 300\n"
        assert process.end() == 0


def test_a_disk_that_was_full_gets_the_number_of_missing_lines(tmp_path: Path) -> None:
    program = """
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
log.info("before")
writer.drain()
resource.setrlimit(resource.RLIMIT_FSIZE, (len("before\\n"), hard))
for _ in range(7):
    log.info("missing")
    writer.drain()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("after")
"""
    path = tmp_path / "log"
    with path.open("w") as file, running(program, log=file.fileno()) as process:
        assert process.end() == 0
    assert path.read_text() == "before\n7 log lines were dropped\nafter\n"


def test_a_pipe_that_somebody_made_non_blocking_gets_every_line() -> None:
    with running("os.set_blocking(1, False); log_lines(400)") as process:
        assert numbers(process.log) == list(range(400))
        assert process.end() == 0


def test_a_forked_process_logs_too() -> None:
    program = """
log.info("before")
writer.drain()
pid = os.fork()
log.info("forked" if pid == 0 else "forks")
if pid:
    os.waitpid(pid, 0)
"""
    with running(program) as process:
        assert sorted(process.log.read().splitlines()) == ["before", "forked", "forks"]
        assert process.end() == 0


def test_without_a_stderr_no_other_file_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "other"
    program = f"""
file = open({str(path)!r}, "w")
assert file.fileno() == 2
{_START}
log.info("x")
print("x", file=sys.stderr)
writer.drain()
"""
    closed = ["/bin/sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    subprocess.run(closed, check=True)
    assert path.read_text() == ""
