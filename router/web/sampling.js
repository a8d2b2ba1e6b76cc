// The sampling controls, and what they say in a request.

import { byId, setText } from "./dom.js";

export class Sampling {
  constructor() {
    byId("fields").addEventListener("input", () => this.#show());
    this.#show();
  }

  // Fields of the body; those that are left empty are not there.
  body() {
    const body = {
      temperature: Number(byId("temperature").value),
      top_p: Number(byId("top-p").value),
    };
    const tokens = byId("max-tokens");
    if (tokens.value) body.max_tokens = tokens.valueAsNumber;
    const seed = byId("seed");
    if (seed.value) body.seed = seed.valueAsNumber;
    return body;
  }

  get system() {
    return byId("system").value.trim();
  }

  // False: something is wrong, and the browser has said what.
  check() {
    const wrong = ["max-tokens", "seed"].map(byId).find((input) => !input.checkValidity());
    if (!wrong) return true;
    byId("sampling").open = true;
    wrong.reportValidity();
    return false;
  }

  #show() {
    const { temperature, top_p: topP, max_tokens: tokens, seed } = this.body();
    setText(byId("temperature-out"), temperature.toFixed(2));
    setText(byId("top-p-out"), topP.toFixed(2));
    const brief = [
      temperature ? `T ${temperature.toFixed(2)}` : "greedy",
      tokens ? `${tokens} tokens` : null,
      seed === undefined ? null : `seed ${seed}`,
      this.system ? "system prompt" : null,
    ];
    setText(byId("sampling-brief"), brief.filter(Boolean).join(" · "));
  }
}
