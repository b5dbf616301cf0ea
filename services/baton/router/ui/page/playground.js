// The playground: chats and completions with the router's own models, by its API as clients see it.

import { AnswerView } from "./answer-view.js";
import { Conversation } from "./conversation.js";
import { Fields } from "./fields.js";
import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact-htm.js";

const conversation = new Conversation();
const NEAR_PX = 80; // from the end of the page, within which it follows the answer

export function Playground({ api }) {
  const redraw = useReducer((count) => count + 1, 0)[1];
  const [problem, setProblem] = useState(null);
  const [models, setModels] = useState([]);
  useEffect(() => follow(redraw), []);
  useEffect(() => {
    const over = new AbortController();
    loadModels(api, over.signal).then(setModels, (error) => over.signal.aborted || setProblem(error));
    return () => over.abort();
  }, []);
  return html`<section class="playground" aria-label="playground">
    <div class="card talk">
      <${Head} />
      ${problem && html`<p class="problem" role="alert">${problem.message}</p>`}
      <${Turns} api=${api} />
      <${Compose} api=${api} />
    </div>
    <div class="card"><${Fields} conversation=${conversation} models=${models} /></div>
  </section>`;
}

/** Draw again when the conversation changes, once for all changes of a frame. */
function follow(redraw) {
  let frame = 0;
  const changed = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const page = document.scrollingElement;
      const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
      redraw();
      if (atEnd && conversation.busy) requestAnimationFrame(() => page.scrollTo(0, page.scrollHeight));
    });
  };
  conversation.addEventListener("change", changed);
  return () => {
    conversation.removeEventListener("change", changed);
    cancelAnimationFrame(frame);
  };
}

async function loadModels(api, signal) {
  const { data } = await (await api("v1/models", { signal })).json();
  if (data.length && !data.some((model) => model.id === conversation.fields.model)) {
    conversation.set("model", data[0].id);
  }
  return data;
}

function Head() {
  const kinds = [[true, "Chat"], [false, "Completion"]];
  return html`<div class="talk-head">
    <h2>Playground</h2>
    <div class="switch" role="group" aria-label="endpoint">
      ${kinds.map(([chat, label]) => html`<button type="button" class="quiet" key=${label}
        aria-pressed=${String(conversation.chat === chat)}
        onClick=${() => conversation.clear(chat)}>${label}</button>`)}
    </div>
    <button type="button" class="quiet clear" disabled=${!conversation.turns.length}
      onClick=${() => conversation.clear()}>New</button>
  </div>`;
}

function Turns({ api }) {
  const { turns, busy } = conversation;
  if (!turns.length) {
    return html`<p class="empty">Ask something. What is asked goes to this router, and stays in this tab.</p>`;
  }
  return html`<div class="turns">
    ${turns.map((turn, index) => {
      if (turn.role === "assistant") {
        const { answer } = turn;
        return html`<${AnswerView} key=${answer.began} api=${api} answer=${answer} name=${`turn-${index}`} />`;
      }
      const label = turn.role === "tool" ? "result of a tool" : conversation.chat ? "you" : "prompt";
      return html`<div class=${`turn ${turn.role}`} key=${index}><p class="hint">${label}</p>
        <div class="text">${turn.text}</div></div>`;
    })}
    ${!busy && html`<button type="button" class="quiet again-button"
      onClick=${() => conversation.again(api)}>Ask again</button>`}
  </div>`;
}

function Compose({ api }) {
  const box = useRef(null);
  const { busy, chat, fields, openCalls, error } = conversation;
  useEffect(() => box.current?.focus({ preventScroll: true }), [chat]);
  if (openCalls.length) return html`<${Results} api=${api} calls=${openCalls} key=${openCalls[0].id} />`;
  const send = () => {
    const text = box.current.value;
    if (!text || conversation.busy) return;
    conversation.say(api, text);
    if (chat && !conversation.error) conversation.set("prompt", "");
  };
  const pressed = (event) => {
    if (event.key === "Escape" && busy) conversation.stop();
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    if (!chat && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    send();
  };
  return html`<form class="compose" onSubmit=${(event) => event.preventDefault()}>
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    <textarea ref=${box} name="prompt" rows=${chat ? 3 : 6} aria-label=${chat ? "your message" : "prompt"}
      placeholder=${chat ? "Enter sends, Shift + Enter begins a line" : "Ctrl + Enter completes"}
      value=${fields.prompt} onInput=${(event) => conversation.set("prompt", event.currentTarget.value)}
      onKeyDown=${pressed}></textarea>
    <div class="compose-buttons">
      ${busy && html`<button type="button" class="quiet stop" onClick=${() => conversation.stop()}>Stop</button>`}
      <button type="button" class="send" disabled=${busy || !fields.prompt || !fields.model} onClick=${send}>
        ${chat ? "Send" : "Complete"}</button>
    </div>
  </form>`;
}

/** The results of the tools that the last answer calls, which the user gives. */
function Results({ api, calls }) {
  const [results, setResults] = useState(() => Object.fromEntries(calls.map((call) => [call.id, ""])));
  return html`<form class="compose" aria-label="results of tools" onSubmit=${(event) => {
    event.preventDefault();
    conversation.giveResults(api, results);
  }}>
    ${calls.map((call) => html`<label key=${call.id}>what <code>${call.name}</code> returns
      <textarea rows="2" value=${results[call.id]} onInput=${(event) =>
        setResults({ ...results, [call.id]: event.currentTarget.value })}></textarea></label>`)}
    <div class="compose-buttons"><button class="send">Give results</button></div>
  </form>`;
}
