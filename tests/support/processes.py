"""Programs in processes of their own, each forked from one that has imported PyTorch and memscale and simulated a step.

Importing both and the first simulation take a processor four seconds. A program that is about what an import does, or
about the seed of hashes, needs an interpreter of its own instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PREPARED = """
import json, os, sys, warnings
import torch, memscale as ms
torch.set_num_threads(1)
ms.profile(torch.nn.Linear(2, 2), torch.ones(1, 2), loss=lambda y, _: y.sum())
for line in sys.stdin:
    source, arguments, environment, streams, stops_at_warnings = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for descriptor, stream in enumerate((os.devnull, *streams)):
    os.dup2(os.open(stream, os.O_RDWR), descriptor)
os.environ.update(environment)
sys.argv[1:] = arguments
if stops_at_warnings:
    warnings.simplefilter("error")
exec(source, {"__name__": "__main__"})
"""


@functools.cache
def _prepared() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PREPARED]
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    atexit.register(started.communicate)  # which ends it: there is no further line
    return started


def run(
    source: str, *arguments: object, stops_at_warnings: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of Python, with these variables besides, to its end."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = [source, [str(each) for each in arguments], environment, [out.name, err.name], stops_at_warnings]
        prepared = _prepared()
        prepared.stdin.write(json.dumps(request) + "\n")
        prepared.stdin.flush()
        status = int(prepared.stdout.readline())
        return subprocess.CompletedProcess(source, status, out.read(), err.read())
