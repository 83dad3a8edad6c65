// Groups as rows: the samples that are compared with each other.
import { html, useEffect, useRef } from "./vendor/htm-preact.module.js";
import { Chart } from "./chart.js";
import { Bar, Problems, chosenRuns } from "./gallery.js";
import { Card } from "./media.js";
import { Message, change, number, useData } from "./page.js";
import { usePages, useRows } from "./virtual.js";

const PER_PAGE = 10;
const ROW_HEIGHT = 330;

export function Groups({ params, runs }) {
  const [run] = chosenRuns(params, runs);
  const { data: facts, error } = useData(run ? "steps" : null, { run }, [run]);
  if (!run) return html`<p class="message">No run here has samples.</p>`;
  const asked = {
    kind: params.get("kind") ?? "rollout", track: params.get("track"), step: params.get("step"), find: params.get("find"),
    prompt: params.get("prompt"), group: params.get("group"), sort: params.get("sort") ?? "file", down: params.get("down") ?? "1",
    degenerate: params.get("degenerate"),
  };
  return html`<${Message} error=${error} />
    <${Bar} asked=${asked} facts=${facts} chosen=${[run]} runs=${runs} most=${1}>
      <label><input type="checkbox" checked=${asked.degenerate === "1"} onChange=${(event) => change({ degenerate: event.target.checked ? "1" : null })} /> degenerate alone</label>
    <//>
    <${Rows} run=${run} asked=${asked} />`;
}

function Rows({ run, asked }) {
  const place = useRef(null);
  const { head, at, need } = usePages("groups", { run, ...asked }, "groups", PER_PAGE, run);
  const total = head?.total ?? 0;
  const { rows, height } = useRows(place, total, ROW_HEIGHT);
  useEffect(() => {
    if (rows.length && total) need(rows[0].index, rows.at(-1).index);
  });
  return html`<p class="quiet">${head ? `${total} groups, ${head.degenerate} degenerate: all rewards equal, so that they teach nothing` : ""}</p>
    <${Problems} head=${head} />
    <div class="overview"><${Curve} curve=${head?.curve} /></div>
    <div class="scrolls" ref=${place} tabindex="0" role="region" aria-label="groups">
      <div class="all" style=${{ height: `${height}px` }}>
        ${rows.map((row) => html`<div key=${row.key} class="row group" style=${{ transform: `translateY(${row.start}px)`, height: `${row.size}px` }}>
          <${Group} run=${run} group=${at(row.index)} sort=${asked.sort} /></div>`)}
      </div>
    </div>`;
}

// Rewards of groups over steps: their mean between the lowest and the highest group.
function Curve({ curve }) {
  if (!(curve?.steps.length > 1)) return null;
  const line = (y, part) => ({ label: part ?? "mean of groups", part, color: "hsl(217 75% 52%)", y, last: [curve.steps.at(-1), y.at(-1)] });
  return html`<${Chart} title="reward of groups" note="between the lowest and the highest group" x=${curve.steps} series=${[line(curve.mean), line(curve.low, "low"), line(curve.high, "high")]} />`;
}

function Group({ run, group, sort }) {
  if (!group) return html`<div class="card empty"></div>`;
  const some = group.size && group.samples.length < group.size ? `${group.samples.length} of ${group.size} recorded` : `${group.samples.length} samples`;
  return html`<section class=${group.is_degenerate ? "strip flat" : "strip"}>
    <h3>${group.is_degenerate && html`<span class="badge">degenerate</span> `}<span class="prompt" title=${group.prompt}>${group.prompt || "(no prompt)"}</span></h3>
    <p class="quiet">${group.kind === "eval" ? "evaluation" : "rollout"} ${group.step}, ${group.track}: ${some}, reward ${number(group.mean, 3)}, std ${number(group.std, 3)}</p>
    <div class="along" tabindex="0" role="region" aria-label=${`samples of the group ${group.prompt.slice(0, 60)}`}>
      ${group.samples.map((sample) => html`<${Card} key=${sample.offset} run=${run} sample=${sample} sort=${sort} />`)}</div>
  </section>`;
}
