// The last requests, the newest first; choosing one opens its explanation.

import { call } from "./api.js";
import { byId, h, keyed, setText } from "./dom.js";
import { clock, count, ms, shortId } from "./format.js";

export class Requests {
  #rows = byId("rows");
  #onChoose;

  constructor(onChoose) {
    this.#onChoose = onChoose;
  }

  show(lines) {
    keyed(this.#rows, lines, (line) => line.id, (line) => this.#make(line), update);
    if (!lines.length) {
      this.#rows.append(h("li", { class: "none" }, "None yet. Send a message, or a curl."));
    }
  }

  // A tenant's own, asked for once: nobody tells a tenant as they change.
  async load() {
    try {
      this.show((await (await call("/v1/requests")).json()).data.slice(0, 24));
    } catch {
      // The list stays as it is; what went wrong shows where it was asked for.
    }
  }

  #make(line) {
    return h("li", {},
      h("button", { type: "button", class: "row", onclick: () => this.#onChoose(line.id) },
        h("span", { class: "row-state" }),
        h("span", { class: "row-name" }, h("code", {}, shortId(line.id)), h("small", {}, clock(line.arrived_at))),
        h("span", { class: "row-pair" }),
        h("span", { class: "row-tokens" }),
        h("span", { class: "row-ttft" })));
  }
}

function update(element, line) {
  const find = (name) => element.querySelector(`.row-${name}`);
  const words = line.state === "running" ? "running" : line.state;
  element.firstChild.dataset.state = line.state;
  setText(find("state"), line.num_failures && line.state === "completed" ? `${words}, retried` : words);
  const { prefill, decode } = line.pair;
  setText(find("pair"), prefill && decode ? `${prefill} → ${decode}` : decode ?? prefill ?? "not placed");
  const has = line.num_prompt_tokens !== undefined; // an operator's list tells more
  setText(find("tokens"), has ? `${count(line.num_prompt_tokens)} → ${count(line.num_output_tokens)} tok` : "");
  setText(find("ttft"), line.ttft_ms === null ? "–" : ms(line.ttft_ms));
  find("ttft").title = "time to the first token";
}
