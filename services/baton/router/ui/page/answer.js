// One answer as it comes: its choices, put together from the events of a stream, and when they came.

/** An answer of ``chat`` or completion. ``body`` is what was asked. */
export class Answer {
  constructor(chat, body) {
    this.chat = chat;
    this.body = body;
    this.state = "waiting"; // then streaming, and done, stopped or failed
    this.error = null;
    this.requestId = null;
    this.usage = null;
    this.choices = [];
    this.began = performance.now();
    this.arrivals = []; // of events with something of the answer, in ms since it was asked for
  }

  get over() {
    return this.state === "done" || this.state === "stopped" || this.state === "failed";
  }

  get ttft() {
    return this.arrivals[0] ?? null;
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? null;
  }

  /** The mean time between tokens of one choice in ms, and tokens of all choices in a second; null: not known. */
  get pace() {
    const span = this.arrivals.length > 1 ? this.arrivals.at(-1) - this.arrivals[0] : 0;
    const after = (this.numTokens ?? 0) - this.choices.length; // the first ones came at the span's start
    if (span <= 0 || after <= 0) return null;
    return { itl: (span * this.choices.length) / after, rate: (1000 * after) / span };
  }

  /** Take in one event of the stream. Throws what the event tells, if that is an error. */
  add(event) {
    if (event.error) throw new Error(event.error.message);
    this.state = "streaming";
    if (event.usage) this.usage = event.usage;
    let grew = false;
    for (const told of event.choices ?? []) grew = this.#choice(told.index).add(told, this.chat) || grew;
    if (grew) this.arrivals.push(performance.now() - this.began);
  }

  /** The message by which a conversation goes on after this answer. */
  message() {
    const choice = this.choices[0] ?? new Choice();
    const message = { role: "assistant", content: choice.text || null };
    if (choice.calls.length) {
      message.tool_calls = choice.calls.map(({ id, name, text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    } else if (message.content === null) message.content = "";
    return message;
  }

  #choice(index) {
    while (this.choices.length <= index) this.choices.push(new Choice());
    return this.choices[index];
  }
}

class Choice {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.tokens = []; // with their log-probabilities, if these were asked for
    this.finish = null;
  }

  /** Take in one delta. Returns whether it had something of the answer. */
  add(told, chat) {
    const delta = chat ? told.delta ?? {} : {};
    const text = (chat ? delta.content : told.text) ?? "";
    const reasoning = delta.reasoning_content ?? "";
    const calls = delta.tool_calls ?? [];
    const tokens = told.logprobs ? tokensOf(told.logprobs, chat) : [];
    this.text += text;
    this.reasoning += reasoning;
    for (const call of calls) this.#call(call);
    this.tokens.push(...tokens);
    this.finish = told.finish_reason ?? this.finish;
    return Boolean(text || reasoning || calls.length || tokens.length);
  }

  #call({ index, id, function: told }) {
    const call = (this.calls[index] ??= { id: "", name: "", text: "" });
    call.id = id ?? call.id;
    call.name += told?.name ?? "";
    call.text += told?.arguments ?? "";
  }
}

/** Tokens with their log-probability and the likeliest ones in their place, from the shapes of both endpoints. */
function tokensOf(logprobs, chat) {
  if (chat) {
    return (logprobs.content ?? []).map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs }));
  }
  return logprobs.tokens.map((token, at) => ({
    token,
    logprob: logprobs.token_logprobs[at],
    top: Object.entries(logprobs.top_logprobs[at] ?? {})
      .map(([other, logprob]) => ({ token: other, logprob }))
      .sort((one, other) => other.logprob - one.logprob),
  }));
}
