// The lanes' steps of the last seconds. A bar's height is a step's time: attention, FFN and transfer on one another.
// Layers take turns within a step, so that this is their shares, not their moments.

import { prepare } from "./canvas.js";
import { full, half, named, pale } from "./colours.js";

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
    for (const [lane, , model, tokens, started, ended, attention, ffn, transfer] of stats.steps) {
      this.spans.push({ lane, model, tokens, started, ended, attention, ffn, transfer });
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
        const spent = { model: lane.model, started: lane.since_s, ended: now, attention: 0, ffn: 0, transfer: null };
        this.bar(context, spent, top, x);
      }
    });
    context.fillStyle = named("--soft");
    const bottom = lanes.length * ROW + 9;
    context.fillText(`${windowS} s ago`, LEFT, bottom);
    context.textAlign = "right";
    context.fillText("now", width, bottom);
    context.textAlign = "left";
    this.describe(lanes, now - windowS);
  }

  bar(context, span, top, x) {
    const from = x(span.started);
    const to = Math.max(from + 1, x(span.ended) - 0.5);
    const seconds = secondsOf(span);
    let bottom = top + ROW - 4;
    for (const [colour, share] of [[full, span.attention], [half, span.ffn ?? 0], [pale, restOf(span, seconds)]]) {
      const height = (ROW - 8) * Math.min(1, share / seconds);
      context.fillStyle = colour(span.model);
      context.fillRect(from, bottom - height, to - from, height);
      bottom -= height;
    }
  }

  describe(lanes, since) {
    const words = lanes.map((lane) => {
      const spans = this.spans.filter((span) => span.lane === lane.lane && span.ended > since);
      const total = spans.reduce((sum, span) => sum + secondsOf(span), 0);
      const share = (part) => Math.round((100 * spans.reduce((sum, span) => sum + (span[part] ?? 0), 0)) / total);
      const shares = total
        ? `, ${share("attention")} % attention, ${share("ffn")} % FFN, ${share("transfer")} % transfer`
        : "";
      return `${lane.phase} lane ${lane.lane}: ${lane.model ?? "idle"}${shares}`;
    });
    this.canvas.setAttribute("aria-label", words.join("; "));
  }
}

// Transfer; where a backend does not tell it apart, everything but attention.
function restOf(span, seconds) {
  return span.transfer === null ? seconds - span.attention - (span.ffn ?? 0) : span.transfer;
}

// Steps whose ends the engine saw in one look have started and ended at one moment; their parts took their time.
function secondsOf(span) {
  const parts = span.attention + (span.ffn ?? 0) + (span.transfer ?? 0);
  return Math.max(span.ended - span.started, parts, 1e-9);
}
