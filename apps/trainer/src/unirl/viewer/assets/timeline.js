// When what worked: a lane per part of the loop, pool and member.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.module.js";
import { Chart, hexOf, paint } from "./chart.js";
import { Message, change, number, useData } from "./page.js";
import { RunPicker } from "./pickers.js";

const { uPlot } = globalThis;
const LANE = 30;
// Kinds of work by phase or method; their colours differ in lightness too.
const KINDS = {
  generating: { color: "hsl(217 75% 52%)", of: ["rollout", "generate"] },
  scoring: { color: "hsl(36 90% 50%)", of: ["reward", "score", "score_track", "announce", "collect"] },
  training: { color: "hsl(150 60% 36%)", of: ["train"] },
  pushing: { color: "hsl(325 65% 52%)", of: ["sync", "push"] },
  evaluating: { color: "hsl(265 60% 62%)", of: ["eval"] },
  saving: { color: "hsl(190 70% 40%)", of: ["checkpoint", "save"] },
  other: { color: "hsl(220 8% 58%)", of: [] },
};
const kindOf = (what) => {
  const last = what.split(".").at(-1);
  return Object.keys(KINDS).find((kind) => KINDS[kind].of.includes(last)) ?? "other";
};

export function Timeline({ params, runs }) {
  const known = runs.filter((run) => run.has.includes("timeline.jsonl"));
  const newest = [...known].sort((a, b) => (b.changed ?? 0) - (a.changed ?? 0))[0];
  const run = params.getAll("run").find((name) => runs.some((each) => each.name === name)) ?? newest?.name;
  const bounds = params.get("from") === null ? {} : { from: params.get("from"), to: params.get("to") };
  const { data, error } = useData(run ? "timeline" : null, { run, ...bounds }, [run]);
  if (!run) return html`<p class="message">No run here has a timeline. Runs of this version write one.</p>`;
  return html`<div class="bar"><${RunPicker} runs=${runs} chosen=${[run]} />
      ${data && html`<${Window} data=${data} />`}</div>
    <${Message} error=${error} />
    ${data && !data.spans.length && html`<p class="message">${data.start === null ? "This run has no timeline.jsonl: it was written before there was one, or has just begun." : "Nothing worked in this window."}</p>`}
    ${data && data.num_left_out > 0 && html`<p class="quiet">${data.num_left_out} shorter spans are left out; zoom in to see them.</p>`}
    ${data && data.spans.length > 0 && html`<${Lanes} data=${data} /><${Shares} data=${data} /><${Staleness} data=${data} />`}`;
}

function Window({ data }) {
  const { from, to, length } = data;
  const size = to - from;
  const go = (least, most) => change({ from: Math.max(0, least).toFixed(3), to: Math.min(length, most).toFixed(3) });
  return html`<span class="buttons">
    <button onClick=${() => go(from - size * 0.8, to - size * 0.8)} disabled=${from <= 0}>earlier</button>
    <button onClick=${() => go(from + size * 0.8, to + size * 0.8)} disabled=${to >= length}>later</button>
    <button onClick=${() => go(from + size / 4, to - size / 4)}>zoom in</button>
    <button onClick=${() => go(from - size / 2, to + size / 2)}>zoom out</button>
    <button onClick=${() => go(0, length)}>all</button>
    <button onClick=${() => change({ from: null, to: null })}>last rollouts</button></span>
    <span class="quiet">${number(from, 5)} to ${number(to, 5)} of ${number(length, 5)} s</span>`;
}

