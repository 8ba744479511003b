// The viewer: a slider through the run; at each stop what it answered to a few held-out problems,
// and panes with one training answer at a time, its tokens shaded by a number. What a model wrote
// is put in as text, never as HTML.
const $ = id => document.getElementById(id);
const { answers, evaluations, SECTIONS, KINDS, TAG, MEANING } = JSON.parse($('data').textContent);
const STAGES = answers[0]?.stages ?? [];
const quantities = Object.keys(answers[0]?.values ?? {})  // those that are known of any token
  .filter(name => answers.some(answer => answer.values[name].some(value => value !== null)));
const stops = [...new Set([...evaluations, ...answers].map(line => line.step))]
  .sort((a, b) => a - b);
const SIDES = ['push', 'change'];  // of the switch
const BLUE = 'var(--blue)', ORANGE = 'var(--orange)', YELLOW = 'var(--yellow)';

// Of lines with a step; the earlier of two.
function nearest(lines, step) {
  const away = line => Math.abs(line.step - step);
  return lines.reduce((a, b) => away(b) < away(a) ? b : a);
}

function element(tag, name, ...children) {
  const made = document.createElement(tag);
  made.className = name;
  made.append(...children);
  return made;
}

// The full colour: the largest on this page.
const limit = {};
for (const name of quantities) {
  const values = answers.flatMap(answer => answer.values[name]);
  limit[name] = values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 1;
}

// By the square root: so small numbers can be seen beside the largest, and all are told apart.
function strength(share) {
  return (0.8 * Math.sqrt(share)).toFixed(3);
}

function shade(value, most) {
  if (value === null) return 'transparent';
  return `rgba(${value < 0 ? ORANGE : BLUE},${strength(Math.abs(value) / most)})`;
}

function tokenSpan(text, title, colour, name = '') {
  const span = element('span', name, text.replaceAll('\n', '\u21b5\n'));
  span.title = title;
  span.style.backgroundColor = colour;
  return span;
}

// Held-out answers get no gradient: 1 - p says how unsure the model was of a token.
function toldAnswer(shown) {
  const is = shown.answer ? 'right' : 'wrong';
  const tokens = shown.texts.map((text, t) => {
    const p = Math.exp(shown.log_prob[t]);
    return tokenSpan(text, `p = ${p.toPrecision(2)}`, `rgba(${YELLOW},${strength(1 - p)})`);
  });
  return element('div', 'one', element('span', is, is), ` ${shown.problem}`,
                 element('div', 'tokens', ...tokens));
}

function tellHeldOut(evaluation) {
  const time = evaluation.step ? `at step ${evaluation.step}` : 'before training';
  $('held-out').textContent = `Held-out problems ${time}: `
    + `${(100 * evaluation.success).toFixed(1)}% solved, ${evaluation.mode}. Some of them`
    + (evaluation.step ? ', at the first evaluation (left) and now' : '')
    + "; the stronger a token's colour, the less sure the model was of it.";
  const before = evaluations.find(line => line.mode === evaluation.mode);
  $('told').replaceChildren(...evaluation.shown.map((shown, i) => evaluation === before
    ? toldAnswer(shown) : element('div', 'pair', toldAnswer(before.shown[i]), toldAnswer(shown))));
}

// A step is a batch of answers; another trainer numbers its updates.
function named(step) {
  const own = answers.find(answer => answer.step === step)?.own_step ?? step;
  return own === step ? `step ${step}` : `step ${step} (${own} of the trainer)`;
}

// All that stands at a stop of the slider.
function show(step) {
  $('step').textContent = $('stop').ariaValueText = `${named(step)} of ${stops.at(-1)}`;
  $('mark')?.style.setProperty('--at', step);
  if (evaluations.length) tellHeldOut(nearest(evaluations, step));
  for (const pane of panes) pane.choose(nearest(answers, step).step);
  if (panes.length && stops.length > 1)
    $('answers-title').textContent = `Training answers of ${named(panes[0].step)}, token by token`;
}

// report.html#step=50 begins there, other addresses at the end.
function stopOfAddress() {
  const wanted = /^#step=(\d+)$/.exec(location.hash)?.[1] ?? stops.at(-1);
  const { step } = nearest([...evaluations, ...answers], wanted);
  $('stop').value = stops.indexOf(step);
  show(step);
}

// A line of a token's account with its numbers put in, as told() in account.py does it; null if one
// of them is not known.
function told(text, answer, t) {
  const known = { ...answer.account, ...answer.values }, used = [];
  const filled = text.replace(/\[\[(.+?)\]\]/g, (_, name) => {
    used.push(Array.isArray(known[name]) ? known[name][t] : known[name] ?? null);
    return used.at(-1);
  });
  return used.includes(null) ? null : filled;
}

// What a reader wants to know first: the reward, and what the others got.
function verdict(answer) {
  const solved = answer.answer === null ? '' : answer.answer > 0 ? ': solved' : ': not solved';
  const cut = answer.finished ? '' : ', cut off by the limit';
  if (answer.reward === null) return `Reward unknown${cut}.`;
  return `Reward ${answer.reward}${solved}${cut}. The ${answer.account.answers} answers to this `
    + `problem got ${answer.account.mean.toPrecision(2)} on average.`;
}

