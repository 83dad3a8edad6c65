// A long list of which only what is in sight is in the page, and only pages of it are asked for.
import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "./vendor/htm-preact.module.js";
import { get, onChange } from "./api.js";

globalThis.process ??= { env: { NODE_ENV: "production" } }; // what virtual-core asks of its bundler
const { Virtualizer, elementScroll, observeElementOffset, observeElementRect } = await import("./vendor/virtual-core/index.js");

// Rows of one height that are in sight: [{index, start, size}], and the height of all.
export function useRows(element, count, size) {
  const [, redraw] = useReducer((number) => number + 1, 0);
  const virtual = useRef(null);
  const options = {
    count, overscan: 3, getScrollElement: () => element.current, estimateSize: () => size,
    scrollToFn: elementScroll, observeElementRect, observeElementOffset, onChange: () => redraw(),
  };
  virtual.current ??= new Virtualizer(options);
  virtual.current.setOptions(options);
  useLayoutEffect(() => virtual.current._didMount(), []);
  useLayoutEffect(() => virtual.current._willUpdate());
  useLayoutEffect(() => virtual.current.measure(), [size]);
  return { rows: virtual.current.getVirtualItems(), height: virtual.current.getTotalSize() };
}

// Entries of a long answer of the server, page by page: `need(first, last)` asks for those that are not there yet.
export function usePages(path, params, field, perPage, run) {
  const key = JSON.stringify([path, params]);
  const state = useRef(null);
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [head, setHead] = useState(null);
  if (state.current?.key !== key) state.current = { key, pages: new Map(), asked: new Set() };
  const load = async (page, own = state.current) => {
    if (own.asked.has(page)) return;
    own.asked.add(page);
    try {
      const found = await get(path, { ...params, first: page * perPage, count: perPage });
      if (own !== state.current) return;
      own.pages.set(page, found[field]);
      setHead({ ...found, key, error: null });
    } catch (error) {
      own.asked.delete(page);
      if (own === state.current) setHead((before) => ({ total: 0, ...before, key, error: error.message }));
    }
    redraw();
  };
  useEffect(() => {
    load(0);
    return onChange((changed) => {
      if (changed !== null && !changed.has(run)) return;
      state.current.asked = new Set();
      const shown = [...state.current.pages.keys()].slice(-4);
      for (const page of new Set([0, ...shown])) load(page);
    });
  }, [key]);
  return {
    head: head?.key === key ? head : null,
    at: (index) => state.current.pages.get(Math.floor(index / perPage))?.[index % perPage],
    need: (first, last) => {
      for (let page = Math.floor(first / perPage); page <= Math.floor(last / perPage); page++) load(page);
    },
  };
}

// Width of an element, as it changes.
export function useWidth(element) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    watch.observe(element.current);
    return () => watch.disconnect();
  }, []);
  return width;
}
