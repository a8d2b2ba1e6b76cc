// One request's time: when each stage ran, on which worker, and two bars whose parts add up to what
// the router measured, with what nobody covers as the residual (docs/handoff.md tells of the parts).

import { h } from "./dom.js";
import { ms } from "./format.js";

// Part → [word, what it is, colour].
const PARTS = {
  validate: ["check", "checks, chat template, text to tokens", "router"],
  pick: ["pick", "waiting for a worker to be ready", "router"],
  line: ["line", "waiting in the router, all prefill queues being full", "wait"],
  prefill_queue: ["queue", "waiting on the prefill worker", "wait"],
  decode_queue: ["room", "waiting for room on the decode worker", "wait"],
  prefill_build: ["build", "computing the prompt", "build"],
  decode_build: ["build on decode", "computing the prompt on the decode worker", "build"],
  prefill_pack: ["pack", "gathering KV into frames", "pack"],
  prefill_ship: ["ship", "sending frames", "ship"],
  decode_install: ["install", "placing KV into blocks", "install"],
  decode_attach: ["attach", "joining the batch", "attach"],
  decode_decode: ["decode", "in the batch, token by token", "decode"],
  retry: ["retries", "the rest of calls that failed", "bad"],
  calls: ["calls", "gRPC, and the workers' own loops", "router"],
  respond: ["respond", "token to bytes", "router"],
  residual: ["residual", "what nobody covers", "residual"],
};
const NO_PART = (name) => [name, "", "router"];

// A whole: stages over time, and the sums. Null before anything is known.
export function waterfall(told) {
  if (told.total_ms === null) return null;
  return h("div", { class: "waterfall" }, timeline(told), h("div", { class: "sums" }, sums(told)));
}

function sums(told) {
  return [
    sum("To the first byte", told.parts_ms, told.residual_ms, told.total_ms),
    told.rest_ms ? sum("From there to the end", told.rest_parts_ms, told.rest_residual_ms, told.rest_ms) : null,
  ];
}

function sum(title, parts, residual, total) {
  const all = [...Object.entries(parts), ["residual", residual]];
  const bar = h("div", { class: "sum-bar", "aria-hidden": "true" }, all.map(([name, value]) => {
    const [word, , colour] = PARTS[name] ?? NO_PART(name);
    const part = h("i", { class: `c-${colour}`, title: `${word}: ${ms(value)}` });
    part.style.flexGrow = value;
    return part;
  }));
  const list = h("ul", { class: "sum-parts" }, all.map(([name, value]) => {
    const [word, what, colour] = PARTS[name] ?? NO_PART(name);
    return h("li", { "data-part": name, "data-ms": value, title: what },
      h("i", { class: `c-${colour}`, "aria-hidden": "true" }), `${word} `, h("b", {}, ms(value)));
  }));
  return h("div", { class: "sum", "data-total": total },
    h("p", { class: "sum-title" }, `${title} `, h("b", {}, ms(total))), bar, list);
}

function timeline(told) {
  const rows = told.prompts.flatMap(rowsOf);
  if (!rows.length) return null;
  rows.sort((a, b) => a.begin - b.begin || a.end - b.end);
  const read = told.read_ms ?? 0;
  const first = told.prompts.map((prompt) => prompt.first_token_ms).filter((at) => at !== null);
  const end = Math.max(told.end_ms ?? 0, ...rows.map((row) => row.end));
  // A long decode would leave no room for the handoff: then the picture ends soon behind it.
  const handed = Math.max(...rows.filter((row) => row.stage !== "decode").map((row) => row.end), ...first, read + 0.001);
  const until = end - read > 2.2 * (handed - read) ? read + 1.25 * (handed - read) : end;
  const place = (at) => (100 * Math.min(Math.max(at - read, 0), until - read)) / (until - read);
  const list = h("ol", { class: "gantt", "aria-label": "Stages, in the order in which they began" });
  for (const row of rows) list.append(rowElement(row, place, row.end > until + 0.001));
  const marks = first.slice(0, 1).map((at) => {
    const mark = h("div", { class: "mark", "aria-hidden": "true" }, h("span", {}, "token 0"));
    mark.style.setProperty("--at", place(at) / 100);
    return mark;
  });
  return h("div", { class: "timeline" }, list, marks);
}

function rowElement(row, place, isCut) {
  const bar = h("i", { class: `bar c-${row.colour}${isCut ? " cut" : ""}` });
  bar.style.left = `${place(row.begin)}%`;
  bar.style.width = `${Math.max(0.4, place(row.end) - place(row.begin))}%`;
  const took = row.busy < row.end - row.begin - 0.01 ? `${ms(row.busy)} of ${ms(row.end - row.begin)}` : ms(row.end - row.begin);
  return h("li", { "data-stage": row.stage, title: row.what },
    h("span", { class: "gantt-name" }, h("b", {}, row.word), h("small", {}, row.worker)),
    h("span", { class: "gantt-bar", "aria-hidden": "true" }, bar),
    h("span", { class: "gantt-ms" }, took));
}

function rowsOf(prompt) {
  const waits = prompt.waits.map((wait) => row("line", "line", "router", wait.begin_ms, wait.end_ms));
  const stages = prompt.attempts.flatMap((attempt) =>
    [...attempt.prefills, attempt.decode].filter(Boolean).flatMap((leg) =>
      leg.stages.map((stage) =>
        row(`${leg.kind}_${stage.stage}`, stage.stage, leg.worker, stage.begin_ms, stage.end_ms, stage.busy_ms))));
  return [...waits, ...stages];
}

function row(part, stage, worker, begin, end, busy = end - begin) {
  const [word, what, colour] = PARTS[part] ?? NO_PART(stage);
  return { stage, word, what, colour, worker, begin, end, busy };
}
