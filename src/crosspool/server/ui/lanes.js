// The lanes' steps of the last seconds: attention solid, transfer, FFN and waiting pale.

import { prepare } from "./canvas.js";
import { full, named, pale } from "./colours.js";

const ROW = 30;
const LEFT = 92;
const KEPT_S = 6;

export class Timeline {
  constructor(canvas, windowSelect) {
    this.canvas = canvas;
    this.windowSelect = windowSelect;
    this.spans = [];
    this.last = null;
    windowSelect.addEventListener("change", () => this.draw());
  }

  add(stats) {
    for (const [lane, , model, tokens, started, ended, attention] of stats.steps) {
      this.spans.push({ lane, model, tokens, started, ended, attention });
    }
    const oldest = stats.now_s - KEPT_S;
    this.spans = this.spans.filter((span) => span.ended > oldest);
    this.last = stats;
    this.draw();
  }

  draw() {
    if (!this.last) return;
    const { lanes, now_s: now } = this.last;
    const windowS = Number(this.windowSelect.value);
    const { context, width } = prepare(this.canvas, lanes.length * ROW + 18);
    const scale = (width - LEFT) / windowS;
    const x = (moment) => LEFT + Math.max(0, moment - (now - windowS)) * scale;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    lanes.forEach((lane, row) => {
      const top = row * ROW;
      context.fillStyle = named("--soft");
      context.fillText(`${lane.phase} ${lane.lane}`, 0, top + ROW / 2);
      context.fillStyle = named("--free");
      context.fillRect(LEFT, top + 4, width - LEFT, ROW - 8);
      for (const span of this.spans) {
        if (span.lane === lane.lane && span.ended > now - windowS) this.bar(context, span, top, x);
      }
      if (lane.state === "running") {
        const spent = { model: lane.model, started: lane.since_s, ended: now, attention: 0 };
        this.bar(context, spent, top, x);
      }
    });
    context.fillStyle = named("--soft");
    const bottom = lanes.length * ROW + 9;
    context.fillText(`${windowS} s ago`, LEFT, bottom);
    context.textAlign = "right";
    context.fillText("now", width, bottom);
    context.textAlign = "left";
    this.describe(lanes);
  }

  bar(context, span, top, x) {
    const from = x(span.started);
    const to = Math.max(from + 1, x(span.ended) - 0.5);
    const solid = (to - from) * Math.min(1, span.attention / Math.max(span.ended - span.started, 1e-9));
    context.fillStyle = pale(span.model);
    context.fillRect(from, top + 4, to - from, ROW - 8);
    context.fillStyle = full(span.model);
    context.fillRect(from, top + 4, solid, ROW - 8);
  }

  describe(lanes) {
    const words = lanes.map((lane) => `${lane.phase} lane ${lane.lane}: ${lane.model ?? "idle"}`);
    this.canvas.setAttribute("aria-label", words.join("; "));
  }
}
