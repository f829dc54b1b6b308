// The charts of decisions per second and store latency over the same period, with bands for degraded periods.

import { OTHERS, Series, isDegraded, isPartlyDegraded, means, periods, worst } from './series.js';
import { count, element, millis } from './format.js';

const LINES = ['#3f8fb5', '#d2575c', '#5fa36a', '#b8860b', '#8a5fb0', '#4c63b6', '#c77b4a', '#6b7785'];
const MAX_LINES = LINES.length - 1;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const ruleName = (name) => (name === OTHERS ? 'other rules' : name);

// The layers of a view, each with a label, a color, a fill if the layers are stacked, and its value in one second.
function layersOf(view, seconds) {
  const outcome = (name, label, of) => ({ label, of, color: css(name), fill: css(`${name}-fill`) });
  if (view === 'outcome') {
    return [
      outcome('allowed', 'allowed', (second) => second.allowed),
      outcome('unmatched', 'no rule', (second) => second.unmatched),
      outcome('denied', 'denied', (second) => second.denied),
      outcome('errors', 'errors', (second) => second.errors),
    ];
  }
  if (view === 'holds') {
    const of = (label, field, color) => ({ label, color: LINES[color], of: (second) => second.holds?.[field] ?? 0 });
    return [of('made', 'held', 0), of('settled or released', 'ended', 2), of('expired', 'expired', 1), of('settled late', 'late', 3), of('unknown', 'unknown', 7), of('queued', 'queued', 4)];
  }
  const of = (name, field) => (second) => {
    const rule = second.rules.find((rule) => rule.rule === name);
    return rule ? field(rule) : 0;
  };
  if (view.startsWith('rule:')) {
    const name = view.slice(5);
    return [
      outcome('allowed', 'allowed', of(name, (rule) => rule.allowed)),
      outcome('denied', 'denied', of(name, (rule) => rule.denied)),
      outcome('shadow', 'would deny (shadow)', of(name, (rule) => rule.shadow_denied)),
    ];
  }
  const field = view === 'denials' ? (rule) => rule.denied : (rule) => rule.allowed + rule.denied + rule.shadow_denied;
  const names = Series.busiest(seconds, field).filter((name) => name !== OTHERS);
  const shown = names.slice(0, MAX_LINES);
  const layers = shown.map((name, place) => ({ label: name, color: LINES[place], of: of(name, field) }));
  const rest = (second) => second.rules.reduce((sum, rule) => sum + (shown.includes(rule.rule) ? 0 : field(rule)), 0);
  if (seconds.some((second) => rest(second) > 0)) layers.push({ label: ruleName(OTHERS), color: LINES[MAX_LINES], of: rest });
  return layers;
}

export class Charts {
  constructor() {
    this.view = 'outcome';
    this.range = 300;
    this.remote = true;
    this.decisions = new Chart('decisions', count);
    this.store = new Chart('store', (value) => millis(value * 1000));
    // for tests and debugging
    window.sluicegateCharts = this;
  }

  draw(series, nowMs) {
    const { times, groups, seconds } = series.points(this.range);
    const bands = periods(seconds, isDegraded);
    const marks = periods(seconds, isPartlyDegraded);
    const span = [nowMs / 1000 - this.range, nowMs / 1000];

    const layers = layersOf(this.view, seconds);
    const values = layers.map((layer) => means(groups, layer.of));
    this.decisions.draw({ times, layers, values, bands, marks, span });
    document.getElementById('decisions-empty').hidden = seconds.length === 0 || values.some((layer) => layer.some((value) => value > 0));

    const p50 = worst(groups, (second) => (second.store_calls > 0 ? second.store_p50_us / 1000 : null));
    const p99 = worst(groups, (second) => (second.store_calls > 0 ? second.store_p99_us / 1000 : null));
    const store = [
      { label: 'p50', color: css('p50') },
      { label: 'p99', color: css('p99') },
    ];
    this.store.draw({ times, layers: store, values: [p50, p99], bands, marks, span });
    const empty = document.getElementById('store-empty');
    empty.hidden = seconds.length === 0 || p50.some((value) => value !== null) || bands.length > 0;
    empty.firstElementChild.textContent = this.remote
      ? 'No calls to the store in this period.'
      : 'Counters are in this server’s memory.';
  }

  // Redraws with the colors of another theme.
  repaint() {
    this.decisions.discard();
    this.store.discard();
  }
}

