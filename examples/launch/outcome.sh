# Whether a run that has ended is worth starting again, by what it left behind; to be sourced. torchrun turns every exit
# code into 1, so status.json decides.
#
#   begin DIR           before it starts
#   worth_another DIR   after it has ended: true for `requeue`, and for a crash or a hang that came further than before

_trained() { cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || echo none; }
_status() { cat "$1/status.json" 2>/dev/null; }

begin() {
  _trained_before=$(_trained "$1")
  _status_before=$(_status "$1")
}

worth_another() {
  local status outcome
  status=$(_status "$1")
  outcome=$(sed -n 's/^{"outcome": "\([a-z-]*\)".*/\1/p' <<<"$status")
  [ "$status" != "$_status_before" ] || outcome=none  # it ended before it could say a word
  case $outcome in
    requeue) return 0 ;;
    crash | hang | rerun | running) [ "$(_trained "$1")" != "$_trained_before" ] ;; # running: killed, with its launcher
    *) return 1 ;;  # done, usage, preflight, bad-result, interrupted: the next one would end in the same way
  esac
}
