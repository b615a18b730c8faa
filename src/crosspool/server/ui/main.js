// Wires the stream of moments to the views.

import { setKey } from "./access.js";
import { Charts } from "./charts.js";
import { onSchemeChange } from "./colours.js";
import { follow } from "./feed.js";
import { Timeline } from "./lanes.js";
import { drawModels } from "./models.js";
import { Playground } from "./playground.js";
import { drawKvPools, drawWeightsPools } from "./pools.js";

const at = (selector) => document.querySelector(selector);
const charts = new Charts(at("#charts"), at("#key-of-charts"));
const timeline = new Timeline(at("#lanes"), at("#window"));
const playground = new Playground();
let latest = null;
let heardAt = 0;

function show(stats) {
  latest = stats;
  heardAt = Date.now();
  document.body.classList.remove("stale");
  const { status, detail } = stats.health;
  const running = stats.models.reduce((sum, m) => sum + m.num_prefilling + m.num_decoding + m.num_parked, 0);
  const state = stats.draining ? "draining" : status;
  setStatus([state, running ? `${running} running` : "", detail ?? ""].filter(Boolean).join(", "),
    state === "idle" || state === "busy" ? "good" : "wait");
  at("#version").textContent = stats.version;
  const rates = charts.add(stats);
  drawModels(at("#models tbody"), stats, rates);
  drawPools();
  timeline.add(stats);
  playground.setModels(stats.cards);
}

function drawPools() {
  if (!latest) return;
  drawKvPools(at("#kv-pool"), latest);
  drawWeightsPools(at("#weights-pool"), latest);
}

function lost(reason) {
  document.body.classList.add("stale");
  const since = heardAt ? `, last heard ${Math.round((Date.now() - heardAt) / 1000)} s ago` : "";
  setStatus(`the server does not answer (${reason})${since}; trying again`, "bad");
}

function setStatus(text, kind) {
  const status = at("#status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `status ${kind}`;
}

function askForKey() {
  setStatus("an API key is needed", "wait");
  const form = at("#key-form");
  form.hidden = false;
  at("#key").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(at("#key").value);
      form.hidden = true;
      resolve();
    }, { once: true });
  });
}

addEventListener("resize", () => { drawPools(); timeline.draw(); });
onSchemeChange(() => { if (latest) { drawPools(); timeline.draw(); charts.rebuild(); } });
follow({ onMoment: show, onLost: lost, onKeyNeeded: askForKey });
