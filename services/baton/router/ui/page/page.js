// The page: asks the router for its figures once a second, and shows one of the views.

import { api, hasKey, inTime, rememberKey } from "./api.js";
import { count, milliseconds, percent, rate } from "./format.js";
import { goodputShare, Latency } from "./latency.js";
import { Memory } from "./memory.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Ring } from "./ring.js";
import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { blocksOf, stateOf, sum } from "./workers.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 10_000; // between two questions of a page that nobody sees

const VIEWS = [
  { name: "ring", title: "Ring", view: Ring, operators: true },
  { name: "memory", title: "Memory", view: Memory, operators: true },
  { name: "latency", title: "Latency", view: Latency, operators: true },
  { name: "requests", title: "Requests", view: Requests },
  { name: "playground", title: "Playground", view: Playground },
];

/** The last document of ui/data, in which points of earlier documents stay for as long as they would there. */
function merged(before, latest) {
  if (!latest.operator) return latest;
  const kept = before?.operator && latest.number >= before.number ? before.points : [];
  return { ...latest, points: [...kept, ...latest.points].slice(-latest.most_points) };
}

async function ask(before, over) {
  const after = before?.points?.at(-1)?.number ?? 0;
  const latest = await (await api(`ui/data?after=${after}`, { signal: inTime(over) })).json();
  return latest.number < after ? ask(null, over) : merged(before, latest); // the router's clock began anew
}

/** The last document, what keeps a newer one from coming, and how to ask again at once. */
function useData() {
  const [state, setState] = useState({ data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    let data = null;
    let timer = 0;
    let asking = null; // the question under way, to abort it
    async function run() {
      clearTimeout(timer);
      if (asking) return;
      const over = (asking = new AbortController());
      let waits = false; // for a key
      try {
        const told = await ask(data, over);
        if (over.signal.aborted) return;
        data = told;
        setState({ data, error: null });
      } catch (error) {
        if (over.signal.aborted) return;
        waits = error.asksForKey === true;
        if (waits) data = null;
        setState({ data, error });
      }
      asking = null;
      if (!waits) timer = setTimeout(run, document.hidden ? HIDDEN_MS : EVERY_MS);
    }
    const abort = () => {
      asking?.abort();
      asking = null;
    };
    again.current = () => {
      abort(); // what was asked with another key is not shown with this one
      data = null;
      setState({ data, error: null });
      run();
    };
    const seen = () => document.hidden || run();
    document.addEventListener("visibilitychange", seen);
    run();
    return () => {
      abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, []);
  return [state, () => again.current()];
}

function useHash() {
  const [hash, setHash] = useState(location.hash.slice(1));
  useEffect(() => {
    const changed = () => setHash(location.hash.slice(1));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return hash.split("/")[0];
}

function State({ data, error }) {
  if (error) {
    return html`<p id="state" class="pill lost" role="status">
      ${error.asksForKey ? "needs a key" : `no answer: ${error.message}`}
    </p>`;
  }
  if (!data) return html`<p id="state" class="pill" role="status">connecting</p>`;
  if (!data.operator) return html`<p id="state" class="pill ready" role="status">live</p>`;
  const ready = data.workers.filter((worker) => stateOf(worker) === "ready").length;
  const all = data.workers.length;
  return html`<p id="state" class="pill ${ready === all ? "ready" : "draining"}" role="status">
    live, ${ready} of ${all} workers ready
  </p>`;
}

/** The form for a key. ``refused``: the router's word on the key that was given last. */
function KeyForm({ refused, given }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    rememberKey(field.current.value);
    given();
  };
  return html`<form id="key" class="card" onSubmit=${submit}>
    <h2>This router asks for a key</h2>
    <p class="muted">
      An operator's key shows the ring; any other shows the requests of its tenant. It is kept in this tab until
      the tab is closed.
    </p>
    <label for="key-field">API key</label>
    <input id="key-field" ref=${field} type="password" autocomplete="off" spellcheck=${false} required />
    <button>Show</button>
    ${refused && html`<p class="bad" role="alert">${refused}</p>`}
  </form>`;
}

function Figure({ id, title, children }) {
  return html`<div><dt>${title}</dt><dd id=${id}>${children}</dd></div>`;
}

function Figures({ data }) {
  const last = data.points.at(-1);
  const held = sum(data.workers, "blocks_held");
  const blocks = data.workers.reduce((total, worker) => total + blocksOf(worker), 0);
  return html`<dl id="figures">
    <${Figure} id="token_rate" title="tokens/s">${last ? rate(last.token_rate) : "–"}<//>
    <${Figure} id="in_flight" title="running">${count(data.in_flight)}<//>
    <${Figure} id="waiting" title="waiting">${count(data.waiting)}<//>
    <${Figure} id="ttft" title="TTFT p50">${milliseconds(last?.ttft_p50)}<//>
    <${Figure} id="itl" title="ITL p50">${milliseconds(last?.itl_p50)}<//>
    <${Figure} id="goodput" title="goodput">${percent(goodputShare(last))}<//>
    <${Figure} id="open_handoffs" title="open handoffs">${count(sum(data.workers, "open_handoffs"))}<//>
    <${Figure} id="kv_use" title="KV blocks held">${blocks ? `${count(held)} of ${count(blocks)}` : "–"}<//>
    <${Figure} id="answers" title="answers">${count(data.answers)}<//>
    <${Figure} id="prompt_tokens" title="prompt tokens">${count(data.prompt_tokens)}<//>
    <${Figure} id="generated_tokens" title="generated">${count(data.generated_tokens)}<//>
  </dl>`;
}

function OwnFigures({ data: { tenants } }) {
  const [own] = tenants;
  return html`<dl id="figures">
    <${Figure} id="tenant" title="tenant">${own.tenant}<//>
    <${Figure} id="in_flight" title="running">${count(own.open)}<//>
    <${Figure} id="waiting" title="waiting">${count(own.waiting)}<//>
    <${Figure} id="token_rate" title="ended tokens/s">${rate(own.token_rate)}<//>
  </dl>`;
}

function Navigation({ views, current }) {
  return html`<nav aria-label="Views">
    ${views.map(
      ({ name, title }) =>
        html`<a href="#${name}" aria-current=${name === current ? "page" : undefined}>${title}</a>`,
    )}
  </nav>`;
}

function App() {
  const [{ data, error }, again] = useData();
  const hash = useHash();
  const views = VIEWS.filter(({ operators }) => !operators || data?.operator !== false);
  const current = views.find(({ name }) => name === hash) ?? views[0];
  useEffect(() => {
    document.title = `${current.title} – Baton`;
  }, [current]);
  const forget = () => {
    rememberKey("");
    again();
  };
  return html`
    <header>
      <h1><svg class="mark" viewBox="0 0 16 16" aria-hidden="true">
        <path class="of-prefill" d="M3 13 13 3" /><path class="of-decode" d="M9 7l4-4" />
      </svg>Baton</h1>
      <${State} data=${data} error=${error} />
      ${data && html`<${Navigation} views=${views} current=${current.name} />`}
      ${hasKey() && html`<button class="quiet" onClick=${forget}>Forget key</button>`}
    </header>
    <main id="view" tabindex="-1">
      ${error?.asksForKey && html`<${KeyForm} refused=${hasKey() ? error.message : ""} given=${again} />`}
      ${data && (data.operator ? html`<${Figures} data=${data} />` : html`<${OwnFigures} data=${data} />`)}
      ${data && html`<${current.view} key=${current.name} api=${api} data=${data} />`}
    </main>
  `;
}

render(html`<${App} />`, document.getElementById("page"));
