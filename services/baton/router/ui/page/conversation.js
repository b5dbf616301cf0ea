// What is said in the playground, and the requests that ask for the next answer. It lasts as long as the page does:
// an answer goes on while another view is shown.

import { Answer } from "./answer.js";
import { eventsOf } from "./events.js";

/** The fields of the playground as they are typed, by name. "" is not sent, so that the router's default holds. */
const FIELDS = {
  model: "",
  system: "",
  prompt: "", // what is typed, and not yet sent
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  n: "",
  stop: "",
  presence_penalty: "",
  frequency_penalty: "",
  repetition_penalty: "",
  logprobs: "",
  tools: "",
  response_format: "",
  extra: "",
};
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "presence_penalty", "frequency_penalty",
  "repetition_penalty"];

/** A field that cannot be sent as it is. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export class Conversation extends EventTarget {
  chat = true;
  fields = { ...FIELDS };
  // {role: "user", text}, {role: "tool", id, text}, {role: "assistant", answer, said}: the turns it was asked with
  turns = [];
  error = null; // of a request that was not sent
  #over = null;

  get busy() {
    return this.#over !== null;
  }

  /** Calls of tools in the last answer that have no result yet. */
  get openCalls() {
    const last = this.turns.findLast((turn) => turn.role === "assistant");
    if (!this.chat || !last?.answer.over) return [];
    const [choice] = last.answer.choices;
    if (!choice || choice.finish === "length") return []; // what was cut off may be half a call
    const told = new Set(this.turns.filter((turn) => turn.role === "tool").map((turn) => turn.id));
    return choice.calls.filter((call) => !told.has(call.id));
  }

  set(name, value) {
    this.fields = { ...this.fields, [name]: value };
    this.error = null;
    this.#changed();
  }

  /** Begin anew, for chats or for completions. */
  clear(chat = this.chat) {
    this.stop();
    this.chat = chat;
    this.turns = [];
    this.error = null;
    this.#changed();
  }

  stop() {
    this.#over?.abort();
  }

  /** Say ``text`` and ask for the answer to it. */
  async say(api, text) {
    await this.#ask(api, [{ role: "user", text }]);
  }

  /** Give the results of tools, by the ids of their calls, and ask for the answer to them. */
  async giveResults(api, results) {
    await this.#ask(api, Object.entries(results).map(([id, text]) => ({ role: "tool", id, text })));
  }

  /** Ask for another answer in place of the last one. */
  async again(api) {
    const { said } = this.turns.at(-1);
    this.turns = this.turns.slice(0, -1 - said.length);
    await this.#ask(api, said);
  }

  /** The body of the request for the next answer. Throws FieldError. */
  bodyFor(said) {
    const { fields } = this;
    const body = { model: fields.model, stream: true, stream_options: { include_usage: true } };
    if (this.chat) body.messages = this.#messages(said);
    else body.prompt = said[0].text;
    for (const name of NUMBERS) if (fields[name] !== "") body[name] = number(name, fields[name]);
    if (fields.seed !== "") body.seed = wholeNumber("seed", fields.seed);
    if (fields.stop !== "") body.stop = fields.stop.split("\n").filter(Boolean).map(unescaped);
    if (fields.logprobs !== "") Object.assign(body, logprobsAsked(this.chat, Number(fields.logprobs)));
    if (this.chat && fields.tools.trim()) body.tools = json("tools", fields.tools);
    if (fields.response_format.trim()) body.response_format = json("response_format", fields.response_format);
    if (fields.extra.trim()) Object.assign(body, json("extra", fields.extra));
    return body;
  }

  #messages(said) {
    const system = this.fields.system.trim() ? [{ role: "system", content: this.fields.system }] : [];
    const answered = this.turns.filter((turn) => turn.role !== "assistant" || turn.answer.choices.length);
    return [...system, ...[...answered, ...said].map(messageOf)];
  }

  async #ask(api, said) {
    if (this.busy) return;
    let body;
    try {
      body = this.bodyFor(said);
    } catch (error) {
      this.error = error;
      this.#changed();
      return;
    }
    const answer = new Answer(this.chat, body);
    this.error = null;
    this.turns = [...(this.chat ? this.turns : []), ...said, { role: "assistant", answer, said }];
    const over = (this.#over = new AbortController());
    this.#changed();
    try {
      const path = this.chat ? "v1/chat/completions" : "v1/completions";
      const response = await api(path, { method: "POST", body, signal: over.signal });
      answer.requestId = response.headers.get("x-baton-request-id");
      for await (const event of eventsOf(response.body)) {
        answer.add(event);
        this.#changed();
      }
      answer.state = "done";
    } catch (error) {
      answer.state = over.signal.aborted ? "stopped" : "failed";
      answer.error = over.signal.aborted ? null : error;
    }
    this.#over = null;
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function messageOf(turn) {
  if (turn.role === "assistant") return turn.answer.message();
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.text };
  return { role: "user", content: turn.text };
}

function logprobsAsked(chat, top) {
  return chat ? { logprobs: true, top_logprobs: top } : { logprobs: top };
}

function number(name, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new FieldError(name, `${name} must be a number, not ${text}`);
  return value;
}

/** Of 64 bits, which a double holds up to 2 ** 53 only. */
function wholeNumber(name, text) {
  const value = Number(text);
  if (!Number.isSafeInteger(value)) {
    const most = Number.MAX_SAFE_INTEGER;
    throw new FieldError(name, `${name} must be a whole number of at most ${most} here, not ${text}`);
  }
  return value;
}

function json(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `${name} is not JSON: ${error.message}`);
  }
}

/** A stop string as it is typed, in which \n and \t stand for what they mean. */
function unescaped(text) {
  return text.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
}
