// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function ms(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (size >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (size >= 100) return `${value.toFixed(0)} ms`;
  if (size >= 10) return `${value.toFixed(1)} ms`;
  return `${value.toFixed(2)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let size = value;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size < 10 && unit ? size.toFixed(1) : size.toFixed(0)} ${units[unit]}`;
}

export const share = (value) =>
  value === null || value === undefined ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

export const clock = (seconds) =>
  new Date(seconds * 1000).toLocaleTimeString([], {
    hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false,
  });

export const shortId = (id) => id.slice(0, 8);

// A worker's problem, as the router words it, for somebody who has not read its code.
export function problem(text) {
  if (!text) return "";
  if (text === "unavailable") return "gone: its process does not answer";
  if (text.startsWith("silent")) return `${text}: frozen, or cut off`;
  if (text === "not heard of yet") return "not heard of yet";
  if (text === "draining") return "draining: it takes nothing new";
  if (text === "its calls fail") return "its calls fail: it is being probed";
  return text;
}
