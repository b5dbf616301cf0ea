// Why an attempt went where it went: the ways that were compared, the chosen one first, and what was known of
// workers.

import { milliseconds } from "./format.js";
import { PartBar } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

const PARTS = ["queue", "compute", "handoff", "wait"];

/** ``attempt`` with its ``placement``. ``ttft``: the request's, in ms, to compare; null: not to be compared. */
export function Placement({ attempt, ttft, several }) {
  const { considered, workers, tokens } = attempt.placement;
  const [chosen] = considered;
  const most = Math.max(...considered.map((way) => way.ttft_ms), 1e-9);
  const was = ttft === null ? "" : `, was ${milliseconds(ttft)}`;
  const ways = considered.length === 1 ? "the only way" : `the cheapest of ${considered.length} ways`;
  return html`<section class="placement">
    <h4>Why there${several ? `: attempt ${attempt.number}` : ""}</h4>
    <p class="muted">${ways} to answer ${tokens} tokens; expected TTFT ${milliseconds(chosen.ttft_ms)}${was}.
      ${" "}Cost is TTFT, the answer's steps (stream), and the delay that both cause others (harm).</p>
    <div class="scroll" role="group" tabindex="0" aria-label="ways considered"><table class="table ways">
      <caption class="unseen">Ways considered, the chosen one first; in milliseconds</caption>
      <thead><tr><th scope="col">prefill → decode</th><th scope="col" class="number">cost</th>
        <th scope="col" class="number">TTFT</th><td class="share-column"></td>
        ${PARTS.map((part) => html`<th scope="col" class="number" key=${part}>
          <i class=${`dot part-way-${part}`}></i>${part}</th>`)}
        <th scope="col" class="number">stream</th><th scope="col" class="number">harm</th>
        <th scope="col" class="number">cached</th></tr></thead>
      <tbody>${considered.map((way, rank) => html`<${Way} key=${rank} way=${way} rank=${rank} most=${most} />`)}</tbody>
    </table></div>
    <div class="scroll" role="group" tabindex="0" aria-label="workers considered"><table class="table workers">
      <caption class="unseen">What was known of the workers</caption>
      <thead><tr><th scope="col">worker</th><th scope="col">role</th><th scope="col" class="number">tokens waiting</th>
        <th scope="col" class="number">sequences</th><th scope="col" class="number">KV blocks held</th>
        <th scope="col" class="number">prefill, tokens/s</th></tr></thead>
      <tbody>${workers.map((worker) => html`<tr key=${worker.address}>
        <th scope="row"><code>${worker.address}</code></th>
        <td><i class=${`dot part-${worker.role}`}></i>${worker.role}</td>
        <td class="number">${worker.prefill_tokens}</td>
        <td class="number">${worker.sequences}</td><td class="number">${worker.blocks_held}</td>
        <td class="number">${worker.prefill_tokens_per_s.toFixed(0)}</td></tr>`)}</tbody>
    </table></div>
  </section>`;
}

function Way({ way, rank, most }) {
  const shares = PARTS.map((part) => ({ part: `way-${part}`, share: way[`${part}_ms`] / most }));
  return html`<tr class=${rank === 0 ? "chosen" : ""}>
    <th scope="row"><code>${[way.prefill, way.decode].filter(Boolean).join(" → ")}</code>${rank === 0 &&
      html` <span class="pill">chosen</span>`}</th>
    <td class="number">${way.cost_ms.toFixed(1)}</td><td class="number">${way.ttft_ms.toFixed(1)}</td>
    <td class="share-column"><${PartBar} parts=${shares} /></td>
    ${PARTS.map((part) => html`<td class="number" key=${part}>${way[`${part}_ms`].toFixed(1)}</td>`)}
    <td class="number">${way.stream_ms.toFixed(1)}</td><td class="number">${way.harm_ms.toFixed(1)}</td>
    <td class="number">${way.cached_tokens}</td></tr>`;
}
