"""The gateway's process with another patience for clients that do not read: so many seconds as the
environment says, where an installed one gives them ten."""

from __future__ import annotations

import os
import sys
from functools import partial

from penstock.engine.process.launch import run_child
from penstock.gateway.http import websocket_protocol
from penstock.gateway.http.http_protocol import HttpLimits
from penstock.gateway.launch import process

PATIENCE = "PENSTOCK_TEST_MAX_STALL_S"

if __name__ == "__main__":
    max_stall_s = float(os.environ[PATIENCE])
    process.HttpLimits = partial(HttpLimits, max_stall_s=max_stall_s)
    websocket_protocol.PatientWebSocketProtocol.max_stall_s = max_stall_s
    websocket_protocol._CLOSE_S = max_stall_s
    sys.exit(run_child("penstock-gateway", process.serve))
