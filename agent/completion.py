"""Completion in the shell: a script for each of them, and what those scripts ask and are answered.

A script hands over the line up to the cursor, in the environment; the answer is a line for each
candidate: its kind, the word, and what it means, between tabs. The words are whole: where `=`
begins a value, what is before it is part of them.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from rules.model import NODE
from rules.values import Value

ASKED = "_PORTRANGER_COMPLETE"
LINE = "_PORTRANGER_LINE"
WORD = "_PORTRANGER_WORD"
FILE = "file"
_HARMLESS = re.compile(r"[\w.,:@%+-]+", re.ASCII)
_END = "\ufffd"  # closes the word at the cursor, which may be empty


class Question(Value):
    """The words before the one at the cursor, and that one as far as it is written."""

    words: tuple[str, ...]
    word: str
    replaced: int  # how much of it, from its end, the shell replaces

    @property
    def at_an_option(self) -> bool:
        """Whether nothing is written yet where an option may come, and no value has to."""
        return not self.word and not "".join(self.words[-1:]).startswith("-")

    @property
    def stem(self) -> str:
        """What a value is written behind: `--option=`."""
        name, equals, _ = self.word.partition("=")
        return name + equals if equals and name.startswith("-") else ""


def asked(environ: Mapping[str, str]) -> Question | None:
    """What a script wants to know; None if this is no script."""
    if ASKED not in environ:
        return None
    *before, last = _split(environ.get(LINE, "") + _END)
    word = last.removesuffix(_END)
    # Bash ends words at = and : and replaces only what is behind the last of them.
    rest = environ.get(WORD, word)
    return Question(tuple(before[1:]), word, len(rest) if word.endswith(rest) else len(word))


def _split(line: str) -> list[str]:
    """The words of a line as a shell has them; an open quote ends with it."""
    reader = shlex.shlex(line, posix=True)
    reader.whitespace_split = True
    reader.commenters = ""
    words: list[str] = []
    try:
        words.extend(reader)
    except ValueError:
        words.append(reader.token)
    return words


def answer(question: Question, found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A line for each candidate: kind, value and help, the value as it completes the word."""
    cut = len(question.word) - question.replaced
    for kind, value, help_text in found:
        whole = question.stem + value
        yield "\t".join((kind, value if kind == FILE else whole[cut:], " ".join(help_text.split())))


def namespaces(word: str, *, node: bool) -> list[str]:
    """The names of namespaces that begin so; also the node's own, where that is meant by `node`."""
    from agent.kernel.netns import names  # ctypes, which nobody else here needs

    try:
        known = names()
    except OSError:  # there may be no right to look
        known = []
    # Nobody's name is to be a pattern or a command in somebody's shell.
    safe = [one for one in known if _HARMLESS.fullmatch(one) and not one.startswith("-")]
    every = dict.fromkeys([*safe, *([NODE] if node else [])])
    return [name for name in every if name.startswith(word)]


# Each of them runs what PATH has under our name, whatever was typed before the blank: a key that
# completes should not start a program out of some folder.
BASH = r"""# bash completion for portranger
_portranger() {
    local kind value _
    COMPREPLY=()
    while IFS=$'\t' read -r kind value _; do
        case $kind in
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(env _PORTRANGER_COMPLETE=bash _PORTRANGER_LINE="${COMP_LINE:0:COMP_POINT}" \
        _PORTRANGER_WORD="$2" portranger 2>/dev/null)
}
complete -o nosort -F _portranger portranger
"""

ZSH = r"""#compdef portranger
_portranger() {
    local line answer kind value help
    local -a plain described
    line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX"
    answer=$(env _PORTRANGER_COMPLETE=zsh _PORTRANGER_LINE="$line" portranger 2>/dev/null)
    for line in "${(@f)answer}"; do
        IFS=$'\t' read -r kind value help <<<"$line"
        case $kind in
            file)
                if [[ $PREFIX == -*=* ]]; then compset -P '*='; fi
                _files
                ;;
            plain)
                if [[ -n $help ]]; then
                    described+=("${value//:/\\:}:$help")
                else
                    plain+=("$value")
                fi
                ;;
        esac
    done
    if (($#described)); then _describe -V portranger described; fi
    if (($#plain)); then compadd -V portranger -a plain; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _portranger "$@"
else
    compdef _portranger portranger
fi
"""

FISH = r"""# fish completion for portranger
function __portranger_complete
    set -l stem (string match --regex '^-[^=]*=' -- (commandline -ct))
    set -l line (commandline -cp | string collect)
    for answer in (env _PORTRANGER_COMPLETE=fish _PORTRANGER_LINE="$line" portranger 2>/dev/null)
        set -l part (string split --max 2 \t -- $answer)
        switch $part[1]
            case file
                for path in (__fish_complete_path "$part[2]")
                    echo "$stem$path"
                end
            case plain
                printf '%s\t%s\n' $part[2] "$part[3]"
        end
    end
end
complete --no-files --keep-order --command portranger --arguments '(__portranger_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
