// Samples of one run, or of several side by side.
import { html, useEffect, useRef } from "./vendor/htm-preact.module.js";
import { Card } from "./media.js";
import { Message, change, useData } from "./page.js";
import { RunPicker } from "./pickers.js";
import { usePages, useRows, useWidth } from "./virtual.js";

const PER_PAGE = 60;
const CARD_WIDTH = 190;
const CARD_HEIGHT = 290;

export function Gallery({ params, runs }) {
  const chosen = chosenRuns(params, runs);
  const { data: facts, error } = useData(chosen.length ? "steps" : null, { run: chosen[0] }, chosen.slice(0, 1));
  if (!chosen.length) return html`<p class="message">No run here has samples. Runs keep some every media_interval rollouts and at every evaluation.</p>`;
  const asked = {
    kind: params.get("kind"), track: params.get("track"), step: params.get("step"), find: params.get("find"),
    prompt: params.get("prompt"), group: params.get("group"), sort: params.get("sort") ?? "file", down: params.get("down") ?? "1",
  };
  return html`<${Message} error=${error} />
    <${Bar} asked=${asked} facts=${facts} chosen=${chosen} runs=${runs} />
    <div class="beside">${chosen.map((run) => html`<${Cards} key=${run} run=${run} asked=${asked} isAlone=${chosen.length === 1} />`)}</div>`;
}

export function chosenRuns(params, runs) {
  const known = runs.map((run) => run.name);
  const named = params.getAll("run").filter((name) => known.includes(name));
  if (named.length) return named;
  const newest = runs.filter((run) => run.has.includes("samples")).sort((a, b) => (b.changed ?? 0) - (a.changed ?? 0));
  return newest.slice(0, 1).map((run) => run.name);
}

export function Bar({ asked, facts, chosen, runs, most = 3, children }) {
  const steps = asked.kind ? facts?.steps[asked.kind] ?? [] : [...new Set([...(facts?.steps.rollout ?? []), ...(facts?.steps.eval ?? [])])].sort((a, b) => a - b);
  const scores = (facts?.scores ?? []).filter((name) => name !== "reward");
  return html`<div class="bar">
    <${RunPicker} runs=${runs} chosen=${chosen} most=${most} />
    <${Choice} name="kind" label="From" value=${asked.kind} options=${[["", "rollouts and evaluations"], ["rollout", "rollouts"], ["eval", "evaluations"]]} />
    <${Choice} name="step" label="Step" value=${asked.step} options=${[["", "all"], ...steps.map((step) => [step, step])]} />
    ${facts?.tracks.length > 1 && html`<${Choice} name="track" label="Track" value=${asked.track} options=${[["", "all"], ...facts.tracks.map((track) => [track, track])]} />`}
    <${Choice} name="sort" label="Sort by" value=${asked.sort} usual="file"
      options=${[["file", "step"], ["reward", "reward"], ["advantage", "advantage"], ["staleness", "staleness"], ...scores.map((score) => [score, score])]} />
    <${Choice} name="down" label="Order" value=${asked.down} usual="1" options=${[["1", "highest first"], ["0", "lowest first"]]} />
    <label>Prompt <input type="search" placeholder="words" value=${asked.find ?? ""} onChange=${(event) => change({ find: event.target.value })} /></label>
    ${(asked.prompt || asked.group) && html`<button onClick=${() => change({ prompt: null, group: null })}>all prompts</button>`}
    ${children}
  </div>`;
}

export function Choice({ name, label, value, options, usual = "" }) {
  return html`<label>${label} <select value=${value ?? usual} onChange=${(event) => change({ [name]: event.target.value === usual ? null : event.target.value })}>
    ${options.map(([key, text]) => html`<option value=${String(key)}>${text}</option>`)}
  </select></label>`;
}

export function Problems({ head }) {
  if (!head) return html`<p class="quiet">reading ...</p>`;
  return html`<${Message} error=${head.error} />
    ${(head.problems ?? []).slice(0, 3).map((problem) => html`<${Message} error=${problem} />`)}
    ${head.files_left_out > 0 && html`<${Message} error=${`${head.files_left_out} older steps are left out: there are too many samples to sort. Choose a step to see them.`} />`}`;
}

function Cards({ run, asked, isAlone }) {
  const place = useRef(null);
  const width = useWidth(place);
  const columns = Math.max(1, Math.floor((width || 1) / CARD_WIDTH));
  const { head, at, need } = usePages("samples", { run, ...asked }, "samples", PER_PAGE, run);
  const total = head?.total ?? 0;
  const { rows, height } = useRows(place, Math.ceil(total / columns), CARD_HEIGHT);
  useEffect(() => {
    if (rows.length && total) need(rows[0].index * columns, Math.min(total, (rows.at(-1).index + 1) * columns) - 1);
  });
  return html`<section class="cards" aria-label=${`samples of ${run}`}>
    <p class="quiet">${isAlone ? "" : html`<b>${run}</b> `}${head ? `${total} samples` : ""}</p>
    <${Problems} head=${head} />
    <div class="scrolls" ref=${place} tabindex="0" role="region" aria-label=${`scrolling samples of ${run}`}>
      <div class="all" style=${{ height: `${height}px` }}>
        ${rows.map((row) => html`<div key=${row.key} class="row" style=${{ transform: `translateY(${row.start}px)`, height: `${row.size}px`, gridTemplateColumns: `repeat(${columns}, minmax(0, 1fr))` }}>
          ${Array.from({ length: columns }, (_, column) => row.index * columns + column).filter((index) => index < total).map((index) => {
            const sample = at(index);
            return sample ? html`<${Card} key=${index} run=${run} sample=${sample} sort=${asked.sort} />` : html`<div key=${index} class="card empty"></div>`;
          })}
        </div>`)}
      </div>
    </div>
  </section>`;
}
