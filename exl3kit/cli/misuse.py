"""What is said about options and arguments that do not fit a verb, and what may have been meant."""

from __future__ import annotations

import sys
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from exl3kit.cli import output
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    import typer


def refuse(error: typer.TyperException, *, as_json: bool) -> int:
    """Say what typer refuses; returns the exit code."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a group by itself: its help is the answer
        with suppress(OSError):  # a stderr that takes nothing changes no verdict
            print(error.format_message(), file=sys.stderr)
        return int(ExitCode.USAGE)
    return output.refuse(explained(error, context), as_json=as_json)


def explained(error: typer.TyperException, context: Any) -> KitError:
    """The fault with the way out: an option like the unknown one, or where the verb's help is."""
    path = context.command_path if context is not None else "kit"
    page = f"`{path} --help` shows examples"
    option = getattr(error, "option_name", None)
    if (missing := getattr(error, "param", None)) is not None and getattr(missing, "help", None):
        name = missing.opts[0] if missing.opts[0].startswith("-") else missing.metavar
        page = f"{name}: {missing.help.removesuffix('.')}; {page}"
    if type(error).__name__ != "NoSuchOption" or context is None or option is None:
        return KitError(error.format_message().removesuffix("."), where=path, next_step=page)
    what = f"there is no option {option}"
    if hasattr(context.command, "commands"):  # before the verb stand none but kit's own
        return KitError(what, where=path, next_step=f"options follow the verb: `{path} VERB {option}`")
    known = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
    close = get_close_matches(option, [name for name in known if name.startswith("--")], n=2)
    return KitError(what, where=path, next_step=f"did you mean {' or '.join(close)}? {page}" if close else page)
