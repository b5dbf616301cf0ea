// Figures as people read them. Each returns text; "–" stands for what is not known.

const NOTHING = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? NOTHING : whole.format(value);
}

/** Three digits that matter: 0.42, 4.2, 42, 4,242. */
export function rate(value) {
  if (value === null || value === undefined) return NOTHING;
  return value >= 10 || value === 0 ? whole.format(value) : value.toFixed(value < 1 ? 2 : 1);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return NOTHING;
  return value >= 1000 ? `${rate(value / 1000)} s` : `${rate(value)} ms`;
}

export function percent(share) {
  if (share === null || share === undefined) return NOTHING;
  const digits = share <= 0 || share >= 1 ? 0 : share > 0.995 ? 2 : share < 0.1 || share > 0.99 ? 1 : 0;
  return `${(100 * share).toFixed(digits)} %`;
}

export function bytes(value) {
  return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

export function bytesPerSecond(value) {
  return scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
}

function scaled(value, step, units) {
  if (value === null || value === undefined) return NOTHING;
  let at = 0;
  while (value >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return `${at === 0 ? whole.format(value) : rate(value)} ${units[at]}`;
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}
