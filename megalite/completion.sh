# Completes `megalite` in bash and zsh: source <(megalite completion bash). Commands and flags come from --help all of the
# command before the cursor. The last answer is cached.
if [ -n "${ZSH_VERSION:-}" ]; then
  autoload -Uz compinit bashcompinit && compinit && bashcompinit
fi
_megalite_before=none

_megalite_in_help() { # prints the commands in the usage of a help text, and the flags at the start of its lines
  sed -n 's/.*{\([a-z,-]*\)} \.\.\.$/\1/p' <<<"$1" | tr , '\n'
  sed -n 's/^  *\(-.*\)/\1/p' <<<"$1" | sed 's/   *.*//' | grep -o -e '--[a-z][a-z0-9_-]*' | sort -u
}

_megalite() {
  local word cur="${COMP_WORDS[COMP_CWORD]}"
  local -a before
  before=()
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
    case $word in -*) break ;; esac
    before+=("$word")
  done
  if [ "$_megalite_before" != "${before[*]}" ]; then
    _megalite_words=$(_megalite_in_help "$(COLUMNS=1000 "${COMP_WORDS[0]}" "${before[@]}" --help all 2>/dev/null </dev/null)")
    _megalite_before="${before[*]}"
  fi
  COMPREPLY=($(compgen -W "$_megalite_words" -- "$cur"))
}
complete -o default -F _megalite megalite
