// Charts over the last minutes, as SVG of the size it is shown at, so that text and lines stay as they are.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const HEIGHT = 168;
const MARGIN = { left: 52, right: 8, top: 8, bottom: 20 };
const MIN_SECONDS = 60; // that a chart is wide

/** The width of an element in pixels, and the ref to give it. */
export function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** The seconds that charts of these points show. */
function secondsOf({ points, now, every_s, most_points }) {
  const oldest = points.length ? now - points[0].at : 0;
  return Math.min(Math.max(oldest, MIN_SECONDS), every_s * most_points);
}

/** The least of 1, 2, 3, 4, 5, 6, 8, 10, 20, … that is no less than ``value``: half of it has few digits too. */
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= value * 0.999);
}

/** Places of a chart: ``x`` of a point, ``y`` of a value. */
function scalesOf(data, width, top, height) {
  const seconds = secondsOf(data);
  const inner = width - MARGIN.left - MARGIN.right;
  const tall = height - MARGIN.top - MARGIN.bottom;
  return {
    seconds,
    x: (at) => MARGIN.left + inner * (1 + (at - data.now) / seconds),
    y: (value) => MARGIN.top + tall * (1 - Math.min(value, top) / top),
    bottom: MARGIN.top + tall,
    right: width - MARGIN.right,
  };
}

function TimeAxis({ data, scales }) {
  const { seconds, x, bottom } = scales;
  const step = seconds > 150 ? 60 : seconds > 75 ? 30 : 15;
  const marks = [];
  for (let back = 0; back <= seconds; back += step) marks.push(back);
  return html`<g class="axis">
    <line x1=${MARGIN.left} x2=${scales.right} y1=${bottom} y2=${bottom} />
    ${marks.map((back) => {
      const anchor = back === 0 ? "end" : x(data.now - back) < MARGIN.left + 16 ? "start" : "middle";
      return html`<text x=${x(data.now - back)} y=${bottom + 14} text-anchor=${anchor}>
        ${back === 0 ? "now" : back % 60 ? `−${back} s` : `−${back / 60} min`}
      </text>`;
    })}
  </g>`;
}

function ValueAxis({ top, scales, form }) {
  return html`<g class="axis">
    ${[0.5, 1].map(
      (share) => html`
        <line class="faint" x1=${MARGIN.left} x2=${scales.right} y1=${scales.y(share * top)} y2=${scales.y(share * top)} />
        <text x=${MARGIN.left - 6} y=${scales.y(share * top) + 4} text-anchor="end">${form(share * top)}</text>
      `,
    )}
    <text x=${MARGIN.left - 6} y=${scales.bottom} text-anchor="end">0</text>
  </g>`;
}

/** An area that a chart is drawn into; shows the moment under the pointer, and tells it by ``onPoint``. */
function Frame({ data, title, top, form, height = HEIGHT, onPoint, children }) {
  const [ref, width] = useWidth();
  const [at, setAt] = useState(null);
  const scales = width ? scalesOf(data, width, top, height) : null;
  const tell = (moment) => {
    setAt(moment);
    onPoint?.(moment);
  };
  const move = (event) => {
    const left = event.currentTarget.getBoundingClientRect().left;
    const moment = data.now + scales.seconds * ((event.clientX - left - MARGIN.left) / (scales.right - MARGIN.left) - 1);
    tell(nearest(data.points, moment)?.at ?? null);
  };
  return html`<div class="chart" ref=${ref}>
    ${scales &&
    html`<svg width=${width} height=${height} role="img" aria-label=${title}
      onPointerMove=${move} onPointerLeave=${() => tell(null)}>
      ${form && html`<${ValueAxis} top=${top} scales=${scales} form=${form} />`}
      ${children(scales)}
      <${TimeAxis} data=${data} scales=${scales} />
      ${at !== null && html`<line class="cursor" x1=${scales.x(at)} x2=${scales.x(at)} y1=${MARGIN.top} y2=${scales.bottom} />`}
    </svg>`}
  </div>`;
}

function nearest(points, moment) {
  return points.reduce(
    (best, point) => (best && Math.abs(best.at - moment) <= Math.abs(point.at - moment) ? best : point),
    null,
  );
}

/** Names of series with their figures, those of the moment under the pointer or the last ones. */
function Legend({ series, point, form }) {
  return html`<ul class="legend">
    ${series.map(
      ({ name, of, key }) => html`<li key=${key}><i class="swatch ${key}"></i>${name} <b>${form(point ? of(point) : null)}</b></li>`,
    )}
  </ul>`;
}

