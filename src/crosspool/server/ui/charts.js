// Rates and times of the last two minutes, one line a model.

import uPlot from "./vendor/uplot.js";
import { full, named } from "./colours.js";

const KEPT_S = 120;
const HEIGHT = 150;
const KINDS = [
  { key: "tokens", title: "tokens / s" },
  { key: "requests", title: "requests ended / s" },
  { key: "ttft", title: "TTFT p50, ms" },
  { key: "tbt", title: "TBT p99, ms" },
];

export class Charts {
  constructor(root, key) {
    this.root = root;
    this.key = key;
    this.names = [];
    this.rows = []; // {at, tokens: {model: value}, ...}
    this.before = null;
    this.plots = [];
    new ResizeObserver(() => this.resize()).observe(root);
  }

  // The values of this moment by kind and model.
  add(stats) {
    const names = stats.cards.map((card) => card.id);
    const now = { at: Date.now() / 1000, engineS: stats.now_s, models: new Map(stats.models.map((m) => [m.name, m])) };
    const row = { at: now.at, tokens: {}, requests: {}, ttft: {}, tbt: {} };
    for (const name of names) {
      row.tokens[name] = this.rate(now, name, (model) => model.generated_tokens);
      row.requests[name] = this.rate(now, name, ended);
      row.ttft[name] = ms(stats.ttft_s[name]?.p50);
      row.tbt[name] = ms(stats.tbt_s[name]?.p99);
    }
    this.before = now;
    this.rows = [...this.rows.filter((old) => old.at > now.at - KEPT_S), row];
    if (names.join() !== this.names.join()) {
      this.names = names;
      this.build();
    }
    this.draw();
    return row;
  }

  rate(now, name, count) {
    const past = this.before?.models.get(name);
    const present = now.models.get(name);
    const passed = now.engineS - (this.before?.engineS ?? now.engineS);
    if (!past || !present || passed <= 0 || count(present) < count(past)) return null; // a server that came back
    return (count(present) - count(past)) / passed;
  }

  build() {
    this.root.replaceChildren();
    this.key.replaceChildren(...this.names.map(keyEntry));
    this.plots = KINDS.map(({ key, title }) => {
      const box = document.createElement("div");
      box.className = "chart";
      box.innerHTML = "<h3></h3>";
      box.firstChild.textContent = title;
      this.root.append(box);
      const axis = { stroke: named("--soft"), grid: { stroke: named("--line"), width: 1 }, ticks: { show: false } };
      const series = this.names.map((name) => ({
        label: name, stroke: full(name), width: 2, points: { show: false }, spanGaps: true,
        value: (_, value) => (value == null ? "-" : value.toFixed(1)),
      }));
      const options = {
        width: this.width(), height: HEIGHT, axes: [{ ...axis, space: 70 }, { ...axis, size: 52 }],
        scales: { x: { time: true, range: () => this.span() }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.1] } },
        series: [{}, ...series], cursor: { y: false }, legend: { show: false },
      };
      return { key, plot: new uPlot(options, this.data(key), box) };
    });
  }

  // Always as long, so that lines grow from the right: a single moment would be drawn on an axis of years.
  span() {
    const end = this.rows.at(-1)?.at ?? Date.now() / 1000;
    return [end - KEPT_S, end];
  }

  rebuild() {
    this.build();
    this.draw();
  }

  data(key) {
    return [this.rows.map((row) => row.at), ...this.names.map((name) => this.rows.map((row) => row[key][name] ?? null))];
  }

  draw() {
    for (const { key, plot } of this.plots) plot.setData(this.data(key));
  }

  width() {
    const box = this.root.firstElementChild ?? this.root;
    return Math.max(200, Math.floor(box.clientWidth));
  }

  resize() {
    for (const { plot } of this.plots) plot.setSize({ width: this.width(), height: HEIGHT });
  }
}

function keyEntry(name) {
  const entry = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = full(name);
  entry.append(swatch, name);
  return entry;
}

function ended(model) {
  return Object.values(model.num_finished).reduce((sum, count) => sum + count, 0);
}

function ms(seconds) {
  return seconds == null ? null : seconds * 1000;
}
