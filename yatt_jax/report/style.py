"""Looks and behaviour of the report page: plain CSS and a little plain JavaScript, inlined."""

from __future__ import annotations

_LIGHT = """--bg:#f7f7f5;--card:#fff;--ink:#1d1f23;--soft:#5f656e;--rule:#e3e3df;--grid:#ecece8;--good:#147a4b;
--bad:#b3372f;--wash:#f2f2ee;--c0:#2a6fdb;--c1:#d9730d;--c2:#1a936f;--c3:#c2378f;--c4:#7a52cc;--c5:#0f8b9e;--c6:#a8761b;--c7:#8a9099"""
_DARK = """--bg:#141517;--card:#1c1e21;--ink:#e8e8e6;--soft:#9da3ab;--rule:#303338;--grid:#282b2f;--good:#5fd39b;
--bad:#ff8d85;--wash:#24262a;--c0:#6ea8fe;--c1:#f5a25d;--c2:#4fd1a5;--c3:#f07cc1;--c4:#b197fc;--c5:#4cc9dc;--c6:#dcb45a;--c7:#7c838c"""

SVG_RULES = """
.chart{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
.tick{fill:var(--soft)}.rung{stroke:var(--grid)}.axis{stroke:var(--rule)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}.line.faint{stroke-width:1.2;opacity:.45}
.dot{stroke:var(--card);stroke-width:1}rect.depth1{opacity:.75}rect.depth2{opacity:.5}rect.open{opacity:.35}
rect.error{stroke:var(--bad);stroke-width:2}.tick.fine{font-size:9.5px}
.wait rect{fill:var(--card);opacity:.74}.wait line{stroke:var(--soft);stroke-dasharray:1.3 2.7;opacity:.85}
.wait.open{opacity:.6}
"""

