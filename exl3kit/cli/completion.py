"""`kit completion`: scripts that let bash, zsh and fish ask the kit what may follow, and the kit's answer.

A script runs the program that was typed, `kit` or `./kit.py`, as `PROGRAM completion words -- WORD...`, the last word
being the one at the cursor. It answers a line for each candidate, with a tab before what is said of it.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from exl3kit.cli import teaching

if TYPE_CHECKING:
    from exl3kit.cli.candidates import Candidate

app = teaching.App("Completion of verbs, options, recipes and nodes: a script for your shell, printed on stdout.")

# readline breaks words at `=`, `:` and `@` and replaces only what follows, hence `before`.
BASH = r"""_kit_completion() {
    local line=${COMP_LINE:0:COMP_POINT} program=$1 value said
    local word=${line##*[[:space:]]} before
    before=${word%"$2"}
    [[ $program == "~/"* ]] && program=$HOME/${program#"~/"}
    COMPREPLY=()
    while IFS=$'\t' read -r value said; do
        [[ $value == */ ]] && compopt -o nospace
        value=${value#"$before"}
        [[ $value == *[[:space:]\'\"\$\\]* ]] && printf -v value %q "$value"
        COMPREPLY+=("$value")
    done < <("$program" completion words --line "$line" 2>/dev/null)
}
complete -o default -F _kit_completion kit kit.py
"""

ZSH = r"""#compdef kit kit.py
_kit() {
    local program=${(Q)${~words[1]}} one
    local -a values shown folders
    for one in "${(@f)$("$program" completion words -- "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        case ${one%%$'\t'*} in
            '') ;;
            */) folders+=(${one%%$'\t'*}) ;;
            *) values+=(${one%%$'\t'*}); shown+=("${one/$'\t'/  }") ;;
        esac
    done
    (( $#values + $#folders )) || { _files; return }
    compadd -l -d shown -a values
    compadd -S '' -a folders
}
if [[ $funcstack[1] == _kit ]]; then _kit "$@"; else compdef _kit kit kit.py; fi
"""

FISH = r"""function __kit_words
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
    set -e words[1]
    set -l found ($program completion words -- $words (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        string join \n -- $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c kit -f -a '(__kit_words)'
complete -c kit.py -f -a '(__kit_words)'
"""


@app.command(cls=teaching.Lookup)
def bash() -> None:
    """Print the script for bash 4 or newer.

    To keep it: `kit completion bash > ~/.kit-completion.bash`, then `echo 'source ~/.kit-completion.bash' >> ~/.bashrc`
    and a new shell.
    """
    print(BASH, end="")


@app.command(cls=teaching.Lookup)
def zsh() -> None:
    """Print the script for zsh.

    To keep it: `kit completion zsh > DIR/_kit` with a DIR of your $fpath, or source it in ~/.zshrc after `compinit`.
    """
    print(ZSH, end="")


@app.command(cls=teaching.Lookup)
def fish() -> None:
    """Print the script for fish.

    To keep it: `kit completion fish > ~/.config/fish/completions/kit.fish`; for `./kit.py` also as `kit.py.fish`.
    """
    print(FISH, end="")


def answer(arguments: list[str]) -> None:
    """Print what may stand in the place of the last word: `--line LINE`, or `-- WORD...`.

    No verb: typer would take twice as long, for it loads pydantic to read a command line.
    """
    from exl3kit.cli import app as kit

    words = split(arguments[1]) if arguments[:1] == ["--line"] else arguments[1:]
    for value, said in candidates(typer.main.get_command(kit), words or [""]):
        print(f"{value}\t{' '.join(said.split())}" if said else value)


def split(line: str) -> list[str]:
    """The words of a shell's line after the program's name, an unfinished quotation among them."""
    for ending in ("", "'", '"'):
        try:
            found = shlex.split(line + ending)
        except ValueError:  # a quotation without its end
            continue
        return [*found[1:], *([""] if line[-1:].isspace() and not ending else [])]
    return []


def candidates(program: Any, words: list[str]) -> list[Candidate]:
    """What may stand in the place of the last word, after the words before it."""
    *before, last = words
    command, given, awaited, number = program, set(), None, 0
    for word in before:
        if awaited is not None:
            awaited = None
        elif word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            option = option_of(command, name)
            given.add(option)
            awaited = None if option is None or option.is_flag or equals else option
        elif subs := getattr(command, "commands", None):
            command, given = subs.get(word), set()
            if command is None:
                return []
        else:
            number += 1
    if awaited is not None:
        return values(awaited, last)
    name, equals, begun = last.partition("=")
    if equals and last.startswith("--"):
        option = option_of(command, name)
        return [] if option is None else [(f"{name}={value}", said) for value, said in values(option, begun)]
    if last.startswith("-"):
        every = command.get_params(typer.Context(command))
        return [(name, one.help or "") for one in every if one.param_type_name == "option"
                for name in (*one.opts, *one.secondary_opts)
                if name.startswith(last) and (one not in given or one.multiple)]  # fmt: skip
    if subs := getattr(command, "commands", None):
        return [(name, sub.get_short_help_str(300)) for name, sub in subs.items() if name.startswith(last)]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    here = arguments[number : number + 1] or [one for one in arguments[-1:] if one.nargs == -1]
    return values(here[0], last) if here else []


def option_of(command: Any, name: str) -> Any:
    """The option of a command that is spelled so, or None."""
    return next((one for one in command.params if name in (*one.opts, *one.secondary_opts)), None)


def values(param: Any, begun: str) -> list[Candidate]:
    """What a parameter may be, of what begins like this."""
    items = param.shell_complete(typer.Context(typer.core.TyperCommand(None)), begun)
    return [(str(item.value), item.help or "") for item in items]
