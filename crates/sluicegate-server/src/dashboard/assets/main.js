// The page: shows the data of the event stream as numbers, charts and tables.

import { Charts } from './charts.js';
import { Live, token } from './live.js';
import { Series, isDegraded, isOverflowing } from './series.js';
import { drawRates, drawRules, drawTop, example } from './tables.js';
import { Try } from './try.js';
import { bytes, clock, count, duration, millis, share } from './format.js';

const at = (id) => document.getElementById(id);
const series = new Series();
const charts = new Charts();
const tryIt = new Try((error) => signIn(error));
// The latest data; `skew` is the offset of the server's clock.
const now = { hello: null, rules: null, top: null, store: 'ok', reload: 'ok', readAt: 0, skew: 0, connected: false };

const live = new Live({
  state(state, detail) {
    now.connected = state === 'live';
    if (state === 'live') status('live', 'live');
    if (state === 'lost') status('wait', `reconnecting in ${duration(Math.max(1000, Math.round(detail / 1000) * 1000))}…`);
    if (state === 'unauthorized') {
      status('stop', 'not signed in');
      signIn(detail);
    }
    if (state === 'live') at('sign-in').hidden = true;
    at('sign-out').hidden = !token.get();
    drawNumbers();
  },
  event(name, data) {
    if (name === 'hello') hello(data);
    if (name === 'rules') takeRules(data);
    if (name === 'top') takeTop(data);
    if (name === 'seconds') takeSeconds(data);
  },
});

function status(state, text) {
  at('status').dataset.state = state;
  if (at('status-text').textContent !== text) at('status-text').textContent = text;
}

function hello(data) {
  now.hello = data;
  at('version').textContent = data.version;
  charts.remote = data.remote_store;
  if (!data.may.includes('admin')) {
    Object.assign(now, { rules: null, top: null });
    drawRules(null);
    drawTop(null);
    at('rules-note').textContent = '';
  }
}

function takeRules(data) {
  now.rules = data;
  drawRules(data.rules, (rule) => {
    tryIt.fill(example(rule));
    at('try').scrollIntoView({ block: 'start' });
  });
  drawRates(series.last(60));
  const first = data.rules[0];
  if (first && at('labels').value === '') at('labels').value = example(first);
  drawCurl(first);
}

function takeTop(data) {
  now.top = data;
  drawTop(data, document.querySelector('input[name="top"]:checked').value);
}

function takeSeconds(data) {
  series.add(data.seconds);
  now.store = data.store;
  now.reload = data.rules;
  now.readAt = data.rules_read_s;
  const newest = data.seconds.at(-1);
  if (newest) now.skew = newest.at_ms - Date.now();
  if (!scheduled) scheduled = requestAnimationFrame(draw);
}

// Draws once for all events that arrive together.
let scheduled = 0;
function draw() {
  scheduled = 0;
  drawNumbers();
  drawViews();
  drawRates(series.last(60));
  charts.draw(series, Date.now() + now.skew);
}

function drawNumbers() {
  const set = (id, text) => {
    if (at(id).textContent !== text) at(id).textContent = text;
  };
  const sum = (seconds, of) => seconds.reduce((total, second) => total + of(second), 0);
  const decided = (second) => second.allowed + second.denied + second.unmatched;
  const few = series.last(5);
  const minute = series.last(60);
  if (few.length > 0) {
    set('rate', count(Math.round((sum(few, decided) / few.length) * 10) / 10));
    const peak = Math.max(...minute.map(decided));
    set('rate-note', `peak ${count(peak)} in the last minute`);
    const denied = sum(minute, (second) => second.denied);
    set('denied', share(denied, sum(minute, decided)));
    set('denied-note', `${count(denied)} denied, ${count(sum(minute, (second) => second.errors))} errors`);
    drawLatency(set, minute);
  }
  drawState(set, minute);
}

function drawLatency(set, minute) {
  if (now.hello && !now.hello.remote_store) {
    set('latency', 'memory');
    set('latency-unit', '');
    const { store_max_bytes: max } = now.hello;
    set('latency-note', `${share(minute.at(-1).store_bytes, max)} of ${bytes(max)} used`);
    return;
  }
  const active = series.last(10).filter((second) => second.store_calls > 0);
  const calls = active.reduce((total, second) => total + second.store_calls, 0);
  const mean = (of) => active.reduce((total, second) => total + of(second) * second.store_calls, 0) / calls;
  const errors = minute.reduce((total, second) => total + second.store_errors, 0);
  set('latency', calls > 0 ? millis(mean((second) => second.store_p50_us)) : '–');
  set('latency-unit', calls > 0 ? 'ms p50' : '');
  const slow = calls > 0 ? `p99 ${millis(Math.max(...active.map((second) => second.store_p99_us)))} ms` : 'no recent calls';
  set('latency-note', errors > 0 ? `${count(errors)} failed in the last minute` : slow);
}

