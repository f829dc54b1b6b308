// The state of a counter over time: admitted units that still count, the requested cost, and the time at which it fits.
// To the left of "now" is the past, to the right the future if there are no further requests.

import { clock, count, duration, shape, windowMillis } from './format.js';

const HEIGHT = 168;
const TOP = 26;
const BOTTOM = 30;
const LEFT = 8;
const RIGHT = 8;

// The counted units from now on, as points of a line: [milliseconds from now, units].
function ahead(snapshot, endMs) {
  const ms = (us) => (us - snapshot.at_us) / 1000;
  if (snapshot.kind === 'concurrency') {
    // The snapshot has only the first and the last expiry of the holds.
    const { from_us, until_us, units } = snapshot.live;
    const [first, last] = units > 0 ? [Math.max(0, ms(from_us)), Math.max(0, ms(until_us))] : [0, 0];
    return [[0, units], [first, units], [last, 0], [Math.max(endMs, last), 0]];
  }
  if (snapshot.kind === 'token-bucket') {
    const empty = snapshot.drains_per_second > 0 ? (snapshot.level / snapshot.drains_per_second) * 1000 : endMs;
    return [[0, snapshot.level], [empty, 0], [Math.max(endMs, empty), 0]];
  }
  if (snapshot.kind === 'fixed-window') {
    const { until_us, units } = snapshot.window;
    return [[0, units], [ms(until_us), units], [ms(until_us), 0], [Math.max(endMs, ms(until_us)), 0]];
  }
  if (snapshot.kind === 'sliding-counter') {
    const { previous, current, ends_us } = snapshot;
    const length = ms(current.until_us) - ms(current.from_us);
    const fade = (units, until, at) => units * Math.min(1, Math.max(0, (until + length - at) / length));
    const level = (at) => fade(previous.units, ms(previous.until_us), at) + fade(current.units, ms(current.until_us), at);
    const end = ends_us > 0 ? ms(ends_us) : 0;
    const points = [0, ms(current.until_us), end].filter((at) => at <= end);
    return [...points.map((at) => [at, level(at)]), [end, 0], [Math.max(endMs, end), 0]];
  }
  let level = snapshot.older_units + snapshot.charges.reduce((sum, charge) => sum + charge.units, 0);
  const points = [[0, level]];
  // Units that are not listed are older than all listed charges: they expire before the first of them.
  if (snapshot.older_units > 0 && snapshot.charges.length > 0) {
    const first = ms(snapshot.charges[0].until_us);
    level -= snapshot.older_units;
    points.push([first, level]);
  }
  for (const { until_us, units } of snapshot.charges) {
    points.push([ms(until_us), level], [ms(until_us), level - units]);
    level -= units;
  }
  points.push([Math.max(endMs, points.at(-1)[0]), level]);
  return points;
}

// The past of the counted units, as points of a line that ends now, if it is known.
function behind(snapshot, startMs) {
  const ms = (us) => (us - snapshot.at_us) / 1000;
  // Only a sliding log stores the time of each charge.
  if (snapshot.kind !== 'sliding-log') return [];
  const points = [[startMs, snapshot.older_units]];
  let level = snapshot.older_units;
  for (const { from_us, units } of snapshot.charges) {
    points.push([ms(from_us), level], [ms(from_us), level + units]);
    level += units;
  }
  points.push([0, level]);
  return points;
}

// The length of the window. That of a calendar window is its current period, and that of requests in flight the time until all expire.
function lengthMs(snapshot, limit) {
  if (snapshot.kind === 'concurrency') return Math.max(1000, (snapshot.live.until_us - snapshot.at_us) / 1000);
  if (limit.zone) return (snapshot.window.until_us - snapshot.window.from_us) / 1000;
  return windowMillis(limit.window);
}

