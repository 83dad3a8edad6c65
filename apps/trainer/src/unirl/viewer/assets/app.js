import { html, render, useEffect, useState } from "./vendor/htm-preact.module.js";
import { onLive } from "./api.js";
import { Curves } from "./curves.js";
import { Details } from "./details.js";
import { Gallery } from "./gallery.js";
import { Groups } from "./groups.js";
import { Message, link, useAddress, useData } from "./page.js";
import { Runs } from "./runs.js";
import { Sample } from "./sample.js";
import { Timeline } from "./timeline.js";

const PAGES = {
  runs: ["Runs", Runs],
  curves: ["Curves", Curves],
  gallery: ["Samples", Gallery],
  groups: ["Groups", Groups],
  timeline: ["Timeline", Timeline],
  details: ["Details", Details],
  sample: ["One sample", Sample],
};

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "");
  const choose = (event) => {
    const chosen = event.target.value;
    if (chosen) {
      localStorage.setItem("theme", chosen);
      document.documentElement.dataset.theme = chosen;
    } else {
      localStorage.removeItem("theme");
      delete document.documentElement.dataset.theme;
    }
    setTheme(chosen);
    dispatchEvent(new Event("themechange"));
  };
  return html`<label class="theme"><span class="hidden">Theme</span>
    <select value=${theme} onChange=${choose}>
      <option value="">system</option><option value="light">light</option><option value="dark">dark</option>
    </select></label>`;
}

function Live() {
  const [isLive, setLive] = useState(null);
  useEffect(() => onLive(setLive), []);
  if (isLive === null) return null;
  return html`<span class=${isLive ? "live" : "live off"} role="status">${isLive ? "live" : "viewer ended?"}</span>`;
}

function App() {
  const { page, params } = useAddress();
  const { data, error } = useData("runs", {});
  const [title, Page] = PAGES[page] ?? [null, null];
  useEffect(() => {
    document.title = `${title ?? "?"} - UniRL`;
  }, [title]);
  const kept = new URLSearchParams(params.getAll("run").map((run) => ["run", run]));
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header>
      <a class="brand" href="#/runs">UniRL</a>
      <nav aria-label="Pages">
        ${Object.entries(PAGES).filter(([name]) => name !== "sample").map(
          ([name, [text]]) =>
            html`<a href=${link(name, kept)} aria-current=${name === page ? "page" : null}>${text}</a>`,
        )}
      </nav>
      <${Live} /><${Theme} />
    </header>
    <main id="main" tabindex="-1">
      <${Message} error=${error} />
      ${Page === null
        ? html`<p class="message">There is no page ${page}.</p>`
        : data && html`<${Page} params=${params} runs=${data.runs} folder=${data.folder} />`}
    </main>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

render(html`<${App} />`, document.getElementById("app"));
