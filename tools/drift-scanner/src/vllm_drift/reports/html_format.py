"""A report as one HTML page that needs nothing else: the matrix, and the evidence behind each cell.

No script, style sheet, font or image from elsewhere, so that the page works as a file, as a build
artifact and behind a strict content policy. Without JavaScript the evidence is a list below the
matrix.
"""

from __future__ import annotations

from html import escape

from vllm_drift.findings import Finding, Report, Verdict
from vllm_drift.matrix import Cell, CellState, Matrix, Row, matrix_of
from vllm_drift.reports.style import Style
from vllm_drift.reports.words import MEANING, by_weight, headline, place

__all__ = ["render"]

_SIGNS = {
    CellState.OK: ("✓", "as declared"),
    CellState.HANDLED: ("◆", "changed here, and declared so"),
    CellState.NOTE: ("✓", "as declared, with a note"),
    CellState.CANNOT_TELL: ("?", "cannot tell"),
    CellState.WARNING: ("!", "warning"),
    CellState.DRIFT: ("✕", "drift"),
    CellState.UNSUPPORTED: ("–", "not as declared, in a release that is not claimed"),
    CellState.UNUSED: ("", "not relied on"),
}

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2024; --soft: #60646c; --line: #d9d9e0;
  --head: #f6f6f8; --ok: #cdebd4; --ok-fg: #14532d; --note: #e3f3d6; --handled: #cfe2ff;
  --handled-fg: #0b3d91; --warning: #ffe6a8; --warning-fg: #6b4500; --drift: #ffc9c9;
  --drift-fg: #8a0f0f; --cannot-tell: #ead6fa; --cannot-tell-fg: #5a1a8a;
  --unsupported: #ececf0; --unsupported-fg: #60646c; }
