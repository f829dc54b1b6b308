// Formatting of numbers and times, and creation of elements.

export function count(number) {
  if (!Number.isFinite(number)) return '–';
  if (number >= 1e6) return `${(number / 1e6).toFixed(number >= 1e7 ? 0 : 1)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(number >= 1e5 ? 0 : 1)} k`;
  if (number >= 100 || Number.isInteger(number)) return String(Math.round(number));
  return number.toFixed(number >= 10 ? 1 : 2).replace(/\.?0+$/, '');
}

export function share(part, whole) {
  if (!whole) return '–';
  const percent = (100 * part) / whole;
  if (part > 0 && percent < 0.1) return '< 0.1 %';
  return `${percent >= 10 || percent === 0 ? Math.round(percent) : percent.toFixed(1)} %`;
}

// Formats microseconds as milliseconds.
export function millis(micros) {
  const value = micros / 1000;
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// Formats a memory size.
export function bytes(number) {
  const mebibytes = number / 2 ** 20;
  return mebibytes >= 1024 ? `${(mebibytes / 1024).toFixed(1)} GiB` : `${mebibytes.toFixed(mebibytes < 10 ? 1 : 0)} MiB`;
}

const UNITS = [['d', 86400000], ['h', 3600000], ['min', 60000], ['s', 1000], ['ms', 1]];

// Formats milliseconds with at most two units.
export function duration(ms) {
  if (ms > 0 && ms < 1) return '< 1 ms';
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0).replace(/\.0$/, '')} s`;
  const parts = [];
  let rest = Math.round(ms / 1000) * 1000;
  for (const [unit, size] of UNITS) {
    const whole = Math.floor(rest / size);
    if (whole > 0) parts.push(`${whole} ${unit}`);
    else if (parts.length > 0) break;
    rest -= whole * size;
    if (parts.length === 2) break;
  }
  return parts.join(' ');
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });
}

// Describes the period of a limit, with the zone and the first day of a calendar window. An in-flight limit has no period.
export function periodText({ window, zone, anchor }) {
  if (!window) return 'in flight';
  let text = `per ${window}`;
  if (zone) text += ` in ${zone}`;
  if (anchor && anchor !== 1 && anchor !== 'monday') text += typeof anchor === 'number' ? ` from day ${anchor}` : ` from ${anchor}`;
  return text;
}

// Parses a duration such as "1h30m" to milliseconds.
export function windowMillis(text) {
  const units = { d: 86400000, h: 3600000, m: 60000, s: 1000, ms: 1 };
  let total = 0;
  for (const [, number, unit] of text.matchAll(/(\d+(?:\.\d+)?)(ms|d|h|m|s)/g)) total += number * units[unit];
  return total;
}

// Creates an element with attributes and children; text is never parsed as HTML.
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}
