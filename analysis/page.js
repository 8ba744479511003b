// The viewer: one answer at a time, its tokens shaded by a number.
// KINDS, SECTIONS and TAG are written before this by page.py.
const $ = id => document.getElementById(id);
const answers = JSON.parse($('episodes').textContent);
const quantities = Object.keys(answers[0].values);
const BLUE = 'var(--blue)', ORANGE = 'var(--orange)';
let shown = answers, at = 0;

function fill(select, choices) {
  for (const [value, text] of choices) select.add(new Option(text, value));
}

function unique(key) {
  const values = [...new Set(answers.map(answer => answer[key]))].sort((a, b) => a - b);
  return values.map(value => [value, value]);
}

// The full colour: 98% of the tokens on this page are smaller.
const limit = {};
for (const name of quantities) {
  const sizes = answers.flatMap(answer => answer.values[name].map(v => Math.abs(v ?? 0)));
  sizes.sort((a, b) => a - b);
  limit[name] = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

function shade(value, most) {
  if (value === null) return 'transparent';
  const strength = 0.8 * Math.min(1, Math.abs(value) / most);
  return `rgba(${value < 0 ? ORANGE : BLUE},${strength.toFixed(3)})`;
}

function hasReward(answer, wanted) {
  if (wanted === '') return true;
  if (wanted === 'solved') return answer.answer > 0;
  if (wanted === 'not solved') return !(answer.answer > 0);
  return answer.reward === +wanted;
}

function choose() {
  const step = $('step').value, reward = $('reward').value;
  shown = answers.filter(a => (step === '' || a.step === +step) && hasReward(a, reward));
  at = 0;
  draw();
}

function tell(answer, t) {
  const numbers = Object.entries(answer.values)
    .map(([name, column]) => `${name} ${column[t] ?? 'unknown'}`).join(', ');
  const place = `${KINDS[answer.kind[t]]} in ${SECTIONS[answer.section[t]]}`;
  $('value').textContent = `token ${t} ${JSON.stringify(answer.texts[t])}, ${place}: ${numbers}`;
}

function tokenSpan(answer, t, name, most) {
  const span = document.createElement('span');
  span.textContent = answer.texts[t].replaceAll('\n', '\u21b5\n');
  span.className = `s${answer.section[t]}${answer.kind[t] === TAG ? ' tag' : ''}`;
  span.style.backgroundColor = shade(answer.values[name][t], most);
  span.title = `${name} ${answer.values[name][t] ?? 'unknown'}`;
  span.onmouseenter = span.onclick = () => tell(answer, t);
  return span;
}

function drawKey(name, most) {
  const signed = answers.some(answer => answer.values[name].some(v => v < 0));
  const ramp = colour => `linear-gradient(90deg, rgba(${colour},0), rgba(${colour},.8))`;
  $('positive').style.background = ramp(BLUE);
  $('most').textContent = most.toPrecision(3) + ' and more';
  $('negative').hidden = $('least').hidden = !signed;
  $('negative').style.background = ramp(ORANGE);
  $('least').textContent = (-most).toPrecision(3) + ' and less';
}

function draw() {
  $('tokens').replaceChildren();
  $('value').textContent = '';
  $('previous').disabled = at <= 0;
  $('next').disabled = at >= shown.length - 1;
  if (!shown.length) {
    $('place').textContent = 'no such answer among those on this page';
    $('prompt').textContent = '';
    return;
  }
  const answer = shown[at], name = $('quantity').value;
  const largest = Math.max(...answer.values[name].map(v => Math.abs(v ?? 0))) || 1;
  const most = $('local').checked ? largest : limit[name];
  const { step, group, episode, reward, finished } = answer;
  $('place').textContent = `${at + 1} of ${shown.length}: step ${step}, question ${group}, `
    + `answer ${episode}, reward ${reward}${finished ? '' : ', cut off'}`;
  $('prompt').textContent = answer.prompt;
  answer.texts.forEach((_, t) => $('tokens').append(tokenSpan(answer, t, name, most)));
  drawKey(name, most);
}

function move(by) {
  if (at + by < 0 || at + by >= shown.length) return;
  at += by;
  draw();
}

fill($('quantity'), quantities.map(name => [name, name]));
fill($('step'), [['', 'all'], ...unique('step')]);
fill($('reward'), [['', 'all'], ['solved', 'solved'], ['not solved', 'not solved'],
                   ...unique('reward')]);
$('quantity').onchange = $('local').onchange = draw;
$('step').onchange = $('reward').onchange = choose;
$('previous').onclick = () => move(-1);
$('next').onclick = () => move(1);
document.addEventListener('keydown', event => {
  if (event.target.tagName === 'SELECT') return;
  if (event.key === 'ArrowLeft') move(-1);
  if (event.key === 'ArrowRight') move(1);
});
draw();
