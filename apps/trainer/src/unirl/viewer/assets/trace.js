// What is known of a sample per token or per denoising step.
import { html } from "./vendor/htm-preact.module.js";

export function Trace({ sample }) {
  if (!sample.trace) return null;
  return html`<p></p>`;
}
