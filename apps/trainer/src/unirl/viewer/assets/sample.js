// One sample: whole, with its parent, the same prompt at other steps, and what is known per token and step.
import { html, useMemo, useState } from "./vendor/htm-preact.module.js";
import { chosenRuns } from "./gallery.js";
import { Card, Facts, Medium, sampleLink } from "./media.js";
import { Message, link, number, useData } from "./page.js";
import { Trace } from "./trace.js";

const MAX_OTHERS = 100;

export function Sample({ params, runs }) {
  const [run] = chosenRuns(params, runs);
  const asked = { run, kind: params.get("kind"), step: params.get("step"), offset: params.get("offset") };
  const { data, error } = useData(run && asked.offset !== null ? "sample" : null, asked, [run]);
  if (error) return html`<${Message} error=${error} />`;
  if (!data) return html`<p class="quiet">${asked.offset === null ? "Choose a sample in the gallery." : "reading ..."}</p>`;
  const { sample, parent, trace } = data;
  const turns = turnsOf(sample);
  return html`<div class="sample">
    <p><a href=${link("gallery", { run })}>samples</a> / <a href=${link("gallery", { run, kind: sample.kind, step: sample.step })}>${sample.kind} ${sample.step}</a> / <a href=${link("groups", { run, kind: sample.kind, step: sample.step, group: sample.group_id })}>its group</a></p>
    <h2 class="prompt">${sample.prompt || "(no prompt)"}</h2>
    ${turns.given.length > 0 && html`<div class="given">${turns.given.map((medium) => html`<${Medium} run=${run} medium=${medium} label="given with the prompt" />`)}</div>`}
    ${parent && html`<section class="parent"><h3>Grew from</h3><a href=${sampleLink(run, parent)}>${parent.track}, reward ${number(parent.scores.reward)}</a>
      <${Medium} run=${run} medium=${parent.media} label=${parent.prompt} /></section>`}
    ${sample.drawn_from && html`<section><h3>Made from</h3><pre class="said" tabindex="0">${sample.drawn_from}</pre></section>`}
    <section class="large"><${Medium} run=${run} medium=${sample.media} label=${sample.prompt} /></section>
    <${Conversation} run=${run} said=${turns.said} />
    <${Facts} sample=${sample} />
    <${Table} sample=${sample} />
    <${Trace} sample=${sample} trace=${trace} />
    <${Others} run=${run} sample=${sample} runs=${runs} />
  </div>`;
}

// What a prompt shows, and each message with the images that it shows: a record has all of them in order.
function turnsOf(sample) {
  const transcript = sample.metadata?.episode?.transcript;
  const said = [];
  let place = 0;
  for (const message of Array.isArray(transcript) ? transcript : []) {
    const next = place + (message.images ?? 0);
    said.push({ ...message, shown: sample.given.slice(place, next) });
    place = next;
  }
  return { given: place > 0 ? said[0].shown : sample.given, said };
}

// What the model and its environment said and showed to each other, turn by turn.
function Conversation({ run, said }) {
  if (said.length < 3) return null;
  return html`<section><h3>Conversation <span class="quiet">${said.length}</span></h3>
    <ol class="turns" tabindex="0" role="region" aria-label="conversation">${said.map(({ role, content, shown }, turn) => html`<li class=${role === "assistant" ? "own" : ""}>
      <span class="quiet">${role}</span>
      ${turn > 0 && shown.length > 0 && html`<div class="given">${shown.map((medium) => html`<${Medium} run=${run} medium=${medium} label=${`shown by ${role} in message ${turn + 1}`} />`)}</div>`}
      ${(content.trim() !== "" || shown.length === 0) && html`<pre class="said">${content.trim()}</pre>`}</li>`)}</ol></section>`;
}

