// Asks the server, and hears from it which runs have changed.

export async function get(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") query.append(name, each);
  }
  const response = await fetch(`api/${path}?${query}`);
  const text = await response.text();
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error(text || response.statusText);
  }
  if (!response.ok) throw new Error(content.error ?? response.statusText);
  return content;
}

export const mediaUrl = (run, file) => `media?${new URLSearchParams({ run, file })}`;

const listeners = new Set();
const states = new Set();
let source = null;
let wasLost = false;

// Calls back with the names of runs that changed; null after a gap, where any may have. Returns what ends that.
export function onChange(callback) {
  listeners.add(callback);
  connect();
  return () => listeners.delete(callback);
}

// Calls back with true while the server is heard.
export function onLive(callback) {
  states.add(callback);
  connect();
  return () => states.delete(callback);
}

function connect() {
  if (source) return;
  source = new EventSource("api/events");
  source.onmessage = (event) => {
    const runs = new Set(JSON.parse(event.data));
    for (const listener of listeners) listener(runs);
  };
  source.onopen = () => {
    states.forEach((state) => state(true));
    if (wasLost) listeners.forEach((listener) => listener(null));
    wasLost = false;
  };
  source.onerror = () => {
    wasLost = true;
    states.forEach((state) => state(false));
    // A browser gives up where the answer is an error.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => ((source = null), connect()), 5000);
  };
}
