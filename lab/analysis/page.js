// The viewer: a slider through the run; at each stop the answers to a few held-out problems, and
// panes with one training answer at a time, its tokens shaded by a number. What a model wrote is
// put in as text, never as HTML.
const $ = id => document.getElementById(id);
const { answers, evaluations, SECTIONS, KINDS, TAG, MEANING } = JSON.parse($('data').textContent);
const STAGES = answers[0]?.stages ?? [];
const quantities = Object.keys(answers[0]?.values ?? {})  // those that are known for some token
  .filter(name => answers.some(answer => answer.values[name].some(value => value !== null)));
const stops = [...new Set([...evaluations, ...answers].map(line => line.step))]
  .sort((a, b) => a - b);
const SIDES = ['push', 'change', 'credit'];  // the sides of the switch
const PAUSE = 900;  // milliseconds between two steps that are played
// The colours of values above and below 0. Each has one meaning in all pictures (page.css).
const UP_AND_DOWN = ['--up', '--down'];
const COLOURS = {
  'gradient size': ['--gradient', '--gradient'],
  'weight': ['--neutral', '--down'],
  'entropy': ['--unsure', '--unsure'],
  'log-prob': ['--unsure', '--unsure'],
  "credit's error": ['--neutral', '--neutral'],
};
const MODES = {
  sampled: 'sampled answers',
  greedy: 'greedy answers, which take the likeliest token at every place',
};
const FULL = 0.95;  // of a step's tokens have at most the size that gets the full colour

// The line whose step is nearest; of two equally near ones the earlier.
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

// The sizes of a step's tokens, the smallest first.
function sizesIn(step, name) {
  return answers.filter(answer => answer.step === step)
    .flatMap(answer => answer.values[name])
    .filter(value => value !== null)
    .map(Math.abs)
    .sort((a, b) => a - b);
}

// The size that gets the full colour: a percentile of the step, because a few tokens have a change
// fifty times as large as most, and beside those no other would be seen.
function fullSize(step, name) {
  const sizes = sizesIn(step, name);
  return sizes[Math.ceil(FULL * sizes.length) - 1] || sizes.at(-1) || 1;
}

// The square root lets small numbers be seen beside large ones.
function colour(name, share) {
  const strength = 0.8 * Math.sqrt(Math.min(share, 1));
  return `rgba(var(${name}),${strength.toFixed(3)})`;
}

function shade(name, value, full) {
  if (value === null) return 'transparent';
  const [above, below] = COLOURS[name] ?? UP_AND_DOWN;
  return colour(value < 0 ? below : above, Math.abs(value) / full);
}

// A credit whose 95% interval includes 0 has no colour: it may be above or below.
function shadeOf(answer, name, t, full) {
  const value = answer.values[name][t], error = answer.values["credit's error"]?.[t];
  const isOpen = name === 'credit' && error && Math.abs(value) < 1.96 * error;
  return shade(name, isOpen ? null : value, full);
}

function tokenSpan(text, title, background, name = '') {
  const span = element('span', name, text.replaceAll('\n', '\u21b5\n'));
  span.title = title;
  span.style.backgroundColor = background;
  return span;
}

// A box of tokens, of which a click or the arrow keys choose one; `tell` is called with its number.
class TokenBox {
  constructor(box, tell) {
    this.box = box;
    this.tell = tell;
    this.spans = [];
    this.chosen = -1;
    box.onclick = event => this.choose(this.spans.indexOf(event.target));
    box.onkeydown = event => this.press(event);
  }

  fill(spans) {
    this.spans = spans;
    this.chosen = -1;
    this.box.replaceChildren(...spans);
  }

  choose(t) {
    if (!this.spans[t]) return;
    this.spans[this.chosen]?.classList.remove('chosen');
    this.spans[t].classList.add('chosen');
    this.spans[t].scrollIntoView({ block: 'nearest' });
    this.chosen = t;
    this.tell(t);
  }

