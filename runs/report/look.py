"""The style sheet of the page: light or dark as the reader's system is, nothing fetched."""

from __future__ import annotations

STYLE = """
:root { --ink: #222; --soft: #666; --back: #fff; --card: #f5f6f8; --line: #d8dbe0; --link: #1f5fa8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a0a4aa; --back: #16181c; --card: #202329; --line: #3a3f47;
    --link: #8ab4f0 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; overflow-wrap: anywhere }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); vertical-align: top }
th[scope=row], .words, th:first-child { text-align: left }
th { font-weight: 600 }
td.words { white-space: normal; min-width: 20rem }
thead th { color: var(--soft) }
.groups th { text-align: center; white-space: normal; border-left: 1px solid var(--line) }
th small { display: block; font-weight: 400; color: var(--soft); white-space: normal;
  min-width: 12rem }
ul { color: var(--soft); font-size: .87rem; padding-left: 1.2rem }
figure { margin: 0 }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px;
  border: 1px solid var(--line) }
figcaption { color: var(--soft); font-size: .87rem; margin-top: .4rem; overflow-wrap: anywhere }
article { background: var(--card); border-radius: 8px; padding: 1rem; margin: 0 0 1rem }
article p { margin: .3rem 0 }
pre { overflow-x: auto; background: var(--back); border: 1px solid var(--line);
  border-radius: 6px; padding: .6rem; margin: .4rem 0 }
code { font: .87rem/1.4 ui-monospace, Menlo, Consolas, monospace }
summary { cursor: pointer; color: var(--link); margin: .4rem 0 }
@media print { article, img { break-inside: avoid } }
""".strip()
