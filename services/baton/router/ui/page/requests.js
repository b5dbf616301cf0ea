// The last requests of the router, and one of them with its waterfall.

import { inTime } from "./api.js";
import { count, milliseconds } from "./format.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { Outcome, RequestTrace } from "./waterfall.js";

const PAGE = 50; // requests on a page
const AGAIN_MS = 2000; // between two looks at the list
const TYPING_MS = 300; // without a key, until what is typed counts
const VIEW = "#requests";
const ANY = { model: "", outcome: "", tenant: "", min_ttft_ms: "" };
const OUTCOMES = ["running", "completed", "cancelled", "failed"];

/** The address of one request within the page. */
export function addressOf(id) {
  return `${VIEW}/${encodeURIComponent(id)}`;
}

/** The id in the page's address; "" shows the list. */
function idOfAddress() {
  const { hash } = location;
  if (!hash.startsWith(`${VIEW}/`)) return "";
  try {
    return decodeURIComponent(hash.slice(VIEW.length + 1));
  } catch {
    return ""; // somebody's own typing, such as "%"
  }
}

export function Requests({ api }) {
  const [id, setId] = useState(idOfAddress);
  const [filters, setFilters] = useState(ANY);
  const [seen, setSeen] = useState(""); // the request that was shown last: its row gets the focus back
  useEffect(() => {
    const moved = () => setId(idOfAddress());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    if (id) setSeen(id);
  }, [id]);
  if (id) return html`<${One} api=${api} id=${id} />`;
  return html`<${List} api=${api} filters=${filters} setFilters=${setFilters} seen=${seen} />`;
}

function One({ api, id }) {
  const heading = useRef(null);
  useEffect(() => heading.current?.focus(), [id]);
  useEffect(() => {
    const back = (event) => {
      if (event.key === "Escape" && !event.defaultPrevented) location.hash = VIEW;
    };
    addEventListener("keydown", back);
    return () => removeEventListener("keydown", back);
  }, []);
  return html`<section class="card one-request" aria-labelledby="one-request">
    <p class="back"><a href=${VIEW}>← All requests</a></p>
    <h2 id="one-request" tabindex="-1" ref=${heading}>Request <code>${id}</code></h2>
    <${RequestTrace} api=${api} id=${id} />
  </section>`;
}

function List({ api, filters, setFilters, seen }) {
  const [pages, setPages] = useState([]); // where each page after the first begins, up to the one shown
  const [live, setLive] = useState(true);
  const before = pages.at(-1) ?? "";
  const { told, error } = useList(api, filters, before, live && !before);
  const choose = (name, value) => {
    setPages([]);
    setFilters({ ...filters, [name]: value });
  };
  const operator = told !== null && told.kept.num_dropped !== null;
  return html`<section class="card requests" aria-labelledby="requests-title">
    <div class="requests-head">
      <h2 id="requests-title">Requests</h2>
      <${Filters} api=${api} filters=${filters} choose=${choose} operator=${operator} />
      <button type="button" class="quiet live" aria-pressed=${String(live)} onClick=${() => setLive(!live)}>
        <i class=${live && !before ? "dot on" : "dot"}></i>${before ? "not live" : live ? "live" : "paused"}</button>
    </div>
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    ${told && html`<${Table} told=${told} operator=${operator} seen=${seen} />
      <div class="requests-foot">
        <p class="muted kept">${keptOf(told)}</p>
        <div class="pager">
          <button type="button" class="quiet" disabled=${!pages.length}
            onClick=${() => setPages(pages.slice(0, -1))}>Newer</button>
          <button type="button" class="quiet" disabled=${!told.next}
            onClick=${() => setPages([...pages, told.next])}>Older</button>
        </div>
      </div>`}
  </section>`;
}

/** The list as the router tells it: at once when what is asked for changes, then every two seconds if ``live``. */
function useList(api, filters, before, live) {
  const [state, setState] = useState({ told: null, error: null });
  const query = queryOf(filters, before);
  useEffect(() => {
    const over = new AbortController();
    let timer = 0;
    const look = async () => {
      try {
        if (!document.hidden) {
          const response = await api(`debug/requests?${query}`, { signal: inTime(over) });
          setState({ told: await response.json(), error: null });
        }
      } catch (error) {
        if (!over.signal.aborted) setState(({ told }) => ({ told: error.status === 401 ? null : told, error }));
      }
      if (live && !over.signal.aborted) timer = setTimeout(look, AGAIN_MS);
    };
    look();
    return () => {
      over.abort();
      clearTimeout(timer);
    };
  }, [query, live]);
  return state;
}

function queryOf(filters, before) {
  const query = new URLSearchParams({ limit: String(PAGE) });
  for (const [name, value] of Object.entries(filters)) if (value !== "") query.set(name, value);
  if (before) query.set("before", before);
  return query.toString();
}

function Filters({ api, filters, choose, operator }) {
  const [models, setModels] = useState([]);
  useEffect(() => {
    const over = new AbortController();
    api("v1/models", { signal: over.signal })
      .then((response) => response.json())
      .then(({ data }) => setModels([...new Set(data.map((model) => model.root ?? model.id))]))
      .catch(() => {}); // the list says what is wrong; without names of models it is the same
    return () => over.abort();
  }, [operator]);
  return html`<form class="filters" role="search" aria-label="requests" onSubmit=${(event) => event.preventDefault()}>
    <label>model <${Choose} value=${filters.model} names=${models}
      choose=${(value) => choose("model", value)} /></label>
    <label>status <${Choose} value=${filters.outcome} names=${OUTCOMES}
      choose=${(value) => choose("outcome", value)} /></label>
    ${operator && html`<label>tenant <${Typed} value=${filters.tenant} size="10"
      choose=${(value) => choose("tenant", value)} /></label>`}
    <label>TTFT from <${Typed} value=${filters.min_ttft_ms} type="number" min="0" step="any" placeholder="0"
      choose=${(value) => choose("min_ttft_ms", value)} /> ms</label>
  </form>`;
}

