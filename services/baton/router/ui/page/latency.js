// Where the time of requests goes, what waits, and how many requests meet their targets.

import { HeatMap, Lines, StackedArea } from "./charts.js";
import { count, milliseconds, percent, rate } from "./format.js";
import { html } from "./vendor/preact-htm.js";

const STAGES = [
  { key: "part-1", stage: "prepare", name: "prepare", told: "read, checked, tokenized" },
  { key: "part-2", stage: "admission", name: "admission", told: "the tenant's limits, and the queue" },
  { key: "part-3", stage: "placement", name: "placement", told: "until workers are chosen and told" },
  { key: "part-4", stage: "prefill_queue", name: "prefill queue", told: "until a worker begins to compute" },
  { key: "part-5", stage: "prefill", name: "prefill", told: "until the first token is at the router" },
];
const HANDOFF = [
  { key: "part-2", stage: "flush", name: "flush", told: "the last blocks are sent" },
  { key: "part-3", stage: "commit", name: "commit", told: "until the request is decode's" },
  { key: "part-4", stage: "queue", name: "queue", told: "until decode's first step with it" },
  { key: "decode", stage: "first_step", name: "first step", told: "that step" },
];
const MISSED = { none: "met all targets", ttft: "late first token", itl: "late tokens", error: "ended in an error" };
const TENANT_AREAS = 6;

/** The share of a point's requests that met their targets; null without any. */
export function goodputShare(point) {
  const all = Object.values(point?.slo ?? {}).reduce((total, each) => total + each, 0);
  return all > 0 ? point.slo.none / all : null;
}

function Card({ id, title, wide, children }) {
  return html`<section class="card ${wide ? "wide-card" : ""}" aria-labelledby=${id}>
    <h2 id=${id}>${title}</h2>
    ${children}
  </section>`;
}

/** A duration taken apart: an area for each part, and its figures as a table. */
function Parts({ id, title, data, parts, of, since }) {
  const series = parts.map(({ key, name, stage }) => ({ key, name, of: (point) => of(point)[stage] ?? null }));
  const last = data.points.at(-1);
  return html`<${Card} id=${id} title=${title}>
    <${StackedArea} data=${data} title="${title}, as stacked areas; the table below has the figures" series=${series} form=${milliseconds} />
    <table class="table">
      <thead><tr>
        <th scope="col">Part</th><th scope="col" class="wide">Until</th>
        <th scope="col" class="number">Mean, 10 s</th><th scope="col" class="number">since start</th><th scope="col" class="number">Observed</th>
      </tr></thead>
      <tbody>
        ${parts.map(({ key, stage, name, told }) => {
          const all = since[stage] ?? { number: 0, seconds: 0 };
          return html`<tr key=${stage} data-stage=${stage}>
            <th scope="row"><i class="swatch ${key}"></i>${name}</th>
            <td class="wide muted">${told}</td>
            <td class="number">${milliseconds(last ? of(last)[stage] : null)}</td>
            <td class="number">${milliseconds(all.number ? (1e3 * all.seconds) / all.number : null)}</td>
            <td class="number">${count(all.number)}</td>
          </tr>`;
        })}
      </tbody>
    </table>
  <//>`;
}

function TokenGaps({ data }) {
  const last = data.points.at(-1);
  return html`<${Card} id="itl-map" title="Between tokens (ITL)">
    <p class="figures">
      <span>p50 <b>${milliseconds(last?.itl_p50)}</b></span><span>p99 <b>${milliseconds(last?.itl_p99)}</b></span>
      <span class="muted">the stronger the colour, the more of the gaps</span>
    </p>
    <${HeatMap} data=${data} bounds=${data.itl_bounds} of=${(point) => point.itl}
      title="Gaps between tokens over time, in buckets of their length" form=${(bound) => milliseconds(1e3 * bound)} />
  <//>`;
}

function Quantiles({ data }) {
  const series = [
    { key: "part-5", name: "p50", of: (point) => point.ttft_p50 },
    { key: "bad", name: "p99", of: (point) => point.ttft_p99 },
  ];
  return html`<${Card} id="ttft-lines" title="Time to first token">
    <${Lines} data=${data} title="p50 and p99 of the time to first token" series=${series} form=${milliseconds} />
  <//>`;
}

function Rates({ data }) {
  const tokens = [
    { key: "decode", name: "generated", of: (point) => point.token_rate },
    { key: "prefill", name: "of prompts", of: (point) => point.prompt_rate },
  ];
  return html`<${Card} id="rates" title="Tokens per second">
    <${Lines} data=${data} title="Tokens per second, generated and of prompts" series=${tokens} form=${rate} />
  <//>`;
}

