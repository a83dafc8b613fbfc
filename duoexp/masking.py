"""Secrets, by the names of their keys or in a URL: what is written, shown or sent has *** in their place."""

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

HIDDEN = "***"
# A whole word of a key split at "_": hf_token and api_key hold secrets; max_new_tokens and eos_token_id do not.
SECRET = re.compile(
    r"(^|_)(token(?!_ids?(_|$))|key|apikey|secrets?|password|passwords|passwd|passphrase|credentials?)(_|$)"
)
OPEN = re.compile(r"tokenizer")  # tokenizer_key names a tokenizer
LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]+(?=@)")  # user:password@ of a URL, or a token in their place
REFERENCE = re.compile(r"\$\{oc\.env:\w+\}")  # it names a variable of the environment, and tells nothing of it


def masked(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with *** for the values of keys that name a secret and for the logins of URLs, at any depth.

    None stays, and so does what names a variable of the environment.
    """
    return {key: _masked(str(key), value) for key, value in config.items()}


def masked_override(argument: str) -> str:
    """An argument of the command line, `path.key=value`, with *** for the value if anything of it is a secret."""
    argument = LOGIN.sub(HIDDEN, argument)
    path, equals, value = argument.partition("=")
    if not equals or value == "null" or REFERENCE.fullmatch(value.strip("'\"")):
        return argument
    if any(names_secret(key) for key in re.split(r"[./@]", path)) or _holds_secret(argument):
        return f"{path}={HIDDEN}"
    return argument


def names_secret(key: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", key).lower()  # apiKey and API-KEY are api_key
    return bool(SECRET.search(words)) and not OPEN.match(words)


def _holds_secret(argument: str) -> bool:
    """Whether the value is a mapping, or a list of them, with a secret inside."""
    try:
        value = {"": OverridesParser.create().parse_override(argument).value()}
    except HydraException:
        return False
    return masked(value) != value


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, str) and REFERENCE.fullmatch(value):
        return value
    if names_secret(key):
        return None if value is None else HIDDEN
    if isinstance(value, str):
        return LOGIN.sub(HIDDEN, value)
    if isinstance(value, dict):
        return masked(value)
    if isinstance(value, list | tuple):
        return [_masked("", item) for item in value]
    return value
