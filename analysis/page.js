// The viewer: a slider through the run; at each stop what it answered to a few held-out problems,
// and panes with one training answer at a time, its tokens shaded by a number. What a model wrote
// is put in as text, never as HTML.
const $ = id => document.getElementById(id);
const { answers, evaluations, SECTIONS, KINDS, TAG, MEANING } = JSON.parse($('data').textContent);
const STAGES = answers[0]?.stages ?? [];
const quantities = Object.keys(answers[0]?.values ?? {})  // those that are known of any token
  .filter(name => answers.some(answer => answer.values[name].some(value => value !== null)));
const stops = unique([...evaluations, ...answers], 'step');
const BLUE = 'var(--blue)', ORANGE = 'var(--orange)', YELLOW = 'var(--yellow)';

function fill(select, choices) {
  for (const text of choices) select.add(new Option(text));
}

function unique(lines, key) {
  return [...new Set(lines.map(line => line[key]))].sort((a, b) => a - b);
}

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

function hasReward(answer, wanted) {
  return wanted === 'all' || (wanted === 'solved') === (answer.answer > 0);
}

function tokenSpan(text, name, colour) {
  const span = element('span', name, text.replaceAll('\n', '\u21b5\n'));
  span.style.backgroundColor = colour;
  return span;
}

function classOf(answer, t) {
  return `s${answer.section[t]}${answer.kind[t] === TAG ? ' tag' : ''}`;
}

// Held-out answers get no gradient: 1 - p says how unsure the model was of a token.
function unsureSpan(text, logProb) {
  const span = tokenSpan(text, '', `rgba(${YELLOW},${strength(1 - Math.exp(logProb))})`);
  span.title = `p = ${Math.exp(logProb).toPrecision(2)}`;
  return span;
}

function toldAnswer(shown) {
  const is = shown.answer ? 'right' : 'wrong';
  const tokens = shown.log_prob ? shown.texts.map((text, t) => unsureSpan(text, shown.log_prob[t]))
    : [tokenSpan(shown.text, '', '')];
  return element('div', 'one', element('span', is, is), ` ${shown.problem}`,
                 element('div', 'tokens', ...tokens));
}

function tellHeldOut(evaluation) {
  const time = evaluation.step ? `at step ${evaluation.step}` : 'before training';
  $('held-out').textContent = `Held-out problems ${time}: `
    + `${(100 * evaluation.success).toFixed(1)}% solved, ${evaluation.mode}. `
    + (evaluation.shown.every(shown => shown.log_prob)
      ? "Some of them; the stronger a token's colour, the less sure the model was of it."
      : 'Some of them, unshaded: this run did not keep how sure the model was of its tokens.');
  $('told').replaceChildren(...evaluation.shown.map(toldAnswer));
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
  const one = name => {
    const value = known[name] === undefined ? name : known[name];
    used.push(Array.isArray(value) ? value[t] : value);
    return used.at(-1);
  };
  const filled = text.replace(/\[\[(.+?)\]\]/g, (_, names) => {
    const [above, below] = names.split(' / '), factors = above.split(' * ').map(one);
    if (factors.length === 1 && !below) return factors[0];
    return +(factors.reduce((a, b) => a * b, 1) / (below ? one(below) : 1)).toPrecision(3);
  });
  return used.includes(null) || /NaN|Infinity/.test(filled) ? null : filled;
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
  constructor(reward) {
    this.root = $('pane').content.cloneNode(true).firstElementChild;
    fill(this.part('reward'), ['all', 'solved', 'not solved']);
    this.part('reward').value = reward;
    this.part('reward').onchange = () => this.choose(this.step);
    this.part('previous').onclick = () => this.move(-1);
    this.part('next').onclick = () => this.move(1);
    this.part('tokens').onmouseover = event => this.point(event.target);
    this.part('tokens').onclick = event => this.follow(event.target);
    this.root.onkeydown = event => this.press(event);
    $('panes').append(this.root);
  }

  part(name) {
    return this.root.querySelector('.' + name);
  }

  choose(step) {
    const reward = this.part('reward').value;
    this.step = step;
    this.shown = answers.filter(a => a.step === step && hasReward(a, reward));
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
    this.part('tokens').replaceChildren();
    this.part('value').textContent = '';
    this.part('account').replaceChildren();
    this.part('prompt').textContent = answer ? answer.prompt : '';
    this.part('previous').disabled = this.at <= 0;
    this.part('next').disabled = this.at >= this.shown.length - 1;
    if (!answer) {
      this.part('place').textContent = 'There is none among those of this step on the page.';
      return;
    }
    this.part('place').textContent = `${verdict(answer)} (${this.at + 1} of ${this.shown.length})`;
    const spans = answer.texts.map((text, t) =>
      tokenSpan(text, classOf(answer, t), shade(answer.values[name][t], limit[name])));
    this.part('tokens').append(...spans);
  }

  point(span) {
    const t = [...this.part('tokens').children].indexOf(span);
    if (t >= 0) this.tell(t);
  }

  tell(t) {
    const answer = this.shown[this.at], spans = this.part('tokens').children;
    spans[this.token]?.classList.remove('chosen');
    this.token = t;
    spans[t].classList.add('chosen');
    const numbers = Object.entries(answer.values)
      .map(([name, column]) => `${name} ${column[t] ?? 'unknown'}`).join(', ');
    const kind = `${KINDS[answer.kind[t]]} in ${SECTIONS[answer.section[t]]}`;
    this.part('value').textContent =
      `Token ${t}, ${JSON.stringify(answer.texts[t])}, ${kind}: ${numbers}.`;
  }

  follow(span) {
    this.point(span);
    const answer = this.shown[this.at], account = this.part('account');
    account.replaceChildren();
    account.createCaption().textContent =
      `In ${named(answer.step)}, answer ${answer.episode}, token ${this.token}`;
    for (const [label, text, place] of this.token < 0 ? [] : STAGES) {
      const line = told(text, answer, this.token);
      if (line === null) continue;
      const row = account.insertRow(), where = document.createElement('code');
      where.textContent = place;
      row.insertCell().textContent = label;
      row.insertCell().append(line, document.createElement('br'), where);
    }
  }

  press(event) {
    if (event.target.tagName === 'SELECT') return;
    if (event.key === 'ArrowLeft') this.move(-1);
    if (event.key === 'ArrowRight') this.move(1);
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const spans = this.part('tokens').children;
    if (event.key === 'Enter' && this.token >= 0) this.follow(spans[this.token]);
    if (!by || event.target !== this.part('tokens') || !spans.length) return;
    event.preventDefault();
    this.tell(Math.min(spans.length - 1, Math.max(0, this.token + by)));
    spans[this.token].scrollIntoView({ block: 'nearest' });
  }
}

// One key for all panes.
function drawKey() {
  const name = $('quantity').value, most = limit[name].toPrecision(3);
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

fill($('quantity'), quantities);
// A solved answer beside one that is not: what the reward tells apart.
const rewards = answers.some(answer => answer.answer > 0) ? ['solved', 'not solved'] : ['all'];
const panes = answers.length ? rewards.map(reward => new Pane(reward)) : [];
$('quantity').onchange = () => {
  drawKey();
  for (const pane of panes) pane.draw();
};
$('stop').max = stops.length - 1;
$('stop').oninput = () => show(stops[$('stop').value]);
$('watch-title').hidden = $('slide').hidden = $('how').hidden = stops.length < 2;
$('answers').hidden = !answers.length;
if (answers.length) drawKey();
if (stops.length) stopOfAddress();
window.onhashchange = stopOfAddress;