function Load({ data }) {
  const requests = [
    { key: "accent", name: "running", of: (point) => point.in_flight },
    { key: "warn", name: "waiting", of: (point) => point.waiting },
  ];
  return html`<${Card} id="load" title="Requests">
    <${Lines} data=${data} title="Requests running and waiting" series=${requests} form=${count} least=${4} />
  <//>`;
}

function Tenants({ data }) {
  const tenants = [...data.tenants].sort((a, b) => b.waiting - a.waiting || b.token_rate - a.token_rate);
  const shown = tenants.slice(0, TENANT_AREAS);
  const series = shown.map(({ tenant }, at) => ({
    key: `tenant-${at}`,
    name: tenant || "everybody",
    of: (point) => point.tenants[tenant] ?? 0,
  }));
  return html`<${Card} id="queue" title="Queue by tenant">
    ${series.length > 0 && html`<${StackedArea} data=${data} title="Waiting requests by tenant; the table below has the figures" series=${series} form=${count} least=${4} />`}
    <table class="table">
      <thead><tr>
        <th scope="col">Tenant</th><th scope="col" class="number">Waiting</th><th scope="col" class="number">Open</th>
        <th scope="col" class="number">Ended tokens/s</th>
        <th scope="col" class="number">Refused</th>
      </tr></thead>
      <tbody>
        ${tenants.map(
          (each) => html`<tr key=${each.tenant} data-tenant=${each.tenant}>
            <th scope="row">${each.tenant || "everybody"}</th>
            <td class="number">${count(each.waiting)}</td><td class="number">${count(each.open)}</td>
            <td class="number">${rate(each.token_rate)}</td><td class="number">${count(each.refused)}</td>
          </tr>`,
        )}
        ${tenants.length === 0 && html`<tr><td colspan="5" class="muted">no request has come yet</td></tr>`}
      </tbody>
    </table>
    <p class="muted">Ended tokens/s: of prompts and answers of requests that have ended.</p>
    ${data.tenants_left_out > 0 && html`<p class="muted">${count(data.tenants_left_out)} more tenants, with fewer requests waiting or fewer tokens, are left out.</p>`}
  <//>`;
}

function Goodput({ data }) {
  const { targets, slo } = data;
  if (targets.ttft === null && targets.itl === null) {
    return html`<${Card} id="slo" title="Goodput">
      <p class="muted">There are no targets: start the router with <code>--slo-ttft</code> or <code>--slo-itl</code>.</p>
    <//>`;
  }
  const named = [
    targets.ttft !== null && `first token within ${milliseconds(1e3 * targets.ttft)}`,
    targets.itl !== null && `99 % of tokens within ${milliseconds(1e3 * targets.itl)}`,
  ];
  const all = Object.values(slo).reduce((total, each) => total + each, 0);
  const rows = Object.entries(slo).sort(([, a], [, b]) => b - a);
  return html`<${Card} id="slo" title="Goodput">
    <p class="muted">Requests with the ${named.filter(Boolean).join(", and ")}.</p>
    <${Lines} data=${data} title="Share of requests that met their targets" least=${1} form=${percent}
      series=${[{ key: "good", name: "met, 10 s", of: goodputShare }]} />
    <table class="table">
      <thead><tr><th scope="col">Since start</th><th scope="col">Cause</th><th scope="col" class="number">Requests</th><th scope="col" class="number">Share</th></tr></thead>
      <tbody>
        ${rows.map(([key, many]) => {
          const [missed, cause] = key.split(" ");
          return html`<tr key=${key} data-slo=${key}>
            <th scope="row">${MISSED[missed]}</th><td>${cause?.replace("_", " ") ?? ""}</td>
            <td class="number">${count(many)}</td><td class="number">${percent(many / all)}</td>
          </tr>`;
        })}
        ${rows.length === 0 && html`<tr><td colspan="4" class="muted">no request has ended yet</td></tr>`}
      </tbody>
    </table>
  <//>`;
}

export function Latency({ data }) {
  return html`<div class="grid charts">
    <${Parts} id="ttft-parts" title="To the first token" data=${data} parts=${STAGES} of=${(point) => point.stages} since=${data.stages} />
    <${Parts} id="handoff-parts" title="From the first token to the second" data=${data} parts=${HANDOFF} of=${(point) => point.handoff} since=${data.handoff} />
    <${TokenGaps} data=${data} />
    <${Quantiles} data=${data} />
    <${Goodput} data=${data} />
    <${Tenants} data=${data} />
    <${Rates} data=${data} />
    <${Load} data=${data} />
  </div>`;
}
