// Whose time it is: the parts of a request's time, by their colours, and shares of a whole as a bar.

import { html } from "./vendor/preact-htm.js";

/** Whose time a phase is: the part of its name before the dot. */
export function partOf(name) {
  return name.split(".", 1)[0];
}

/** Shares of a whole, one beside the other. ``parts`` have ``part`` and ``share``, which add up to 1 at most. */
export function PartBar({ parts }) {
  let at = 0;
  return html`<svg class="part-bar" aria-hidden="true">
    ${parts.map(({ part, share }) => {
      const x = at;
      at += share;
      return html`<rect class=${`part-${part}`} x=${`${100 * x}%`} width=${`${100 * share}%`} y="0" height="100%" />`;
    })}
  </svg>`;
}
