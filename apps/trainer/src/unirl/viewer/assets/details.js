// Recipe and its differences between runs, log, alarms, checkpoints.
import { html, useState } from "./vendor/htm-preact.module.js";
import { Message, number, useData } from "./page.js";
import { RunPicker } from "./pickers.js";

export function Details({ params, runs }) {
  const known = runs.map((run) => run.name);
  const named = params.getAll("run").filter((name) => known.includes(name));
  const chosen = named.length ? named : known.slice(0, 1);
  if (!chosen.length) return html`<p class="message">There is no run yet.</p>`;
  return html`<div class="bar"><${RunPicker} runs=${runs} chosen=${chosen} most=${8} /></div>
    <${Recipes} chosen=${chosen} />
    ${chosen.map((run) => html`<${Run} key=${run} run=${run} isAlone=${chosen.length === 1} />`)}`;
}

function Recipes({ chosen }) {
  const [words, setWords] = useState("");
  const [onlyDiffers, setOnlyDiffers] = useState(true);
  const { data, error } = useData("recipes", { run: chosen }, chosen);
  if (!data) return html`<${Message} error=${error} />`;
  const hides = onlyDiffers && chosen.length > 1;
  const rows = data.rows.filter((row) => (!hides || row.differs) && row.key.toLowerCase().includes(words.toLowerCase()));
  return html`<section><h2>Recipe</h2><div class="bar">
      <label>Key <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
      ${chosen.length > 1 && html`<label><input type="checkbox" checked=${onlyDiffers} onChange=${(event) => setOnlyDiffers(event.target.checked)} /> differences alone</label>`}
      <span class="quiet">${rows.length} of ${data.rows.length} keys</span></div>
    <div class="wide tall" tabindex="0" role="region" aria-label="recipe"><table class="mono">
      <thead><tr><th>key</th>${data.runs.map((run) => html`<th>${run}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.key} class=${row.differs && !hides ? "differs" : ""}><th scope="row">${row.key}</th>
        ${row.values.map((value) => html`<td class="breaks">${value ?? html`<span class="quiet">not set</span>`}</td>`)}</tr>`)}</tbody></table></div></section>`;
}

function Run({ run, isAlone }) {
  return html`<section>${!isAlone && html`<h2>${run}</h2>`}<${Alarms} run=${run} /><${Checkpoints} run=${run} /><${Log} run=${run} /></section>`;
}

function Alarms({ run }) {
  const { data, error } = useData("alerts", { run }, [run]);
  return html`<h2>Alarms</h2><${Message} error=${error} />
    ${data && !data.length && html`<p class="quiet">none</p>`}
    ${data?.length > 0 && html`<div class="wide"><table><thead><tr><th>rollout</th><th>alarm</th><th>what it says</th></tr></thead>
      <tbody>${data.map((alarm) => html`<tr><td class="num">${number(alarm.step)}</td><th scope="row" class="alarm">${alarm.alarm}</th><td>${alarm.text}</td></tr>`)}</tbody></table></div>`}`;
}

function Checkpoints({ run }) {
  const { data, error } = useData("checkpoints", { run }, [run]);
  if (!data) return html`<${Message} error=${error} />`;
  return html`<h2>Checkpoints</h2>
    ${!data.checkpoints.length && html`<p class="quiet">none yet</p>`}
    ${data.checkpoints.length > 0 && html`<p>Continue from the newest:</p><${Command} text=${data.continue} />`}
    ${data.checkpoints.map((each) => html`<details open=${each.is_newest}><summary>after ${each.step} rollouts${each.is_newest ? ", newest" : ""}${each.is_best ? `, best: ${number(each.score)}` : ""}</summary>
      ${each.commands.map(([label, text]) => html`<p class="quiet">${label}</p><${Command} text=${text} />`)}</details>`)}`;
}

function Command({ text }) {
  const [said, setSaid] = useState("copy");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("copied");
    } catch {
      setSaid("select it"); // a page without https elsewhere than localhost may not copy
    }
    setTimeout(() => setSaid("copy"), 1500);
  };
  return html`<div class="command"><code>${text}</code><button onClick=${copy} aria-label=${`copy ${text}`}>${said}</button></div>`;
}

function Log({ run }) {
  const { data, error } = useData("log", { run }, [run]);
  if (!data) return html`<${Message} error=${error} />`;
  return html`<h2>Log</h2>${data.file === null
    ? html`<p class="quiet">This run has no run.log: it was written before there was one.</p>`
    : html`<p class="quiet">${data.file}${data.is_cut ? ", its end" : ""}</p><pre class="log" tabindex="0">${data.text}</pre>`}`;
}
