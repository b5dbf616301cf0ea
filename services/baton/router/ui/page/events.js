// Server-sent events of an answer that is read by fetch: EventSource can neither post nor send a key.

const END = "[DONE]";

/** The JSON of each event of ``body``, a ReadableStream of bytes, as it comes, until [DONE] or the stream's end. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (waiting + value).split(/\r?\n\r?\n/);
    waiting = events.pop();
    for (const event of events) {
      const data = dataOf(event);
      if (data === END) return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** The data of one event; "" if it is a comment. */
function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
