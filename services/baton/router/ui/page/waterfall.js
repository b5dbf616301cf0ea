// Where the time of one request went: its phases as a waterfall, which is a table with a bar in each row, and why
// its workers were chosen. The figures are those of `baton explain`, in its precision.

import { inTime } from "./api.js";
import { milliseconds, percent } from "./format.js";
import { PartBar, partOf } from "./parts.js";
import { Placement } from "./placement.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const AGAIN_MS = 2000; // between two looks at a request that runs
const FOR_GOOD = [401, 403, 404]; // the answers after which it is not looked at again
const HEAD_SHARE = 0.4; // of the whole; where what comes before decode.steps is less, it is shown alone at first
const LEAST = 0.4; // percent of the axis, below which a bar would not be seen
const TICKS = 5; // on the axis, about

/** One request by its id, from the router; looked at again until it has ended. */
export function RequestTrace({ api, id }) {
  const [told, setTold] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const over = new AbortController();
    let timer = 0;
    const look = async () => {
      let again = false;
      try {
        const response = await api(`debug/requests/${encodeURIComponent(id)}`, { signal: inTime(over) });
        const document = await response.json();
        setTold(document);
        setError(null);
        again = document.outcome === "running";
      } catch (failure) {
        if (over.signal.aborted) return;
        again = !FOR_GOOD.includes(failure.status);
        if (!again) setTold(null);
        setError(failure);
      }
      if (again && !over.signal.aborted) timer = setTimeout(look, AGAIN_MS);
    };
    setTold(null);
    setError(null);
    look();
    return () => {
      over.abort();
      clearTimeout(timer);
    };
  }, [id]);
  const problem = error && html`<p class="trace-gone" role="alert">${error.message}</p>`;
  if (!told) return problem ?? html`<p class="muted" role="status">asking the router</p>`;
  return html`<div class="trace">
    ${problem}
    <${Facts} told=${told} />
    ${told.choices.map((choice) => html`<${Choice} key=${choice.index} told=${told} choice=${choice} />`)}
  </div>`;
}

/** How a request ended, or that it runs. */
export function Outcome({ outcome }) {
  return html`<span class=${`pill outcome ${kindOf(outcome)}`}>${outcome}</span>`;
}

function kindOf(outcome) {
  return ["running", "completed", "cancelled"].includes(outcome) ? outcome : "failed";
}

