"""Nothing stays behind: not after an end, not after a signal, not after a kill."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.terminal import hears_signals
from tidekv_llm.lifetime import PrivateFolder, ended_by_signals, remove_abandoned

HOLDER = """
import sys, time
from pathlib import Path
from tidekv_llm.lifetime import PrivateFolder, ended_by_signals
with ended_by_signals(), PrivateFolder("held-", Path(sys.argv[1])) as folder:
    (folder.path / "deep").mkdir()
    (folder.path / "deep" / "document.pdf").write_text("private")
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


def hold(parent: Path, *before: str) -> subprocess.Popen[str]:
    """A process with a folder, and a document in it."""
    command = [*before, sys.executable, "-c", HOLDER, str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hears_signals)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def end(process: subprocess.Popen[str], number: signal.Signals) -> int:
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def test_a_folder_is_private_and_goes_with_its_block(tmp_path: Path) -> None:
    with PrivateFolder("held-", tmp_path) as folder:
        (folder.path / "file").write_text("x")
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []
    folder.close()  # twice is fine


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_removes_the_folder(tmp_path: Path, name: str) -> None:
    process = hold(tmp_path)
    number = signal.Signals[name]
    assert end(process, number) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_two_signals_at_once_do_not_break_the_cleaning_up(tmp_path: Path) -> None:
    process = hold(tmp_path)
    process.send_signal(signal.SIGHUP)
    end(process, signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    process = hold(tmp_path, "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert end(process, signal.SIGTERM) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    killed, living = hold(tmp_path), hold(tmp_path)
    assert end(killed, signal.SIGKILL) == -signal.SIGKILL
    (tmp_path / "other").mkdir()
    assert len(list(tmp_path.glob("held-*"))) == 2
    with PrivateFolder("held-", tmp_path) as mine:
        left = set(tmp_path.glob("held-*"))
        assert mine.path in left and len(left) == 2
        assert living.poll() is None and list(tmp_path.glob("held-*/deep/document.pdf"))
    end(living, signal.SIGTERM)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_link_with_the_right_name_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".lock").touch()
    (precious / "file").write_text("x")
    (tmp_path / "held-link").symlink_to(precious)
    folder = tmp_path / "held-with-a-linked-lock"
    folder.mkdir()
    (folder / ".lock").symlink_to(precious / "file")
    assert remove_abandoned("held-", tmp_path) == 0
    assert (precious / "file").read_text() == "x" and folder.is_dir()


def test_processes_that_start_at_the_same_time_leave_each_other_alone(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tidekv_llm.lifetime import PrivateFolder\n"
        "for _ in range(100):\n"
        "    with PrivateFolder('held-', Path(sys.argv[1])) as folder:\n"
        "        (folder.path / 'file').write_text('x')\n"
        "        assert (folder.path / 'file').read_text() == 'x'\n"
    )
    starting = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(120) for process in starting] == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_other_threads_and_later_code_keep_their_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with ended_by_signals():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failed


WORKING = """
import sys, time
from tidekv_llm import cli
def work(options):
    print("ready", flush=True)
    time.sleep(600)
cli.sessions._list = work
sys.exit(cli.main(["sessions", "list"]))
"""


def test_the_command_line_ends_on_a_signal_with_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", WORKING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert end(process, signal.SIGTERM) == 128 + signal.SIGTERM
