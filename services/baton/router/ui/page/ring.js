// The ring: prompts go from the router to prefill, their KV from prefill to decode, tokens back to the router.

import { useWidth } from "./charts.js";
import { ago, bytes, bytesPerSecond, count, milliseconds, percent, rate } from "./format.js";
import { html } from "./vendor/preact-htm.js";
import { blocksOf, roleOf, stateOf, sum } from "./workers.js";

const NARROW = 720; // pixels below which the router stands above the workers
const CHARACTER = 6.7; // width of one, in the font of addresses
const LABELS = 10; // most pairs with their figures in the drawing
const FEW = 16; // pairs beside which figures can still be read
const SHAPES = [
  { most: 8, tall: 54, gap: 12 },
  { most: 16, tall: 40, gap: 8 },
  { most: Infinity, tall: 22, gap: 4 },
];

/** Boxes of the router and of all workers, by address, and the size of the drawing. */
function layOut(workers, width) {
  const lanes = { prefill: [], decode: [], both: [], unknown: [] };
  for (const worker of workers) (lanes[roleOf(worker)] ?? lanes.unknown).push(worker);
  const narrow = width < NARROW;
  const shape = SHAPES.find(({ most }) => Math.max(lanes.prefill.length, lanes.decode.length) <= most);
  const routerWide = narrow ? width - 2 : 148;
  const left = narrow ? 18 : routerWide + 96;
  const right = narrow ? width - 1 : width - 26;
  const between = narrow ? 72 : Math.max(140, 0.3 * (right - left));
  const wide = Math.min(narrow ? 400 : 300, (right - left - between) / 2);
  const top = narrow ? 104 : 28;
  const tallest = Math.max(lanes.prefill.length, lanes.decode.length);
  const height = (many) => Math.max(0, many * (shape.tall + shape.gap) - shape.gap);
  const boxes = new Map();
  const place = (lane, x) =>
    lane.forEach((worker, at) => {
      const y = top + (height(tallest) - height(lane.length)) / 2 + at * (shape.tall + shape.gap);
      boxes.set(worker.address, { worker, x, y, wide, tall: shape.tall });
    });
  place(lanes.prefill, left);
  place(lanes.decode, right - wide);
  const others = [...lanes.both, ...lanes.unknown];
  const below = top + height(tallest) + (tallest ? 26 : 0);
  const columns = Math.max(1, Math.floor((right - left + 12) / (Math.min(wide, 220) + 12)));
  const cell = (right - left + 12) / columns - 12;
  others.forEach((worker, at) => {
    const x = left + (at % columns) * (cell + 12);
    boxes.set(worker.address, { worker, x, y: below + Math.floor(at / columns) * (shape.tall + shape.gap), wide: cell, tall: shape.tall });
  });
  const bottom = others.length ? below + Math.ceil(others.length / columns) * (shape.tall + shape.gap) : below - 26;
  const middle = top + Math.max(height(tallest), bottom - top) / 2;
  const router = narrow
    ? { x: 1, y: 1, wide: routerWide, tall: 64 }
    : { x: 1, y: Math.max(top, middle - 62), wide: routerWide, tall: 124 };
  const lanesAt = [
    lanes.prefill.length && { name: "prefill", x: left, y: top - 10 },
    lanes.decode.length && { name: "decode", x: right - wide, y: top - 10 },
    others.length && { name: lanes.both.length ? "both" : "unknown", x: left, y: below - 9 },
  ].filter(Boolean);
  return { boxes, router, narrow, lanesAt, height: Math.max(bottom, router.y + router.tall) + 44, width, left, right, bottom };
}

