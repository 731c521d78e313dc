"""The command line. Importing it imports neither jax nor numpy: help and lists are instant."""

import os
import signal
import sys
import threading
from collections.abc import Sequence

import jaxpt
from jaxpt.lab.errors import RunFailed, UserError, expected

HELP = """jaxpt: a laboratory for LLM training.

usage: jaxpt COMMAND ...

  list [KIND] [--json]              experiments (the default), objectives, envs, laws, invariants, errata
  run NAME [options] [--field value ...]
                                    run an experiment: seeds, curves, claims, report
  finetune --checkpoint DIR --data FILE [options]
                                    SFT, DPO or GRPO of a model you have, on texts you have; also `run finetune`
  describe ROW [--vs ROW] [--json]  an objective's formula with all its constants, or how two rows differ
  fit FILE [--law NAME] [options]
                                    fit a scaling law to a table of runs: parameters, intervals, frontier

  verify TARGET --family F [options]
                                    check anybody's loss, in jax, numpy or torch, against a catalogue of laws
  import SOURCE DIR                 a GGUF file, or smollm2, as a folder that jaxpt and transformers read
  memory [--mesh data=8,...] [options] [--field value ...]
                                    bytes per device by part and FLOPs of a training step, before it is run

  jaxpt COMMAND --help says more; jaxpt --version prints the version."""

COMMANDS = ("list", "run", "finetune", "describe", "fit", "verify", "import", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 the experiment's code failed, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    _insist_on_interrupts()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _complain(str(error), 2)
    except RunFailed as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return _complain(_interrupted(words), 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        return 141


def _insist_on_interrupts() -> None:
    """Ctrl-C is raised again every few seconds until it is caught here: one that lands in a callback of the
    garbage collector is printed and lost."""

    def interrupt(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, interrupt)


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help"):
        print(HELP)
        return 0
    if command == "--version":
        print(f"jaxpt {jaxpt.__version__}")
        return 0
    if command == "run":
        from jaxpt.cli.run import run_command as handler
    elif command == "finetune":
        from jaxpt.cli.finetune import finetune_command as handler
    elif command == "list":
        from jaxpt.cli.tables import list_command as handler
    elif command == "describe":
        from jaxpt.cli.tables import describe_command as handler
    elif command == "fit":
        from jaxpt.cli.fit import fit_command as handler
    elif command == "verify":
        from jaxpt.cli.verify import verify_command as handler
    elif command == "import":
        from jaxpt.cli.imports import import_command as handler
    elif command == "memory":
        from jaxpt.cli.memory import memory_command as handler
    else:
        raise UserError(f"command {command!r} is unknown: {expected(command, COMMANDS)}")
    return handler(rest)


def _complain(sentence: str, code: int) -> int:
    print(f"jaxpt: {sentence}", file=sys.stderr, flush=True)
    return code


def _interrupted(words: list[str]) -> str:
    if words[:1] not in (["run"], ["finetune"]):
        return "interrupted"
    import shlex

    again = [*words, *([] if "--resume" in words else ["--resume"])]
    return f"interrupted; finished chunks are kept, continue with: {shlex.join(['jaxpt', *again])}"
