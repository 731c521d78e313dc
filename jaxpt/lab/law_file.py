"""A scaling law by name, or from a user's file."""

import importlib.util
from pathlib import Path

from jaxpt.lab.errors import UserError, expected
from jaxpt.scaling.laws import Law, table, user_law


def find_law(name: str) -> Law:
    """The law called `name`, or of `file.py:function`. UserError in one sentence where there is none."""
    file, colon, function = name.rpartition(":")
    if not colon:
        laws = table()
        if name not in laws:
            raise UserError(f"--law {name}: {expected(name, laws)}")
        return laws[name]
    if not Path(file).is_file():
        raise UserError(f"--law {name}: there is no file {file}")
    spec = importlib.util.spec_from_file_location("users_law", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--law {name}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--law {name}: {file} cannot be imported: {type(error).__name__}: {error}") from None
    found = getattr(module, function, None)
    if not callable(found):
        callables = [key for key, value in vars(module).items() if callable(value)]
        raise UserError(f"--law {name}: {file} has no such function: {expected(function, callables)}")
    try:
        return user_law(found, function)
    except ValueError as error:
        raise UserError(f"--law {name}: {error}") from None
