"""The HTML page of a run or a probe: one file that needs no other."""
import base64
import json
import re
from html import escape
from pathlib import Path

import numpy as np

from analysis.tables import Table
from analysis.tally import lay_flat
from countdown_task import KINDS, SECTIONS, TAG
from engine.credit_file import read_columns
from engine.files import writing
from engine.tokens import token_bytes


def write_page(path: Path, title: str, intro: list[str], short: list[str], tables: list[Table], pictures: list[tuple[Path, str]], places: dict[str, tuple],
               episodes: list[dict]) -> None:
    """One file that needs no other: pictures and data are inside, nothing is fetched. `places` says which pictures, by
    name, stand below which table; the others come at the end."""
    caption, left = dict(pictures), [path for path, _ in pictures]
    links = [(anchor(table.name), table.title) for table in tables] + [("answers", "Answers, token by token")] * bool(episodes)
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(text)}</p>" for text in intro),
            *(["<h2>In short</h2><ul>", *(f"<li>{escape(text)}</li>" for text in short), "</ul>"] if short else []),
            "<nav>" + "".join(f"<a href=#{name}>{escape(text)}</a>" for name, text in links) + "</nav>"]
    for table in tables:
        mine = [p for name in places.get(table.name, ()) for p in left if p.stem == name]
        left = [p for p in left if p not in mine]
        body.append(section_of(table) + "".join(figure_of(p, caption[p]) for p in mine) + "</section>")
    body += [figure_of(p, caption[p]) for p in left] + [VIEWER] * bool(episodes)
    data = json.dumps(episodes, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # so that no text can end the script
    script = f"const SECTIONS = {json.dumps(SECTIONS)}, KINDS = {json.dumps(KINDS)}, TAG = {TAG};" + SCRIPT if episodes else ""
    with writing(path):
        path.write_text(PAGE.format(title=escape(title), style=STYLE, body="\n".join(body), data=data, script=script), encoding="utf-8")


def anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def section_of(table: Table) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}{'' if text else ' class=n'}>{escape(cell)}</{tag}>" for cell, text in zip(cells, table.texts())) + "</tr>"

    rows = "".join(line(cells, "td") for cells in table.cells())
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in table.notes)
    return (f"<section id={anchor(table.name)}><h2>{escape(table.title)}</h2><p class=finding>{escape(table.finding)}</p>"
            f"<div class=wide><table><thead>{line(table.columns, 'th')}</thead><tbody>{rows}</tbody></table></div>{notes}")


