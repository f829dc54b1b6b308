// The form that sends a request and shows its decision and explanation.

import { ApiError, headers, apiError } from './live.js';
import { caption, timeline } from './timeline.js';
import { clock, count, duration, element, periodText } from './format.js';

// Parses `name=value` pairs, separated by spaces or commas; values can be quoted.
export function readLabels(text) {
  const labels = {};
  const pair = /\s*([^\s=,"']+)=("([^"]*)"|'([^']*)'|[^\s,]*)\s*,?/y;
  let at = 0;
  while (text.slice(at).trim() !== '') {
    pair.lastIndex = at;
    const found = pair.exec(text);
    if (!found) throw new Error(`“${text.slice(at).trim()}” is not a label: write name=value`);
    const [, name, raw, double, single] = found;
    labels[name] = double ?? single ?? raw;
    at = pair.lastIndex;
  }
  return labels;
}

// Parses an integer, or `unit=number` pairs.
export function readCost(text) {
  const trimmed = text.trim();
  if (trimmed === '') return 1;
  if (/^\d+$/.test(trimmed)) return Number(trimmed);
  const costs = {};
  for (const part of trimmed.split(/[\s,]+/)) {
    const found = /^([^=\s]+)=(\d+)$/.exec(part);
    if (!found) throw new Error(`“${part}” is not a cost: write an integer, or unit=number`);
    costs[found[1]] = Number(found[2]);
  }
  return costs;
}

async function call(name, body) {
  const response = await fetch(`/v1/${name}`, { method: 'POST', headers: headers({ 'content-type': 'application/json' }), body: JSON.stringify(body) });
  if (!response.ok) throw await apiError(response);
  return response.json();
}

// Describes the live holds of a counter.
function liveHolds({ state, snapshot }) {
  const { count: number, units, oldest_us, partial } = state.holds;
  const bound = partial ? 'at least ' : '';
  const age = Math.max(0, (snapshot.at_us - oldest_us) / 1000);
  return `${count(number)} live ${number === 1 ? 'hold' : 'holds'} of ${bound}${count(units)} ${units === 1 ? 'unit' : 'units'}, the oldest made ${bound}${duration(age)} ago.`;
}

export class Try {
  // `signIn(error)` prompts for another token.
  constructor(signIn) {
    this.form = document.getElementById('try-form');
    this.verdict = document.getElementById('verdict');
    this.reasons = document.getElementById('reasons');
    this.signIn = signIn;
    this.blank = [...this.verdict.childNodes];
    this.form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.send(event.submitter?.value ?? 'check');
    });
    let width = 0;
    new ResizeObserver(() => {
      if (this.explanation && width !== this.reasons.clientWidth) this.explain();
      width = this.reasons.clientWidth;
    }).observe(this.reasons);
  }

  // Resets the form for another user. A pending response is discarded.
  clear() {
    this.sequence = (this.sequence ?? 0) + 1;
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

  async send(name) {
   // A response that arrives after a later request is discarded.
   const sequence = (this.sequence = (this.sequence ?? 0) + 1);
    try {
      const body = { labels: readLabels(this.form.labels.value), cost: readCost(this.form.cost.value) };
      const answer = name === 'explain' ? null : await call(name, body);
      const explanation = await call('explain', body);
      if (sequence !== this.sequence) return;
      this.explanation = explanation;
      // After a charge, the explanation describes the next request.
      this.another = name === 'check' || name === 'hold';
      this.showDecision(name, answer ?? this.explanation.decision);
      if (answer?.token) this.offerRelease(answer, body);
      this.explain();
    } catch (error) {
      if (sequence !== this.sequence) return;
      this.explanation = null;
      this.reasons.replaceChildren();
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) this.signIn(error);
      const isUnanswered = error instanceof ApiError ? error.status >= 500 : error instanceof TypeError;
      const title = isUnanswered ? 'No response' : 'Not sent';
      const detail = error instanceof TypeError ? 'the server is unreachable' : error.message;
      this.show('warn', title, detail);
    }
  }

  show(state, title, detail) {
    this.verdict.dataset.state = state;
    this.verdict.replaceChildren(element('strong', {}, title), element('p', {}, detail));
  }

  // Adds when a hold expires, and a button that releases it.
  offerRelease({ token, expires_at_us }, body) {
    if (expires_at_us === undefined) return;
    const release = async () => {
      const sequence = (this.sequence = (this.sequence ?? 0) + 1);
      try {
        const { outcome } = await call('release', { token });
        const explanation = await call('explain', body);
        if (sequence !== this.sequence) return;
        this.explanation = explanation;
        this.show('good', `Hold: ${outcome}`, outcome === 'released' ? 'Its estimate was refunded.' : 'Nothing was refunded.');
        this.explain();
      } catch (error) {
        if (sequence === this.sequence) this.show('warn', 'No response', error.message);
      }
    };
    const button = element('button', { type: 'button', onclick: release }, 'Release');
    this.verdict.append(element('p', {}, `Held until ${clock(expires_at_us / 1000)}. `, button));
  }

  showDecision(name, answer) {
    const { allowed, rule, remaining, limit, retry_after_ms: wait, never, source, at_us } = answer;
    const checked = name === 'check' || name === 'hold';
    const degraded = { open: 'Decided without the store: allowed without counting. ', closed: 'Decided without the store: denied by a rule that fails closed. ', fallback: 'Decided without the store, by this server’s share of the limit. ' }[source] ?? '';
    if (rule === null && allowed) {
      return this.show('good', checked ? 'Allowed' : 'Would be allowed', degraded || 'No rule applies to this request, so nothing is counted.');
    }
    if (allowed) {
      const left = `${count(remaining)} of ${count(limit)} remaining for ${rule}, the rule with the least remaining quota.`;
      return this.show('good', checked ? 'Allowed' : 'Would be allowed', `${degraded}${checked ? 'It was charged; ' : 'Nothing was charged; '}${left}`);
    }
    const title = `${checked ? 'Denied' : 'Would be denied'} by ${rule}`;
    if (never || wait === null) return this.show('bad', title, `${degraded}Waiting does not help: this request can never be allowed.`);
    const when = at_us === null ? '' : ` (at ${clock(at_us / 1000 + wait)})`;
    return this.show('bad', title, `${degraded}Retry in ${duration(wait)}${when}, if no other request is charged in between. Denied requests are not charged.`);
  }

  explain() {
    const { decision, applies, others, more_others: more } = this.explanation;
    const width = Math.max(280, this.reasons.clientWidth);
    const nodes = applies.map((applying) => {
      const tier = decision.tiers.find((tier) => tier.rule === applying.rule);
      const allowed = tier ? tier.allowed : applying.limit !== null;
      const tags = [];
      if (applying.limit) tags.push(element('span', { class: 'tag' }, `${applying.limit.algorithm} · ${count(applying.limit.amount)} ${periodText(applying.limit)}`));
      if (applying.limit?.shadow) tags.push(element('span', { class: 'tag warn' }, 'shadow: never denies'));
      tags.push(element('span', { class: allowed ? 'tag good' : 'tag bad' }, `${this.another ? 'next request ' : ''}${allowed ? 'fits' : 'does not fit'}`));
      const drawing = applying.snapshot && applying.state && timeline({ ...applying, another: this.another, retryMs: tier?.retry_after_ms ?? null, never: tier?.never ?? false, fits: allowed }, width);
      return element('div', { class: 'reason' },
        element('h3', {}, applying.rule ?? 'key', ...tags),
        element('p', { class: 'fine' }, this.another ? 'Next request: ' : '', applying.arithmetic, '.'),
        applying.state?.leased > 0 && element('p', { class: 'fine' }, `${count(applying.state.leased)} of the used units are leased: charged in advance and not spent yet.`),
        applying.state?.holds && element('p', { class: 'fine' }, liveHolds(applying)),
        applying.key && element('p', { class: 'fine mono' }, applying.key),
        drawing,
        drawing && element('p', { class: 'fine' }, caption(applying.snapshot, applying.limit)));
    });
    if (others.length === 0 && more > 0) {
      nodes.push(element('p', { class: 'fine' }, `${more} ${more === 1 ? 'rule does' : 'rules do'} not apply. The list needs a token with the scope admin.`));
    } else if (others.length > 0) {
      const list = others.map(({ rule, because }) => element('li', {}, element('b', {}, rule), `: ${because}`));
      if (more > 0) list.push(element('li', {}, `and ${more} more`));
      const open = applies.length === 0 || this.reasons.querySelector('details')?.open === true;
      nodes.push(element('details', open ? { open: '' } : {}, element('summary', {}, `${others.length + more} ${others.length + more === 1 ? 'rule does' : 'rules do'} not apply`), element('ul', {}, ...list)));
    }
    this.reasons.replaceChildren(...nodes);
  }
}
