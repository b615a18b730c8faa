// The table of models.

import { bytes } from "./canvas.js";
import { full } from "./colours.js";

export function drawModels(body, stats, rates) {
  const loads = new Map(stats.models.map((model) => [model.name, model]));
  body.replaceChildren(...stats.cards.map((card) => row(card, loads.get(card.id), stats, rates)));
}

function row(card, load, stats, rates) {
  const line = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = full(card.id);
  name.append(swatch, card.id);
  line.append(name, cell(stateOf(card, stats), false));
  const running = load ? load.num_prefilling + load.num_decoding + load.num_parked : "-";
  const tbt = stats.tbt_s[card.id];
  const values = [
    running,
    load ? load.num_queued : "-",
    load ? `${load.pages_used} + ${load.pages_reserved}` : "-",
    bytes(card.crosspool.weights_bytes),
    rates.tokens[card.id] == null ? "-" : rates.tokens[card.id].toFixed(0),
    ms(stats.ttft_s[card.id]?.p50),
    tbt ? `${ms(tbt.p50)} / ${ms(tbt.p99)}` : "-",
  ];
  line.append(...values.map((value) => cell(value, true)));
  return line;
}

function stateOf(card, stats) {
  const { state, loaded_bytes: loaded, total_bytes: total } = card.crosspool;
  if (state === "loading" && total) return `loading ${Math.floor((100 * loaded) / total)} %`;
  return state === "ready" ? (stats.model_health?.[card.id]?.status ?? state) : state;
}

function cell(value, isNumber) {
  const found = document.createElement("td");
  found.textContent = value;
  if (isNumber) found.className = "num";
  return found;
}

function ms(seconds) {
  return seconds == null ? "-" : `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
}