CSS = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
main{{max-width:1120px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:26px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:18px;margin:40px 0 4px;letter-spacing:-.005em}}
h3{{font-size:13.5px;font-weight:600;margin:0 0 6px}}
p{{margin:0 0 10px}}.soft{{color:var(--soft)}}.small{{font-size:13px}}
code,pre{{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
.command{{display:block;background:var(--wash);border-radius:6px;padding:8px 12px;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(158px,1fr));gap:12px;margin:18px 0}}
.card{{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;
min-width:0;margin-top:12px}}
.tiles .card,.grid .card{{margin-top:0}}
.tile .what{{color:var(--soft);font-size:13px}}.tile .figure{{font-size:21px;font-weight:600;letter-spacing:-.02em;
font-variant-numeric:tabular-nums;white-space:nowrap}}.tile.wide{{grid-column:span 2}}
.up{{color:var(--good)}}.down{{color:var(--bad)}}.arrow{{color:var(--soft);font-weight:400;padding:0 .15em}}
.grid{{display:grid;grid-template-columns:repeat(auto-fill,minmax(310px,1fr));gap:12px;margin-top:12px}}
.chart{{display:block;width:100%;height:auto;overflow:visible}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft);margin:0 0 4px}}
.legend i{{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}}
.legend i.faint{{opacity:.45}}.legend i.box{{height:11px;width:11px}}
.legend i.wait{{height:11px;width:15px;
background:repeating-linear-gradient(90deg,var(--soft) 0 1.3px,transparent 1.3px 4px)}}
.note{{margin:8px 0 0}}h3.apart{{margin-top:22px}}
.stack{{display:flex;height:9px;border-radius:5px;overflow:hidden;background:var(--wash)}}.stack i{{min-width:1px}}
tr.sum td{{font-weight:600;border-top:2px solid var(--rule)}}tr.worst td:first-child{{color:var(--bad)}}
.key{{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}}
.empty{{display:grid;place-items:center;color:var(--soft);font-size:13px}}
.pair .two{{display:grid;grid-template-columns:1fr 1fr;gap:12px;margin-top:10px}}
.text{{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}}
.media{{display:flex;flex-wrap:wrap;gap:6px;margin-bottom:6px}}
.media img{{min-height:56px;max-width:100%;max-height:180px;object-fit:contain;border-radius:4px}}
.media .pixels{{image-rendering:pixelated}}
.media audio{{width:230px;height:34px}}
.says{{background:var(--wash);border-radius:8px;padding:10px 12px;min-width:0}}
.says header{{display:flex;flex-wrap:wrap;gap:2px 10px;align-items:baseline;font-size:12.5px;color:var(--soft);
margin-bottom:4px}}
.score{{font-weight:600;font-variant-numeric:tabular-nums;color:var(--ink)}}
.wrap{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:13.5px}}
th{{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px;white-space:nowrap}}
th,td{{padding:7px 10px;border-bottom:1px solid var(--rule);vertical-align:top}}
tr:last-child td{{border-bottom:0}}td.n,th.n{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
td .text{{max-width:46ch}}td.fact{{color:var(--soft);white-space:nowrap;width:1%}}
.bar{{height:9px;border-radius:5px;min-width:2px}}td.share{{width:45%;vertical-align:middle}}
td.who{{white-space:nowrap}}
details{{margin-top:12px}}summary{{cursor:pointer;font-weight:600;font-size:14px}}
details pre{{overflow-x:auto;margin:10px 0 0}}
#tip{{position:fixed;pointer-events:none;background:var(--card);border:1px solid var(--rule);border-radius:7px;
padding:6px 10px;font-size:12.5px;box-shadow:0 3px 14px #0003;display:none;z-index:9;font-variant-numeric:tabular-nums}}
#tip i{{display:inline-block;width:9px;height:9px;border-radius:3px;margin-right:6px}}
#tip b{{font-weight:600;margin-left:10px;float:right}}
.cursor{{stroke:var(--soft);stroke-dasharray:2 3}}
@media(max-width:640px){{.pair .two{{grid-template-columns:1fr}}.tile.wide{{grid-column:1/-1}}
.broad{{overflow-x:auto}}.broad>.chart{{min-width:620px}}}}
@media print{{body{{background:#fff}}.card{{break-inside:avoid}}}}
{SVG_RULES}
"""

# Tooltips: the values of every line at the step nearest to the pointer.
SCRIPT = """
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  const near = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  for (const svg of document.querySelectorAll("svg[data-tips]")) {
    const t = JSON.parse(svg.dataset.tips);
    const [low, high, from, to] = t.x;
    const lines = t.lines.filter(l => l.p.length);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    svg.addEventListener("pointermove", e => {
      const box = svg.getBoundingClientRect();
      const at = low + ((e.clientX - box.left) / box.width * t.w - from) / (to - from) * (high - low);
      const step = near(lines.map(l => near(l.p, at)), at)[0];
      const x = from + (step - low) / (high - low) * (to - from);
      for (const [k, v] of [["x1", x], ["x2", x], ["y1", t.h[0]], ["y2", t.h[1]]]) cursor.setAttribute(k, v);
      svg.append(cursor);
      tip.replaceChildren(`step ${step}`, ...lines.map(l => {
        const [row, dot, value] = ["div", "i", "b"].map(tag => document.createElement(tag));
        const p = near(l.p, step);
        dot.style.background = `var(--c${l.c})`;
        value.textContent = p[0] === step ? p[1] : `${p[1]} at ${p[0]}`;
        row.append(value, dot, l.n);
        return row;
      }));
      tip.style.display = "block";
      const left = e.clientX + 16 + tip.offsetWidth > innerWidth ? e.clientX - 16 - tip.offsetWidth : e.clientX + 16;
      tip.style.left = `${left}px`;
      tip.style.top = `${Math.min(e.clientY + 12, innerHeight - tip.offsetHeight - 8)}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.style.display = "none"; cursor.remove(); });
  }
})();
"""

# A picture on its own: the rules travel inside it, and it follows the theme of whoever shows it.
PICTURE_CSS = f"svg{{{_LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{_DARK}}}}}{SVG_RULES}"
