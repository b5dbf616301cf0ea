// KV memory as a map: a field of cells for each worker, in the colours of what its blocks are.

import { bytes, count, percent } from "./format.js";
import { html } from "./vendor/preact-htm.js";
import { blocksOf, roleOf, stateOf, sum } from "./workers.js";

const COLUMNS = 40;
const MOST_CELLS = 320;
const PARTS = [
  { name: "held", field: "blocks_held", told: "read or written by a request or a transfer" },
  { name: "cached", field: "blocks_cached", told: "kept for prompts that begin alike, given up when needed" },
  { name: "free", field: "blocks_free", told: "empty" },
];

/** How many of ``cells`` each part has: the largest remainders round up, and what has any block has a cell. */
function cellsOf(worker, cells) {
  const blocks = blocksOf(worker);
  const exact = PARTS.map(({ field }) => (cells * worker[field]) / blocks);
  const found = exact.map((share) => (share > 0 ? Math.max(1, Math.floor(share)) : 0));
  const order = [0, 1, 2].sort((a, b) => exact[b] - found[b] - (exact[a] - found[a]));
  for (let left = cells - found.reduce((a, b) => a + b, 0), at = 0; left > 0; left -= 1, at += 1) found[order[at % 3]] += 1;
  found[found.indexOf(Math.max(...found))] -= found.reduce((a, b) => a + b, 0) - cells;
  return found;
}

function pathOf(from, many) {
  let path = "";
  for (let cell = from; cell < from + many; cell += 1) path += `M${cell % COLUMNS} ${Math.floor(cell / COLUMNS)}h.86v.8h-.86z`;
  return path;
}

function Cells({ worker, label }) {
  const cells = Math.min(blocksOf(worker), MOST_CELLS);
  const parts = cellsOf(worker, cells);
  let from = 0;
  return html`<svg class="cells" viewBox="0 0 ${COLUMNS} ${Math.ceil(cells / COLUMNS)}" role="img" aria-label=${label}>
    ${PARTS.map(({ name }, at) => {
      const path = pathOf(from, parts[at]);
      from += parts[at];
      return html`<path key=${name} class="cell ${name}" d=${path} />`;
    })}
  </svg>`;
}

function WorkerMemory({ worker }) {
  const state = stateOf(worker);
  const blocks = blocksOf(worker);
  const told = PARTS.map(({ name, field }) => `${count(worker[field])} ${name}`).join(", ");
  return html`<li class="card worker-memory">
    <h3>${worker.address}
      ${state !== "ready" && html` <span class="pill ${state}">${state}</span>`}</h3>
    ${blocks > 0
      ? html`<${Cells} worker=${worker} label=${`KV blocks of ${worker.address}: ${told}`} />
          <p class="figures">
            ${PARTS.map(({ name, field }) => html`<span><i class="swatch ${name}"></i>${count(worker[field])} ${name}</span>`)}
            ${worker.blocks_reserved > 0 && html`<span>${count(worker.blocks_reserved)} promised to handoffs</span>`}
          </p>
          <p class="muted">${count(blocks)} blocks${worker.block_bytes > 0 && ` of ${bytes(worker.block_bytes)}, ${bytes(blocks * worker.block_bytes)}`}</p>
          <${Groups} worker=${worker} />`
      : html`<p class="muted">no report</p>`}
  </li>`;
}

/**
 * What the prefix cache can find, for each group of the model's layers, of a model that has several: held blocks
 * too, if prompts may share them.
 */
function Groups({ worker }) {
  const { kv_groups: groups, blocks_findable: findable } = worker;
  const blocks = blocksOf(worker);
  if (findable.length < 2) return null;
  return html`<dl class="groups">
    ${findable.map(
      (many, at) => html`<div key=${at}>
        <dt>${groups[at]} </dt>
        <dd><svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
            <rect class="cell free" width="100" height="6" /><rect class="cell cached" width=${Math.min(100, (100 * many) / blocks)} height="6" />
          </svg>
          ${count(many)} findable</dd>
      </div>`,
    )}
  </dl>`;
}

function Total({ workers }) {
  const blocks = workers.reduce((total, worker) => total + blocksOf(worker), 0);
  return html`<section class="card" aria-labelledby="kv-all">
    <h2 id="kv-all">KV memory of all workers</h2>
    <table class="table">
      <thead><tr><th scope="col">Blocks</th><th scope="col" class="number">Number</th><th scope="col" class="number">Share</th><th scope="col" class="wide">Meaning</th></tr></thead>
      <tbody>
        ${PARTS.map(
          ({ name, field, told }) => html`<tr key=${name}>
            <th scope="row"><i class="swatch ${name}"></i>${name}</th>
            <td class="number" id="kv-${name}">${count(sum(workers, field))}</td>
            <td class="number">${blocks ? percent(sum(workers, field) / blocks) : "–"}</td>
            <td class="wide muted">${told}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}

const ROLES = ["prefill", "decode", "both", "unknown"];

export function Memory({ data: { workers } }) {
  return html`
    <${Total} workers=${workers} />
    ${ROLES.map((role) => {
      const these = workers.filter((worker) => roleOf(worker) === role);
      const blocks = these.reduce((total, worker) => total + blocksOf(worker), 0);
      return (
        these.length > 0 &&
        html`<section key=${role} aria-labelledby="kv-of-${role}">
          <h2 id="kv-of-${role}" class="of-role"><span class="role ${role}">${role}</span>
            <span class="muted">${blocks ? `${percent(sum(these, "blocks_held") / blocks)} held` : ""}</span></h2>
          <ul class="grid memory">
            ${these.map((worker) => html`<${WorkerMemory} key=${worker.address} worker=${worker} />`)}
          </ul>
        </section>`
      );
    })}
  `;
}