  press(event) {
    const by = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.choose(this.chosen + by);
  }
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function timeOf(evaluation) {
  return evaluation.step ? `after step ${evaluation.step}` : 'before training';
}

// One answer to a held-out problem. It gets no gradient: 1 - p says how uncertain the model was
// about a token.
function heldOutAnswer(evaluation, shown) {
  const outcome = shown.outcome;
  const tokens = element('div', 'tokens'), chosen = element('p', 'note chance');
  tokens.tabIndex = 0;
  tokens.role = 'group';
  tokens.ariaLabel = `the answer ${timeOf(evaluation)}; the arrow keys go through its tokens`;
  chosen.role = 'status';
  const p = shown.log_prob.map(Math.exp);
  const box = new TokenBox(tokens, t => {
    chosen.textContent =
      `token ${t}, ${JSON.stringify(shown.texts[t])}: p = ${p[t].toPrecision(2)}`;
  });
  box.fill(shown.texts.map((text, t) =>
    tokenSpan(text, `p = ${p[t].toPrecision(2)}`, colour('--unsure', 1 - p[t]))));
  return element('div', 'one', `${timeOf(evaluation)}: `, element('b', outcome.split(' ')[0], outcome), tokens,
                 chosen);
}

// What the evaluation nearest to a step says, beside what the first one said.
function showHeldOut(step) {
  const evaluation = nearest(evaluations, step);
  const first = evaluations.find(line => line.mode === evaluation.mode);
  $('held-out').textContent =
    `${capital(timeOf(evaluation))}, ${evaluation.said} (${MODES[evaluation.mode]}).`;
  $('nearest').textContent = evaluation.step === step ? ''
    : `There was no evaluation at step ${step}, so this is the nearest one.`;
  $('held-out-answers').replaceChildren(...evaluation.shown.map((shown, i) => {
    const pair = element('div', evaluation === first ? '' : 'pair');
    if (evaluation !== first) pair.append(heldOutAnswer(first, first.shown[i]));
    pair.append(heldOutAnswer(evaluation, shown));
    return element('div', '', element('p', 'problem', shown.problem), pair);
  }));
}

// Everything that depends on the slider.
function show(step) {
  $('stop').value = stops.indexOf(step);
  $('step').textContent = $('stop').ariaValueText = `step ${step} of ${stops.at(-1)}`;
  if (evaluations.length) showHeldOut(step);
  if (!panes.length) return;
  shownStep = nearest(answers, step).step;
  drawKey();
  for (const pane of panes) pane.open();
  if (stops.length > 1)
    $('answers-title').textContent = `Training answers of step ${shownStep}, token by token`;
}

// page.html#step=50 goes to the stop that is nearest to step 50, and
// page.html#step=1&answer=5&token=22 to a token.
function showAddress() {
  const wanted = /^#step=(\d+)(?:&answer=(\d+)(?:&token=(\d+))?)?$/.exec(location.hash);
  if (!wanted) return;
  const [step, number, t] = wanted.slice(1).map(Number);
  show(nearest([...evaluations, ...answers], step).step);
  const answer = answers.find(one => one.step === step && one.episode === number);
  if (answer) goTo(answer).box.choose(t);
}

// Open an answer in its pane, which is returned.
function goTo(answer) {
  if (shownStep !== answer.step) show(answer.step);
  const pane = panes.find(one => one.has(answer));
  pane.at = pane.shown.indexOf(answer);
  pane.draw();
  return pane;
}

// Play the run from the step that is shown, or from the start if that is the last; or stop it.
let playing = null;
function play(goesOn) {
  clearInterval(playing);
  playing = goesOn ? setInterval(playNext, PAUSE) : null;
  $('play').textContent = goesOn ? 'pause' : 'play';
}

function playNext() {
  const next = Number($('stop').value) + 1;
  show(stops[next]);
  if (next === stops.length - 1) play(false);
}

// A line of a token's account with its numbers put in, as with_numbers() in account.py does it; null
// if a number is not known.
function withNumbers(text, answer, t) {
  const known = { ...answer.account, ...answer.values }, used = [];
  const filled = text.replace(/\[\[(.+?)\]\]/g, (_, name) => {
    used.push(Array.isArray(known[name]) ? known[name][t] : known[name] ?? null);
    return used.at(-1);
  });
  return used.includes(null) ? null : filled;
}

// What a reader wants to know first: the reward, and the rewards of the other answers.
function verdict(answer) {
  let solved = '';
  if (answer.answer !== null) solved = answer.answer > 0 ? ', solved' : ', not solved';
  const cut = answer.finished ? '' : ', cut off by the limit on tokens';
  if (answer.reward === null) return `reward unknown${cut}.`;
  return `reward ${answer.reward}${solved}${cut}. The ${answer.account.answers} answers to this `
    + `problem have a mean reward of ${answer.account.mean.toPrecision(2)}.`;
}

class Pane {
  constructor(kind) {  // of PANES: which answers it shows
    this.root = $('pane').content.cloneNode(true).firstElementChild;
    this.part('kind').textContent = kind;
    this.has = PANES[kind];
    this.part('previous').onclick = () => this.move(-1);
    this.part('next').onclick = () => this.move(1);
    this.part('number').onchange = () => this.move(this.part('number').selectedIndex - this.at);
    this.box = new TokenBox(this.part('tokens'), t => this.follow(t));
    $('panes').append(this.root);
  }

  part(name) {
    return this.root.querySelector('.' + name);
  }

  // Begin with the first answer of the step.
  open() {
    this.shown = answers.filter(answer => answer.step === shownStep && this.has(answer));
    this.at = 0;
    this.part('number').replaceChildren(
      ...this.shown.map(answer => new Option(`${answer.episode}`)));
    this.draw();
  }

  move(by) {
    if (this.at + by < 0 || this.at + by >= this.shown.length) return;
    this.at += by;
    this.draw();
  }

