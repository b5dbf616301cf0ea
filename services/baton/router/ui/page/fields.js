// The fields of the playground: the model, sampling, tools and the form of the answer.

import { valueOf } from "./json.js";
import { html } from "./vendor/preact-htm.js";

const SAMPLING = [
  { name: "temperature", label: "temperature", hint: "model's", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "top_p", hint: "model's", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "top_k", hint: "model's", min: -1, step: 1 },
  { name: "min_p", label: "min_p", hint: "model's", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", label: "max_tokens", hint: "router's", min: 1, step: 1 },
  { name: "seed", label: "seed", hint: "drawn", step: 1 },
  { name: "n", label: "n", hint: "1", min: 1, step: 1 },
  { name: "presence_penalty", label: "presence penalty", hint: "0", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "frequency penalty", hint: "0", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "repetition penalty", hint: "model's", min: 0.01, step: 0.05 },
];
const LOGPROBS = ["", "0", "1", "3", "5", "10", "20"];
const EXAMPLES = {
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The temperature in a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  response_format: {
    type: "json_schema",
    json_schema: {
      name: "answer",
      schema: {
        type: "object",
        properties: { summary: { type: "string", maxLength: 80 }, certain: { type: "boolean" } },
        required: ["summary", "certain"],
        additionalProperties: false,
      },
    },
  },
  extra: { tool_choice: "auto", min_tokens: 1 },
};

/** ``models``: entries of /v1/models. */
export function Fields({ conversation, models }) {
  const { chat, fields, error } = conversation;
  const set = (name) => (event) => conversation.set(name, event.currentTarget.value);
  const wrong = (name) => (error?.field === name ? error.message : null);
  const model = models.find((each) => each.id === fields.model);
  return html`<form class="fields" aria-label="fields of the request" onSubmit=${(event) => event.preventDefault()}>
    <label class="wide">model
      <select value=${fields.model} onChange=${set("model")}>
        ${models.map(({ id }) => html`<option key=${id} value=${id} selected=${id === fields.model}>${id}</option>`)}
      </select></label>
    ${model && html`<p class="hint">at most ${model.max_model_len.toLocaleString()} tokens, prompt included</p>`}
    ${chat && html`<label class="wide">system
      <textarea rows="2" value=${fields.system} onInput=${set("system")} placeholder="none"></textarea></label>`}
    <fieldset><legend>Sampling</legend>
      ${SAMPLING.map(({ name, label, hint, ...bounds }) => html`<label key=${name}>${label}
        <input type="number" name=${name} value=${fields[name]} placeholder=${hint} ...${bounds}
          aria-invalid=${String(wrong(name) !== null)} onInput=${set(name)} /></label>`)}
      <label>log-probabilities <select name="logprobs" value=${fields.logprobs} onChange=${set("logprobs")}>
        ${LOGPROBS.map((each) => html`<option key=${each} value=${each} selected=${each === fields.logprobs}>${
          each === "" ? "off" : each === "0" ? "chosen only" : `top ${each}`}</option>`)}
      </select></label>
      <label class="wide">stop, one on a line
        <textarea name="stop" rows="1" value=${fields.stop} onInput=${set("stop")}
          placeholder="none"></textarea></label>
    </fieldset>
    ${chat && html`<${JsonField} name="tools" label="tools" conversation=${conversation} wrong=${wrong("tools")} />`}
    <${JsonField} name="response_format" label="response_format" conversation=${conversation}
      wrong=${wrong("response_format")} />
    <${JsonField} name="extra" label="any other fields" conversation=${conversation} wrong=${wrong("extra")} />
  </form>`;
}

/** JSON as it is typed; without the focus, pretty. */
function JsonField({ name, label, conversation, wrong }) {
  const text = conversation.fields[name];
  const value = text.trim() ? valueOf(text) : undefined;
  const set = (given) => conversation.set(name, given);
  const tidy = () => value !== undefined && set(JSON.stringify(value, null, 2));
  const broken = wrong ?? (text.trim() && value === undefined ? "not JSON yet" : null);
  return html`<details class="json-field" open=${text !== "" || undefined}>
    <summary>${label} <span class="hint">${text.trim() ? (broken ?? "JSON") : "none"}</span></summary>
    <textarea name=${name} aria-label=${`${label}, as JSON`} rows=${Math.min(Math.max(text.split("\n").length, 4), 16)}
      spellcheck=${false} value=${text} aria-invalid=${String(broken !== null)} onBlur=${tidy}
      onInput=${(event) => set(event.currentTarget.value)}></textarea>
    <div class="json-buttons">
      <button type="button" class="quiet" onClick=${() => set(JSON.stringify(EXAMPLES[name], null, 2))}>Example</button>
      <button type="button" class="quiet" disabled=${!text} onClick=${() => set("")}>Clear</button>
    </div>
  </details>`;
}
