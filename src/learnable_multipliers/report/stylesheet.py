"""The look of the page; its colours are those of the figures, in both faces."""

from __future__ import annotations

from learnable_multipliers.report.theme import DARK, LIGHT

_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1rem 4rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.15; margin: 0 0 1.2rem;
  letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 3.2rem 0 0.8rem; padding-top: 1rem;
  border-top: 1px solid var(--rule); letter-spacing: -0.01em; }
h3 { font-size: 1rem; margin: 1.6rem 0 0.4rem; overflow-wrap: anywhere; }
p, ul, figcaption { max-width: 44rem; overflow-wrap: anywhere; }
.summary { border-left: 4px solid var(--blue); padding: 0 0 0 1.1rem; margin: 0; }
.summary p { margin: 0 0 0.6rem; }
.summary p:first-child { font-size: 1.15rem; line-height: 1.45; }
.muted, figcaption, th { color: var(--muted); }
a { color: var(--blue); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.45rem 0.5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { white-space: normal; vertical-align: bottom; line-height: 1.25; }
th { font-weight: 600; }
td.text, th.text, tbody th { text-align: left; }
th:first-child { position: sticky; left: 0; background: var(--page); padding-left: 0; }
tbody th { color: var(--ink); min-width: 8.5rem; max-width: 13rem; white-space: normal;
  overflow-wrap: break-word; }
td.differs { font-weight: 600; }
.swatch { display: inline-block; width: 1.1rem; height: 0; margin-right: 0.5rem;
  vertical-align: middle; }
.panels { display: grid; gap: 1.4rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); align-items: start; }
figure.panels { gap: 0.4rem 2rem; }
.panels h3 { margin: 0.6rem 0 0; }
figure { margin: 0 0 1rem; min-width: 0; }
figcaption { font-size: 0.92rem; line-height: 1.5; margin-top: 0.5rem; }
figcaption strong { color: var(--ink); }
svg { display: block; width: 100%; max-width: 32rem; height: auto; }
svg * { stroke-linejoin: round; }
svg text { font-family: inherit; }
pre { margin: 0.3rem 0 1rem; padding: 0.8rem 1rem; border: 1px solid var(--rule);
  border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre mark { background: none; color: var(--blue); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; margin: 0 0 1rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
summary { cursor: pointer; color: var(--blue); margin: 0.6rem 0; }
"""


def stylesheet() -> str:
    """Return the CSS of a page, light or dark by the reader's preference."""
    light, dark = (
        " ".join(f"--{name}: {value};" for name, value in face.items()) for face in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{_RULES}"
    )