function useMoment(points) {
  const [moment, setMoment] = useState(null);
  return [moment === null ? points.at(-1) : nearest(points, moment), setMoment];
}

/**
 * Areas on top of one another. ``series``: {key: class in page.css, name, of: point → value or null}, the lowest
 * first. ``least``: a value that the chart has room for in any case.
 */
export function StackedArea({ data, title, series, form, least = 0 }) {
  const [point, setMoment] = useMoment(data.points);
  const stacks = data.points.map((each) => {
    let below = 0;
    return [0, ...series.map(({ of }) => (below += of(each) ?? 0))];
  });
  const top = niceTop(Math.max(least, ...stacks.map((stack) => stack.at(-1))));
  return html`
    <${Legend} series=${series} point=${point} form=${form} />
    <${Frame} data=${data} title=${title} top=${top} form=${form} onPoint=${setMoment}>
      ${({ x, y }) =>
        series.map(({ key }, index) => {
          const edge = (level) => data.points.map((each, at) => `${x(each.at).toFixed(1)},${y(stacks[at][level]).toFixed(1)}`);
          const outline = [...edge(index + 1), ...edge(index).reverse()];
          return html`<polygon key=${key} class="area ${key}" points=${outline.join(" ")} />`;
        })}
    <//>
  `;
}

/** Lines beside one another; where a value is null a line has a gap. */
export function Lines({ data, title, series, form, least = 0 }) {
  const [point, setMoment] = useMoment(data.points);
  const values = data.points.flatMap((each) => series.map(({ of }) => of(each) ?? 0));
  const top = niceTop(Math.max(least, ...values));
  return html`
    <${Legend} series=${series} point=${point} form=${form} />
    <${Frame} data=${data} title=${title} top=${top} form=${form} onPoint=${setMoment}>
      ${({ x, y }) =>
        series.map(({ key, of }) => html`<path key=${key} class="line ${key}" d=${lineOf(data.points, of, x, y)} />`)}
    <//>
  `;
}

function lineOf(points, of, x, y) {
  let drawing = false;
  return points
    .map((point) => {
      const value = of(point);
      const step = value === null ? "" : `${drawing ? "L" : "M"}${x(point.at).toFixed(1)} ${y(value).toFixed(1)}`;
      drawing = value !== null;
      return step;
    })
    .join("");
}

const SHADES = 6;

/**
 * The share of observations in each bucket of a histogram, a column for each point. ``bounds`` are upper ones;
 * ``of`` gives a point's counts, one more than there are bounds. Only buckets that have any are shown.
 */
export function HeatMap({ data, title, bounds, of, form }) {
  const used = data.points.flatMap((point) => of(point).flatMap((many, at) => (many > 0 ? [at] : [])));
  const low = used.length ? Math.max(0, Math.min(...used) - 1) : 0;
  const high = used.length ? Math.min(bounds.length, Math.max(...used) + 1) : bounds.length;
  const rows = high - low + 1;
  return html`<${Frame} data=${data} title=${title} top=${rows}>
    ${(scales) => {
      const tall = scales.y(0) - scales.y(1);
      const shades = shadesOf(data, of, low, high, scales, tall);
      const marks = bounds.slice(low, high).map((bound, at) => ({ bound, y: scales.y(at + 1) }));
      const every = Math.ceil(14 / tall);
      return html`
        ${shades.map((d, shade) => html`<path key=${shade} class="heat heat-${shade}" d=${d} />`)}
        <g class="axis">
          ${marks.map(({ bound, y }, at) => at % every === 0 && html`<text x=${MARGIN.left - 6} y=${y + 4} text-anchor="end">${form(bound)}</text>`)}
        </g>
      `;
    }}
  <//>`;
}

/** One path for each shade: thousands of cells as elements of their own would be slow. */
function shadesOf(data, of, low, high, scales, tall) {
  const paths = Array.from({ length: SHADES }, () => []);
  const wide = Math.max(1, scales.x(data.every_s) - scales.x(0));
  for (const point of data.points) {
    const counts = of(point);
    const most = Math.max(...counts);
    for (let at = low; at <= high; at += 1) {
      if (!(counts[at] > 0)) continue;
      const shade = Math.min(SHADES - 1, Math.floor(SHADES * Math.sqrt(counts[at] / most)));
      const left = Math.max(MARGIN.left, scales.x(point.at) - wide);
      const across = (scales.x(point.at) - left).toFixed(1);
      paths[shade].push(`M${left.toFixed(1)} ${scales.y(at - low + 1).toFixed(1)}h${across}v${tall.toFixed(1)}h-${across}z`);
    }
  }
  return paths.map((cells) => cells.join(""));
}
