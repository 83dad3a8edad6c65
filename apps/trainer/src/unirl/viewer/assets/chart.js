// One chart: uPlot with the page's colours, the values under the cursor, and a table of the last values.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";
import { number } from "./page.js";

const { uPlot } = globalThis;
const HEIGHT = 220;
const NUM_UNDER_CURSOR = 8;
export const hexOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// series: [{label, color, y, last, part}]; edges of a band ("low", "high") follow their mean.
// onZoom gets [from, to], or null for all. names: the lines are named above the chart.
export function Chart({ title, x, series, isLog, onZoom, note, names, xLabel = "rollouts" }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [under, setUnder] = useState(null);
  const shape = JSON.stringify([series.map((each) => [each.label, each.color, each.part]), isLog]);

  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(title, series, isLog, place.current.clientWidth, onZoom, setUnder), table(x, series, isLog), place.current);
    };
    draw();
    const resize = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resize.observe(place.current);
    addEventListener("themechange", draw);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", draw);
    return () => {
      resize.disconnect();
      removeEventListener("themechange", draw);
      system.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    plot.current?.setData(table(x, series, isLog));
  }, [x, series]);

  const lines = series.filter((each) => !each.part);
  return html`<figure class="chart">
    <figcaption>${title}${note && html` <span class="quiet">${note}</span>`}
      ${onZoom && html`<button class="plain zoom" onClick=${() => onZoom(null)}>all steps</button>`}</figcaption>
    ${names && html`<ul class="kinds">${lines.map((each) => html`<li><i class="swatch" ref=${paint(each.color)}></i>${each.label}</li>`)}</ul>`}
    <div class="plot" ref=${place} role="img" aria-label=${`${title} over ${xLabel}: ${described(lines)}`}></div>
    ${under && html`<div class="under" aria-hidden="true"><b>${number(under.x)}</b>
      ${under.rows.map((row) => html`<span><i ref=${paint(row.color)}></i>${number(row.value)} ${row.label}</span>`)}</div>`}
    <details class="values"><summary>values</summary><table>
      <thead><tr><th>curve</th><th>last step</th><th>last value</th></tr></thead>
      <tbody>${lines.map((each) => html`<tr><td><i class="swatch" ref=${paint(each.color)}></i>${each.label}</td>
        <td class="num">${number(each.last?.[0])}</td><td class="num">${number(each.last?.[1], 6)}</td></tr>`)}</tbody>
    </table></details>
  </figure>`;
}

// A colour as a style of the element: the page's policy has no styles in its text.
export const paint = (value) => (element) => {
  if (element) element.style.background = value;
};

function described(lines) {
  const few = lines.slice(0, 5).map((each) => `${each.label} ends at ${number(each.last?.[1])}`);
  return `${lines.length} curves. ${few.join("; ")}`;
}

function table(x, series, isLog) {
  // A logarithmic axis has no place for what is not positive.
  const shown = (y) => (isLog ? y.map((value) => (value > 0 ? value : null)) : y);
  return [x, ...series.map((each) => shown(each.y))];
}

function options(title, series, isLog, width, onZoom, setUnder) {
  const [ink, grid] = [hexOf("--quiet"), hexOf("--line")];
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
  const bands = [];
  series.forEach((each, index) => {
    if (each.part === "low") bands.push({ series: [index + 2, index + 1], fill: each.color.replace(")", " / .18)") });
  });
  return {
    width, height: HEIGHT, bands,
    legend: { show: false },
    cursor: { sync: { key: "steps" }, points: { size: 5 }, drag: { x: true, y: false, setScale: !onZoom } },
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
    axes: [axis, { ...axis, size: 56, values: (_, values) => values.map((value) => (value === null ? "" : number(value, 3))) }],
    series: [{}, ...series.map((each) => ({
      label: each.label, stroke: each.part ? "transparent" : each.color, width: each.part ? 0 : 1.5, spanGaps: true,
      points: { show: (u, index) => u.data[index].filter((value) => value !== null).length < 3 },
    }))],
    hooks: {
      setSelect: [(u) => {
        if (onZoom && u.select.width > 4) {
          onZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }
      }],
      setCursor: [(u) => setUnder(u.cursor.event?.type?.startsWith("mouse") || u.cursor.idx !== null ? nearest(u, series) : null)],
    },
  };
}

function nearest(u, series) {
  const { idx, top } = u.cursor;
  if (idx === null || idx === undefined || !u.over.matches(":hover")) return null;
  const at = u.posToVal(top, "y");
  const rows = series
    .map((each, index) => ({ label: each.label, color: each.color, part: each.part, value: lastKnown(u.data[index + 1], idx) }))
    .filter((row) => !row.part && row.value !== null)
    .sort((a, b) => Math.abs(a.value - at) - Math.abs(b.value - at))
    .slice(0, NUM_UNDER_CURSOR);
  return { x: u.data[0][idx], rows };
}

function lastKnown(values, index) {
  for (let place = index; place >= Math.max(0, index - 20); place--) if (values[place] !== null) return values[place];
  return null;
}
