// Rules in force and heaviest keys.

import { count, element, share } from './words.js';

const SHOWN_KEYS = 10;
const need = (what) => element('p', { class: 'fine' }, `${what} need a token that may `, element('code', {}, 'admin'), '.');

// A rule in one line of words.
export function inWords(rule) {
  const unit = rule.unit === 'requests' ? '' : ` ${rule.unit}`;
  let words = `${count(rule.amount)}${unit} per ${rule.window}`;
  if (rule.burst !== null && rule.burst !== rule.amount) words += `, ${count(rule.burst)} at once`;
  if (rule.per.length > 0) words += `, for each ${rule.per.join(' and ')}`;
  return words;
}

function condition(word, pairs) {
  return Object.entries(pairs).map(([label, patterns]) => `${word} ${label}=${patterns.join('|')}`);
}

// Labels of a request that the rule would match.
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
    return box.replaceChildren(element('p', { class: 'fine' }, 'There are no rules: every request passes. Write some into tollgate.toml.'));
  }
  const items = rules.map((rule) => {
    const tags = [element('span', { class: 'tag' }, rule.algorithm)];
    if (rule.shadow) tags.push(' ', element('span', { class: 'tag warn' }, 'shadow'));
    if (rule.overdraft) tags.push(' ', element('span', { class: 'tag' }, 'overdraft'));
    if (rule.overrides > 0) tags.push(' ', element('span', { class: 'tag' }, `${rule.overrides} overrides`));
    const which = [...condition('when', rule.when), ...condition('unless', rule.unless)].join(', ');
    const without = { open: 'lets pass', closed: 'refuses', local: 'its share' }[rule.on_store_failure];
    return element('li', { 'data-rule': rule.name },
      element('div', {}, element('span', { class: 'name' }, rule.name), ...tags),
      element('div', { class: 'now' }, '\u00a0'),
      element('div', { class: 'what' }, inWords(rule), which ? ` · ${which}` : '', ` · without the store: ${without}`),
      element('div', { class: 'act' }, element('button', { type: 'button', class: 'link', onclick: () => tryIt(rule), 'aria-label': `Try ${rule.name}` }, 'try')));
  });
  box.replaceChildren(element('ul', { class: 'rules' }, ...items));
}

// What each rule said in these seconds.
export function drawRates(seconds) {
  const totals = new Map();
  for (const second of seconds) {
    for (const { rule, allowed, denied, shadow_denied } of second.rules) {
      const total = totals.get(rule) ?? { met: 0, denied: 0, shadow: 0 };
      totals.set(rule, total);
      total.met += allowed + denied + shadow_denied;
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
    const denied = total.shadow > 0 ? `${share(total.shadow, total.met)} would be refused` : `${share(total.denied, total.met)} refused`;
    now.replaceChildren(element('b', {}, count(Math.round((total.met / seconds.length) * 10) / 10)), ' /s · ', denied);
  }
}

export function drawTop(top, by) {
  const box = document.getElementById('top');
  const note = document.getElementById('top-note');
  note.textContent = '';
  if (!top) return box.replaceChildren(need('Keys'));
  const keys = top[by].slice(0, SHOWN_KEYS);
  if (keys.length === 0) {
    const nothing = by === 'heaviest' ? 'No key has asked lately.' : 'No key was refused lately.';
    return box.replaceChildren(element('p', { class: 'fine' }, nothing));
  }
  const rows = keys.map(({ rule, key, count: asked, refused }) => element('tr', {},
    element('td', {}, element('span', { class: 'mono' }, key || 'all together'), element('small', {}, rule)),
    element('td', { class: 'count' }, count(asked)),
    element('td', { class: refused > 0 ? 'count refused' : 'count' }, element('b', {}, count(refused)))));
  box.replaceChildren(element('table', {},
    element('thead', {}, element('tr', {}, element('th', { scope: 'col' }, 'key and rule'), element('th', { scope: 'col', class: 'count' }, 'asked'), element('th', { scope: 'col', class: 'count' }, 'refused'))),
    element('tbody', {}, ...rows)));
  note.textContent = `Of the last ${Math.max(1, Math.round(top.seconds / 60))} min, from a bounded sketch.`;
}
