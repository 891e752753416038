"""What the stub engine did when, shared with the readers through a mapped file.

times[frame]     monotonic seconds at which a frame was sent
starts[stream]   the frame that held a stream's first token
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_FRAMES = 1 << 16
MAX_STREAMS = 1 << 14


class ClockFile:
    """Both arrays; the engine writes, readers read."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(8 * (MAX_FRAMES + MAX_STREAMS)))
        mapped = np.memmap(path, dtype=np.float64, mode="r+")
        self.times: npt.NDArray[np.float64] = mapped[:MAX_FRAMES]
        self.starts: npt.NDArray[np.float64] = mapped[MAX_FRAMES:]