  draw() {
    const answer = this.shown[this.at], name = $('quantity').value;
    this.box.fill([]);
    this.part('account').replaceChildren();
    this.part('prompt').textContent = answer ? answer.prompt : '';
    this.part('asked').open = this.part('prompt').textContent.length < 200;
    this.part('previous').disabled = this.at <= 0;
    this.part('next').disabled = this.at >= this.shown.length - 1;
    this.part('choose').hidden = !answer;
    this.part('number').selectedIndex = this.at;
    if (!answer) {
      this.part('position').textContent = `This page has no such answer of step ${shownStep}.`;
      return;
    }
    this.part('position').textContent =
      `Step ${shownStep}, answer ${answer.episode} (${this.at + 1} of `
      + `${this.shown.length} here): ${verdict(answer)}`;
    const full = fullSize(answer.step, name);
    this.box.fill(answer.texts.map((text, t) => {
      const value = answer.values[name][t];
      if (answer.own && !answer.own[t]) {
        return tokenSpan(text, 'written by the environment', '', 'reply');
      }
      const classes = `s${answer.section[t]}${answer.kind[t] === TAG ? ' tag' : ''}`;
      const paid = answer.paid?.[t] ?? null;
      const title = `${name} ${value ?? 'unknown'}` + (paid === null ? '' : `, paid ${paid}`);
      const span = tokenSpan(text, title, shadeOf(answer, name, t, full), classes);
      if (paid !== null) span.dataset.paid = paid > 0 ? `+${paid}` : paid;
      return span;
    }));
  }

  // The account of token t.
  follow(t) {
    const answer = this.shown[this.at], account = this.part('account');
    const name = $('quantity').value;
    account.replaceChildren();
    account.createCaption().textContent =
      `Step ${answer.step}, answer ${answer.episode}, token ${t}, `
      + `${JSON.stringify(answer.texts[t])}: ${KINDS[answer.kind[t]]} token, section `
      + `${SECTIONS[answer.section[t]]}, ${name} ${answer.values[name][t] ?? 'unknown'}`;
    for (const [label, text, computedBy] of STAGES) {
      const line = withNumbers(text, answer, t);
      if (line === null) continue;
      const row = account.insertRow(), where = document.createElement('code');
      where.textContent = computedBy;
      row.insertCell().textContent = label;
      row.insertCell().append(line, document.createElement('br'), where);
    }
  }
}

// One key for all panes.
function drawKey() {
  const name = $('quantity').value;
  const full = fullSize(shownStep, name), size = full.toPrecision(3);
  for (const side of SIDES) $(side).ariaPressed = side === name;
  const values = answers.flatMap(answer => answer.values[name]);
  const [above, below] = COLOURS[name] ?? UP_AND_DOWN;
  const ramp = hue => 'linear-gradient(90deg,' + [0, .02, .1, .25, .5, 1]
    .map(share => `${colour(hue, share)} ${100 * share}%`) + ')';
  $('positive').style.background = ramp(above);
  $('negative').style.background = ramp(below);
  $('above').hidden = !values.some(value => value > 0);
  $('below').hidden = !values.some(value => value < 0);
  $('most').textContent = `${size} or more`;
  $('least').textContent = `-${size} or less`;
  const same = answers.every(answer => new Set(answer.values[name]).size < 2);
  $('meaning').textContent = `The stronger a token's colour, ${MEANING[name]}.`
    + (same ? ' In this run all tokens of an answer have the same value.' : '');
  const sizes = sizesIn(shownStep, name);
  const larger = sizes.filter(value => value > full).length;
  let beyond = '';
  if (larger)
    beyond = `, and for the ${larger} of ${sizes.length} tokens that have more (at most `
      + `${sizes.at(-1).toPrecision(3)})`;
  $('scale').textContent =
    `The scale is that of step ${shownStep}: the full colour stands for ${size}${beyond}.`;
}

// A solved answer beside one that is not: what the reward tells apart.
const ALL = { 'Answers': () => true };
const SOLVED_OR_NOT = {
  'Answers that solved their problem': answer => answer.answer > 0,
  'Answers that did not': answer => !(answer.answer > 0),
};
const PANES = answers.some(answer => answer.answer > 0) ? SOLVED_OR_NOT : ALL;
const panes = answers.length ? Object.keys(PANES).map(kind => new Pane(kind)) : [];
let shownStep;  // whose training answers are shown

for (const name of quantities) $('quantity').add(new Option(name));
$('quantity').onchange = () => {
  drawKey();
  for (const pane of panes) pane.draw();
};
for (const side of SIDES) {
  $(side).hidden = !quantities.includes(side);
  $(side).onclick = () => {
    $('quantity').value = side;
    $('quantity').onchange();
  };
}
$('switch').hidden = $('change').hidden && $('credit').hidden;
$('stop').max = stops.length - 1;
$('stop').oninput = () => {
  play(false);
  show(stops[$('stop').value]);
};
$('play').onclick = () => {
  if (!playing && Number($('stop').value) === stops.length - 1) show(stops[0]);
  play(!playing);
};
$('watch-title').hidden = $('slide').hidden = $('how').hidden = stops.length < 2;
$('answers').hidden = !answers.length;
if (stops.length) {
  show(stops[0]);
  showAddress();
  window.onhashchange = showAddress;
}
