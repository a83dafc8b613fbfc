"""What a user gets instead of a traceback: one sentence with the value, the cause and the way out."""

import difflib
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from duoexp.config import Config, InputError
from duoexp.masking import masked_override

QUOTES = (
    "on the command line, quote a value with a sign such as = , # ; & ( [ { < or a letter beyond ASCII twice, as in "
    "'key=\"a value\"', or give a prompt as task.path=FILE.txt"
)


def is_input(error: BaseException) -> bool:
    """Whether the input is at fault, rather than the program or the machine."""
    return isinstance(error, InputError | HydraException | OmegaConfBaseException)


def lacks_plugin(error: BaseException) -> InputError | None:
    """What to say when Hydra does not find the plugin of a launcher or a sweeper."""
    found = re.search(r"Unknown plugin class : 'hydra_plugins\.hydra_(\w+?)_(launcher|sweeper)\.", str(error))
    if not found:
        return None
    extra = {"submitit": "slurm"}.get(found[1], found[1])
    return InputError(f"hydra/{found[2]}={found[1]} needs a package that is not here; pip install 'duoexp[{extra}]'")


def is_told(error: BaseException) -> bool:
    """Whether its sentence is all that a user needs; the traceback of anything else is a report of a fault of ours."""
    return is_input(error) or type(error).__name__ in ("RunFailed", "DraftFailed")  # by name: their modules load torch


def is_interrupt(error: BaseException) -> bool:
    """Whether an interrupt is behind it: a library that it met in the middle of something may raise an error of its
    own.
    """
    return any(isinstance(each, KeyboardInterrupt) for each in _chain(error))


def tell(error: Exception) -> int:
    """Tells of it on stderr, in a sentence or with its traceback; returns the exit code that goes with it."""
    if is_interrupt(error):
        return 130
    if not is_told(error):
        traceback.print_exception(error)
    print(f"error: {sentence(error)}", file=sys.stderr)
    return 2 if is_input(error) else 1


def told(call: Callable[[], object]) -> int:
    """The exit code of a process that calls this; its error is told."""
    try:
        call()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return tell(error)
    return 0


def sentence(error: BaseException) -> str:
    """The error in a sentence; Hydra's own are put into words that name the key, the value and what is allowed."""
    for cause in _chain(error):
        if isinstance(cause, InputError):
            return str(cause)
    text = str(error)
    if found := re.match(r"Could not override '([^']+)'", text):
        return _unknown_key(found[1])
    if found := re.match(r"Error merging override (.+)", text):
        hint = f"; {QUOTES}" if "to string" in _last(error) else ""  # it was taken for a list or a mapping
        return f"{masked_override(found[1])} cannot be used: {_last(error)}{hint}"
    if found := re.match(r"Ambiguous value for argument '(.*)'\n", text):
        return f"{masked_override(found[1])} can mean several values, for which add -m; {QUOTES}"
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        return f"{text.splitlines()[0]}; give a text that holds ${{ as task.path=FILE.txt"
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']*':((?:\n\t[^\n]+)+)", text):
        return f"{found[1]}={found[2]} is not there; choose {', '.join(found[3].split())}"
    if isinstance(error, OverrideParseException):
        return f"{masked_override(_unparsed() or text.splitlines()[0])} cannot be parsed; {QUOTES}"
    if text.startswith(("Error locating target", "Error in call to target")):
        return f"{text.splitlines()[0].partition(', set env var')[0].rstrip(':')} ({_last(error)})"
    return " ".join(text.split())


def _unparsed() -> str | None:
    """The first argument that is no override."""
    parser = OverridesParser.create()
    for argument in sys.argv[1:]:
        try:
            parser.parse_overrides([argument] if not argument.startswith("-") else [])
        except HydraException:
            return argument
    return None


def _unknown_key(key: str) -> str:
    parent, _, name = key.rpartition(".")
    allowed = _keys(parent)
    if name in allowed:
        return f"{key} is no choice of this command; leave it out"
    near = difflib.get_close_matches(name, allowed, n=1)
    way = f"did you mean {'.'.join(filter(None, [parent, near[0]]))}" if near else "see the keys with --cfg job"
    known = f", {parent or 'the config'} has {', '.join(allowed)}" if allowed else ""
    return f"{key} is no key of this config{known}; {way}"


def _keys(path: str) -> list[str]:
    """The fields at a path of the schema; none where it is free, as below draft.policy."""
    kind: Any = Config
    for part in filter(None, path.split(".")):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def _last(error: BaseException) -> str:
    """The root of it, in its first line."""
    root = list(_chain(error))[-1]
    return str(root).split("\n")[0] or type(root).__name__


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
