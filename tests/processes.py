"""Launch a test script on several processes, as `torchrun` would, but with every process's own exit code."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def launch(script: str, *arguments: object, num_processes: int = 2, timeout: float = 240) -> list[int]:
    """Run `tests/<script>` on CPU processes that meet over gloo; returns their exit codes, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(TESTS / script), *map(str, arguments)]
    running = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_processes)
    ]
    try:
        return [process.wait(timeout) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
