// The tokens of an answer, shaded by how likely each was, and the likeliest ones in the place of one of them.

import { html, useState } from "./vendor/preact-htm.js";

const SHADES = [0.9, 0.6, 0.3, 0.1]; // from which probability on a token has shade 0, 1, 2, 3; below the last, 4

/** ``tokens`` with ``token``, ``logprob`` and ``top``. Arrow keys and the pointer go from one to the other. */
export function Tokens({ tokens, name }) {
  const [at, setAt] = useState(0);
  const here = Math.min(at, tokens.length - 1);
  const move = (event) => {
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    setAt(Math.min(Math.max(to, 0), tokens.length - 1));
  };
  return html`<div class="token-view">
    <div class="token-list" role="listbox" tabindex="0" aria-label="tokens, with their probabilities"
      aria-activedescendant=${`${name}-${here}`} onKeyDown=${move}>
      ${tokens.map((each, index) => html`<${Token} key=${index} id=${`${name}-${index}`} told=${each}
        active=${index === here} activate=${() => setAt(index)} />`)}
    </div>
    <${Alternatives} told=${tokens[here]} />
  </div>`;
}

function Token({ id, told, active, activate }) {
  const probability = told.logprob === null ? null : Math.exp(told.logprob);
  const shade = probability === null ? 0 : SHADES.findIndex((least) => probability >= least);
  const label = `${told.token === " " ? "space" : told.token}, ${odds(probability)}`;
  return html`<span id=${id} role="option" aria-selected=${String(active)} aria-label=${label}
    class=${`token shade-${shade < 0 ? SHADES.length : shade}`} onMouseEnter=${activate} onClick=${activate}>
    ${told.token.replaceAll("\n", "⏎\n")}</span>`;
}

function Alternatives({ told }) {
  const others = told.top.some((each) => each.token === told.token) ? told.top : [told, ...told.top];
  return html`<table class="alternatives" aria-live="polite">
    <caption>${html`<code>${visible(told.token)}</code>`} <span class="muted">in its place</span></caption>
    <tbody>${others.map((each) => {
      const probability = each.logprob === null ? null : Math.exp(each.logprob);
      return html`<tr key=${each.token} class=${each.token === told.token ? "chosen" : ""}>
        <th scope="row"><code>${visible(each.token)}</code></th>
        <td class="odds"><svg aria-hidden="true"><rect x="0" y="0" height="100%"
          width=${`${100 * (probability ?? 0)}%`} /></svg></td>
        <td class="number">${odds(probability)}</td>
        <td class="number muted">${each.logprob === null ? "–" : each.logprob.toFixed(3)}</td></tr>`;
    })}</tbody>
  </table>`;
}

/** A probability in percent, small ones with more digits. */
function odds(probability) {
  if (probability === null) return "–";
  if (probability < 1e-4) return "< 0.01 %";
  return `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)} %`;
}

function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