function curve(x1, y1, x2, y2) {
  const bend = Math.max(24, Math.abs(x2 - x1) / 2);
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

/** Cut ``text`` in its middle to what fits, so that the ends, which differ, stay. */
function fitted(text, pixels) {
  const most = Math.floor(pixels / CHARACTER);
  if (text.length <= most) return text;
  const tail = Math.ceil(0.65 * (most - 1));
  return `${text.slice(0, Math.max(0, most - 1 - tail))}…${text.slice(-tail)}`;
}

function Router({ box, data }) {
  const { x, y, wide } = box;
  const last = data.points.at(-1);
  const lines = [
    `${count(data.in_flight)} running`,
    `${count(data.waiting)} waiting`,
    `TTFT ${milliseconds(last?.ttft_p50)}`,
    `${rate(last?.token_rate)} tokens/s`,
  ];
  const columns = box.tall < 100 ? 2 : 1;
  return html`<g class="node router">
    <rect x=${x} y=${y} width=${wide} height=${box.tall} rx="8" />
    <text class="name" x=${x + 12} y=${y + 22}>router</text>
    ${lines.map((line, at) => {
      const column = columns === 2 ? Math.floor(at / 2) : 0;
      const row = columns === 2 ? at % 2 : at;
      return html`<text class="told" x=${x + (columns === 2 ? 82 + column * Math.min(170, (wide - 90) / 2) : 12)} y=${y + (columns === 2 ? 27 : 46) + row * 20}>${line}</text>`;
    })}
  </g>`;
}

/** The worker's KV memory as a bar: held, cached, free. */
function MemoryBar({ worker, x, y, wide, tall }) {
  const blocks = blocksOf(worker);
  const held = blocks ? (wide * worker.blocks_held) / blocks : 0;
  const cached = blocks ? (wide * worker.blocks_cached) / blocks : 0;
  return html`<rect class="cell free" x=${x} y=${y} width=${wide} height=${tall} rx="1.5" />
    <rect class="cell held" x=${x} y=${y} width=${held} height=${tall} rx="1.5" />
    <rect class="cell cached" x=${x + held} y=${y} width=${cached} height=${tall} rx="1.5" />`;
}

/** What goes over a worker's links: out of prefill, into decode. */
function flowOf(worker, pairs) {
  const role = roleOf(worker);
  const end = role === "decode" ? "decode" : "prefill";
  const total = sum(pairs.filter((pair) => pair[end] === worker.address), "bytes_per_s");
  if (!(total > 0) || !worker.ready) return "";
  return `${bytesPerSecond(total)} ${end === "decode" ? "in" : "out"}`;
}

function Worker({ box: { worker, x, y, wide, tall }, change, pairs }) {
  const state = stateOf(worker);
  const load = state === "ready" || state === "draining" ? `${worker.running} run · ${worker.waiting} wait` : state;
  const word = state === "draining" ? `draining · ${worker.running} run` : load;
  const role = roleOf(worker);
  const short = tall < 30;
  const inner = wide - 22;
  const wordWide = Math.min(inner, word.length * 6.1);
  const beside = short || wide < 220 ? "" : (change?.what ?? flowOf(worker, pairs));
  return html`<g class="node ${state} of-${role} ${change ? "changed" : ""}" data-worker=${worker.address} data-state=${state} data-role=${role}>
    <title>${worker.address}: ${role}, ${state}, ${worker.running} running, ${worker.waiting} waiting</title>
    <rect class="box" x=${x} y=${y} width=${wide} height=${tall} rx=${short ? 4 : 7} />
    <rect class="edge" x=${x} y=${y + 4} width="3" height=${tall - 8} rx="1.5" />
    <text class="name" x=${x + 12} y=${y + (short ? 13 : 19)}>${fitted(worker.address, short ? inner - wordWide - 8 : inner - 6.4 * beside.length)}</text>
    ${beside && html`<text class=${change ? "change" : "told"} x=${x + wide - 10} y=${y + 19} text-anchor="end">${beside}</text>`}
    ${short
      ? html`<text class="told" x=${x + wide - 10} y=${y + 13} text-anchor="end">${word}</text>`
      : html`<text class="told" x=${x + 12} y=${y + (tall < 50 ? 31 : 35)}>${word}</text>`}
    ${!short && wide > 190 && html`<text class="told" x=${x + wide - 10} y=${y + (tall < 50 ? 31 : 35)} text-anchor="end">${blocksOf(worker) ? `KV ${percent(worker.blocks_held / blocksOf(worker))}` : ""}</text>`}
    <${MemoryBar} worker=${worker} x=${x + 12} y=${y + tall - (short ? 5 : tall < 50 ? 6 : 11)} wide=${inner} tall=${short ? 2 : tall < 50 ? 3 : 5} />
  </g>`;
}

/** From the router to every worker that it gives prompts to. */
function Prompts({ plan, workers }) {
  const { router, narrow, boxes } = plan;
  return workers
    .filter((worker) => worker.ready && roleOf(worker) !== "decode" && boxes.get(worker.address).x === plan.left)
    .map((worker) => {
      const box = boxes.get(worker.address);
      const y = box.y + box.tall / 2;
      const d = narrow
        ? `M8 ${router.y + router.tall}V${y - 8}Q8 ${y} ${Math.min(16, box.x - 2)} ${y}H${box.x}`
        : curve(router.x + router.wide, router.y + router.tall / 2, box.x, y);
      const busy = worker.running + worker.waiting > 0 && stateOf(worker) === "ready";
      return html`<path key=${worker.address} class="prompts ${busy ? "busy" : ""}" d=${d} />`;
    });
}

function pairCurve(plan, { prefill, decode }) {
  const from = plan.boxes.get(prefill);
  const to = plan.boxes.get(decode);
  if (!from?.worker.ready || !to?.worker.ready || roleOf(from.worker) === "decode" || from === to) return null;
  const [x1, y1, x2, y2] = [from.x + from.wide, from.y + from.tall / 2, to.x, to.y + to.tall / 2];
  return { d: curve(x1, y1, x2, y2), x1, x2, y1, y2 };
}

/** The height of a curve of ``curve`` at a share of its width that is found by halving. */
function heightAt({ x1, y1, x2, y2 }, x) {
  const bend = Math.max(24, Math.abs(x2 - x1) / 2);
  let [low, high] = [0, 1];
  for (let step = 0; step < 12; step += 1) {
    const t = (low + high) / 2;
    const at = (1 - t) ** 3 * x1 + 3 * (1 - t) ** 2 * t * (x1 + bend) + 3 * (1 - t) * t * t * (x2 - bend) + t ** 3 * x2;
    if (at < x) low = t;
    else high = t;
  }
  const t = (low + high) / 2;
  return (1 - t) ** 3 * y1 + 3 * (1 - t) ** 2 * t * y1 + 3 * (1 - t) * t * t * y2 + t ** 3 * y2;
}

/** Labels in front of the decode workers, apart by their heights; those that find no room are left to the table. */
function labelsOf(drawn, narrow) {
  if (narrow || drawn.length > FEW) return [];
  const taken = [];
  const labels = [];
  for (const { pair, at } of drawn) {
    if (labels.length >= LABELS) break;
    for (const share of [0.3, 0.5, 0.7, 0.4, 0.6]) {
      const x = at.x1 + share * (at.x2 - at.x1);
      const y = heightAt(at, x);
      if (taken.some((other) => Math.abs(other.y - y) < 22 && Math.abs(other.x - x) < 136)) continue;
      taken.push({ x, y });
      labels.push({ pair, x, y });
      break;
    }
  }
  return labels;
}

function Label({ x, y, text }) {
  const wide = 14 + 6.2 * text.length;
  return html`<g class="label">
    <rect x=${x - wide / 2} y=${y - 9} width=${wide} height="18" rx="9" />
    <text x=${x} y=${y + 4} text-anchor="middle">${text}</text>
  </g>`;
}

/** From prefill to decode: the wider, the more bytes; moving while any go. */
function Handoffs({ plan, pairs }) {
  const most = Math.max(1, ...pairs.map((pair) => pair.bytes_per_s));
  const drawn = pairs
    .filter((pair) => pair.bytes_per_s > 0 || pair.open > 0)
    .map((pair) => ({ pair, at: pairCurve(plan, pair) }))
    .filter(({ at }) => at !== null);
  return html`
    ${[...drawn].reverse().map(({ pair, at }) => {
      const share = Math.sqrt(pair.bytes_per_s / most);
      const id = `${pair.prefill} ${pair.decode}`;
      return html`<g key=${id} class="handoff ${pair.bytes_per_s > 0 ? "flows" : ""}" data-pair=${id}>
        <title>${pair.prefill} to ${pair.decode}: ${bytesPerSecond(pair.bytes_per_s)}, ${pair.open} open</title>
        <path class="band" d=${at.d} stroke="url(#baton)" stroke-width=${(1 + 5 * share).toFixed(1)} stroke-opacity=${(0.25 + 0.6 * share).toFixed(2)} />
        <path class="motion" d=${at.d} />
      </g>`;
    })}
    ${labelsOf(drawn, plan.narrow).map(
      ({ pair, x, y }) => html`<${Label} key=${`${pair.prefill} ${pair.decode}`} x=${x} y=${y}
        text="${bytesPerSecond(pair.bytes_per_s)}${pair.open > 0 ? ` · ${pair.open} open` : ""}" />`,
    )}
  `;
}

/** Tokens on their way back, which closes the ring. */
function Tokens({ plan, last }) {
  const { router, right, narrow, bottom } = plan;
  const y = bottom + 22;
  if (narrow) return html`<${Label} x=${plan.width / 2} y=${y} text="${rate(last?.token_rate)} tokens/s back to clients" />`;
  const x = router.x + router.wide / 2;
  const edge = right + 12;
  const lowest = Math.max(y, router.y + router.tall + 22);
  const d = `M${right + 2} ${bottom - 20}Q${edge} ${bottom - 20} ${edge} ${bottom - 6}V${lowest - 12}Q${edge} ${lowest} ${edge - 12} ${lowest}H${x + 12}Q${x} ${lowest} ${x} ${lowest - 12}V${router.y + router.tall + 5}`;
  const flows = last?.token_rate > 0;
  return html`<g class="tokens ${flows ? "flows" : ""}">
    <path class="band" d=${d} marker-end="url(#arrow)" /><path class="motion" d=${d} />
    <${Label} x=${(x + right) / 2} y=${lowest} text="${rate(last?.token_rate)} tokens/s" />
  </g>`;
}

const RECENT_S = 20;

function Drawing({ data }) {
  const [ref, width] = useWidth();
  const plan = width ? layOut(data.workers, width) : null;
  const recent = new Map(
    [...data.changes].reverse().filter(({ at, what }) => data.now - at < RECENT_S && what.includes(" to ")).map((change) => [change.worker, change]),
  );
  const roles = ["prefill", "decode", "both"].map((role) => [role, data.workers.filter((worker) => roleOf(worker) === role).length]);
  const told = roles.filter(([, many]) => many).map(([role, many]) => `${many} ${role}`).join(", ");
  return html`<div class="ring" ref=${ref}>
    ${plan &&
    html`<svg width=${width} height=${plan.height} role="img" aria-label="The ring: the router and ${told || "no"} workers. The tables below have all figures.">
      <defs>
        <linearGradient id="baton" gradientUnits="userSpaceOnUse" x1="0" x2=${width} y1="0" y2="0">
          <stop class="from" offset="35%" /><stop class="to" offset="75%" />
        </linearGradient>
        <marker id="arrow" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0 8 4 0 8z" /></marker>
      </defs>
      <${Prompts} plan=${plan} workers=${data.workers} />
      <${Tokens} plan=${plan} last=${data.points.at(-1)} />
      <${Handoffs} plan=${plan} pairs=${data.pairs} />
      ${plan.lanesAt.map(({ name, x, y }) => html`<text key=${name} class="lane ${name}" x=${x} y=${y}>${name === "both" ? "prefill and decode" : name}</text>`)}
      <${Router} box=${plan.router} data=${data} />
      ${[...plan.boxes.values()].map((box) => html`<${Worker} key=${box.worker.address} box=${box} change=${recent.get(box.worker.address)} pairs=${data.pairs} />`)}
    </svg>`}
    ${data.workers.length === 0 && html`<p class="muted">The router knows no worker yet.</p>`}
  </div>`;
}

function Workers({ workers }) {
  return html`<section class="card" aria-labelledby="workers-title">
    <h2 id="workers-title">Workers</h2>
    <div class="scroll" tabindex="0" role="group" aria-label="Table of workers">
      <table class="table" id="workers">
        <thead><tr>
          <th scope="col">Worker</th><th scope="col">Role</th><th scope="col">Model</th><th scope="col">State</th>
          <th scope="col" class="number">Running</th><th scope="col" class="number">Waiting</th><th scope="col" class="number">Handoffs</th>
          <th scope="col" class="number">KV held</th><th scope="col" class="number">cached</th><th scope="col" class="number">free</th>
          <th scope="col" class="number">Prompt tokens waiting</th><th scope="col" class="number">Link, sending</th>
        </tr></thead>
        <tbody>
          ${workers.map((worker) => {
            const state = stateOf(worker);
            return html`<tr key=${worker.address}>
              <th scope="row">${worker.address}</th>
              <td><span class="role ${roleOf(worker)}">${roleOf(worker)}</span></td><td>${worker.model}</td>
              <td><span class="pill ${state}">${state}</span></td>
              <td class="number">${count(worker.running)}</td><td class="number">${count(worker.waiting)}</td>
              <td class="number">${count(worker.open_handoffs)}</td><td class="number">${count(worker.blocks_held)}</td>
              <td class="number">${count(worker.blocks_cached)}</td><td class="number">${count(worker.blocks_free)}</td>
              <td class="number">${count(worker.waiting_tokens)}</td>
              <td class="number">${worker.link_bytes_per_s > 0 ? bytesPerSecond(worker.link_bytes_per_s) : "–"}</td>
            </tr>`;
          })}
        </tbody>
      </table>
    </div>
  </section>`;
}

function Pairs({ data: { pairs, pairs_left_out: left } }) {
  if (pairs.length === 0) return null;
  return html`<section class="card" aria-labelledby="pairs-title">
    <h2 id="pairs-title">Handoffs by pair</h2>
    <div class="scroll tall" tabindex="0" role="group" aria-label="Table of pairs">
      <table class="table" id="pairs">
        <thead><tr>
          <th scope="col">Prefill</th><th scope="col">Decode</th><th scope="col" class="number">Open</th>
          <th scope="col" class="number">Bytes/s</th><th scope="col" class="number">Per s</th><th scope="col" class="number">Transfer</th>
          <th scope="col" class="number">Handoffs</th><th scope="col" class="number">Bytes</th>
        </tr></thead>
        <tbody>
          ${pairs.map(
            (pair) => html`<tr key=${`${pair.prefill} ${pair.decode}`}>
              <th scope="row">${pair.prefill}</th><td>${pair.decode}</td><td class="number">${count(pair.open)}</td>
              <td class="number">${bytesPerSecond(pair.bytes_per_s)}</td><td class="number">${rate(pair.handoffs_per_s)}</td>
              <td class="number">${milliseconds(pair.transfer_ms)}</td>
              <td class="number">${count(pair.handoffs)}</td><td class="number" data-bytes=${pair.bytes}>${bytes(pair.bytes)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${left > 0 && html`<p class="muted">${count(left)} pairs with less to do are left out.</p>`}
  </section>`;
}

function Changes({ data: { changes, now } }) {
  return html`<section class="card" aria-labelledby="changes-title">
    <h2 id="changes-title">Changes</h2>
    <div class="scroll tall" tabindex="0" role="log" aria-label="Changes of workers, the latest first"><ol class="changes">
      ${changes.map(({ at, worker, what }) => html`<li key=${`${at} ${worker} ${what}`}><span>${worker}</span> <b>${what}</b> <span class="muted">${ago(now - at)}</span></li>`)}
      ${changes.length === 0 && html`<li class="muted">None since the router started.</li>`}
    </ol></div>
  </section>`;
}

export function Ring({ data }) {
  return html`
    <section class="card" aria-labelledby="ring-title">
      <h2 id="ring-title">The ring</h2>
      <p class="figures">
        <span>handoffs <b>${bytesPerSecond(sum(data.pairs, "bytes_per_s"))}</b></span>
        <span>open <b>${count(sum(data.pairs, "open"))}</b></span>
        <span class="keys"><i class="swatch held"></i>held <i class="swatch cached"></i>cached <i class="swatch free"></i>free KV</span>
      </p>
      <${Drawing} data=${data} />
    </section>
    <div class="grid sides">
      <${Pairs} data=${data} />
      <${Changes} data=${data} />
    </div>
    <${Workers} workers=${data.workers} />
  `;
}
