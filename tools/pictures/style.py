"""How the page of a run looks: CSS without a single outside address. The colours are those of the pictures."""

from __future__ import annotations

from tools.pictures.canvas import COLOURS


def _variables(which: int) -> str:
    return "".join(f"--{name}:{both[which]};" for name, both in COLOURS.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(0)} --page:#f4f5f6; --bad:#b3261e; --good:#00734f; }}
@media (prefers-color-scheme: dark) {{
  :root {{ {_variables(1)} --page:#101316; --bad:#ff8a80; --good:#4fd6a8; }}
}}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 2.5rem 1rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; }
.lead { color: var(--muted); margin: 0 0 1.6rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); margin: 0 0 1.2rem; }
.card, section { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; }
.card { padding: .65rem .85rem; }
.card b { display: block; font-size: 1.3rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { color: var(--muted); font-size: .82rem; }
section { padding: 1rem 1.2rem 1.1rem; margin: 0 0 1.2rem; }
section p { margin: .5rem 0 0; color: var(--muted); font-size: .9rem; }
section p.say { color: var(--ink); margin: 0 0 .6rem; }
figure { margin: 0; } figcaption { color: var(--muted); font-size: .9rem; margin-top: .5rem; }
figure + h3 { margin-top: 1.4rem; }
svg { display: block; width: 100%; height: auto; font-family: inherit; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.narrow { display: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .32rem .7rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { min-width: 3.5rem; }
th { color: var(--muted); font-weight: 500; } tr:last-child > * { border-bottom: 0; }
tbody th { white-space: nowrap; overflow-wrap: normal; }
code, pre { font: .85em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; margin: .3rem 0 0; }
summary { cursor: pointer; color: var(--muted); font-size: .9rem; }
ul { margin: .3rem 0 0; padding-left: 1.2rem; font-size: .9rem; }
footer { color: var(--muted); font-size: .82rem; }
@media (max-width: 40rem) {
  main { padding: 1.4rem .7rem 3rem; } h1 { font-size: 1.5rem; } section { padding: .8rem .8rem; }
  .wide { display: none; } .narrow { display: block; }
  .cards { grid-template-columns: repeat(2, 1fr); } tbody th { white-space: normal; }
}
@media print { body { background: none; } section { break-inside: avoid; } }
"""
)
