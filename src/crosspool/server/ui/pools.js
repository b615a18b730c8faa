// Both pools as maps of cells, coloured by model.

import { bytes, prepare } from "./canvas.js";
import { full, half, named, pale } from "./colours.js";

const CELL = 13;
const ROWS = 8;

export function drawKvPools(root, stats) {
  for (const pool of stats.pools) {
    const own = stats.models
      .filter((model) => pool.kv_rank in model.frames_by_rank)
      .map((model) => ({ name: model.name, ...model.frames_by_rank[pool.kv_rank] }));
    const shares = [
      ...own.map((model) => ({ size: model.used, colour: full(model.name), text: `${model.name} uses` })),
      ...own.map((model) => ({ size: model.reusable, colour: half(model.name), text: `${model.name} keeps` })),
      ...own.map((model) => ({ size: model.reserved, colour: pale(model.name), text: `${model.name} reserves` })),
    ];
    const size = (frames) => bytes(frames * pool.frame_bytes);
    const reusable = pool.frames_reusable ? `${size(pool.frames_reusable)} reusable, ` : "";
    const label = `${size(pool.frames_used)} used, ${size(pool.frames_reserved)} reserved, ${reusable}` +
      `${size(pool.frames_free)} free of ${size(pool.frames_budget)}`;
    drawMap(root, pool.kv_rank, shares, pool.frames_budget, label, size);
  }
}

export function drawWeightsPools(root, stats) {
  const ranks = [...new Set(stats.cards.flatMap((card) => card.crosspool.weights_ranks))];
  for (const rank of ranks) {
    const shares = stats.cards
      .filter((card) => card.crosspool.weights_ranks.includes(rank))
      .map((card) => ({ size: card.crosspool.bytes_by_rank[rank] ?? 0, colour: full(card.id), text: card.id }));
    const total = shares.reduce((sum, share) => sum + share.size, 0);
    drawMap(root, rank, shares, total, `${bytes(total)} of ${shares.length} models`, bytes);
  }
}

function drawMap(root, name, shares, total, label, format) {
  const box = boxOf(root, name);
  box.querySelector(".what").textContent = name;
  box.querySelector(".label").textContent = label;
  const canvas = box.querySelector("canvas");
  const { context, width } = prepare(canvas, ROWS * CELL);
  const columns = Math.max(1, Math.floor(width / CELL));
  const cells = columns * ROWS;
  context.fillStyle = named("--free");
  for (let cell = 0; cell < cells; cell += 1) fill(context, cell);
  let from = 0;
  let sum = 0;
  for (const share of shares) {
    sum += share.size;
    // What is held shows, however little it is: at least one cell.
    const to = Math.min(cells, Math.max(share.size ? from + 1 : from, Math.round((cells * sum) / Math.max(total, 1))));
    context.fillStyle = share.colour;
    for (let cell = from; cell < to; cell += 1) fill(context, cell);
    from = to;
  }
  const spoken = shares.filter((share) => share.size).map((share) => `${share.text} ${format(share.size)}`);
  canvas.setAttribute("aria-label", `${name}: ${label}. ${spoken.join(", ")}`);
}

// Cells run down the columns, so that a model's share is one block.
function fill(context, cell) {
  context.fillRect(Math.floor(cell / ROWS) * CELL, (cell % ROWS) * CELL, CELL - 2, CELL - 2);
}

function boxOf(root, name) {
  let box = [...root.children].find((child) => child.dataset.name === name);
  if (!box) {
    box = document.createElement("div");
    box.className = "pool";
    box.dataset.name = name;
    box.innerHTML = '<p><span class="what"></span><span class="label"></span></p><canvas role="img"></canvas>';
    root.append(box);
  }
  return box;
}
