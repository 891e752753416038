"""An engine process without a model: the real transport, and one token per stream and frame.

Every request gets the same token until its `max_tokens`; its seed is the number of its stream.
It runs as a child process, `python -m penstock.load.gateway.stub_engine`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.process.launch import Status, run_child
from penstock.engine.protocol.messages import Abort, EngineInfo, Submit
from penstock.engine.protocol.sockets import GatewayGone, GatewayId, Inbound, Transport
from penstock.engine.request import FinishReason, RequestOutput
from penstock.load.gateway.readers import ClockFile

_CONTEXT = 1 << 20


class StubEngine:
    """Sends `frames_per_s` frames a second, late ones at once; every stream gets `token_id`."""

    def __init__(
        self, transport: Transport, clock: ClockFile, *, token_id: int, frames_per_s: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._token_ids = (token_id,)
        self._period_s = 1.0 / frames_per_s
        self._left: dict[tuple[GatewayId, str], int] = {}  # tokens, by gateway and request
        self._num_frames = 0

    def run(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + self._period_s, time.monotonic() - 1.0)
            while (rest_s := next_s - time.monotonic()) > 0:
                for inbound in self._transport.receive(timeout_s=rest_s):
                    self._handle(inbound)
            self._send_frame()

    def _handle(self, inbound: Inbound) -> None:
        gateway_id, message = inbound
        if isinstance(message, Submit):
            request = message.request
            self._left[gateway_id, request.request_id] = request.sampling_params.max_tokens
            self._clock.starts[request.sampling_params.seed] = self._num_frames
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._left.pop((gateway_id, request_id), None)
        elif isinstance(message, GatewayGone):
            self._left = {key: left for key, left in self._left.items() if key[0] != gateway_id}

    def _send_frame(self) -> None:
        outputs: dict[GatewayId, list[RequestOutput]] = {}
        for key, left in list(self._left.items()):
            gateway_id, request_id = key
            is_last = left <= 1
            outputs.setdefault(gateway_id, []).append(
                RequestOutput(
                    request_id=request_id,
                    token_ids=self._token_ids,
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    is_last=is_last,
                )
            )
            if is_last:
                del self._left[key]
            else:
                self._left[key] = left - 1
        self._clock.times[self._num_frames] = time.monotonic()
        self._num_frames += 1
        for gateway_id, frame in outputs.items():
            self._transport.send(gateway_id, tuple(frame))


def serve(settings: Mapping[str, Any], status: Status) -> None:
    """Run the process until it is killed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    info = EngineInfo(
        model="stub", model_path="", max_model_len=_CONTEXT, vocab_size=settings["vocab_size"],
        num_blocks=_CONTEXT, block_size=16, num_host_blocks=0, max_num_seqs=1 << 14,
        scheduling_policy="fcfs", dtype="float32", device="cpu", eos_token_ids=(), pid=0,
    )  # fmt: skip
    transport = Transport(settings["address"], info)
    clock = ClockFile(Path(settings["clock_file"]))
    engine = StubEngine(
        transport, clock, token_id=settings["token_id"], frames_per_s=settings["frames_per_s"]
    )
    transport.start()
    status.ready()
    engine.run()


if __name__ == "__main__":
    sys.exit(run_child("penstock-stub-engine", serve))
