// The tables of active rules and heavy hitters.

import { count, element, periodText, share } from './format.js';

const SHOWN_KEYS = 10;
const need = (what) => element('p', { class: 'fine' }, `${what} need a token with the scope `, element('code', {}, 'admin'), '.');

// Describes a rule in one line.
export function summary(rule) {
  const unit = rule.unit === 'requests' ? '' : ` ${rule.unit}`;
  let text = `${count(rule.amount)}${unit} ${periodText(rule)}`;
  if (rule.burst !== null && rule.burst !== rule.amount) text += `, burst ${count(rule.burst)}`;
  if (rule.ttl) text += `, holds expire after ${rule.ttl}`;
  if (rule.on_expiry === 'release' && rule.window) text += ', expired holds are refunded';
  if (rule.max_excess !== undefined) text += `, at most ${count(rule.max_excess)} above the estimate`;
  if (rule.hold) text += `, hold id in ${rule.hold}`;
  if (rule.per.length > 0) text += `, per ${rule.per.join(' and ')}`;
  return text;
}

function condition(word, pairs) {
  return Object.entries(pairs).map(([label, patterns]) => `${word} ${label}=${patterns.join('|')}`);
}

// Labels of a request that matches the rule.
export function example(rule) {
  const labels = new Map();
  for (const [label, [pattern]] of Object.entries(rule.when)) labels.set(label, pattern.replace(/\*/g, 'x').replace(/\/\d+$/, ''));
  for (const label of rule.per) if (!labels.has(label)) labels.set(label, label === 'ip' ? '203.0.113.9' : 'example');
  return [...labels].map(([label, value]) => (/\s/.test(value) ? `${label}="${value}"` : `${label}=${value}`)).join(' ');
}

export function drawRules(rules, tryIt) {
  const box = document.getElementById('rules');
  if (!rules) return box.replaceChildren(need('Rules'));
  if (rules.length === 0) {
    return box.replaceChildren(element('p', { class: 'fine' }, 'There are no rules: every request is allowed. Add rules to sluicegate.toml.'));
  }
  const items = rules.map((rule) => {
    const tags = [element('span', { class: 'tag' }, rule.algorithm)];
    if (rule.shadow) tags.push(' ', element('span', { class: 'tag warn' }, 'shadow'));
    if (rule.overdraft) tags.push(' ', element('span', { class: 'tag' }, 'overdraft'));
    if (rule.lease) tags.push(' ', element('span', { class: 'tag' }, `lease ${rule.lease}`));
    if (rule.overrides > 0) tags.push(' ', element('span', { class: 'tag' }, `${rule.overrides} overrides`));
    const which = [...condition('when', rule.when), ...condition('unless', rule.unless)].join(', ');
    const without = { open: 'allows', closed: 'denies', local: 'enforces its share' }[rule.on_store_failure];
    return element('li', { 'data-rule': rule.name },
      element('div', {}, element('span', { class: 'name' }, rule.name), ...tags),
      element('div', { class: 'now' }, '\u00a0'),
      element('div', { class: 'what' }, summary(rule), which ? ` · ${which}` : '', ` · without the store: ${without}`),
      element('div', { class: 'act' }, element('button', { type: 'button', class: 'link', onclick: () => tryIt(rule), 'aria-label': `Try ${rule.name}` }, 'try')));
  });
  box.replaceChildren(element('ul', { class: 'rules' }, ...items));
}

// Shows the rate and the share of denials of each rule.
export function drawRates(seconds) {
  const totals = new Map();
  for (const second of seconds) {
    for (const { rule, allowed, denied, shadow_denied } of second.rules) {
      const total = totals.get(rule) ?? { checks: 0, denied: 0, shadow: 0 };
      totals.set(rule, total);
      total.checks += allowed + denied + shadow_denied;
      total.denied += denied;
      total.shadow += shadow_denied;
    }
  }
  for (const item of document.querySelectorAll('#rules [data-rule]')) {
    const total = totals.get(item.dataset.rule);
    const now = item.querySelector('.now');
    if (!total) {
      now.textContent = 'idle';
      continue;
    }
    const denied = total.shadow > 0 ? `${share(total.shadow, total.checks)} would be denied` : `${share(total.denied, total.checks)} denied`;
    now.replaceChildren(element('b', {}, count(Math.round((total.checks / seconds.length) * 10) / 10)), ' /s · ', denied);
  }
}

export function drawTop(top, by) {
  const box = document.getElementById('top');
  const note = document.getElementById('top-note');
  note.textContent = '';
  if (!top) return box.replaceChildren(need('Keys'));
  const keys = top[by].slice(0, SHOWN_KEYS);
  if (keys.length === 0) {
    const nothing = by === 'heaviest' ? 'No recent checks.' : 'No recent denials.';
    return box.replaceChildren(element('p', { class: 'fine' }, nothing));
  }
  const rows = keys.map(({ rule, key, count: checks, denied }) => element('tr', {},
    element('td', {}, element('span', { class: 'mono' }, key || 'all requests'), element('small', {}, rule)),
    element('td', { class: 'count' }, count(checks)),
    element('td', { class: denied > 0 ? 'count denied' : 'count' }, element('b', {}, count(denied)))));
  box.replaceChildren(element('table', {},
    element('thead', {}, element('tr', {}, element('th', { scope: 'col' }, 'key and rule'), element('th', { scope: 'col', class: 'count' }, 'checks'), element('th', { scope: 'col', class: 'count' }, 'denied'))),
    element('tbody', {}, ...rows)));
  note.textContent = `Estimates for the last ${Math.max(1, Math.round(top.seconds / 60))} min.`;
}
