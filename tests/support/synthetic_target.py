"""The synthetic server as what is soaked.

python -m tests.support.synthetic_target 'FLAGS OF THE SERVER' FLAGS OF THE SOAK…
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from penstock.load.launch import end_as_interrupted
from penstock.load.soak import command as soak
from penstock.load.soak.target import Target
from penstock.load.soak.watch import Family

from .synthetic import settings as synthetic_settings
from .synthetic.server import serve as serve_synthetic

ROOT = Path(__file__).parents[2]
SOAK_SYNTHETIC = (sys.executable, "-m", "tests.support.synthetic_target")
_DOWN_S = 0.3


@contextlib.contextmanager
def synthetic_server(flags: str) -> Iterator[Target]:
    """The synthetic server. A kill is of all of it, as of a gateway."""
    parser = argparse.ArgumentParser(prog="--synthetic")
    synthetic_settings.add_arguments(parser)
    settings = synthetic_settings.from_arguments(parser.parse_args(shlex.split(flags)))
    with serve_synthetic(settings) as server:

        async def kill() -> str:
            server.kill()
            await asyncio.sleep(_DOWN_S)
            server.restart()
            return "synthetic"

        def family() -> Family:
            if server.process.poll() is not None:
                return {}
            return {"synthetic": psutil.Process(server.process.pid)}

        name = f"the synthetic server {flags}".strip()
        yield Target(name=name, base_url=server.base_url, family=family, kill=kill, victims=family)


if __name__ == "__main__":
    soak_parser = argparse.ArgumentParser()
    soak.add_arguments(soak_parser)
    parsed = soak_parser.parse_args(["--kills", *sys.argv[2:]])
    end_as_interrupted()
    with synthetic_server(sys.argv[1]) as synthetic:
        sys.exit(soak.soak_target(synthetic, parsed))