function drawState(set, minute) {
  let [state, word, note] = ['good', 'Healthy', 'store available, rules current'];
  const newest = series.seconds.at(-1);
  if (!now.connected) [state, word, note] = ['warn', 'Unknown', newest ? `last update at ${clock(newest.at_ms)}` : 'not connected'];
  else if (now.store !== 'ok') [state, word, note] = ['bad', 'Degraded', 'store unavailable, failure policies decide: run sluicegate doctor'];
  else if (minute.some(isOverflowing)) [state, word, note] = ['bad', 'Memory full', 'new keys share counters: raise store.max_memory'];
  else if (now.reload !== 'ok') [state, word, note] = ['warn', 'Stale rules', 'the new configuration was rejected: run sluicegate rules check'];
  else if (minute.some(isDegraded)) note = 'recovered after a degraded period';
  at('state-card').dataset.state = state;
  set('state', word);
  set('state-note', note);
  if (now.rules) {
    const read = now.readAt > 0 ? ` · loaded at ${clock(now.readAt * 1000)}` : '';
    const stale = now.reload === 'ok' ? '' : ' · the changed file was rejected';
    set('rules-note', `${now.rules.rules.length} ${now.rules.rules.length === 1 ? 'rule' : 'rules'} · ${now.rules.fingerprint.slice(0, 8)}${read}${stale}`);
  }
}

// The selectable rules: active ones and those in the history.
function drawViews() {
  const seen = Series.busiest(series.last(3600));
  const names = [...new Set([...(now.rules?.rules.map((rule) => rule.name) ?? []), ...seen])].filter((name) => !name.startsWith('!'));
  const group = at('view-rules');
  const shown = [...group.children].map((option) => option.textContent);
  if (names.join('\n') === shown.join('\n')) return;
  group.replaceChildren(...names.map((name) => new Option(name, `rule:${name}`, false, charts.view === `rule:${name}`)));
}

function drawCurl(rule) {
  const labels = rule ? Object.fromEntries(example(rule).split(' ').filter(Boolean).map((pair) => pair.split('='))) : { route: 'login', ip: '203.0.113.9' };
  const bearer = token.get() ? " -H \"Authorization: Bearer $TOKEN\"" : '';
  const body = JSON.stringify({ labels }).replaceAll("'", "'\\''");
  at('curl').textContent = `curl${bearer} ${location.origin}/v1/check -d '${body}'`;
}

function signIn(error) {
  const box = at('sign-in');
  const had = token.get();
  const reason = error.status === 401
    ? 'This server requires a token from its configuration ([[server.token]]).'
    : had ? `The token was rejected: ${error.message}.` : `${error.message}.`;
  at('sign-in-reason').textContent = reason;
  if (box.hidden) {
    box.hidden = false;
    at('token').focus();
  }
}

at('sign-in-form').addEventListener('submit', (event) => {
  event.preventDefault();
  if (token.get()) clearUserData();
  token.set(at('token').value.trim());
  at('token').value = '';
  restart();
});
at('sign-out').addEventListener('click', () => {
  token.forget();
  clearUserData();
  restart();
});

// Removes everything that the previous user has seen or entered.
function clearUserData() {
  series.clear();
  Object.assign(now, { hello: null, rules: null, top: null });
  for (const id of ['rate', 'denied', 'latency']) at(id).textContent = '–';
  for (const id of ['rate-note', 'denied-note', 'latency-note']) at(id).textContent = '\u00a0';
  for (const id of ['version', 'latency-unit', 'rules-note']) at(id).textContent = '';
  charts.view = at('view').value = 'outcome';
  drawRules(null);
  drawTop(null);
  drawCurl();
  tryIt.clear();
}

function restart() {
  status('wait', 'connecting…');
  draw();
  live.forget();
  live.connect();
}

at('view').addEventListener('change', () => {
  charts.view = at('view').value;
  draw();
});
at('range').addEventListener('change', (event) => {
  charts.range = Number(event.target.value);
  draw();
});
at('top-by').addEventListener('change', () => drawTop(now.top, document.querySelector('input[name="top"]:checked').value));

const darkSystem = matchMedia('(prefers-color-scheme: dark)');
const isDark = () => (document.documentElement.dataset.theme ?? (darkSystem.matches ? 'dark' : 'light')) === 'dark';
function drawTheme() {
  at('theme').textContent = isDark() ? 'Light' : 'Dark';
  at('theme').setAttribute('aria-label', `Use the ${isDark() ? 'light' : 'dark'} theme`);
  charts.repaint();
  draw();
}
at('theme').addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  localStorage.setItem('sluicegate-theme', document.documentElement.dataset.theme);
  drawTheme();
});
darkSystem.addEventListener('change', drawTheme);
addEventListener('online', () => now.connected || live.connect());
document.addEventListener('visibilitychange', () => {
  if (!document.hidden && !now.connected && at('sign-in').hidden) live.connect();
});

drawCurl();
drawTheme();
live.connect();