function Facts({ told }) {
  const facts = [
    ["status", html`<${Outcome} outcome=${told.outcome} />`],
    ["model", told.model],
    ["tenant", told.tenant],
    ["endpoint", told.endpoint],
    ["arrived", html`<time datetime=${told.arrived}>${new Date(told.arrived).toLocaleString()}</time>`],
    ["tokens", `${told.prompt_tokens} → ${told.completion_tokens}`],
  ];
  if (told.client_request_id) facts.push(["its client calls it", html`<code>${told.client_request_id}</code>`]);
  if (told.trace_id) facts.push(["trace", html`<code>${told.trace_id}</code>`]);
  return html`<dl class="trace-facts">
    ${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

function Choice({ told, choice }) {
  const whole = Math.max(told.e2e_ms, 1e-3);
  const head = headOf(choice);
  const zooms = head < whole && head > 0;
  const [zoomed, setZoomed] = useState(null);
  const near = zoomed ?? (zooms && head < HEAD_SHARE * whole);
  const scale = { end: near ? head : whole, first: choice.ttft_ms };
  return html`<section class="trace-choice" aria-label=${`choice ${choice.index}`}>
    <div class="trace-head">
      <h3>${told.choices.length > 1 ? `Choice ${choice.index}` : "Where the time went"}</h3>
      <p class="trace-sums">${sums(told, choice)}</p>
      ${zooms && html`<div class="switch" role="group" aria-label="part of the time shown">
        <button type="button" class="quiet" aria-pressed=${String(near)}
          onClick=${() => setZoomed(true)}>to the second token</button>
        <button type="button" class="quiet" aria-pressed=${String(!near)}
          onClick=${() => setZoomed(false)}>whole answer</button>
      </div>`}
    </div>
    <${Parts} choice=${choice} />
    <${Phases} choice=${choice} scale=${scale} />
    ${choice.attempts.map((attempt) => html`<${Handoff} key=${attempt.number} attempt=${attempt} />`)}
    ${choice.attempts_left_out > 0 &&
    html`<p class="muted">${choice.attempts_left_out} attempts between the first and the last ones are not kept.</p>`}
    <${Reasons} attempts=${choice.attempts} ttft=${choice.ttft_ms} />
  </section>`;
}

/** The time until the answer is under way: until what is left is the rest of the answer. */
function headOf(choice) {
  const last = choice.phases.findLast((phase) => phase.name === "decode.steps");
  return last ? 1.08 * last.start_ms : 0;
}

function sums(told, choice) {
  const ttft = choice.ttft_ms === null ? "no token yet" : `TTFT ${choice.ttft_ms.toFixed(1)} ms`;
  const tpot = choice.tpot_ms === null ? "" : `, ${choice.tpot_ms.toFixed(1)} ms per token after it`;
  const tokens = choice.tokens === 1 ? "1 token" : `${choice.tokens} tokens`;
  return `${tokens}, ${ttft}${tpot}, ${told.e2e_ms.toFixed(1)} ms in all`;
}

/** The whole time in one bar, by who had the request. */
function Parts({ choice }) {
  const parts = new Map();
  for (const phase of choice.phases) {
    const part = partOf(phase.name);
    parts.set(part, (parts.get(part) ?? 0) + phase.ms);
  }
  const all = Math.max([...parts.values()].reduce((sum, each) => sum + each, 0), 1e-9);
  const given = [...parts].map(([part, took]) => ({ part, share: took / all, took }));
  return html`<div class="trace-parts">
    <${PartBar} parts=${given} />
    <ul class="trace-legend">
      ${given.map(({ part, took, share }) => html`<li key=${part}>
        <i class=${`dot part-${part}`}></i>${part}<b>${milliseconds(took)}</b><span>${percent(share)}</span></li>`)}
    </ul>
  </div>`;
}

function Phases({ choice, scale }) {
  return html`<table class="phases" role="table">
    <caption class="unseen">The phases of choice ${choice.index}, one after the other; in milliseconds</caption>
    <thead role="rowgroup"><tr role="row">
      <th scope="col">phase</th><th scope="col" class="meaning">what it is</th>
      <th scope="col" class="number">start, ms</th><th scope="col" class="number">took, ms</th>
      <td class="lane-cell" aria-hidden="true"><${Axis} scale=${scale} /></td>
    </tr></thead>
    <tbody role="rowgroup">
      ${rowsOf(choice).map((row) => html`<${Row} key=${row.key} row=${row} scale=${scale} />`)}
    </tbody>
  </table>`;
}

/** Phases with what stands between them: where an attempt begins, the blocks in flight, the first token. */
function rowsOf(choice) {
  const rows = [];
  const attempts = new Map(choice.attempts.map((attempt) => [attempt.number, attempt]));
  let attempt = null;
  let first = choice.ttft_ms;
  choice.phases.forEach((phase, index) => {
    if (first !== null && phase.start_ms >= first - 0.001) {
      rows.push({ kind: "first", key: "first", at: first });
      first = null;
    }
    if (phase.attempt !== null && phase.attempt !== attempt) {
      attempt = phase.attempt;
      rows.push({ kind: "attempt", key: `attempt-${attempt}`, attempt: attempts.get(attempt) });
    }
    rows.push({ kind: "phase", key: `phase-${index}`, phase });
    const next = choice.phases[index + 1];
    const handoff = attempts.get(phase.attempt)?.handoff;
    if (handoff && phase.name.startsWith("prefill.") && !next?.name.startsWith("prefill.")) {
      const own = choice.phases.filter((each) => each.attempt === phase.attempt);
      rows.push({ kind: "flight", key: `flight-${phase.attempt}`, handoff, end: endOfFlight(own) });
    }
  });
  return rows;
}

/** When the last block had arrived: where handoff.commit begins, or else where decode goes on. */
function endOfFlight(phases) {
  const after = phases.find((phase) => phase.name === "handoff.commit" || phase.name.startsWith("decode."));
  return after ? after.start_ms : null;
}

function Row({ row, scale }) {
  if (row.kind === "attempt") return html`<${AttemptRow} attempt=${row.attempt} scale=${scale} />`;
  if (row.kind === "flight") return html`<${FlightRow} row=${row} scale=${scale} />`;
  if (row.kind === "first") {
    return html`<tr class="first-row" role="row"><th scope="row">first token</th><td class="meaning" role="cell"></td>
      <td class="number start" role="cell">${row.at.toFixed(1)}</td><td class="number" role="cell"></td>
      <${Lane} scale=${scale} bars=${[]} /></tr>`;
  }
  const { phase } = row;
  const part = partOf(phase.name);
  const faint = /\.(network|untold)$/.test(phase.name) ? " faint" : "";
  const bars = [{ start: phase.start_ms, length: phase.ms, kind: `part-${part}${faint}` }];
  return html`<tr class=${part === "resume" ? "phase resume" : "phase"} role="row">
    <th scope="row"><i class=${`dot part-${part}${faint}`}></i><span class="name">${phase.name}</span></th>
    <td class="meaning" role="cell">${phase.meaning}</td>
    <td class="number start" role="cell">${phase.start_ms.toFixed(1)}</td>
    <td class="number took" role="cell">${phase.ms.toFixed(3)}</td>
    <${Lane} scale=${scale} bars=${bars} /></tr>`;
}

function AttemptRow({ attempt, scale }) {
  const where = [attempt.prefill, attempt.decode].filter(Boolean).join(" → ");
  const notes = [];
  if (attempt.cached_tokens !== undefined) notes.push(`${attempt.cached_tokens} tokens cached`);
  if (attempt.preemptions) notes.push(`preempted ${attempt.preemptions} times`);
  if (!where && attempt.handed_on) notes.push("prefill and decode apart");
  const ended = attempt.ended_ms === null ? "" : `ended at ${attempt.ended_ms.toFixed(1)} ms: ${attempt.why ?? ""}`;
  return html`<tr class="attempt" role="row"><th scope="rowgroup" colspan="3">
    <span class="attempt-name">attempt ${attempt.number}</span>
    ${where && html`<code>${where}</code>`}
    <span class="muted">${notes.join(", ")}</span>
    ${ended && html`<span class="why">${ended}</span>`}
  </th><td class="meaning" role="cell"></td><${Lane} scale=${scale} bars=${[]} /></tr>`;
}

const FLIGHT = ["room", "wait", "grant", "transfer"];

function FlightRow({ row, scale }) {
  const { handoff, end } = row;
  const bars = [];
  let at = end;
  for (const name of end === null ? [] : [...FLIGHT].reverse()) {
    const length = handoff[`${name}_ms`];
    at -= length;
    bars.push({ start: at, length, kind: `flight-${name}` });
  }
  const total = FLIGHT.reduce((sum, name) => sum + handoff[`${name}_ms`], 0);
  return html`<tr class="flight" role="row">
    <th scope="row"><i class="dot part-handoff"></i>blocks over ${handoff.connector}</th>
    <td class="meaning" role="cell">in flight, beside its computing</td>
    <td class="number start" role="cell">beside</td><td class="number" role="cell">${total.toFixed(3)}</td>
    <${Lane} scale=${scale} bars=${bars} /></tr>`;
}

const placeOf = (value, scale) => Math.min(Math.max((100 * value) / scale.end, 0), 100);

/** The bars of one row, over the lines of the axis. Its figures stand beside it. */
function Lane({ scale, bars }) {
  return html`<td class="lane-cell" aria-hidden="true"><svg class="lane-bars">
    ${ticksOf(scale.end).map((tick) => html`<line class="tick" x1=${`${placeOf(tick, scale)}%`}
      x2=${`${placeOf(tick, scale)}%`} y1="0" y2="100%" />`)}
    ${scale.first !== null && scale.first <= scale.end && html`<line class="first" y1="0" y2="100%"
      x1=${`${placeOf(scale.first, scale)}%`} x2=${`${placeOf(scale.first, scale)}%`} />`}
    ${bars.filter((bar) => bar.start < scale.end && bar.start + bar.length > 0).map((bar) => {
      const from = placeOf(bar.start, scale);
      const to = placeOf(bar.start + bar.length, scale);
      return html`<rect class=${bar.kind} x=${`${from}%`} width=${`${to - from}%`} y="22%" height="56%" rx="2" />
        ${to - from < LEAST && html`<line class=${`sliver ${bar.kind}`} x1=${`${from}%`} x2=${`${from}%`} y1="22%"
          y2="78%" />`}`;
    })}
  </svg></td>`;
}

function Axis({ scale }) {
  return html`<svg class="trace-axis">
    ${ticksOf(scale.end).map((tick, index) => html`<text y="12" x=${`${placeOf(tick, scale)}%`}
      text-anchor=${index === 0 ? "start" : placeOf(tick, scale) > 96 ? "end" : "middle"}>
      ${tickLabel(tick, scale.end)}</text>`)}
  </svg>`;
}

/** What decode told of the blocks: the first four durations go beside prefill's computing. */
function Handoff({ attempt: { number, handoff } }) {
  if (!handoff) return null;
  const told = [...FLIGHT, "flush", "commit"].map((name) => `${name} ${handoff[`${name}_ms`].toFixed(1)}`);
  const over = `handoff over ${handoff.connector}, in ms: ${told.join(", ")}`;
  return html`<p class="handoff-note">attempt ${number}: ${over}</p>`;
}

/** Round numbers from 0 to ``end``. */
function ticksOf(end) {
  const rough = end / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= 0.8 * rough);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
}

function tickLabel(tick, end) {
  if (end >= 5000) return `${+(tick / 1000).toFixed(1)} s`;
  return tick === 0 ? "0" : `${+tick.toPrecision(6)} ms`;
}

function Reasons({ attempts, ttft }) {
  const placed = attempts.filter((attempt) => attempt.placement);
  if (!placed.length) return null;
  return html`<div class="trace-reasons">
    ${placed.map((attempt) => html`<${Placement} key=${attempt.number} attempt=${attempt}
      ttft=${attempt.number === 0 ? ttft : null} several=${attempts.length > 1} />`)}
  </div>`;
}