class Chart {
  constructor(id, format) {
    this.box = document.getElementById(id);
    this.legend = document.getElementById(`${id}-legend`);
    this.format = format;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
  }

  size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  discard() {
    this.plot?.destroy();
    this.plot = null;
  }

  draw(picture) {
    const key = JSON.stringify(picture.layers.map(({ label, color, fill }) => [label, color, fill]));
    if (!this.plot || key !== this.key) {
      this.discard();
      this.key = key;
      this.picture = picture;
      this.plot = new uPlot(this.options(picture.layers), this.data(picture), this.box);
    } else {
      this.picture = picture;
      this.plot.setData(this.data(picture), false);
    }
    const [min, max] = picture.span;
    this.plot.setScale('x', { min, max });
    this.drawLegend();
  }

  // Stacked layers are drawn as sums, the highest first, so that each covers the lower part of the one before.
  data({ times, layers, values }) {
    if (!layers[0]?.fill) return [times, ...values];
    const sums = [];
    values.forEach((layer, place) => {
      sums.push(layer.map((value, at) => (value === null ? null : value + (place > 0 ? sums[place - 1][at] : 0))));
    });
    return [times, ...sums.reverse()];
  }

  options(layers) {
    const drawn = layers[0]?.fill ? [...layers].reverse() : layers;
    const axis = { stroke: css('soft'), font: '12px system-ui, sans-serif', ticks: { show: false }, grid: { stroke: css('grid'), width: 1 } };
    const two = (number) => String(number).padStart(2, '0');
    const time = (seconds, step) => {
      const at = new Date(seconds * 1000);
      return `${two(at.getHours())}:${two(at.getMinutes())}${step < 60 ? `:${two(at.getSeconds())}` : ''}`;
    };
    return {
      ...this.size(),
      padding: [10, 26, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: 'sluicegate' } },
      scales: { x: { time: true }, y: { range: (_, __, max) => [0, max > 0 ? max * 1.12 : 1] } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 70, values: (_, splits, __, ___, step) => splits.map((at) => time(at, step)) },
        { ...axis, size: 46, space: 34, values: (_, splits) => splits.map(count) },
      ],
      series: [
        {},
        ...drawn.map(({ label, color, fill }) => ({ label, stroke: color, fill, width: fill ? 1.5 : 2, points: { show: false }, spanGaps: false })),
      ],
      hooks: { drawAxes: [(plot) => this.bands(plot)], setCursor: [() => this.drawLegend()] },
    };
  }

  // A full-height band where the store was unavailable, a mark at the upper edge where individual requests were decided without it.
  bands(plot) {
    const { ctx, bbox } = plot;
    const { bands, marks, span: [min, max] } = this.picture;
    const fill = (periods, height) => {
      for (const [from, until] of periods) {
        if (until < min || from > max) continue;
        const left = Math.max(plot.valToPos(from, 'x', true), bbox.left);
        const right = Math.min(Math.max(plot.valToPos(until, 'x', true), left + 3), bbox.left + bbox.width);
        ctx.fillRect(left, bbox.top, right - left, height);
      }
    };
    ctx.save();
    ctx.fillStyle = css('band');
    fill(marks, 3 * devicePixelRatio);
    ctx.globalAlpha = 0.18;
    fill(bands, bbox.height);
    ctx.restore();
  }

  // Shows the values at the cursor, or the newest.
  drawLegend() {
    const { times, layers, values, marks } = this.picture;
    const at = this.plot?.cursor.idx ?? times.length - 1;
    const items = layers.map((layer, place) => ({ ...layer, value: values[place][at] }));
    const shown = items.filter(({ value }, place) => layers.length <= 3 || value > 0 || place === 0 || values[place].some((value) => value > 0));
    const entries = shown.map(({ label, color, value }) => [color, label, value === null || value === undefined ? '–' : this.format(value)]);
    if (marks.length > 0) entries.push([css('band'), 'decided without the store', '']);
    // Only changed text is updated: screen readers cannot follow a legend that is rebuilt every second.
    while (this.legend.children.length > entries.length) this.legend.lastChild.remove();
    entries.forEach(([color, label, value], place) => {
      let item = this.legend.children[place];
      if (!item) {
        item = element('li', {}, element('span', { class: 'swatch' }), element('span', { class: 'name' }), element('b'));
        this.legend.append(item);
      }
      const [swatch, name, number] = item.children;
      swatch.style.background = color;
      if (name.textContent !== label) name.textContent = label;
      if (number.textContent !== value) number.textContent = value;
    });
  }
}
