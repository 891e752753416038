/**
 * Numbers as a reader takes them in at a glance.
 */

const NOTHING = "–";
const PREFIXES = ["", "k", "M", "G", "T", "P"];

/** Whole below a thousand, then three figures: 12, 0.4, 1.25k, 31.4M. */
export function amount(/** @type {number | null} */ value) {
  if (value === null) return NOTHING;
  if (value < 100 && !Number.isInteger(value)) return trimmed(value, value < 10 ? 2 : 1);
  return scaled(value, 1000, PREFIXES);
}

export function count(/** @type {number | null} */ value) {
  return value === null ? NOTHING : Math.round(value).toLocaleString("en");
}

export function bytes(/** @type {number | null} */ value) {
  if (value === null) return NOTHING;
  return `${scaled(value, 1024, ["", " Ki", " Mi", " Gi", " Ti"])}${value < 1024 ? " " : ""}B`;
}

export function percent(/** @type {number | null} */ share) {
  if (share === null) return NOTHING;
  return `${trimmed(100 * share, share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function duration(/** @type {number | null} */ seconds) {
  if (seconds === null) return NOTHING;
  if (seconds < 1) return `${trimmed(seconds * 1000, seconds < 0.01 ? 1 : 0)} ms`;
  return `${trimmed(seconds, seconds < 10 ? 2 : 1)} s`;
}

function scaled(/** @type {number} */ value, /** @type {number} */ base, /** @type {string[]} */ prefixes) {
  let step = 0;
  while (value >= base && step < prefixes.length - 1) {
    value /= base;
    step += 1;
  }
  const decimals = step === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(decimals)}${prefixes[step]}`;
}

function trimmed(/** @type {number} */ value, /** @type {number} */ decimals) {
  return String(Number(value.toFixed(decimals)));
}
