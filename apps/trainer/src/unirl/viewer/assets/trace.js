// What is known of a sample per token or per denoising step: log-probs, ratio, advantage, version.
import { html, useState } from "./vendor/htm-preact.module.js";
import { Chart } from "./chart.js";
import { number } from "./page.js";

const MARKS = { "\n": "↵", "\t": "→", " ": "␣" };
const SHADES = {
  "log-prob": { of: (row) => row.trained ?? row.logp, shade: (value) => [-value / 4, "hsl(25 90% 50% / "] },
  "log-ratio": { of: (row) => row.logRatio, shade: (value) => [Math.abs(value) / 0.4, value > 0 ? "hsl(217 85% 55% / " : "hsl(345 80% 50% / "] },
};

export function Trace({ sample, trace }) {
  if (!trace) {
    if (sample.kind === "eval" || !["text", "image", "video"].includes(sample.media?.kind)) return null;
    return html`<p class="quiet">No log-probs per token or step are known of this sample: it was not trained on, its algorithm has none, or the run was written before they were kept.</p>`;
  }
  const rows = trace.trained_logp.map((trained, index) => {
    const logp = trace.logp?.[index] ?? null;
    return { index, trained, logp, logRatio: trained === null || logp === null ? null : trained - logp };
  });
  const head = html`<p class="quiet">advantage ${number(sample.advantage, 4)}, policy version ${number(sample.policy_version)}, trained in update ${trace.update} of its rollout.
    The ratio is of the forward that trained on it to who sampled it${trace.update > 0 ? ", so that it has what the updates before changed" : ""}.</p>`;
  return trace.kind === "tokens" ? html`<${Tokens} trace=${trace} rows=${rows} sample=${sample} head=${head} />` : html`<${Steps} trace=${trace} rows=${rows} head=${head} />`;
}

function Tokens({ trace, rows, sample, head }) {
  const [by, setBy] = useState("log-prob");
  const [at, setAt] = useState(null);
  const { of, shade } = SHADES[by];
  const shaded = (row) => (element) => {
    const value = of(row);
    const [strength, start] = value === null ? [0, "hsl(0 0% 0% / "] : shade(value);
    if (element) element.style.background = `${start}${Math.min(0.75, strength).toFixed(3)})`;
  };
  const shown = (text) => (text === "" ? "□" : text.replace(/[\n\t]|^ | $/g, (mark) => MARKS[mark]));
  const row = at === null ? null : rows[at];
  return html`<section><h3>Tokens <span class="quiet">${rows.length}${sample.media?.num_tokens > rows.length ? ` of ${sample.media.num_tokens}` : ""}</span></h3>${head}
    <label>Shade by <select value=${by} onChange=${(event) => setBy(event.target.value)}>${Object.keys(SHADES).map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
    <p class="tokens">${rows.map((each) => html`<button key=${`${by} ${each.index}`} class=${`token${each.trained === null ? " untrained" : ""}`} ref=${shaded(each)} onMouseEnter=${() => setAt(each.index)} onFocus=${() => setAt(each.index)}
      aria-label=${`token ${each.index}: ${trace.texts[each.index]}, log-prob ${number(each.logp)}, ratio ${ratio(each)}`}>${shown(trace.texts[each.index])}</button>`)}</p>
    <p class="reading" aria-live="polite">${row === null ? html`<span class="quiet">Point at a token, or reach it by the Tab key.</span>`
      : html`<b>${row.index}</b> <code>${JSON.stringify(trace.texts[row.index])}</code> id ${trace.tokens[row.index]}, log-prob ${number(row.logp)} when sampled${row.trained === null ? ", not trained" : html`, ${number(row.trained)} when trained, ratio ${ratio(row)}`}`}</p>
    <${Rows} rows=${rows} first="token" label=${(each) => JSON.stringify(trace.texts[each.index])} sample=${sample} /></section>`;
}

function Steps({ trace, rows, head }) {
  const order = rows.map((row) => row.index).sort((a, b) => trace.steps[a] - trace.steps[b]);
  const pick = (of) => order.map((index) => of(rows[index]));
  const x = order.map((index) => trace.steps[index]);
  const line = (label, color, y) => ({ label, color, y, last: [x.at(-1), y.at(-1)] });
  const ratios = pick((row) => (row.logRatio === null ? null : Math.exp(row.logRatio)));
  return html`<section><h3>Denoising steps <span class="quiet">${rows.length}</span></h3>${head}
    <div class="grid"><${Chart} title="log-prob" names xLabel="denoising steps" x=${x} series=${[line("when sampled", "hsl(25 90% 50%)", pick((row) => row.logp)), line("when trained", "hsl(217 75% 52%)", pick((row) => row.trained))]} />
      ${ratios.some((value) => value !== null) && html`<${Chart} title="ratio" xLabel="denoising steps" x=${x} series=${[line("ratio", "hsl(150 60% 40%)", ratios)]} />`}</div>
    <${Rows} rows=${order.map((index) => rows[index])} first="step" label=${(each) => `${trace.steps[each.index]} (sigma ${trace.sigmas[each.index]})`} /></section>`;
}

const ratio = (row) => (row.logRatio === null ? "unknown" : number(Math.exp(row.logRatio), 6));

function Rows({ rows, first, label }) {
  return html`<details><summary>as a table</summary><div class="wide tall" tabindex="0" role="region" aria-label=${`values per ${first}`}><table>
    <thead><tr><th>${first}</th><th>log-prob when sampled</th><th>when trained</th><th>ratio</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.index}><th scope="row">${label(row)}</th><td class="num">${number(row.logp, 6)}</td><td class="num">${row.trained === null ? "not trained" : number(row.trained, 6)}</td><td class="num">${ratio(row)}</td></tr>`)}</tbody></table></div></details>`;
}
