// The API key, kept for this tab only, and requests that carry it.

const STORED = "crosspool-api-key";
const ROOT = new URL("..", document.baseURI);

export function setKey(key) {
  sessionStorage.setItem(STORED, key);
}

// fetch of a route of this server, wherever a proxy has put it.
export function call(path, options = {}) {
  const key = sessionStorage.getItem(STORED);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
}

// Data of the server-sent events of a response, as text.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection is gone already
  }
}