function Table({ sample }) {
  const rows = [
    ["id", sample.sample_id], ["track", sample.track], ["group", sample.group_id],
    ["group size", sample.group_size], ["group reward std", sample.group_reward_std], ["policy version", sample.policy_version], ["ended", sample.end],
    ["tokens", sample.media?.num_tokens],
    ...Object.entries(sample.scores).map(([name, value]) => [`score ${name}`, value]),
    ...Object.entries(sample.counts ?? {}),
    ...Object.entries(sample.metadata ?? {}).map(([name, value]) => [`data: ${name}`, typeof value === "object" ? JSON.stringify(value) : value]),
  ].filter(([, value]) => value !== null && value !== undefined);
  return html`<details><summary>all fields</summary><table><tbody>${rows.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="breaks">${number(value, 6)}</td></tr>`)}</tbody></table></details>`;
}

// The same prompt at other steps, and a slider between two of them.
function Others({ run, sample, runs }) {
  const [other, setOther] = useState("");
  const place = sample.sample_id;
  const asked = { prompt: sample.prompt_id, kind: sample.kind, track: sample.track, sort: "file", down: 0, count: MAX_OTHERS };
  const { data } = useData("samples", { run, ...asked }, [run]);
  const { data: elsewhere } = useData(other ? "samples" : null, { run: other, ...asked }, [other]);
  const same = useMemo(() => [
    ...(data?.samples ?? []).filter((each) => each.sample_id === place || sample.kind !== "eval").map((each) => ({ run, sample: each })),
    ...(elsewhere?.samples ?? []).filter((each) => each.sample_id === place || sample.kind !== "eval").map((each) => ({ run: other, sample: each })),
  ], [data, elsewhere, other, place]);
  if (!data) return null;
  return html`<section><h3>The same prompt at other steps <span class="quiet">${same.length}</span></h3>
    <label>and of the run <select value=${other} onChange=${(event) => setOther(event.target.value)}><option value="">(none)</option>
      ${runs.filter((each) => each.name !== run).map((each) => html`<option value=${each.name}>${each.name}</option>`)}</select></label>
    <div class="along" tabindex="0" role="region" aria-label="the same prompt at other steps">${same.map((each) => html`<${Card} key=${`${each.run} ${each.sample.step} ${each.sample.offset}`} run=${each.run} sample=${each.sample} />`)}</div>
    ${same.length > 1 && html`<${BeforeAfter} key=${other} same=${same} />`}</section>`;
}

function BeforeAfter({ same }) {
  const [left, setLeft] = useState(0);
  const [right, setRight] = useState(same.length - 1);
  const [cut, setCut] = useState(50);
  const pick = (label, value, set) => html`<label>${label} <select value=${value} onChange=${(event) => set(Number(event.target.value))}>
    ${same.map((each, index) => html`<option value=${index}>${each.run} ${each.sample.kind} ${each.sample.step}, reward ${number(each.sample.scores.reward, 3)}</option>`)}</select></label>`;
  const [before, after] = [same[Math.min(left, same.length - 1)], same[Math.min(right, same.length - 1)]];
  const areImages = before.sample.media?.kind === "image" && after.sample.media?.kind === "image";
  return html`<section class="compare"><h3>Before and after</h3><div class="bar">${pick("Left", left, setLeft)}${pick("Right", right, setRight)}</div>
    ${areImages
      ? html`<div class="over"><${Medium} run=${after.run} medium=${after.sample.media} label="after" />
          <div class="top" style=${{ clipPath: `inset(0 ${100 - cut}% 0 0)` }}><${Medium} run=${before.run} medium=${before.sample.media} label="before" /></div>
          <div class="edge" style=${{ left: `${cut}%` }}></div></div>
        <label>Slide <input type="range" min="0" max="100" value=${cut} onInput=${(event) => setCut(Number(event.target.value))} aria-label="where the image before ends" /></label>`
      : html`<div class="beside"><div><${Medium} run=${before.run} medium=${before.sample.media} label="before" /></div><div><${Medium} run=${after.run} medium=${after.sample.media} label="after" /></div></div>`}
  </section>`;
}
