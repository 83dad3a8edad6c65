// Curves of any metric, several runs in one chart.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.module.js";
import { Chart, paint } from "./chart.js";
import { Message, change, color, useData } from "./page.js";

const FIRST = ["reward/mean", "eval/reward", "train/loss", "train/grad_norm", "group/zero_std_ratio", "policy/approx_kl", "policy/entropy", "perf/samples_per_s"];
const MAX_AT_FIRST = 50;
const AGAIN_MS = 800;

export function Curves({ params, runs }) {
  const all = runs.map((run) => run.name);
  const named = params.getAll("run").filter((name) => all.includes(name));
  const chosen = named.length ? named : all.slice(0, MAX_AT_FIRST);
  const words = params.get("find") ?? "";
  const zoom = params.get("from") ? [params.get("from"), params.get("to")] : null;
  const settings = { smooth: Number(params.get("smooth") ?? 0), isLog: params.get("log") === "1", isBand: params.get("band") === "1", zoom };
  // Runs of one band have the colour of its first, whose name it bears.
  const first = new Map();
  for (const run of runs) if (chosen.includes(run.name) && !first.has(run.kin)) first.set(run.kin, run.name);
  const bearer = (run) => (settings.isBand && chosen.includes(run.name) ? first.get(run.kin) : run.name);
  const key = runs.map((run) => `${run.name}\t${bearer(run)}`).join("\n");
  const colors = useMemo(() => new Map(runs.map((run) => [run.name, color(all.indexOf(bearer(run)))])), [key]);
  const { data: names, error } = useData("metrics", { run: chosen }, chosen);
  return html`<${Message} error=${error} />
    <div class="bar">
      <label>Metric <input type="search" placeholder="any name" value=${words} onInput=${(event) => change({ find: event.target.value })} /></label>
      <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${settings.smooth}
        onChange=${(event) => change({ smooth: event.target.value === "0" ? null : event.target.value })} /> <output>${settings.smooth}</output></label>
      <label><input type="checkbox" checked=${settings.isLog} onChange=${(event) => change({ log: event.target.checked ? "1" : null })} /> log scale</label>
      <label><input type="checkbox" checked=${settings.isBand} onChange=${(event) => change({ band: event.target.checked ? "1" : null })} /> seeds as a band</label>
    </div>
    <div class="columns">
      <${Legend} runs=${runs} chosen=${chosen} colors=${colors} />
      <div class="charts">${names && sections(names, words).map(
        ([title, metrics, isOpen]) => html`<${Section} key=${title} ...${{ title, metrics, isOpen, chosen, colors, settings }} />`,
      )}</div>
    </div>`;
}

function Legend({ runs, chosen, colors }) {
  const [words, setWords] = useState("");
  const shown = runs.filter((run) => run.name.toLowerCase().includes(words.toLowerCase()));
  const toggle = (name) => change({ run: chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name] });
  const isPhone = matchMedia("(max-width: 700px)").matches;
  return html`<details class="legend" open=${!isPhone}><summary>${chosen.length} of ${runs.length} runs</summary>
    <input type="search" aria-label="Filter runs" placeholder="filter" value=${words} onInput=${(event) => setWords(event.target.value)} />
    <ul>${shown.map((run) => html`<li key=${run.name}><label><input type="checkbox" checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} />
      <i class="swatch" ref=${paint(colors.get(run.name))}></i> <span>${run.name}</span></label></li>`)}</ul>
  </details>`;
}

// Sections by the first part of a name; what most look for first.
function sections(names, words) {
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (parts.length) {
    const found = names.filter((name) => parts.every((part) => name.toLowerCase().includes(part)));
    return [[`${found.length} metrics`, found, true]];
  }
  const first = FIRST.filter((name) => names.includes(name));
  const components = names.filter((name) => /^reward\/[^/]+\/mean$/.test(name));
  const groups = new Map();
  for (const name of names) {
    const head = name.split("/")[0];
    if (!groups.has(head)) groups.set(head, []);
    groups.get(head).push(name);
  }
  const byHead = [...groups].map(([head, own]) => [head, own, false]);
  const parted = components.length ? [["Reward by component", together(components), components.length > 1]] : [];
  const categories = names.filter((name) => /^eval\/.+\/reward$/.test(name));
  if (categories.length) parted.push(["Held-out reward by category", together(categories), false]);
  return [["Overview", first, true], ...parted, ...byHead];
}

// Several metrics in one chart, then each alone.
const together = (metrics) => (metrics.length > 1 ? [metrics.join("\n"), ...metrics] : metrics);

function Section({ title, metrics, isOpen, chosen, colors, settings }) {
  const [open, setOpen] = useState(isOpen);
  return html`<details class="section" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${title} <span class="quiet">${metrics.filter((metric) => !metric.includes("\n")).length}</span></summary>
    <div class="grid">${open && metrics.map((metric) => html`<${Metric} key=${metric} ...${{ metric, chosen, colors, settings }} />`)}</div>
  </details>`;
}

// A chart asks for its curves when it comes into sight.
function Metric({ metric, chosen, colors, settings }) {
  const place = useRef(null);
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    const sight = new IntersectionObserver(([entry]) => entry.isIntersecting && setSeen(true), { rootMargin: "200px" });
    sight.observe(place.current);
    return () => sight.disconnect();
  }, []);
  return html`<div ref=${place} class="slot">${isSeen && html`<${MetricChart} ...${{ metric, chosen, colors, settings }} />`}</div>`;
}

function MetricChart({ metric, chosen, colors, settings }) {
  const { smooth, isLog, isBand, zoom } = settings;
  const metrics = metric.split("\n");
  const asked = { metric: metrics, run: metrics.length > 1 ? chosen.slice(0, 1) : chosen, smooth: smooth || null, band: isBand ? 1 : null, points: innerWidth < 700 || chosen.length > 20 ? 300 : 600, from: zoom?.[0], to: zoom?.[1] };
  const { data, error, again } = useData("curves", asked, chosen);
  useEffect(() => {
    if (!data || data.is_whole) return;
    const timer = setTimeout(again, AGAIN_MS);
    return () => clearTimeout(timer);
  }, [data]);
  const series = useMemo(
    () => (data?.series ?? []).map((each) => ({
      ...each,
      label: metrics.length > 1 ? each.metric : each.runs.length > 1 ? `${each.name} (${each.runs.length} seeds)` : each.name,
      color: metrics.length > 1 ? color(metrics.indexOf(each.metric)) : colors.get(each.name),
    })),
    [data, colors],
  );
  if (error) return html`<${Message} error=${`${metric}: ${error}`} />`;
  if (!data) return html`<p class="quiet">${metric} ...</p>`;
  const zoomTo = (range) => change({ from: range && range[0].toFixed(2), to: range && range[1].toFixed(2) });
  const title = metrics.length > 1 ? `together, of ${chosen[0]}` : metric;
  return html`<${Chart} title=${title} names=${metrics.length > 1} x=${data.x} series=${series} isLog=${isLog} onZoom=${zoomTo} note=${data.is_whole ? null : "coarse, still reading"} />`;
}
