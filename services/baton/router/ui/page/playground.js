// Placeholder until the playground is merged.

import { html } from "./vendor/preact-htm.js";

export function Playground() {
  return html`<section class="card"><h2>Playground</h2></section>`;
}