// Draws one counter; `width` is in pixels.
export function timeline({ snapshot, limit, cost, state, retryMs, never, fits, another }, width) {
  const windowMs = lengthMs(snapshot, limit);
  const resetMs = state.reset_after_ms;
  const startMs = snapshot.kind === 'token-bucket' || snapshot.kind === 'concurrency' ? -0.12 * Math.max(resetMs, windowMs * 0.2) : snapshot.kind === 'sliding-counter' ? Math.min(-windowMs * 0.5, (snapshot.previous.from_us - snapshot.at_us) / 1000) : -windowMs;
  const endMs = Math.max(resetMs, retryMs ?? 0, windowMs * 0.12) * 1.06;
  const line = ahead(snapshot, endMs);
  const used = line[0][1];
  const most = Math.max(limit.capacity, used, Math.min(used + cost, limit.capacity * 2)) * 1.12;

  const x = (at) => LEFT + ((at - startMs) / (endMs - startMs)) * (width - LEFT - RIGHT);
  const y = (units) => HEIGHT - BOTTOM - (units / most) * (HEIGHT - TOP - BOTTOM);
  const path = (points) => points.map(([at, units], place) => `${place ? 'L' : 'M'}${x(at).toFixed(1)} ${y(units).toFixed(1)}`).join('');
  const floor = y(0);
  const svg = shape('svg', { class: 'timeline', viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: 'img', 'aria-label': description({ used, limit, cost, retryMs, never, fits }) });
  const draw = (name, attributes, ...children) => svg.append(shape(name, attributes, ...children));
  const text = (at, above, content, more = {}) => draw('text', { x: at.toFixed(1), y: above.toFixed(1), ...more }, content);

  // the windows of a counter
  const box = ({ from_us, until_us, units }, name) => {
    const from = Math.max((from_us - snapshot.at_us) / 1000, startMs);
    const until = Math.min((until_us - snapshot.at_us) / 1000, endMs);
    if (until <= from) return;
    draw('rect', { class: name, x: x(from), y: y(units), width: x(until) - x(from), height: floor - y(units) });
    draw('path', { class: 'window', d: `M${x(from)} ${TOP}V${floor}M${x(until)} ${TOP}V${floor}` });
    const label = `${count(units)} in this window`;
    if (x(until) - x(from) > label.length * 7) text((x(from) + x(until)) / 2, floor - 7, label, { 'text-anchor': 'middle' });
  };
  if (snapshot.kind === 'sliding-counter') {
    box(snapshot.previous, 'before');
    box({ ...snapshot.current, until_us: Math.min(snapshot.current.until_us, snapshot.at_us) }, 'before');
  }
  if (snapshot.kind === 'fixed-window') box({ ...snapshot.window, until_us: snapshot.at_us }, 'counts');

  const past = behind(snapshot, startMs);
  const whole = [...past, ...line];
  draw('path', { class: 'counts', d: `${path(whole)}L${x(whole.at(-1)[0])} ${floor}L${x(whole[0][0])} ${floor}Z` });
  draw('path', { class: 'edge', d: path(whole) });
  draw('path', { class: 'axis', d: `M${LEFT} ${floor}H${width - RIGHT}` });
  draw('path', { class: 'limit', d: `M${LEFT} ${y(limit.capacity)}H${width - RIGHT}` });
  text(LEFT + 2, y(limit.capacity) - 4, `limit ${count(limit.capacity)}`, { class: 'limit-text' });

  if (snapshot.kind === 'sliding-log') {
    let level = snapshot.older_units;
    for (const { from_us, units } of snapshot.charges) {
      level += units;
      draw('circle', { class: 'charge', cx: x((from_us - snapshot.at_us) / 1000), cy: y(level), r: 3.5 });
    }
  }

  if (cost > 0) {
    const top = Math.min(used + cost, most);
    draw('rect', { class: fits ? 'requested' : 'requested over', x: x(0) + 2, y: y(top), width: 9, height: Math.max(3, y(used) - y(top)), rx: 2 });
    // Keep the label clear of the "fits in" line and above the axis.
    const isNear = !fits && retryMs !== null && x(retryMs) - x(0) < 100;
    text(x(0) + 15, Math.min(Math.max(y(top) + 10, TOP + (isNear ? 21 : 4)), floor - 5), `+ ${count(cost)} ${another ? 'next' : 'requested'}`, { class: fits ? 'requested-text' : 'requested-text over' });
  }
  if (used > 0) text(x(0) - 6, Math.min(y(used) - 5, floor - 20), `${count(Math.ceil(used))} used`, { class: 'strong', 'text-anchor': x(0) > 70 ? 'end' : 'start' });
  draw('path', { class: 'now', d: `M${x(0)} ${TOP - 8}V${floor + 4}` });
  text(x(0), TOP - 12, 'now', { class: 'strong', 'text-anchor': 'middle' });

  const label = (at, content, name, anchor) => text(Math.min(Math.max(x(at), LEFT), width - RIGHT), HEIGHT - 10, content, { class: name ?? '', 'text-anchor': anchor });
  if (startMs < -windowMs * 0.4) label(startMs, `${duration(-startMs)} ago`, undefined, 'start');
  const nowLabel = clock(snapshot.at_us / 1000);
  label(0, nowLabel, 'strong', x(0) < 40 ? 'start' : x(0) > width - 40 ? 'end' : 'middle');
  if (!fits && retryMs !== null && !never) {
    draw('path', { class: 'when', d: `M${x(retryMs)} ${TOP - 4}V${floor + 4}` });
    const late = x(retryMs) > width - 90;
    text(x(retryMs) + (late ? -5 : 5), TOP + 6, `fits in ${duration(retryMs)}`, { class: 'when-text', 'text-anchor': late ? 'end' : 'start' });
  }
  if (resetMs > 0 && x(resetMs) - x(0) > 110) label(resetMs, `+ ${duration(resetMs)}`, undefined, x(resetMs) > width - 60 ? 'end' : 'middle');
  return svg;
}

// Explains the drawing.
export function caption(snapshot, limit) {
  if (snapshot.kind === 'sliding-log') {
    const older = snapshot.older_units > 0 ? ` ${count(snapshot.older_units)} older units are not drawn individually.` : '';
    return `Each dot is an admitted request, which expires after ${limit.window}.${older}`;
  }
  if (snapshot.kind === 'sliding-counter') return 'The current window counts in full, the previous one in proportion to its overlap with the sliding window.';
  if (snapshot.kind === 'fixed-window') return 'All units count until the window ends.';
  if (snapshot.kind === 'concurrency') return 'Live holds count until they are settled or released, at the latest until they expire. The slope begins when the first one expires and ends when the last one does.';
  return `The level drains by ${count(snapshot.drains_per_second)} per second; a request fits as soon as the level plus its cost is within the limit.`;
}

function description({ used, limit, cost, retryMs, never, fits }) {
  const begin = `${count(used)} of ${count(limit.capacity)} count now, ${count(cost)} requested: `;
  if (fits) return `${begin}fits`;
  return begin + (never || retryMs === null ? 'never fits' : `fits in ${duration(retryMs)}`);
}
