"""`kit completion`: scripts that let bash, zsh and fish ask the kit what may follow, and the kit's answer.

A script runs the program that was typed, `kit` or `./kit.py`, as `PROGRAM completion words -- WORD...`, the last word
being the one at the cursor. It answers a line for each candidate, with a tab before what is said of it.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

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


@app.command(cls=teaching.Lookup, hidden=True)
def words(
    words: Annotated[list[str] | None, typer.Argument(help="The words after the program's name.")] = None,
    line: Annotated[str | None, typer.Option("--line", help="Up to the cursor, in place of words.")] = None,
) -> None:
    """Print what may stand in the place of the last word."""
    for value, said in candidates(split(line) if line is not None else words or [""]):
        print(f"{value}\t{said}" if said else value)


def split(line: str) -> list[str]:
    """The words of a shell's line after the program's name, an unfinished quotation among them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    found = []
    try:
        found = list(iter(lexer.get_token, lexer.eof))
    except ValueError:  # a quotation without its end: ended here
        return split(line + "'") if line.count("'") % 2 else split(line + '"')
    return [*map(str, found[1:]), *([""] if line[-1:].isspace() else [])]


def candidates(words: list[str]) -> list[Candidate]:
    """What may stand in the place of the last word, after the words before it."""
    from typer._click.shell_completion import ShellComplete  # typer has no public name for it

    from exl3kit.cli import app as kit

    class Answer(ShellComplete):
        def source_vars(self) -> dict[str, str]:
            raise NotImplementedError

        def get_completion_args(self) -> tuple[list[str], str]:
            return words[:-1], words[-1]

        def format_completion(self, item: object) -> str:
            raise NotImplementedError

    *before, last = words
    option, equals, _ = last.partition("=")
    prefix = option + equals if equals and option.startswith("--") else ""
    answer = Answer(typer.main.get_command(kit), {}, "kit", "").get_completions(before, last)
    return [(prefix + str(item.value), " ".join((item.help or "").split())) for item in answer]
