// The stream of moments from the server; it comes back by itself when the server does.

import { call, eventsOf } from "./access.js";

const INTERVAL_S = 0.5;
const SILENT_MS = 5000; // a stream that says nothing this long is taken for lost
const RETRY_MS = 1000;

// onMoment(stats), onLost(reason), onKeyNeeded(): called as things happen. Never returns.
export async function follow({ onMoment, onLost, onKeyNeeded }) {
  for (;;) {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), SILENT_MS);
    try {
      const response = await call(`stats/stream?interval=${INTERVAL_S}`, { signal: stop.signal });
      if (response.status === 401) {
        clearTimeout(timer);
        await onKeyNeeded();
        continue;
      }
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      for await (const data of eventsOf(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => stop.abort(), SILENT_MS);
        onMoment(JSON.parse(data));
      }
      onLost("the server ended the stream");
    } catch (error) {
      onLost(error.name === "AbortError" ? "no word from the server" : error.message);
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