function Lanes({ data }) {
  const place = useRef(null);
  const [under, setUnder] = useState(null);
  const latest = useRef(data);
  latest.current = data;
  const names = data.lanes.map((lane) => lane.name);
  const shape = JSON.stringify(names);
  useEffect(() => {
    let plot = null;
    const draw = () => {
      plot?.destroy();
      plot = new uPlot(options(place.current.clientWidth, names, latest, setUnder), [[data.from, data.to], [0, 0]], place.current);
    };
    draw();
    place.current.redraw = () => plot.setData([[latest.current.from, latest.current.to], [0, 0]]);
    const resize = new ResizeObserver(() => plot.setSize({ width: place.current.clientWidth, height: names.length * LANE + 50 }));
    resize.observe(place.current);
    addEventListener("themechange", draw);
    return () => {
      resize.disconnect();
      removeEventListener("themechange", draw);
      plot.destroy();
    };
  }, [shape]);
  useEffect(() => place.current.redraw?.(), [data]);
  const busy = data.lanes.map((lane) => `${lane.name} ${Math.round(lane.busy * 100)} % busy`).join(", ");
  return html`<ul class="kinds">${Object.entries(KINDS).map(([kind, { color }]) => html`<li><i class="swatch" ref=${paint(color)}></i>${kind}</li>`)}<li class="quiet">nothing: idle</li></ul>
    <figure class="chart lanes"><div ref=${place} role="img" aria-label=${`lanes over seconds: ${busy}`}></div>
    ${under && html`<div class="under" aria-hidden="true"><b>${under[0]}: ${under[1]}</b><span>${number(under[3] - under[2], 4)} s from ${number(under[2], 6)} s</span>
      ${under[4] !== null && html`<span>rollout ${under[4]}</span>`}${under[5] !== null && html`<span>request ${under[5]}, version ${under[6]}, ${under[4] - under[6]} behind</span>`}</div>`}</figure>`;
}

function options(width, names, latest, setUnder) {
  const [ink, grid] = [hexOf("--quiet"), hexOf("--line")];
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
  return {
    width, height: names.length * LANE + 50, legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false },
    scales: { x: { time: false, range: () => [latest.current.from, latest.current.to] }, y: { range: () => [-names.length, 0] } },
    axes: [{ ...axis, label: "seconds", labelSize: 16, labelFont: "11px system-ui, sans-serif", size: 34 },
      { ...axis, size: 92, grid: { show: false }, splits: () => names.map((_, index) => -index - 0.5), values: () => names.map((name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name)) }],
    series: [{}, { show: false }],
    hooks: {
      draw: [(u) => drawSpans(u, names, latest.current)],
      setSelect: [(u) => {
        if (u.select.width > 4) change({ from: u.posToVal(u.select.left, "x").toFixed(3), to: u.posToVal(u.select.left + u.select.width, "x").toFixed(3) });
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      setCursor: [(u) => setUnder(spanUnder(u, names, latest.current))],
    },
  };
}

function drawSpans(u, names, data) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const row = bbox.height / names.length;
  for (const [lane, what, begin, end] of data.spans) {
    const [left, right] = [u.valToPos(begin, "x", true), u.valToPos(end, "x", true)];
    ctx.fillStyle = KINDS[kindOf(what)].color;
    ctx.fillRect(left, bbox.top + names.indexOf(lane) * row + row * 0.15, Math.max(1, right - left - 0.5), row * 0.7);
  }
  ctx.restore();
}

function spanUnder(u, names, data) {
  const { left, top } = u.cursor;
  if (left === null || left < 0) return null;
  const at = u.posToVal(left, "x");
  const lane = names[Math.floor((top / u.over.clientHeight) * names.length)];
  const slack = (data.to - data.from) / u.over.clientWidth;
  return data.spans.filter((span) => span[0] === lane && span[2] - slack <= at && span[3] + slack >= at).sort((a, b) => a[3] - a[2] - (b[3] - b[2]))[0] ?? null;
}

function Shares({ data }) {
  return html`<div class="wide"><table><caption class="hidden">Seconds in this window</caption><thead><tr><th>lane</th><th>busy</th><th>idle</th><th>seconds of</th></tr></thead>
    <tbody>${data.lanes.map((lane) => html`<tr><th scope="row" class="once">${lane.name}</th><td class="num">${Math.round(lane.busy * 100)} %</td><td class="num">${Math.round(100 - lane.busy * 100)} %</td>
      <td>${Object.entries(lane.seconds).sort((a, b) => b[1] - a[1]).map(([what, seconds]) => `${what} ${number(seconds, 3)}`).join(", ")}</td></tr>`)}</tbody></table></div>`;
}

// How many versions each request of a schedule is behind the rollout that it belongs to.
function Staleness({ data }) {
  const behind = useMemo(() => data.spans.filter((span) => span[1] === "rollout" && span[6] !== null).sort((a, b) => a[2] - b[2]), [data]);
  if (!behind.length) return null;
  const y = behind.map((span) => span[4] - span[6]);
  const series = [{ label: "versions behind", color: "hsl(217 75% 52%)", y, last: [number(behind.at(-1)[2], 5), y.at(-1)] }];
  return html`<h3>Staleness of requests</h3><${Chart} title="rollout - version" x=${behind.map((span) => span[2])} series=${series} xLabel="seconds" />`;
}
