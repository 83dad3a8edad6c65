// What a sample is, shown: image, video, sound or text. Texts of samples are text, never markup.
import { html } from "./vendor/htm-preact.module.js";
import { mediaUrl } from "./api.js";
import { link, number } from "./page.js";

export function Medium({ run, medium, label, isSmall }) {
  if (!medium) return html`<p class="quiet">nothing decoded</p>`;
  switch (medium.kind) {
    case "image":
      return html`<img class=${medium.width < 200 ? "pixels" : ""} src=${mediaUrl(run, medium.file)} alt=${label} loading="lazy" decoding="async" />`;
    case "video":
      return medium.file.endsWith(".mp4")
        ? html`<video src=${mediaUrl(run, medium.file)} aria-label=${label} controls loop muted=${!medium.sound} preload="metadata" playsinline></video>`
        : html`<img class=${medium.width < 200 ? "pixels" : ""} src=${mediaUrl(run, medium.file)} alt=${label} loading="lazy" />`;
    case "sound":
      return html`<audio src=${mediaUrl(run, medium.file)} aria-label=${label} controls preload=${isSmall ? "none" : "metadata"}></audio>`;
    case "text":
      return html`<pre class="said" tabindex=${isSmall ? null : 0}>${medium.text === "" ? html`<span class="quiet">(empty)</span>` : medium.text}</pre>`;
    default:
      return html`<p class="quiet">${medium.type ?? medium.kind} is not shown</p>`;
  }
}

export const sampleLink = (run, sample) =>
  link("sample", { run, kind: sample.kind, step: sample.step, offset: sample.offset });

// One sample on a page of many.
export function Card({ run, sample, sort }) {
  const label = `${sample.kind} ${sample.step}: ${sample.prompt.slice(0, 80)}`;
  return html`<article class="card">
    <div class="shows"><${Medium} run=${run} medium=${sample.media} label=${label} isSmall /></div>
    <a class="says" href=${sampleLink(run, sample)} title=${sample.prompt}>${sample.prompt || "(no prompt)"}</a>
    ${sample.drawn_from && html`<p class="from" title=${sample.drawn_from}>from: ${sample.drawn_from}</p>`}
    <${Facts} sample=${sample} sort=${sort} />
  </article>`;
}

export function Facts({ sample, sort }) {
  const facts = [
    [sample.kind === "eval" ? "eval" : "rollout", sample.step],
    ["reward", sample.scores.reward],
    ["advantage", sample.advantage],
    ["staleness", sample.staleness],
  ];
  if (sort && !["file", "reward", "advantage", "staleness"].includes(sort)) facts.push([sort, sample.scores[sort]]);
  return html`<dl class="facts">${facts
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => html`<div class=${name === sort ? "sorted" : ""}><dt>${name}</dt><dd>${number(value, 3)}</dd></div>`)}
    ${sample.error && html`<div class="alarm"><dt>error</dt><dd>${sample.error}</dd></div>`}
    ${sample.group_reward_std === 0 && sample.group_size > 1 && html`<div class="flat"><dt>group</dt><dd>degenerate</dd></div>`}</dl>`;
}
