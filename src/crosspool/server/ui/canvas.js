// A canvas sized for the screen's pixels.

export function prepare(canvas, cssHeight) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth || canvas.parentElement.clientWidth;
  canvas.style.height = `${cssHeight}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(cssHeight * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, cssHeight);
  return { context, width };
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (count >= 1024 && index < units.length - 1) {
    count /= 1024;
    index += 1;
  }
  return `${index && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[index]}`;
}
