// Which runs a page shows.
import { html } from "./vendor/htm-preact.module.js";
import { change } from "./page.js";

// One run, or up to `most` side by side.
export function RunPicker({ runs, chosen, most = 1 }) {
  const set = (place, name) => {
    const next = [...chosen];
    if (name) next[place] = name;
    else next.splice(place, 1);
    change({ run: next, step: most === 1 ? undefined : null });
  };
  const options = runs.map((run) => html`<option value=${run.name}>${run.name}</option>`);
  return html`${chosen.map((name, place) => html`<label>${place ? "and" : "Run"} <select value=${name} onChange=${(event) => set(place, event.target.value)}>
      ${chosen.length > 1 && html`<option value="">(not this one)</option>`}${options}</select></label>`)}
    ${chosen.length < most && runs.length > 1 && html`<label><span class="hidden">another run side by side</span>
      <select value="" onChange=${(event) => set(chosen.length, event.target.value)}><option value="">+ side by side</option>${options}</select></label>`}`;
}
