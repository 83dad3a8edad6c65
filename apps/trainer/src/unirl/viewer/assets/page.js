// What pages share: the address, loading of data, small pieces.
import { html, useEffect, useState, useRef, useCallback } from "./vendor/htm-preact.module.js";
import { get, onChange } from "./api.js";

// The address: #/page?name=value. Everything that a page shows follows from it, so links and the back button work.
function parseHash() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path || "runs", params: new URLSearchParams(query ?? "") };
}

export function useAddress() {
  const [address, setAddress] = useState(parseHash);
  useEffect(() => {
    const follow = () => setAddress(parseHash());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return address;
}

export function link(page, params) {
  const query = new URLSearchParams();
  const pairs = params instanceof URLSearchParams ? [...params] : Object.entries(params ?? {});
  for (const [name, value] of pairs) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") query.append(name, each);
  }
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

// Changes some values of the address; null removes one.
export function change(changes, { replace = true } = {}) {
  const { page, params } = parseHash();
  for (const [name, value] of Object.entries(changes)) {
    params.delete(name);
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") params.append(name, each);
  }
  const next = link(page, params);
  if (next === location.hash) return;
  if (replace) {
    history.replaceState(null, "", next);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = next;
  }
}

// {data, error} of a request, asked again when the request changes and when one of `runs` does (all with null).
export function useData(path, params, runs = null) {
  const [state, setState] = useState({ data: null, error: null });
  const key = path === null ? null : JSON.stringify([path, params]);
  const asked = useRef(0);
  const ask = useCallback(async () => {
    if (key === null) return;
    const number = ++asked.current;
    try {
      const data = await get(path, params);
      if (number === asked.current) setState({ data, error: null });
    } catch (error) {
      if (number === asked.current) setState((before) => ({ data: before.data, error: error.message }));
    }
  }, [key]);
  useEffect(() => {
    ask();
    return onChange((changed) => {
      if (changed === null || runs === null || runs.some((run) => changed.has(run))) ask();
    });
  }, [key, JSON.stringify(runs)]);
  return { ...state, again: ask };
}

export const Message = ({ error }) => (error ? html`<p class="message" role="alert">${error}</p>` : null);

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  return size >= 1e6 || (size < 1e-3 && size > 0) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function ago(seconds) {
  if (!seconds) return "";
  const passed = Date.now() / 1000 - seconds;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  }
  return `${Math.max(0, Math.floor(passed))} s ago`;
}

const HUES = [217, 25, 145, 340, 275, 185, 50, 0, 95, 305];
// Colours that differ for the first ten and stay legible on both themes.
export const color = (index) =>
  `hsl(${(HUES[index % HUES.length] + 17 * Math.floor(index / HUES.length)) % 360} 70% ${index % 20 < 10 ? 50 : 40}%)`;