class Pane {
  constructor(reward) {  // which answers: all, solved or not solved
    this.root = $('pane').content.cloneNode(true).firstElementChild;
    this.part('reward').textContent = this.reward = reward;
    this.part('previous').onclick = () => this.move(-1);
    this.part('next').onclick = () => this.move(1);
    this.part('tokens').onclick = event => this.follow(this.spans.indexOf(event.target));
    this.part('tokens').onkeydown = event => this.press(event);
    $('panes').append(this.root);
  }

  part(name) {
    return this.root.querySelector('.' + name);
  }

  choose(step) {
    this.step = step;
    this.shown = answers.filter(a => a.step === step
      && (this.reward === 'all' || (this.reward === 'solved') === (a.answer > 0)));
    this.at = 0;
    this.draw();
  }

  move(by) {
    if (this.at + by < 0 || this.at + by >= this.shown.length) return;
    this.at += by;
    this.draw();
  }

  draw() {
    const answer = this.shown[this.at], name = $('quantity').value;
    this.token = -1;
    this.spans = [];
    this.part('tokens').replaceChildren();
    this.part('account').replaceChildren();
    this.part('prompt').textContent = answer ? answer.prompt : '';
    this.part('asked').open = this.part('prompt').textContent.length < 200;
    this.part('previous').disabled = this.at <= 0;
    this.part('next').disabled = this.at >= this.shown.length - 1;
    if (!answer) {
      this.part('place').textContent = 'There is none among those of this step on the page.';
      return;
    }
    this.part('place').textContent = `${verdict(answer)} (${this.at + 1} of ${this.shown.length})`;
    this.spans = answer.texts.map((text, t) => {
      const value = answer.values[name][t];
      return tokenSpan(text, `${name} ${value ?? 'unknown'}`, shade(value, limit[name]),
                       `s${answer.section[t]}${answer.kind[t] === TAG ? ' tag' : ''}`);
    });
    this.part('tokens').append(...this.spans);
  }

  // The account of token t, if there is one.
  follow(t) {
    if (!this.spans[t]) return;
    this.spans[this.token]?.classList.remove('chosen');
    this.spans[t].classList.add('chosen');
    this.spans[t].scrollIntoView({ block: 'nearest' });
    this.token = t;
    const answer = this.shown[this.at], account = this.part('account');
    account.replaceChildren();
    account.createCaption().textContent =
      `In ${named(answer.step)}, answer ${answer.episode}, token ${t}, `
      + `${JSON.stringify(answer.texts[t])}: ${KINDS[answer.kind[t]]} in `
      + SECTIONS[answer.section[t]];
    for (const [label, text, place] of STAGES) {
      const line = told(text, answer, t);
      if (line === null) continue;
      const row = account.insertRow(), where = document.createElement('code');
      where.textContent = place;
      row.insertCell().textContent = label;
      row.insertCell().append(line, document.createElement('br'), where);
    }
  }

  press(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.follow(this.token + by);
  }
}

// One key for all panes.
function drawKey() {
  const name = $('quantity').value, most = limit[name].toPrecision(3);
  for (const side of SIDES) $(side).ariaPressed = side === name;
  const has = test => answers.some(answer => answer.values[name].some(test));
  const ramp = colour => 'linear-gradient(90deg,' + [0, .02, .1, .25, .5, 1]
    .map(share => `rgba(${colour},${strength(share)}) ${100 * share}%`) + ')';
  $('positive').style.background = ramp(BLUE);
  $('negative').style.background = ramp(ORANGE);
  $('above').hidden = !has(v => v > 0);
  $('below').hidden = !has(v => v < 0);
  $('most').textContent = most;
  $('least').textContent = `-${most}`;
  const same = answers.every(answer => new Set(answer.values[name]).size < 2);
  $('meaning').textContent = `The stronger a token's colour, ${MEANING[name]}.`
    + (same ? ' Here all tokens of an answer have the same.' : '');
}

for (const name of quantities) $('quantity').add(new Option(name));
// A solved answer beside one that is not: what the reward tells apart.
const rewards = answers.some(answer => answer.answer > 0) ? ['solved', 'not solved'] : ['all'];
const panes = answers.length ? rewards.map(reward => new Pane(reward)) : [];
$('quantity').onchange = () => {
  drawKey();
  for (const pane of panes) pane.draw();
};
for (const side of SIDES) $(side).onclick = () => {
  $('quantity').value = side;
  $('quantity').onchange();
};
$('switch').hidden = !quantities.includes('change');
$('stop').max = stops.length - 1;
$('stop').oninput = () => show(stops[$('stop').value]);
$('watch-title').hidden = $('slide').hidden = $('how').hidden = stops.length < 2;
$('answers').hidden = !answers.length;
if (answers.length) drawKey();
if (stops.length) stopOfAddress();
window.onhashchange = stopOfAddress;
