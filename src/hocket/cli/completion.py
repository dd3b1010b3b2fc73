"""`hocket completion`: a completion script, from the same table that flags are read by.

Not through shtab: it needs an argparse parser, while flags are dataclasses, and has no fish.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import parse_flags
from hocket.cli.spelling import Flag, flags_of, spelled
from hocket.spec.errors import OptionError, unknown

Shell = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SHELL")]
Verbs = Mapping[str, Mapping[str, Flag]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionFlags:
    """Print a completion script of verbs, flags and their values.

    bash: eval "$(hocket completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc;
    fish: hocket completion fish > ~/.config/fish/completions/hocket.fish

    Attributes:
        shell: bash, zsh or fish.
    """

    shell: Shell = ""


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    shell = parse_flags(CompletionFlags, "completion", arguments, CompletionFlags()).shell
    if not shell:
        raise OptionError("which shell?", hint='eval "$(hocket completion bash)"')
    if shell not in SCRIPTS:
        message, hint = unknown("shell", shell, SCRIPTS)
        raise OptionError(message, hint=hint)
    print(SCRIPTS[shell](every_verb()), end="")
    return 0


def every_verb() -> dict[str, dict[str, Flag]]:
    """The flags of each verb, once each; positional arguments are left to the shell's files."""
    from hocket.cli.main import VERBS

    found = {}
    for verb in VERBS:
        flags = flags_of(importlib.import_module(f"hocket.cli.{verb}")).values()
        found[verb] = {flag.name: flag for flag in flags if not flag.positional}
    return found


def bash(verbs: Verbs) -> str:
    """For bash: `complete -F`."""
    flags, values = [], []
    for verb, known in verbs.items():
        flags.append(f'    {verb}) flags="{" ".join(map(spelled, sorted(known)))}" ;;')
        for flag in known.values():
            if flag.choices:
                words = " ".join(flag.choices)
                values.append(f'    {verb}:{spelled(flag.name)}) values="{words}" ;;')
    return f"""\
_hocket() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local verb="${{COMP_WORDS[1]}}" flags="" values=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(verbs)} help --version" -- "$current"))
    return
  fi
  case "$verb" in
    help) flags="{" ".join(verbs)}" ;;
{chr(10).join(flags)}
  esac
  case "$verb:$before" in
    completion:completion) values="{" ".join(SCRIPTS)}" ;;
    config:config) values="show" ;;
    config:show) values="{" ".join(verbs)}" ;;
{chr(10).join(values)}
  esac
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [ "$verb" = help ] || [ "${{current#-}}" != "$current" ]; then
    COMPREPLY=($(compgen -W "$flags {COMMON}" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _hocket hocket
"""


def zsh(verbs: Verbs) -> str:
    """For zsh: `compdef` and `_arguments`."""
    from hocket.cli.main import VERBS

    cases = []
    for verb, known in verbs.items():
        lines = [f"    {verb}) _arguments -s '*:file:_files' \\"]
        for flag in sorted(known.values(), key=lambda one: one.name):
            value = "" if flag.switch else ":value:"
            if flag.choices:
                value += f"({' '.join(flag.choices)})"
            elif flag.metavar.rstrip(".") in ("FILE", "DIR", "PATH", "RUN"):
                value += "_files"
            lines.append(f"      '{spelled(flag.name)}[{_quoted(flag.text)}]{value}' \\")
        cases.append("\n".join(lines) + "\n      '--help[print help]' ;;")
    names = " ".join(f"'{verb}:{_quoted(text)}'" for verb, text in VERBS.items())
    return f"""\
#compdef hocket
_hocket() {{
  local -a verbs
  verbs=({names})
  if (( CURRENT == 2 )); then _describe verb verbs; return; fi
  case $words[2] in
{chr(10).join(cases)}
  esac
}}
compdef _hocket hocket
"""


def _quoted(text: str) -> str:
    """A description inside a single-quoted specification of zsh."""
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text.replace("'", "'\\''")


def fish(verbs: Verbs) -> str:
    """For fish: one `complete` a verb and flag."""
    from hocket.cli.main import VERBS

    lines = []
    for verb, text in VERBS.items():
        lines.append(f"complete -c hocket -n __fish_use_subcommand -fa {verb} -d {_fish(text)}")
    for verb, known in verbs.items():
        seen = f"-n '__fish_seen_subcommand_from {verb}'"
        for flag in sorted(known.values(), key=lambda one: one.name):
            value = "" if flag.switch else " -r"
            if flag.choices:
                value = f" -xa '{' '.join(flag.choices)}'"
            name = spelled(flag.name)[2:]
            lines.append(f"complete -c hocket {seen} -l {name}{value} -d {_fish(flag.text)}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "'\"'\"'")
    return f"'{escaped}'"


COMMON = "--help --config --set --quiet"
SCRIPTS: dict[str, Callable[[Verbs], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
