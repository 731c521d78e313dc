"""The child of `jaxpt verify`: a request on stdin, the answer on stdout; what the target prints goes to stderr."""

import json
import os
import sys
import threading
import time


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # also for what C code prints
    request = json.loads(sys.stdin.read())
    answer_to.write(json.dumps(_answer(request)))
    answer_to.flush()
    os._exit(0)  # threads of the target's do not hold the answer up


def _end_with(parent: int) -> None:
    """Nobody waits for an answer when the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(request: dict) -> dict:
    from jaxpt.verify import TargetError, check, load

    target = request.pop("target")
    try:
        fn = load(target)
        _cache(request["framework"])
        report = check(fn, name=target, **request)
    except TargetError as error:
        words = str(error)
        return {"error": words if words.startswith("target ") else f"target {target!r}: {words}"}
    except ValueError as error:
        return {"error": str(error)}
    return {"record": report.record(), "text": report.text(), "ok": report.ok}


def _cache(framework: str | None) -> None:
    """Compiled programs are kept between calls, where those of runs are."""
    if "jax" not in sys.modules and framework != "jax":
        return
    from jaxpt.lab.compiling import keep_programs

    keep_programs()


if __name__ == "__main__":
    main()
