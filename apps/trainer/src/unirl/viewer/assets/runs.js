// The list of runs.
import { html, useMemo, useState } from "./vendor/htm-preact.module.js";
import { ago, link, number } from "./page.js";

const COLUMNS = [
  ["name", "run"],
  ["state", "state"],
  ["step", "rollouts"],
  ["reward", "reward"],
  ["eval", "held out"],
  ["num_alarms", "alarms"],
  ["changed", "changed"],
  ["recipe", "recipe"],
  ["seed", "seed"],
];

export function Runs({ runs, folder }) {
  const [words, setWords] = useState("");
  const [order, setOrder] = useState({ by: "changed", down: true });
  const [chosen, setChosen] = useState(() => new Set());
  const shown = useMemo(() => sorted(filtered(runs, words), order), [runs, words, order]);
  const sort = (by) => setOrder({ by, down: order.by === by ? !order.down : by === "changed" });
  const toggle = (name) => {
    const next = new Set(chosen);
    next.has(name) ? next.delete(name) : next.add(name);
    setChosen(next);
  };
  const all = shown.length > 0 && shown.every((run) => chosen.has(run.name));
  const few = [...chosen];
  if (!runs.length) {
    return html`<p class="message">No run below ${folder} yet. This page shows one as soon as it begins, for example:
      <code>uv run trainer worlds/arithmetic/grpo</code></p>`;
  }
  return html`<div class="bar">
      <label>Filter <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
      <a class="button" href=${link("curves", { run: few })}>Curves of ${few.length || "all"}</a>
      ${few.length >= 2 && html`<a class="button" href=${link("details", { run: few })}>Compare recipes</a>`}
      <span class="quiet">${shown.length} of ${runs.length} runs in ${folder}</span>
    </div>
    <div class="wide" tabindex="0" role="region" aria-label="Runs">
    <table>
      <thead><tr>
        <th><input type="checkbox" aria-label="all runs" checked=${all}
          onChange=${() => setChosen(all ? new Set() : new Set(shown.map((run) => run.name)))} /></th>
        ${COLUMNS.map(
          ([key, text]) => html`<th aria-sort=${order.by === key ? (order.down ? "descending" : "ascending") : null}>
            <button class="plain" onClick=${() => sort(key)}>${text}${order.by === key ? (order.down ? " ↓" : " ↑") : ""}</button></th>`,
        )}
      </tr></thead>
      <tbody>${shown.map((run) => html`<${Row} key=${run.name} run=${run} chosen=${chosen.has(run.name)} toggle=${toggle} />`)}</tbody>
    </table></div>`;
}

function Row({ run, chosen, toggle }) {
  const change = run.eval_before !== null && run.eval !== null ? run.eval - run.eval_before : null;
  return html`<tr>
    <td><input type="checkbox" aria-label=${run.name} checked=${chosen} onChange=${() => toggle(run.name)} /></td>
    <th scope="row"><a href=${link("curves", { run: run.name })}>${run.name}</a></th>
    <td><span class=${`state ${run.state}`}>${run.state}</span></td>
    <td class="num">${number(run.step)}${run.num_rollouts ? html`<span class="quiet"> / ${run.num_rollouts}</span>` : ""}</td>
    <td class="num">${number(run.reward)}</td>
    <td class="num">${number(run.eval)}${change ? html` <span class="quiet">${change > 0 ? "+" : ""}${number(change, 3)}</span>` : ""}</td>
    <td class="num">${run.num_alarms ? html`<span class="alarm">${run.num_alarms}</span>` : ""}</td>
    <td class="once">${ago(run.changed)}</td>
    <td>${run.recipe}</td>
    <td class="num">${number(run.seed)}</td>
  </tr>`;
}

function filtered(runs, words) {
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => parts.every((part) => `${run.name} ${run.recipe} ${run.state}`.toLowerCase().includes(part)));
}

function sorted(runs, { by, down }) {
  const rank = (run) => run[by] ?? (typeof run[by] === "string" ? "" : -Infinity);
  const compare = (a, b) => {
    const [left, right] = [rank(a), rank(b)];
    const order = typeof left === "string" && typeof right === "string" ? left.localeCompare(right, undefined, { numeric: true }) : left - right;
    return (down ? -order : order) || a.name.localeCompare(b.name, undefined, { numeric: true });
  };
  return [...runs].sort(compare);
}