function Choose({ value, names, choose }) {
  return html`<select value=${value} onChange=${(event) => choose(event.currentTarget.value)}>
    <option value="">any</option>
    ${names.map((name) => html`<option key=${name} value=${name} selected=${name === value}>${name}</option>`)}
  </select>`;
}

function Typed({ value, choose, ...more }) {
  const timer = useRef(0);
  const typed = (event) => {
    const { value: now, validity } = event.currentTarget;
    clearTimeout(timer.current);
    if (validity.valid) timer.current = setTimeout(() => choose(now), TYPING_MS);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  return html`<input value=${value} autocomplete="off" spellcheck=${false} onInput=${typed} ...${more} />`;
}

function Table({ told, operator, seen }) {
  if (!told.requests.length) return html`<p class="muted none">No request is like that.</p>`;
  const longest = Math.max(...told.requests.map((each) => each.e2e_ms), 1e-9);
  return html`<div class="scroll"><table class="table request-list">
    <caption class="unseen">Requests, the latest first</caption>
    <thead><tr>
      <th scope="col">arrived</th><th scope="col">request</th><th scope="col" class="model">model</th>
      ${operator && html`<th scope="col" class="tenant">tenant</th>`}<th scope="col">status</th>
      <th scope="col" class="number tokens-of">tokens</th><th scope="col" class="number">TTFT</th>
      <th scope="col" class="number">total</th><td class="spans"></td>
      ${operator && html`<th scope="col" class="workers">workers</th>`}
      <th scope="col" class="number attempts">attempts</th>
    </tr></thead>
    <tbody>${told.requests.map((each) => html`<${Row} key=${each.request_id} told=${each} operator=${operator}
      longest=${longest} seen=${each.request_id === seen} />`)}</tbody>
  </table></div>`;
}

function Row({ told, operator, longest, seen }) {
  const link = useRef(null);
  useEffect(() => {
    if (seen) link.current.focus();
  }, []);
  const address = addressOf(told.request_id);
  const open = (event) => {
    if (!event.target.closest("a") && getSelection().isCollapsed) location.hash = address;
  };
  const arrived = new Date(told.arrived);
  const workers = [told.prefill, told.decode].filter(Boolean).join(" → ");
  return html`<tr onClick=${open}>
    <td class="arrived"><time datetime=${told.arrived} title=${arrived.toLocaleString()}>${timeOf(arrived)}</time></td>
    <th scope="row"><a href=${address} ref=${link} title=${told.request_id}>${shortOf(told.request_id)}</a></th>
    <td class="model">${told.model}</td>${operator && html`<td class="tenant">${told.tenant}</td>`}
    <td><${Outcome} outcome=${told.outcome} /></td>
    <td class="number tokens-of">${told.prompt_tokens} → ${told.completion_tokens}</td>
    <td class="number ttft">${milliseconds(told.ttft_ms)}</td><td class="number total">${milliseconds(told.e2e_ms)}</td>
    <td class="spans"><${Spans} told=${told} longest=${longest} /></td>
    ${operator && html`<td class="workers"><code>${workers || "–"}</code></td>`}
    <td class=${told.num_attempts > 1 ? "number attempts again" : "number attempts"}>${told.num_attempts}</td>
  </tr>`;
}

/** The request's time beside that of the longest one on the page: until its first token, and after it. */
function Spans({ told, longest }) {
  const first = told.ttft_ms ?? told.e2e_ms;
  const width = (value) => `${(100 * value) / longest}%`;
  return html`<svg class="span-bar" aria-hidden="true">
    <rect class=${told.ttft_ms === null ? "part-route" : "part-prefill"} x="0" y="25%" height="50%"
      width=${width(first)} />
    <rect class="part-decode" x=${width(first)} y="25%" height="50%" width=${width(told.e2e_ms - first)} />
  </svg>`;
}

/** What an id begins with, and the beginning of what tells it from others. */
function shortOf(id) {
  const at = id.lastIndexOf("-") + 1;
  return html`<span class="fine">${id.slice(0, at)}</span>${id.slice(at, at + 8)}`;
}

function timeOf(date) {
  const digits = (value, width = 2) => String(value).padStart(width, "0");
  const clock = [date.getHours(), date.getMinutes(), date.getSeconds()].map((each) => digits(each)).join(":");
  return html`${clock}<span class="fine">.${digits(date.getMilliseconds(), 3)}</span>`;
}

function keptOf({ kept, silent_processes: silent }) {
  const bounds = `The last ${count(kept.max_requests)} requests that ended are kept, in at most ` +
    `${Math.round(kept.max_bytes / 2 ** 20)} MiB`;
  const gone = kept.num_dropped ? `; ${count(kept.num_dropped)} older ones are gone` : "";
  const quiet = silent ? ` ${silent} of the router's processes did not answer: theirs are missing.` : "";
  return `${bounds}${gone}.${quiet}`;
}
