// One answer in the playground: text, reasoning, calls of tools, figures, tokens, and where its time went.

import { count, milliseconds, rate } from "./format.js";
import { Json, valueOf } from "./json.js";
import { addressOf } from "./requests.js";
import { Tokens } from "./tokens.js";
import { html, useState } from "./vendor/preact-htm.js";
import { RequestTrace } from "./waterfall.js";

const STATES = { waiting: "waiting for the first token", streaming: "streaming", stopped: "stopped" };

export function AnswerView({ api, answer, name }) {
  const [shown, setShown] = useState(null); // tokens, time or request
  const hasTokens = answer.choices.some((choice) => choice.tokens.length);
  const tabs = [
    ["tokens", "Tokens", hasTokens],
    ["time", "Where the time went", answer.requestId !== null && answer.over],
    ["request", "Request", true],
  ].filter(([, , there]) => there);
  return html`<article class="turn assistant" aria-label="answer" aria-busy=${String(!answer.over)}>
    <div class=${answer.choices.length > 1 ? "choices several" : "choices"}>
      ${answer.choices.map((choice, index) => html`<${ChoiceView} key=${index} choice=${choice} index=${index}
        answer=${answer} />`)}
    </div>
    ${answer.state in STATES && html`<p class=${`answer-state ${answer.state}`} role="status">${
      STATES[answer.state]}</p>`}
    ${answer.error && html`<p class="problem" role="alert">${answer.error.message}</p>`}
    <${Figures} answer=${answer} />
    <div class="answer-tabs">
      ${tabs.map(([tab, label]) => html`<button type="button" class="quiet" key=${tab}
        aria-expanded=${String(shown === tab)}
        onClick=${() => setShown(shown === tab ? null : tab)}>${label}</button>`)}
      ${answer.requestId && html`<a href=${addressOf(answer.requestId)}>${
        answer.requestId.slice(0, 8)}… in requests</a>`}
    </div>
    ${shown === "tokens" && answer.choices.map((choice, index) => choice.tokens.length > 0 &&
      html`<${Tokens} key=${index} tokens=${choice.tokens} name=${`${name}-${index}`} />`)}
    ${shown === "time" && html`<${RequestTrace} api=${api} id=${answer.requestId} />`}
    ${shown === "request" && html`<${Json} value=${answer.body} />`}
  </article>`;
}

function ChoiceView({ choice, index, answer }) {
  const formed = answer.body.response_format !== undefined && answer.over && choice.text.trim() !== "";
  const value = formed ? valueOf(choice.text) : undefined;
  return html`<section class="choice-view">
    ${answer.choices.length > 1 && html`<h3 class="hint">choice ${index}</h3>`}
    ${choice.reasoning && html`<details class="reasoning" open>
      <summary>reasoning</summary>${choice.reasoning}</details>`}
    ${value === undefined ? html`<div class="text">${choice.text}</div>` : html`<${Json} value=${value} />`}
    ${formed && html`<p class="hint">${value === undefined ? "not JSON: it was cut off" : "JSON"}</p>`}
    ${choice.calls.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
    ${choice.finish === "length" && html`<p class="hint">cut off at its most tokens</p>`}
  </section>`;
}

function Call({ call }) {
  const value = valueOf(call.text);
  return html`<div class="call"><p><span class="pill">calls</span> <code>${call.name}</code></p>
    ${value === undefined ? html`<pre class="json">${call.text}</pre>` : html`<${Json} value=${value} />`}</div>`;
}

function Figures({ answer }) {
  if (answer.ttft === null) return null;
  const { pace, usage } = answer;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const figures = [["TTFT", milliseconds(answer.ttft)]];
  if (pace) figures.push(["ITL", milliseconds(pace.itl)], ["tokens/s", rate(pace.rate)]);
  if (usage) {
    figures.push(["prompt", `${count(usage.prompt_tokens)}${cached ? `, ${cached} cached` : ""}`]);
    figures.push(["answer", count(usage.completion_tokens)]);
  }
  return html`<div class="answer-figures"><dl>
    ${figures.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl><${Beat} arrivals=${answer.arrivals} />
  </div>`;
}

/** A line for each event of the stream, at the time it came: pauses are gaps. */
function Beat({ arrivals }) {
  const end = Math.max(arrivals.at(-1), 1e-9);
  const most = Math.ceil(arrivals.length / 400); // more lines than that cannot be told apart
  const label = `events came from ${milliseconds(arrivals[0])} to ${milliseconds(end)}`;
  return html`<svg class="beat" role="img" aria-label=${label}>
    <line class="base" x1="0" x2="100%" y1="100%" y2="100%" />
    ${arrivals.filter((_, index) => index % most === 0).map((at, index) => html`<line
      class=${index === 0 ? "first" : "event"} x1=${`${(100 * at) / end}%`}
      x2=${`${(100 * at) / end}%`} y1="0" y2="100%" />`)}
  </svg>`;
}
