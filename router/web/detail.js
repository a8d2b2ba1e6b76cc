// One request, explained: the same document as GET /v1/requests/{id}, drawn.

import { ApiError, call } from "./api.js";
import { byId, h } from "./dom.js";
import { facts } from "./facts.js";
import { bytes, clock, ms, shortId } from "./format.js";
import { waterfall } from "./waterfall.js";

const AGAIN_MS = 500;

export class Detail {
  #dialog = byId("detail");
  #body = byId("detail-body");
  #id = null;

  constructor() {
    byId("detail-close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => {
      this.#id = null;
      history.replaceState(null, "", location.pathname);
    });
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // beside the sheet
    });
  }

  async open(id) {
    this.#id = id;
    byId("detail-title").textContent = `Request ${shortId(id)}`;
    this.#body.replaceChildren(h("p", { class: "aside" }, "Asking…"));
    if (!this.#dialog.open) this.#dialog.showModal();
    history.replaceState(null, "", `#request=${id}`);
    while (this.#id === id && (await this.#read(id)) === "running") {
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  async #read(id) {
    try {
      const told = await (await call(`/v1/requests/${id}`)).json();
      if (this.#id === id) this.#body.replaceChildren(...explained(told));
      return told.state;
    } catch (error) {
      if (this.#id === id) this.#body.replaceChildren(h("p", { class: "notice bad" }, reason(error)));
      return "unknown";
    }
  }
}

function explained(told) {
  return [
    h("p", { class: "aside" }, `${told.state} · ${told.endpoint} · ${clock(told.arrived_at)}${told.streamed ? " · streamed" : ""}`),
    told.error ? h("p", { class: "notice bad" }, told.error.message) : null,
    factList(facts(told)),
    waterfall(told),
    told.clock_error_ms ? h("p", { class: "aside" }, `Times of workers are off by ${ms(told.clock_error_ms)} at most.`) : null,
    ...told.prompts.flatMap((prompt) => prompt.attempts.map((attempt) => attemptElement(prompt, attempt, told.prompts.length > 1))),
    h("p", { class: "links" },
      h("button", { type: "button", class: "ghost", onclick: (event) => download(told.id, event.target) }, "Download a Perfetto trace"),
      h("code", {}, told.id)),
  ].filter(Boolean);
}

// By a call instead of a link: a link carries no API key.
async function download(id, button) {
  try {
    const response = await call(`/v1/requests/${id}?format=perfetto`);
    const url = URL.createObjectURL(await response.blob());
    h("a", { href: url, download: `baton-${shortId(id)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  } catch (error) {
    button.after(h("p", { class: "notice bad", role: "alert" }, reason(error)));
  }
}

const reason = (error) => (error instanceof ApiError ? error.message : "The router does not answer.");

export function factList(found) {
  return h("dl", { class: "figures" }, found.map(([label, value]) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, value))));
}

function attemptElement(prompt, attempt, isOneOfMany) {
  const legs = [...attempt.prefills, attempt.decode].filter(Boolean);
  const name = isOneOfMany ? `Prompt ${prompt.id.split("-").at(-1)}, attempt` : "Attempt";
  const outcome = attempt.outcome ?? "running";
  return h("section", { class: "attempt" },
    h("h3", {}, `${name} ${attempt.number}: `, h("span", { class: tone(attempt.outcome) }, outcome)),
    attempt.detail ? h("p", { class: "aside" }, attempt.detail) : null,
    attempt.local_prefill_reason ? h("p", { class: "aside" }, `Decode computed the prompt, or a rest of it: ${attempt.local_prefill_reason.replaceAll("_", " ")}.`) : null,
    choiceElement(attempt.choice),
    legs.map(legElement),
    candidates("Decode workers that could have been picked", attempt.candidates),
    attempt.num_left_out ? h("p", { class: "aside" }, `${attempt.num_left_out} more calls are not kept.`) : null);
}

function choiceElement(choice) {
  if (!choice) return null;
  const way = (one) => `${one.prefill ? "with a handoff" : "decode alone"}: first token after ${ms(one.ttft_ms)}, cost ${ms(one.cost_ms)}`;
  const saved = choice.saved_ms === null ? "" : ` ${choice.saved_ms >= 0 ? "Disaggregation gained" : "Disaggregation cost"} ${ms(Math.abs(choice.saved_ms))}.`;
  const other = choice.other ? ` The other way, ${way(choice.other)}.` : "";
  return h("p", { class: "aside" }, `Predicted ${way(choice.taken)}.${other}${saved}`);
}

function legElement(leg) {
  const outcome = leg.outcome ?? "running";
  const found = [["began after", ms(leg.begin_ms)], ["lasted", leg.end_ms === null ? "–" : ms(leg.end_ms - leg.begin_ms)]];
  if (leg.kv) {
    found.push(["bytes", bytes(leg.kv.nbytes)], ["frames", String(leg.kv.frames)]);
    if (leg.kv.codec) found.push(["codec", leg.kv.codec]);
    if (leg.kv.transports) found.push(["transport", leg.kv.transports.join(", ")]);
    if (leg.kv.offers !== null) found.push(["offers", String(leg.kv.offers)]);
  }
  if (leg.first_token) found.push(["from token", String(leg.first_token)]);
  if (leg.chunks.length) found.push(["chunks", String(leg.chunks.length)]);
  if (leg.clock_error_ms !== null) found.push(["clock within", ms(leg.clock_error_ms)]);
  return h("div", { class: `leg of-${leg.kind}` },
    h("h4", {}, h("b", {}, leg.worker), ` ${leg.kind}${leg.replaces_lost ? ", in place of a lost transfer" : ""} · `, h("span", { class: tone(leg.outcome) }, outcome)),
    leg.detail ? h("p", { class: "aside" }, leg.detail) : null,
    factList(found),
    candidates("Prefill workers that could have been picked", leg.candidates));
}

function candidates(title, rows) {
  if (!rows.length) return null;
  const head = ["Worker", "Load", "Picks", "Cost", "Why"];
  const cells = (one) => [one.worker, one.load, one.num_picks, one.cost_ms === null ? "–" : ms(one.cost_ms), one.why.replaceAll("_", " ")];
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title },
    h("table", {},
      h("caption", {}, title),
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((one) => h("tr", { class: one.why === "taken" ? "taken" : "" },
        cells(one).map((cell, index) => (index ? h("td", {}, String(cell)) : h("th", { scope: "row" }, cell))))))));
}

const tone = (outcome) => (outcome === null || outcome === "done" ? "fine" : outcome === "cancelled" ? "" : "failed");
