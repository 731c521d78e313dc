"""jaxpt's command in processes of its own, watched from outside."""

import os
import subprocess
import sys
import time
from pathlib import Path

# python -c, because the shell that started the tests may have told its children to ignore Ctrl-C
MAIN = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxpt.cli import main; sys.exit(main())")


def start(words, out, variables=(), **more):
    """variables: of its environment, beside this process's own; more: of subprocess.Popen."""
    env = {**os.environ, **dict(variables), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", MAIN, *words, "--out", str(out)], env=env, text=True,
                            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more})


def workers_of(out):
    """Process ids of workers whose command line names a folder under `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "jaxpt.lab.worker" in words and any(w.startswith(str(out)) for w in words):
            found.append(int(entry.parent.name))
    return found


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
