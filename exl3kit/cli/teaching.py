"""Help that teaches: verbs in the order in which a newcomer needs them, examples, and lines that fit the screen.

Plain text without rich, so that it is fast, has no control characters and reads the same on any terminal.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from exl3kit import run_log
from exl3kit.cli.examples import examples_of
from exl3kit.errors import MEANINGS, KitError

WIDEST, NARROW, NARROWEST = 100, 60, 24  # columns; below NARROW an explanation goes under what it explains
MOST_FIRST = 26  # columns of what is explained, where both stand side by side
TYPES = {"str": "TEXT", "int": "N", "float": "X", "path": "PATH"}
# What people type who know other programs.
SYNONYMS = {
    "start": "up",
    "serve": "up",
    "run": "up",
    "deploy": "up",
    "stop": "down",
    "ps": "status",
    "check": "doctor",
}


class Verb(TyperCommand):
    """A verb: its help has examples, and every run of it has a log."""

    keeps_log = True

    def get_help(self, ctx: Any) -> str:
        """The page that `--help` prints."""
        return page(self, ctx)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        if self.keeps_log:
            run_log.begin(spoken(ctx))
        return super().invoke(ctx)


class Lookup(Verb):
    """A verb that only reads files of this machine and ends at once: a log of it would say nothing."""

    keeps_log = False


class Group(TyperGroup):
    """A verb with sub-verbs, or `kit` itself."""

    def get_help(self, ctx: Any) -> str:
        """The page that `--help` prints."""
        return page(self, ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb that is meant; raises `KitError` with what may have been meant when there is none."""
        word = args[0]
        if self.get_command(ctx, word) is None and not ctx.resilient_parsing and not word.startswith("-"):
            meant = " or ".join(f"`kit {path}`" for path in self.meant(ctx, word))
            raise KitError(
                f"`{ctx.command_path}` has no verb {word!r}",
                next_step=f"did you mean {meant}?" if meant else f"`{ctx.command_path} --help` lists the verbs",
            )
        return super().resolve_command(ctx, args)

    def meant(self, ctx: Any, word: str) -> list[str]:
        """What may be meant by `word`: verbs of this group with like names, else any verb at all."""
        here = f"{spoken(ctx)} ".lstrip()
        if ctx.parent is None and word in SYNONYMS:
            return [SYNONYMS[word]]
        if close := get_close_matches(word, self.commands, n=2):
            return [here + name for name in close]
        every = {name: path for path, name in tree(ctx.find_root().command)}
        return [every[name] for name in get_close_matches(word, every, n=1, cutoff=0.75)]


def with_epilogs(command: Any, path: str = "") -> None:
    """Give a command and all below it their examples as an epilog too, where makers of reference pages look."""
    command.epilog = "\n".join(f"# {one.why}\n{one.command}" for one in examples_of(path)) or None
    for name, below in getattr(command, "commands", {}).items():
        with_epilogs(below, f"{path} {name}".strip())


def tree(group: Any, above: str = "") -> Iterable[tuple[str, str]]:
    """(path, name) of every verb that runs something: ("bench prefill", "prefill")."""
    for name, command in group.commands.items():
        path = f"{above} {name}".strip()
        if isinstance(command, TyperGroup):
            yield from tree(command, path)
        elif not command.hidden:
            yield path, name


def spoken(ctx: Any) -> str:
    """The verb's own words, `bench prefill`; empty for `kit` itself."""
    return str(ctx.command_path).partition(" ")[2]


class App(typer.Typer):
    """A group whose verbs and sub-groups are of the classes above."""

    def __init__(self, help: str, cls: type[Group] = Group) -> None:
        super().__init__(
            cls=cls,
            help=help,
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any
    ) -> Callable[[Any], Any]:
        """Register a verb; one of class `Verb` unless another is given."""
        return super().command(name, cls=cls or Verb, **options)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(command: Any, ctx: Any, width: int | None = None) -> str:
    """The help of a verb or a group, for a screen of `width` columns (the terminal's when left out)."""
    width = max(NARROWEST, min(width or shutil.get_terminal_size().columns, WIDEST) - 1)
    parts = [wrapped(f"Usage: {ctx.command_path} {' '.join(usage(command, ctx))}", width, "", " " * 7)]
    parts += [wrapped(" ".join(text.split()), width, "  ", "  ") for text in (command.help or "").split("\n\n")]
    if examples := examples_of(spoken(ctx)):
        lines = [line for one in examples for line in (*comment(one.why, width), f"  {one.command}")]
        parts.append("\n".join(["Examples:", *lines]))
    if isinstance(command, TyperGroup):
        parts += panels(command, ctx, width)
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        told = [record(one, ctx) for one in command.get_params(ctx) if one.param_type_name == kind]
        if rows := [row for row in told if row is not None]:
            parts.append(f"{title}:\n{explained(rows, width)}")
    if ctx.parent is None:
        rows = [(str(int(code)), meaning) for code, meaning in MEANINGS.items()]
        parts.append(f"Exit codes:\n{explained(rows, width)}")
    return "\n\n".join(parts)


def usage(command: Any, ctx: Any) -> list[str]:
    """`[OPTIONS] RECIPE [LOCK]`."""
    words = ["[OPTIONS]"]
    for param in command.get_params(ctx):
        if param.param_type_name == "argument":
            name = (param.metavar or param.name).upper() + ("..." if param.nargs == -1 else "")
            words.append(name if param.required else f"[{name}]")
    return [*words, "VERB ..."] if isinstance(command, TyperGroup) else words


def panels(group: TyperGroup, ctx: Any, width: int) -> list[str]:
    """The verbs of a group under the headings that they were registered with, in their order."""
    shown: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command: Any = group.get_command(ctx, name)
        if not command.hidden:
            panel = command.rich_help_panel
            said = command.get_short_help_str(300).removesuffix(".")
            shown.setdefault(panel if isinstance(panel, str) else "Verbs", []).append((name, said))
    first = max(len(name) for rows in shown.values() for name, _ in rows)
    return [f"{panel}:\n{explained(rows, width, first)}" for panel, rows in shown.items()]


def record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """An option or argument with its explanation: `("--ready X", "Seconds until ... [default: 1800.0]")`."""
    found = param.get_help_record(ctx)
    if found is None:
        return None
    name, said = found
    if param.param_type_name == "argument":
        return (param.metavar or param.name).upper(), re.sub(r"\s*\[required\]$", "", said)
    return re.sub(r"<(?:list\[)?(\w+)[^>]*>", lambda match: TYPES.get(match[1], match[1].upper()), name), said


def explained(rows: Sequence[tuple[str, str]], width: int, first: int | None = None) -> str:
    """Names with their explanations: side by side, or one below the other where that would be too narrow."""
    if width < NARROW:
        return "\n".join(f"  {name}\n{wrapped(said, width, '      ', '      ')}" if said else f"  {name}"
                         for name, said in rows)  # fmt: skip
    column = min(first or max(len(name) for name, _ in rows), MOST_FIRST) + 4
    lines = []
    for name, said in rows:
        head = f"  {name}"
        if len(head) > column - 2:
            lines.append(head)
            head = ""
        lines.append(wrapped(said, width, head.ljust(column), " " * column) if said else head)
    return "\n".join(lines)


def comment(text: str, width: int) -> list[str]:
    """A comment of the shell above an example."""
    return wrapped(text, width, "  # ", "  # ").splitlines()


def wrapped(text: str, width: int, first: str, later: str) -> str:
    """Text in lines of at most `width` columns; a word longer than that stays whole, since it may be copied."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
