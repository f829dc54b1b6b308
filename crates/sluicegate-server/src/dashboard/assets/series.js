// The seconds of the last hour, and the points drawn from them.

const KEPT = 3600;
// Seconds per point for each range in seconds, chosen so that lines are smooth and short events stay visible.
const STEPS = { 300: 1, 900: 3, 3600: 10 };
// A pause of more than this many points is drawn as a gap.
const GAP = 4;
export const OTHERS = '!other';

export class Series {
  constructor() {
    this.seconds = [];
  }

  add(seconds) {
    const newest = this.seconds.at(-1)?.at_ms ?? 0;
    // After a restart the server sends only its own history; earlier seconds are kept.
    for (const second of seconds) {
      if (second.at_ms > newest) this.seconds.push(second);
    }
    const oldest = (this.seconds.at(-1)?.at_ms ?? 0) - KEPT * 1000;
    let gone = 0;
    while (gone < this.seconds.length && this.seconds[gone].at_ms < oldest) gone += 1;
    this.seconds.splice(0, gone);
  }

  clear() {
    this.seconds = [];
  }

  // The newest seconds, at most `count`.
  last(count) {
    const from = (this.seconds.at(-1)?.at_ms ?? 0) - count * 1000;
    let first = this.seconds.length;
    while (first > 0 && this.seconds[first - 1].at_ms > from) first -= 1;
    return this.seconds.slice(first);
  }

  // The names of the rules in these seconds, busiest first.
  static busiest(seconds, of = (rule) => rule.allowed + rule.denied + rule.shadow_denied) {
    const totals = new Map();
    for (const second of seconds) {
      for (const rule of second.rules) totals.set(rule.rule, (totals.get(rule.rule) ?? 0) + of(rule));
    }
    return [...totals].filter(([, total]) => total > 0).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name]) => name);
  }

  // The points of the last `range` seconds: times in seconds, and the seconds of each point, which are empty in a gap.
  points(range) {
    const step = STEPS[range];
    const seconds = this.last(range);
    const times = [];
    const groups = [];
    for (const second of seconds) {
      const at = second.at_ms / 1000;
      const time = step === 1 ? at : Math.floor(at / step) * step;
      if (times.length > 0 && time - times.at(-1) > GAP * step) {
        times.push(times.at(-1) + step, time - step);
        groups.push([], []);
      }
      if (times.at(-1) === time) groups.at(-1).push(second);
      else {
        times.push(time);
        groups.push([second]);
      }
    }
    return { times, groups, step, seconds };
  }
}

// The mean of `of` over the seconds of each point; null in a gap.
export function means(groups, of) {
  return groups.map((group) => (group.length === 0 ? null : group.reduce((sum, second) => sum + of(second), 0) / group.length));
}

// The maximum of `of` over the seconds of each point; null if no second has a value.
export function worst(groups, of) {
  return groups.map((group) => {
    const values = group.map(of).filter((value) => value !== null);
    return values.length === 0 ? null : Math.max(...values);
  });
}

// The store is unavailable, as opposed to late for individual requests.
export const isDegraded = (second) => second.breakers_open > 0 || second.degraded * 2 > second.allowed + second.denied;
// Some requests were decided without the store.
export const isPartlyDegraded = (second) => second.breakers_open > 0 || second.degraded > 0;

// The memory store is full: new keys share overflow counters.
export const isOverflowing = (second) => second.overflow_decisions > 0;

// The periods of matching seconds, in seconds since 1970. A short pause does not end a period.
export function periods(seconds, are) {
  const bands = [];
  for (const second of seconds.filter(are)) {
    const at = second.at_ms / 1000;
    const band = bands.at(-1);
    if (band && at - band[1] <= 3) band[1] = at;
    else bands.push([at - 1, at]);
  }
  return bands;
}