def figure_of(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'


def episodes_of(run: Path, tokenizer, steps: list[int], most_tokens: int = 60_000) -> list[dict]:
    """What the page shows token by token: of each step whole groups, those with different rewards first, as many as fit."""
    found = []
    for step in steps:
        tokens = lay_flat(read_columns(run, step))
        groups, room = np.unique(tokens["group"]), most_tokens // len(steps)
        for g in sorted(groups, key=lambda g: np.ptp(tokens["reward"][tokens["group"] == g]) == 0):
            members = np.flatnonzero(tokens["group"] == g)
            size = int(tokens["length"][members].sum())
            if size > room and any(e["step"] == step for e in found):
                break
            room -= size
            found += [episode(tokens, tokenizer, step, int(b)) for b in members]
    return found


def episode(tokens: dict, tokenizer, step: int, b: int) -> dict:
    start, n = int(tokens["episode_start"][b]), int(tokens["length"][b])
    part, g = slice(start, start + n), int(tokens["group"][b])
    prompts = np.split(tokens["prompt_ids"], tokens["prompt_start"][1:])
    advantage, weight = tokens["advantage"][part], tokens["weight"][part]
    values = {"advantage": advantage, "weight": weight, "contribution": advantage * weight * tokens["log_prob"][part],
              "gradient size": np.abs(advantage) * weight * tokens["s"][part],
              "entropy": tokens["entropy"][part], "log-prob": tokens["log_prob"][part]}
    for name in ("true_credit", "true_credit_se"):
        if name in tokens:
            values[name.replace("_", " ")] = tokens[name][part].astype(float)
    return {"step": step, "episode": b, "group": g, "reward": rounded(tokens["reward"][b]), "answer": rounded(tokens["reward_answer"][b]),
            "finished": bool(tokens["finished"][b]), "prompt": b"".join(token_bytes(tokenizer, prompts[g].tolist())).decode(errors="replace"),
            "texts": [piece.decode(errors="replace") for piece in token_bytes(tokenizer, tokens["token_id"][part].tolist())],
            "section": tokens["section"][part].tolist(), "kind": tokens["kind"][part].tolist(),
            "values": {name: [rounded(v) for v in column] for name, column in values.items()}}


def rounded(value) -> float | None:
    """Four digits are enough for the eye and keep the page small."""
    return float(f"{value:.4g}") if np.isfinite(value) else None
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head><body>
{body}
<script type="application/json" id="episodes">{data}</script>
<script>{script}</script>
</body></html>
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fdfdfb; --soft: #6a6a6a; --line: #d8d8d4; --blue: 0,114,178; --orange: 213,94,0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e2; --paper: #16171a; --soft: #9b9b97; --line: #3a3b40; --blue: 86,180,233; --orange: 240,140,40; } img { filter: invert(1) hue-rotate(180deg); } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .3rem; } .finding { margin: .2rem 0 .8rem; font-weight: 600; }
nav { columns: 18rem; font-size: .85rem; } nav a { display: block; color: inherit; }
.note, figcaption { color: var(--soft); font-size: .85rem; margin: .3rem 0; } figure { margin: 1rem 0; } img { max-width: 100%; border-radius: 4px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: pre; } .n { text-align: right; }
[hidden] { display: none !important; } .bar { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin: .6rem 0; } select, button { font: inherit; }
#tokens, #prompt { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 4px; padding: .6rem; margin: .5rem 0; }
#prompt { color: var(--soft); line-height: 1.4; max-height: 9rem; overflow: auto; }
#tokens span { border-bottom: 2px solid transparent; border-radius: 2px; } #tokens .s1 { border-bottom-color: #009e73; } #tokens .s2 { border-bottom-color: #cc79a7; }
#tokens .tag { font-weight: 700; } #tokens span:hover, #tokens span:focus { outline: 2px solid var(--ink); }
#value { min-height: 3em; font-size: .88rem; } .key { display: inline-block; width: 9rem; height: .9rem; border: 1px solid var(--line); vertical-align: middle; }
"""
VIEWER = """<section id=answers><h2>Answers, token by token</h2>
<p class=finding>Every token shaded by what it was given: blue above zero, orange below. Point at a token for its numbers.</p>
<p class=note>A selection: whole groups of some steps, those whose answers had different rewards first. The contribution is A w lp, so it
is above zero where the advantage is below; the gradient size is abs(A) w s.</p>
<div class=bar><label>shade by <select id=quantity></select></label><label>step <select id=step></select></label><label>reward <select id=reward></select></label>
<label><input type=checkbox id=local> full colour at the largest of this answer</label>
<button id=previous>&larr; previous</button><button id=next>next &rarr;</button><span id=place></span></div>
<div class=bar><span>0</span><span class=key id=positive></span><span id=most></span><span class=key id=negative></span><span id=least></span>
<span style="border-bottom:2px solid #009e73">think</span><span style="border-bottom:2px solid #cc79a7">answer</span><b>tag</b></div>
<div id=prompt></div><div id=tokens></div><div id=value></div></section>"""
SCRIPT = """
const all = JSON.parse(document.getElementById('episodes').textContent), $ = id => document.getElementById(id);
const BLUE = 'var(--blue)', ORANGE = 'var(--orange)';
let shown = all, at = 0;
function fill(select, choices) { for (const [value, text] of choices) select.add(new Option(text, value)); }
const unique = key => [...new Set(all.map(e => e[key]))].sort((a, b) => a - b);
fill($('quantity'), Object.keys(all[0].values).map(name => [name, name]));
fill($('step'), [['', 'all'], ...unique('step').map(v => [v, v])]);
fill($('reward'), [['', 'all'], ['solved', 'solved'], ['not solved', 'not solved'], ...unique('reward').map(v => [v, v])]);
const limit = {};  // 98% of the tokens on this page are smaller than this: the full colour
for (const name of Object.keys(all[0].values)) {
  const sizes = all.flatMap(e => e.values[name].map(v => Math.abs(v ?? 0))).sort((a, b) => a - b);
  limit[name] = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}
const shade = (v, most) => v === null ? 'transparent' : `rgba(${v < 0 ? ORANGE : BLUE},${(0.8 * Math.min(1, Math.abs(v) / most)).toFixed(3)})`;
function choose() {
  const step = $('step').value, reward = $('reward').value;
  shown = all.filter(e => (step === '' || e.step === +step) && (reward === '' || (reward === 'solved' ? e.answer > 0 : reward === 'not solved' ? !(e.answer > 0) : e.reward === +reward)));
  at = 0; draw();
}
function tell(e, t) {
  const numbers = Object.entries(e.values).map(([name, column]) => `${name} ${column[t] ?? 'unknown'}`).join(', ');
  $('value').textContent = `token ${t} ${JSON.stringify(e.texts[t])}, ${KINDS[e.kind[t]]} in ${SECTIONS[e.section[t]]}: ${numbers}`;
}
function draw() {
  $('tokens').replaceChildren(); $('value').textContent = '';
  $('previous').disabled = at <= 0; $('next').disabled = at >= shown.length - 1;
  if (!shown.length) { $('place').textContent = 'no such answer among those on this page'; $('prompt').textContent = ''; return; }
  const e = shown[at], name = $('quantity').value;
  const most = $('local').checked ? Math.max(...e.values[name].map(v => Math.abs(v ?? 0))) || 1 : limit[name];
  $('place').textContent = `${at + 1} of ${shown.length}: step ${e.step}, question ${e.group}, answer ${e.episode}, reward ${e.reward}${e.finished ? '' : ', cut off'}`;
  $('prompt').textContent = e.prompt;
  e.texts.forEach((text, t) => {
    const span = document.createElement('span');
    span.textContent = text.replaceAll('\\n', '\\u21b5\\n');
    span.className = `s${e.section[t]}${e.kind[t] === TAG ? ' tag' : ''}`;
    span.style.backgroundColor = shade(e.values[name][t], most);
    span.title = `${name} ${e.values[name][t] ?? 'unknown'}`;
    span.onmouseenter = span.onclick = () => tell(e, t);
    $('tokens').append(span);
  });
  $('positive').style.background = `linear-gradient(90deg, rgba(${BLUE},0), rgba(${BLUE},.8))`; $('most').textContent = most.toPrecision(3) + ' and more';
  const signed = all.some(e => e.values[name].some(v => v < 0));
  $('negative').hidden = $('least').hidden = !signed;
  $('negative').style.background = `linear-gradient(90deg, rgba(${ORANGE},0), rgba(${ORANGE},.8))`; $('least').textContent = (-most).toPrecision(3) + ' and less';
}
function move(by) { if (at + by >= 0 && at + by < shown.length) { at += by; draw(); } }
$('quantity').onchange = $('local').onchange = draw; $('step').onchange = $('reward').onchange = choose;
$('previous').onclick = () => move(-1); $('next').onclick = () => move(1);
document.addEventListener('keydown', e => { if (e.target.tagName !== 'SELECT') { if (e.key === 'ArrowLeft') move(-1); if (e.key === 'ArrowRight') move(1); } });
draw();
"""
