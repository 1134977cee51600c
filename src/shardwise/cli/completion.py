"""`shardwise completion SHELL` prints what makes a shell complete verbs, options, config keys, their values, presets
and runs.

The shell asks `shardwise completion words -- LINE` at each Tab, so there is one list of words for all shells, and it is
never out of date. Written here because config words (`section.key=value`) are no options of argparse, and those are
all that completers for argparse know. Read next: candidates.py.
"""

from __future__ import annotations

import argparse

from shardwise.errors import Exit, UserError

HELP = (
    "Print a script that makes a shell complete verbs, options, config keys, values, presets and runs.\n\n"
    'bash   eval "$(shardwise completion bash)"            in ~/.bashrc\n'
    'zsh    eval "$(shardwise completion zsh)"             in ~/.zshrc, after compinit\n'
    "fish   shardwise completion fish | source             in ~/.config/fish/config.fish"
)

# Without a candidate a shell completes files, also behind the `=` of a key: bash breaks words there (and at `:`) and
# expects only what follows, the two others are told to.
BASH = r"""_shardwise() {
  local line="${COMP_LINE:0:COMP_POINT}" found
  local last="${line##*[[:space:]]}"
  local broken="${last%"${last##*[=:]}"}"
  [[ "$COMP_WORDBREAKS" == *=* ]] || broken=""
  COMPREPLY=()
  while IFS= read -r found; do
    [[ -n "$found" ]] && COMPREPLY+=("${found#"$broken"}")
  done < <(shardwise completion words -- "$line" 2>/dev/null)
  if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _shardwise shardwise"""

ZSH = r"""_shardwise() {
  local -a found open
  found=("${(@f)$(shardwise completion words -- "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  found=(${found:#})
  open=(${(M)found:#*[=.]})
  found=(${found:#*[=.]})
  if (( ! $#found && ! $#open )); then compset -P '*='; _files; return; fi
  (( $#found )) && compadd -- $found
  (( $#open )) && compadd -S '' -- $open
}
compdef _shardwise shardwise"""

FISH = r"""function __shardwise_words
  set -l found (shardwise completion words -- (commandline -cp | string collect) 2>/dev/null)
  if test (count $found) -gt 0
    printf '%s\n' $found
  else
    set -l token (commandline -ct | string collect)
    set -l key (string match -r '^[^=/]*=' -- $token)
    string replace -r '^' -- "$key" (__fish_complete_path (string replace -- "$key" '' $token))
  end
end
complete -c shardwise -f -a '(__shardwise_words)'"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=[*SCRIPTS, "words"], help="`words` is what those scripts ask at each Tab")
    parser.add_argument("line", nargs="?", default="", help="with `words`: the command line up to the cursor")


def run(args: argparse.Namespace) -> int:
    if args.line and args.shell != "words":
        why = "its script asks for the command line itself"
        raise UserError(f"`completion {args.shell}` takes no `{args.line}`", why=why, fix="leave it out")
    if args.shell == "words":
        from shardwise.cli.candidates import candidates

        for word in candidates(args.line):
            print(word)
    else:
        print(SCRIPTS[args.shell])
    return Exit.DONE
