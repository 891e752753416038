"""Tells which functions a process has entered, and when first.

Python imports this at its start where the folder is on PYTHONPATH: so `tests.support.request_path`
sees into the processes of a server that knows nothing of it. A function is entered when it is
called or resumed; the body of a module, which runs at its import, does not count. Whoever connects
to the process's socket gets what was entered since the last connection.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from types import FrameType

# Of file and function, to the monotonic clock's time.
_entered: dict[tuple[str, str], float] = {}


def _note(frame: FrameType, _event: str, _argument: object) -> None:
    """A trace function that traces no lines."""
    code = frame.f_code
    function = (code.co_filename, code.co_qualname)
    if function not in _entered and code.co_name != "<module>":
        _entered[function] = time.monotonic()


def _tell(listener: socket.socket) -> None:
    global _entered
    while True:
        connection, _ = listener.accept()
        entered, _entered = _entered, {}
        with connection, connection.makefile("w") as file:
            told = [(*function, at_s) for function, at_s in entered.items()]
            json.dump({"command": sys.orig_argv[1:], "entered": told}, file)


def _start(folder: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{os.getpid()}")
    listener.listen()
    threading.Thread(target=_tell, args=(listener,), daemon=True).start()
    threading.settrace(_note)
    sys.settrace(_note)


if "PENSTOCK_ENTERED_FILES" in os.environ:
    _start(os.environ["PENSTOCK_ENTERED_FILES"])
