// Placeholder until the list of requests and its waterfall are merged.

import { html } from "./vendor/preact-htm.js";

export function Requests() {
  return html`<section class="card"><h2>Requests</h2></section>`;
}