@media (prefers-color-scheme: dark) { :root { --bg: #15171a; --fg: #e6e8eb; --soft: #9ba1a8;
  --line: #34373d; --head: #1e2125; --ok: #16442a; --ok-fg: #b9f0ca; --note: #2c431a;
  --handled: #173a70; --handled-fg: #cfe2ff; --warning: #5c4300; --warning-fg: #ffe6a8;
  --drift: #6d1a1a; --drift-fg: #ffd5d5; --cannot-tell: #45205f; --cannot-tell-fg: #ead6fa;
  --unsupported: #26292e; --unsupported-fg: #9ba1a8; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1.5rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.sub { color: var(--soft); margin: 0 0 1rem; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .86em; }
.scroll { overflow: auto; max-height: 78vh; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: separate; border-spacing: 0; }
th, td { border-bottom: 1px solid var(--line); border-right: 1px solid var(--line); }
thead th { position: sticky; top: 0; z-index: 2; background: var(--head); font-weight: 600;
  padding: .45rem .2rem; font-size: .8rem; vertical-align: bottom; }
thead th span { writing-mode: vertical-rl; transform: rotate(180deg); }
thead th.outside { font-weight: 400; color: var(--soft); font-style: italic; }
tbody th { position: sticky; left: 0; z-index: 1; background: var(--head); text-align: left;
  padding: .25rem .75rem; font-weight: 500; white-space: nowrap; }
thead th:first-child { left: 0; z-index: 3; text-align: left; padding: .45rem .75rem; }
tbody th small { color: var(--soft); font-weight: 400; margin-left: .5rem; }
td { padding: 0; text-align: center; min-width: 2rem; }
td a { display: block; padding: .3rem .2rem; text-decoration: none; color: inherit;
  font-weight: 600; }
td a:hover, td a:focus-visible { outline: 2px solid var(--fg); outline-offset: -2px; }
.ok { background: var(--ok); color: var(--ok-fg); }
.note { background: var(--note); color: var(--ok-fg); }
.handled { background: var(--handled); color: var(--handled-fg); }
.warning { background: var(--warning); color: var(--warning-fg); }
.drift { background: var(--drift); color: var(--drift-fg); }
.cannot-tell { background: var(--cannot-tell); color: var(--cannot-tell-fg); }
.unsupported { background: var(--unsupported); color: var(--unsupported-fg); }
.legend { display: flex; flex-wrap: wrap; gap: .5rem 1.25rem; margin: .75rem 0; padding: 0;
  list-style: none; font-size: .85rem; color: var(--soft); }
.legend b { display: inline-block; min-width: 1.5rem; text-align: center; border-radius: 4px;
  margin-right: .35rem; }
section.evidence { border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem;
  margin: .75rem 0; scroll-margin-top: 1rem; }
section.evidence h3 { margin: 0 0 .25rem; font-size: 1rem; }
section.evidence:target { outline: 3px solid var(--handled-fg); }
.tag { display: inline-block; border-radius: 4px; padding: 0 .4rem; font-size: .8rem;
  font-weight: 600; margin-right: .4rem; }
.where { color: var(--soft); } .finding { margin: .5rem 0; }
pre { background: var(--head); border: 1px solid var(--line); border-radius: 6px; padding: .5rem;
  overflow: auto; max-height: 24rem; margin: .35rem 0; }
pre .add { color: #1a7f37; } pre .del { color: #cf222e; }
.js #evidence > section { display: none; } .js #evidence > section.open { display: block; }
#panel { position: fixed; right: 1rem; bottom: 1rem; width: min(46rem, calc(100vw - 2rem));
  max-height: 70vh; overflow: auto; background: var(--bg); border: 1px solid var(--line);
  border-radius: 10px; box-shadow: 0 8px 40px #0006; padding: 0 1rem; z-index: 10; }
#panel[hidden] { display: none; }
#panel section.evidence { border: 0; padding: .25rem 0; }
#panel button { position: sticky; top: .5rem; float: right; font: inherit; cursor: pointer; }
"""

_SCRIPT = """
document.documentElement.classList.add('js');
const panel = document.getElementById('panel');
const show = () => {
  const section = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const body = panel.querySelector('div');
  body.replaceChildren();
  panel.hidden = !(section && section.classList.contains('evidence'));
  if (!panel.hidden) {
    const copy = section.cloneNode(true);
    copy.removeAttribute('id');
    body.append(copy);
  }
};
const close = () => {
  history.replaceState(null, '', location.pathname + location.search);
  show();
};
panel.querySelector('button').addEventListener('click', close);
document.addEventListener('keydown', (e) => { if (e.key === 'Escape') close(); });
document.addEventListener('click', (e) => {
  const link = e.target.closest('td a');
  if (!link) return;
  e.preventDefault();
  history.replaceState(null, '', link.getAttribute('href'));
  show();
});
addEventListener('hashchange', show);
show();
"""


def render(report: Report, style: Style) -> str:
    """Return the report as one self-contained HTML page."""
    matrix = matrix_of(report)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(headline(report))}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(headline(report))}</h1>",
        f'<p class="sub">vllm-drift {escape(report.command)}; each cell opens its evidence.</p>',
        _legend(matrix),
        _table(matrix),
        *_preexisting(report),
        *[f'<p class="sub">{escape(note)}</p>' for note in report.notes],
        '<div id="evidence">',
        *_evidence(matrix, style),
        "</div>",
        '<aside id="panel" hidden aria-live="polite"><button type="button">close</button>'
        "<div></div></aside>",
        f"<script>{_SCRIPT}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _legend(matrix: Matrix) -> str:
    used = {cell.state for row in matrix.rows for cell in row.cells}
    items = [
        f'<li><b class="{state.value}">{sign or "&nbsp;"}</b>{escape(meaning)}</li>'
        for state, (sign, meaning) in _SIGNS.items()
        if state in used
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(matrix: Matrix) -> str:
    head = "".join(
        f'<th scope="col"{"" if r.claimed else _UNCLAIMED}><span>{escape(r.label)}</span></th>'
        for r in matrix.releases
    )
    rows = []
    for number, row in enumerate(matrix.rows):
        cells = "".join(
            _cell(cell, _anchor(number, column), f"{row.symbol}, {release.label}")
            for column, (cell, release) in enumerate(zip(row.cells, matrix.releases, strict=True))
        )
        rows.append(
            f'<tr><th scope="row"><code>{escape(row.symbol)}</code>'
            f"<small>{escape(row.kind)}</small></th>{cells}</tr>"
        )
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">symbol</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


_UNCLAIMED = ' class="outside" title="not claimed by the plugin"'


def _anchor(row: int, column: int) -> str:
    return f"c{row}-{column}"


def _cell(cell: Cell, anchor: str, name: str) -> str:
    sign, meaning = _SIGNS[cell.state]
    if not cell.findings:
        return "<td></td>"
    verdict = cell.verdict.value if cell.verdict is not None else meaning
    title = escape(f"{name}: {verdict}", quote=True)
    return f'<td class="{cell.state.value}"><a href="#{anchor}" title="{title}">{sign}</a></td>'


def _evidence(matrix: Matrix, style: Style) -> list[str]:
    parts = []
    for number, row in enumerate(matrix.rows):
        for column, (cell, release) in enumerate(zip(row.cells, matrix.releases, strict=True)):
            if cell.findings:
                parts.append(_section(row, cell, release.label, _anchor(number, column), style))
    return parts


def _section(row: Row, cell: Cell, label: str, anchor: str, style: Style) -> str:
    sign, meaning = _SIGNS[cell.state]
    findings = [f for f in cell.findings if f.verdict is not Verdict.UNCHANGED]
    shown = by_weight(findings or list(cell.findings))
    why = style.why.get(row.symbol, "")
    return (
        f'<section class="evidence" id="{anchor}"><h3><code>{escape(row.symbol)}</code> in '
        f'{escape(label)}</h3><span class="tag {cell.state.value}">{sign} {escape(meaning)}</span>'
        f'<span class="where">{escape(why)}</span>'
        f"{''.join(_finding(f) for f in shown)}</section>"
    )


def _finding(f: Finding) -> str:
    where = place(f)
    since = f" since {escape(f.first_seen)}" if f.first_seen else ""
    older = f" (compared with {escape(f.compared_with)})" if f.compared_with else ""
    severity = {"error": "drift", "warning": "warning", "info": "note"}[f.severity.value]
    return (
        f'<div class="finding"><span class="tag {severity}" '
        f'title="{escape(MEANING[f.verdict], quote=True)}">{f.verdict.value}</span>'
        f"{escape(f.message)}<br>"
        f'<span class="where"><code>{escape(where)}</code>{since}{older}</span>'
        f"{_detail(f.detail)}</div>"
    )


def _detail(detail: str) -> str:
    if not detail:
        return ""
    lines = []
    for line in detail.rstrip().splitlines():
        kind = {"+": "add", "-": "del"}.get(line[:1])
        text = escape(line)
        lines.append(f'<span class="{kind}">{text}</span>' if kind else text)
    return "<pre>" + "\n".join(lines) + "</pre>"


def _preexisting(report: Report) -> list[str]:
    found = [f for f in report.preexisting if f.verdict is not Verdict.UNCHANGED]
    if not found:
        return []
    rows = "".join(
        f"<li><code>{escape(f.symbol)}</code> {_finding(f)}</li>" for f in by_weight(found)
    )
    return ["<h2>Preexisting: wrong before, and still</h2>", f"<ul>{rows}</ul>"]
