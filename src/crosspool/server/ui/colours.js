// One colour for a model everywhere on the page, in light and dark.

const HUES = [207, 27, 145, 325, 262, 50, 182, 0];
const dark = matchMedia("(prefers-color-scheme: dark)");
const order = new Map();

function hue(model) {
  if (!order.has(model)) order.set(model, order.size);
  const index = order.get(model);
  return index < HUES.length ? HUES[index] : Math.round((index * 137.5) % 360);
}

export function full(model) {
  return `hsl(${hue(model)} 65% ${dark.matches ? 62 : 42}%)`;
}

export function half(model) {
  return `hsl(${hue(model)} 55% ${dark.matches ? 48 : 62}%)`;
}

export function pale(model) {
  return `hsl(${hue(model)} 45% ${dark.matches ? 34 : 80}%)`;
}

export function named(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

export function onSchemeChange(redraw) {
  dark.addEventListener("change", redraw);
}
