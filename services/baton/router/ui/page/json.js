// JSON, pretty and with its parts told apart; as text, never as markup.

import { html } from "./vendor/preact-htm.js";

const PARTS = /("(?:[^"\\]|\\.)*")(\s*:)?|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\btrue\b|\bfalse\b|\bnull\b/g;

/** The value of ``text``; undefined if it is no JSON, or only a part of one as yet. */
export function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

export function Json({ value }) {
  const text = JSON.stringify(value, null, 2);
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(PARTS)) {
    const [whole, string, colon] = found;
    pieces.push(text.slice(at, found.index));
    if (colon) pieces.push(html`<span class="json-name">${string}</span>`, colon);
    else pieces.push(html`<span class=${string ? "json-string" : "json-value"}>${whole}</span>`);
    at = found.index + whole.length;
  }
  return html`<pre class="json" tabindex="0">${pieces}${text.slice(at)}</pre>`;
}
