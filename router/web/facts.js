// What a request's explanation comes to, in a line, and the handoff's figures.

import { bytes, count, ms, plural, share } from "./format.js";

// Legs of the last attempt of the first prompt that went somewhere.
export function lastAttempt(told) {
  return told.prompts[0]?.attempts.at(-1) ?? null;
}

export function numTokens(told) {
  return told.prompts.flatMap((prompt) => prompt.samples).reduce((sum, one) => sum + one.num_tokens, 0);
}

// Short facts, each a [label, value].
export function facts(told) {
  const prompt = told.prompts[0];
  if (!prompt) return [];
  const tokens = numTokens(told);
  const first = prompt.first_token_ms;
  const span = prompt.end_ms !== null && first !== null ? prompt.end_ms - first : null;
  const found = [
    ["first token", ms(told.ttft_ms)],
    ["tokens", `${count(prompt.num_tokens)} in, ${count(tokens)} out`],
  ];
  if (span && tokens > 1) found.push(["per token", ms(span / (tokens - 1))]);
  if (prompt.num_cached_tokens) found.push(["cached", plural(prompt.num_cached_tokens, "token")]);
  return [...found, ...handoffFacts(told, prompt)];
}

function handoffFacts(told, prompt) {
  const attempt = lastAttempt(told);
  const kv = attempt?.prefills.findLast((leg) => leg.kv)?.kv ?? attempt?.decode?.kv;
  const local = attempt?.local_prefill_reason;
  if (!kv) return local ? [["computed on decode", local.replaceAll("_", " ")]] : [];
  const found = [["handed over", `${bytes(kv.nbytes)} in ${plural(kv.frames, "frame")}`]];
  if (kv.transports?.length) found.push(["over", transports(kv.transports)]);
  if (prompt.exposed_handoff_ms !== null) {
    found.push(["handoff felt", `${ms(prompt.exposed_handoff_ms)} (${share(prompt.exposed_share)})`]);
  }
  return found;
}

const SHARED = ["posix", "sysv", "cma", "xpmem", "self"];

function transports(names) {
  if (names.some((name) => name.startsWith("rc") || name.startsWith("dc"))) return "RDMA";
  return names.some((name) => SHARED.includes(name)) ? "shared memory" : names.join(", ");
}
