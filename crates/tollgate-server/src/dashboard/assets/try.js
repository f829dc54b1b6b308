// A request to try: labels in, decision and explanation out.

import { Refused, headers, refusal } from './live.js';
import { caption, timeline } from './timeline.js';
import { clock, count, duration, element } from './words.js';

// `name=value` pairs, separated by spaces or commas; quotes keep what is between them.
export function readLabels(text) {
  const labels = {};
  const pair = /\s*([^\s=,"']+)=("([^"]*)"|'([^']*)'|[^\s,]*)\s*,?/y;
  let at = 0;
  while (text.slice(at).trim() !== '') {
    pair.lastIndex = at;
    const found = pair.exec(text);
    if (!found) throw new Error(`“${text.slice(at).trim()}” is no label: write name=value`);
    const [, name, raw, double, single] = found;
    labels[name] = double ?? single ?? raw;
    at = pair.lastIndex;
  }
  return labels;
}

// A whole number of requests, or units by name.
export function readCost(text) {
  const trimmed = text.trim();
  if (trimmed === '') return 1;
  if (/^\d+$/.test(trimmed)) return Number(trimmed);
  const costs = {};
  for (const part of trimmed.split(/[\s,]+/)) {
    const found = /^([^=\s]+)=(\d+)$/.exec(part);
    if (!found) throw new Error(`“${part}” is no cost: write a whole number, or unit=number`);
    costs[found[1]] = Number(found[2]);
  }
  return costs;
}

async function call(name, body) {
  const response = await fetch(`/v1/${name}`, { method: 'POST', headers: headers({ 'content-type': 'application/json' }), body: JSON.stringify(body) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

export class Try {
  // `signIn(refused)` asks for another token.
  constructor(signIn) {
    this.form = document.getElementById('try-form');
    this.verdict = document.getElementById('verdict');
    this.reasons = document.getElementById('reasons');
    this.signIn = signIn;
    this.blank = [...this.verdict.childNodes];
    this.form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.ask(event.submitter?.value ?? 'check');
    });
    let width = 0;
    new ResizeObserver(() => {
      if (this.explanation && width !== this.reasons.clientWidth) this.explain();
      width = this.reasons.clientWidth;
    }).observe(this.reasons);
  }

  // For another visitor: as at first. An answer that is under way is not shown.
  clear() {
    this.asked = (this.asked ?? 0) + 1;
    this.explanation = null;
    this.form.reset();
    this.reasons.replaceChildren();
    this.verdict.replaceChildren(...this.blank);
    delete this.verdict.dataset.state;
  }

  fill(labels) {
    this.form.labels.value = labels;
    this.form.labels.focus();
  }

  async ask(name) {
    // an answer that comes after a later question is not shown
    const asked = (this.asked = (this.asked ?? 0) + 1);
    try {
      const body = { labels: readLabels(this.form.labels.value), cost: readCost(this.form.cost.value) };
      const answer = name === 'explain' ? null : await call(name, body);
      const explanation = await call('explain', body);
      if (asked !== this.asked) return;
      this.explanation = explanation;
      // what is explained after a check is what the next one would meet
      this.another = name === 'check';
      this.say(name, answer ?? this.explanation.decision);
      this.explain();
    } catch (error) {
      if (asked !== this.asked) return;
      this.explanation = null;
      this.reasons.replaceChildren();
      const refused = error instanceof Refused;
      if (refused && (error.status === 401 || error.status === 403)) this.signIn(error);
      const title = refused ? (error.status >= 500 ? 'No answer' : 'Not asked') : error instanceof TypeError ? 'No answer' : 'Not asked';
      const detail = error instanceof TypeError ? 'the server cannot be reached' : error.message;
      this.show('warn', title, detail);
    }
  }

  show(state, title, detail) {
    this.verdict.dataset.state = state;
    this.verdict.replaceChildren(element('strong', {}, title), element('p', {}, detail));
  }

  say(name, answer) {
    const { allowed, rule, remaining, limit, retry_after_ms: wait, never, source, at_us } = answer;
    const checked = name === 'check';
    const degraded = { open: 'Decided without the store: the rules let it pass uncounted. ', closed: 'Decided without the store: a rule refuses then. ', fallback: 'Decided without the store, by this server’s share of the limit. ' }[source] ?? '';
    if (rule === null && allowed) {
      return this.show('good', checked ? 'Passed' : 'Would pass', degraded || 'No rule applies to this request, so nothing is counted.');
    }
    if (allowed) {
      const left = `${count(remaining)} of ${count(limit)} left by ${rule}, the tightest rule that applies.`;
      return this.show('good', checked ? 'Passed' : 'Would pass', `${degraded}${checked ? 'It was charged; ' : 'Nothing was charged; '}${left}`);
    }
    const title = `${checked ? 'Refused' : 'Would be refused'} by ${rule}`;
    if (never || wait === null) return this.show('bad', title, `${degraded}Waiting does not help: it will never fit.`);
    const when = at_us === null ? '' : ` (at ${clock(at_us / 1000 + wait)})`;
    return this.show('bad', title, `${degraded}It passes in ${duration(wait)}${when}, if nobody else comes before. A refusal costs nothing.`);
  }

  explain() {
    const { decision, applies, others, more_others: more } = this.explanation;
    const width = Math.max(280, this.reasons.clientWidth);
    const nodes = applies.map((applying) => {
      const tier = decision.tiers.find((tier) => tier.rule === applying.rule);
      const allowed = tier ? tier.allowed : applying.limit !== null;
      const tags = [];
      if (applying.limit) tags.push(element('span', { class: 'tag' }, `${applying.limit.algorithm} · ${count(applying.limit.amount)} per ${applying.limit.window}`));
      if (applying.limit?.shadow) tags.push(element('span', { class: 'tag warn' }, 'shadow: never refuses'));
      tags.push(element('span', { class: allowed ? 'tag good' : 'tag bad' }, `${allowed ? 'has room' : 'no room'}${this.another ? ' for another' : ''}`));
      const drawing = applying.picture && applying.state && timeline({ ...applying, another: this.another, retryMs: tier?.retry_after_ms ?? null, never: tier?.never ?? false, fits: allowed }, width);
      return element('div', { class: 'reason' },
        element('h3', {}, applying.rule ?? 'key', ...tags),
        element('p', { class: 'fine' }, this.another ? 'Another one now: ' : '', applying.arithmetic, '.'),
        applying.key && element('p', { class: 'fine mono' }, applying.key),
        drawing,
        drawing && element('p', { class: 'fine' }, caption(applying.picture, applying.limit)));
    });
    if (others.length === 0 && more > 0) {
      nodes.push(element('p', { class: 'fine' }, `${more} ${more === 1 ? 'rule does' : 'rules do'} not apply. Which, and why, needs a token that may admin.`));
    } else if (others.length > 0) {
      const list = others.map(({ rule, because }) => element('li', {}, element('b', {}, rule), `: ${because}`));
      if (more > 0) list.push(element('li', {}, `and ${more} more`));
      const open = applies.length === 0 || this.reasons.querySelector('details')?.open === true;
      nodes.push(element('details', open ? { open: '' } : {}, element('summary', {}, `${others.length + more} ${others.length + more === 1 ? 'rule does' : 'rules do'} not apply`), element('ul', {}, ...list)));
    }
    this.reasons.replaceChildren(...nodes);
  }
}
